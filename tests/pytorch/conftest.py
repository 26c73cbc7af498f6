"""Scripts are run by a test, not imported to look for doctests."""

collect_ignore = ["scripts"]

"""Property tests of every day: fewer examples than hypothesis's 100, where a test does not say how many."""

from hypothesis import settings

settings.register_profile("everyday", max_examples=30)
settings.load_profile("everyday")

"""`python -m penstock.cli`, for a Python whose scripts are not on the path."""

from penstock.__main__ import run

run()

"""The `penstock` command: one thin file per verb, each parses, calls one library function, renders.

May import: every room. Imported by: nothing.
"""

from penstock.cli._main import main

__all__ = ["main"]

"""Records of raw files without random access, in order or through a shuffle buffer, each in exactly one part.

    Recipe -> share_of: a part's bytes -> PartRun: its records, with a state after every one

Knows nothing of torch or processes.

May import: `errors`, `identity`, `order`, `shapes`, `sources`. Imported by: `pytorch`. Holds no state.
"""

from penstock.streams._recipe import OnError, Recipe, make_recipe
from penstock.streams._run import PartRun
from penstock.streams._shares import share_of
from penstock.streams._state import check_state, start_state

__all__ = [
    "OnError",
    "PartRun",
    "Recipe",
    "check_state",
    "make_recipe",
    "share_of",
    "start_state",
]

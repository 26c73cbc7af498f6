"""Records of raw files without random access, in order or through a shuffle buffer, each in exactly one part.

    Recipe -> share_of: a part's bytes -> PartRun: its records, with a state after every one

Knows nothing of torch or processes.

May import: `errors`, `identity`, `order`, `shapes`, `sources`. Imported by: `pytorch`. Holds no state.
"""

from penstock.streams._recipe import OnError, Recipe, check_state, make_recipe, start_state
from penstock.streams._run import PartRun

__all__ = [
    "OnError",
    "PartRun",
    "Recipe",
    "check_state",
    "make_recipe",
    "start_state",
]

"""Where data should be: advice from sizes and limits, and copies on the node's own storage.

    advise(data)            does it fit, map it or stream it, which shuffle, what the first epoch costs -> Advice
    stage(source, scratch)  lock -> copy -> sync -> verify -> rename: all of it, or nothing              -> Staged

May import: `errors`, `filesystem`, `metrics`, `plan`, `report`, `shards`, `workers`. Imported by: `cli`. Holds no
state.
"""

from penstock.placement._advise import advise
from penstock.placement._stage import stage

__all__ = ["advise", "stage"]

"""This process among those that train together."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple


class Ranks(NamedTuple):
    """Who this is, of how many."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this process decides for all."""
        return self.rank == 0


def find_ranks() -> Ranks:
    """From torch.distributed, or from what launchers set."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Ranks(int(distributed.get_rank()), int(distributed.get_world_size()))
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

"""A notice that all ranks of a job read: they must change turns together, or each would wait for the other.

Rank 0 writes that a turn begins at a step that no rank can have reached; every rank counts its own steps. The board
is a mapped file of five numbers; one rank writes it, and each step looks whether there is a new notice: under 1 µs.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from pathlib import Path
from typing import NamedTuple

_NUMBERS, _TURN = struct.Struct("<qqqqq"), struct.Struct("<q")
NEVER = 1 << 62
_MARGIN = 4


class Ranks(NamedTuple):
    """The rank of this process, and how many there are."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this process decides for all."""
        return self.rank == 0

    @property
    def margin(self) -> int:
        """Steps between an announcement and what it announces, so that all ranks see it in time."""
        return _MARGIN if self.world_size > 1 else 0


def find_ranks() -> Ranks:
    """What torch.distributed says, or the variables that launchers set."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Ranks(int(distributed.get_rank()), int(distributed.get_world_size()))
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


class Notice(NamedTuple):
    """What the board says."""

    trial: int
    begins_at: int
    """Step of the loop, as each rank counts."""
    whole_epochs: bool
    """Whether the turn begins with an epoch."""
    stops_at: int
    turn: int
    """Counts notices. Written last: a rank that sees it sees the rest."""


class Board:
    """A notice that all ranks of a job see."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _NUMBERS.size:
                os.posix_fallocate(descriptor, 0, _NUMBERS.size)  # writing to a map without room on disk raises SIGBUS
            self._map = mmap.mmap(descriptor, _NUMBERS.size)
        finally:
            os.close(descriptor)
        self._notice = self._read()

    def read(self) -> Notice:
        """The notice; before the first one, turn 0 and never a stop."""
        if _TURN.unpack_from(self._map, _NUMBERS.size - _TURN.size)[0] != self._notice.turn:
            self._notice = self._read()
        return self._notice

    def write(self, notice: Notice) -> None:
        """Put up a notice."""
        _NUMBERS.pack_into(self._map, 0, *notice)

    def _read(self) -> Notice:
        trial, begins_at, whole, stops_at, turn = _NUMBERS.unpack_from(self._map)
        return Notice(trial, begins_at, bool(whole), stops_at or NEVER, turn)

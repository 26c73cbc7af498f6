"""Where ranks read whose turn it is: ranks that train together must change together, or each would wait for the other.

Rank 0 writes that a turn begins at a step that no rank can have reached; every rank counts its own steps. The board
is a mapped file of five numbers; one rank writes it, and each step looks whether there is a new notice: under 1 µs.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

_NUMBERS, _TURN = struct.Struct("<qqqqq"), struct.Struct("<q")
NEVER = 1 << 62


class Notice(NamedTuple):
    """What stands on the board."""

    trial: int
    begins_at: int
    """Step of the loop, as each rank counts."""
    whole_epochs: bool
    """Whether the turn begins with an epoch."""
    stops_at: int
    turn: int
    """Counts notices. It is written last: who sees it sees the rest."""


class Board:
    """A notice that all ranks of a job see."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _NUMBERS.size:
                os.posix_fallocate(descriptor, 0, _NUMBERS.size)  # a map without room on the disk would be a signal
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

"""Records that cross the border of two ranges, so that only one of the two readers reads them from the file.

The reader of the range before a border completes its last record behind it; the reader of the range after it looks
there for its first one. Whoever comes first puts what it read into a `Crossings`, if both were given one that
they share; the other takes it from there. Where nothing is found, it is read: forgetting costs bytes, never records.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Crossing(NamedTuple):
    """What was read at a border."""

    first: int
    """Where the first record at the border or behind it begins."""
    data: bytes
    """Bytes at least to `first`: from one separator's length before the border on, or from byte 0."""


class Crossings(Protocol):
    """What readers of one stream tell each other. It may forget, but never give what was put for another border."""

    def get(self, path: str, border: int) -> Crossing | None:
        """What was put for this byte of a file."""
        ...

    def put(self, path: str, border: int, crossing: Crossing) -> None:
        """Keep it for whoever asks."""
        ...


class NoCrossings:
    """Remembers nothing: each reader reads for itself."""

    def get(self, path: str, border: int) -> Crossing | None:
        """Nothing."""
        return None

    def put(self, path: str, border: int, crossing: Crossing) -> None:
        """Forget it."""

"""How many shards may be open at once, over all datasets of the process.

Each takes a descriptor and one more for its map, and the usual limit is 1,024 for everything the
training script has open: half of it is left alone. The oldest go first: with windows read in order
they are also the ones that are done with.
"""

from __future__ import annotations

import resource
import threading
import weakref
from collections import deque
from typing import Protocol


class _Closes(Protocol):
    def close_shards(self, numbers: set[int]) -> None: ...


class OpenFiles:
    """The open shards of all datasets, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reset()

    def reset(self) -> None:
        """Forget all of them (in a forked child)."""
        self._lock = threading.Lock()
        self._order: deque[tuple[weakref.ref[_Closes], int]] = deque()

    def opened(self, owner: _Closes, number: int) -> None:
        """Note that `owner` opened shard `number`."""
        with self._lock:
            self._order.append((weakref.ref(owner), number))

    def make_room(self) -> None:
        """Close the oldest shards when there are too many.

        A quarter at a time: every closing copies a table.
        """
        with self._lock:
            if len(self._order) <= self.limit:
                return
            oldest = [self._order.popleft() for _ in range(len(self._order) - self.limit * 3 // 4)]
        for owner in {reference() for reference, _ in oldest} - {None}:
            assert owner is not None
            owner.close_shards({number for reference, number in oldest if reference() is owner})


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 4096
    return max(16, min(4096, soft // 4))


OPEN_FILES = OpenFiles(_limit())

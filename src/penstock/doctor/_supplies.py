"""Where batches come from during a turn: the script's own iterator, memory, or a loader rebuilt with a change.

When its turn is over, a supply goes idle once it has prefetched all it may. The next turn begins only then, so that no
supply computes during the turn of another.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.doctor._batches import bytes_of, copy_batch, group_by_length, rows_of
from penstock.watching import gauge_of

_MOST_REPLAYED, _MOST_REPLAYED_BYTES = 8, 256 << 20
_MOST_GATHERED_BYTES = 1 << 29
_PREFETCHING_SECONDS = 0.5
"""How long an iterator gets to prefetch all it may, if its queue cannot be looked at."""


class BatchSupply(Protocol):
    """Gives batches during turns."""

    def take(self) -> Any:
        """The next batch. Raises StopIteration at the end of the epoch."""
        ...

    def num_ready(self) -> float:
        """Batches that are ready; NaN if that cannot be known."""
        ...

    def is_idle(self) -> bool:
        """Whether everything that may be prefetched has been."""
        ...

    def close(self) -> None:
        """Let go of workers."""
        ...


class IteratorSupply:
    """Batches of an iterator of torch's or ours."""

    def __init__(self, iterator: Iterator[Any], loader: Any) -> None:
        self.iterator: Iterator[Any] | None = iterator
        self._plans_loader = loader if loads_plan(loader) else None
        self._gauge = gauge_of(loader, iterator)
        self._taken_at = time.monotonic()

    def take(self) -> Any:
        assert self.iterator is not None
        self._taken_at = time.monotonic()
        return next(self.iterator)

    def num_ready(self) -> float:
        return math.nan if self._gauge is None else self._gauge()[0]

    def is_idle(self) -> bool:
        """Whether prefetching has finished; if the queue cannot be inspected, whether enough time has passed."""
        iterator: Any = self.iterator
        if getattr(iterator, "_num_workers", None) == 0:
            return True
        if self._plans_loader is not None:
            statistics = self._plans_loader.stats()
            return bool(statistics.num_queued >= statistics.prefetch)
        if not hasattr(iterator, "_worker_result_queue") or not hasattr(iterator, "_tasks_outstanding"):
            return time.monotonic() > self._taken_at + _PREFETCHING_SECONDS
        try:
            ready = iterator._worker_result_queue.qsize()
            if iterator._data_queue is not iterator._worker_result_queue:
                ready += iterator._data_queue.qsize()
        except (NotImplementedError, OSError, ValueError):  # no qsize on this system; a queue that is closed
            return True
        return bool(ready >= iterator._tasks_outstanding)

    def close(self) -> None:
        """Drop the iterator: workers end with the last reference."""
        self.iterator = self._gauge = self._plans_loader = None


class Replay:
    """The first batches of a run, kept to be served again: as copies, because scripts change batches in place."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._bytes = 0
        self._num_taken = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no need for more."""
        return len(self._kept) >= _MOST_REPLAYED or self._bytes >= _MOST_REPLAYED_BYTES

    def keep(self, batch: Any) -> None:
        """Keep a copy."""
        self._kept.append(copy_batch(batch))
        self._bytes += bytes_of(batch)

    def take(self) -> Any:
        if not self._kept:
            raise StopIteration
        self._num_taken += 1
        return copy_batch(self._kept[self._num_taken % len(self._kept)])

    def num_ready(self) -> float:
        """NaN: batches are not made during a turn."""
        return math.nan

    def is_idle(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing runs."""


class GroupedSupply:
    """Batches of another supply, regrouped by length: less padding.

    While one group is served, the next is gathered, a batch for each that is taken: loading costs as much as before.
    """

    def __init__(self, supply: BatchSupply, *, num_batches: int) -> None:
        self._supply, self._num_batches = supply, num_batches
        self._gathered: list[Any] = []
        self._ready: deque[Any] = deque()

    @property
    def is_ready(self) -> bool:
        """Whether a group is there."""
        return bool(self._ready)

    def deal(self) -> None:
        """Make a group of what was gathered, off the clock; the first time, gather it."""
        if not self._gathered:
            while len(self._gathered) < self._num_batches and self._gather():
                pass
        full = [batch for batch in self._gathered if rows_of(batch) == rows_of(self._gathered[0])]
        self._ready.extend(group_by_length(full) if full else [])
        self._gathered.clear()

    def take(self) -> Any:
        if not self._ready:
            raise StopIteration
        self._gather()
        return self._ready.popleft()

    def num_ready(self) -> float:
        return self._supply.num_ready()

    def is_idle(self) -> bool:
        return self._supply.is_idle()

    def close(self) -> None:
        """The other supply is not ours to close."""
        self._gathered.clear()
        self._ready.clear()

    def _gather(self) -> bool:
        """Gather one more batch; False if there is none, or no room for it."""
        if self._gathered and len(self._gathered) * bytes_of(self._gathered[0]) >= _MOST_GATHERED_BYTES:
            return False
        try:
            self._gathered.append(self._supply.take())
        except StopIteration:
            return False
        return True


class IndexTap:
    """The indices that an iterator draws, remembered: others may draw the next ones, or read the last ones again."""

    def __init__(self, indices: Iterator[Any], remembered: deque[Any]) -> None:
        self._indices, self.remembered = indices, remembered

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = next(self._indices)
        self.remembered.append(index)
        return index


def loads_plan(loader: Any) -> bool:
    """Whether a plan is loaded."""
    return getattr(loader, "_source", None) is not None


def is_ours(loader: Any) -> bool:
    """Whether it is Penstock's, or inherits from Penstock's."""
    return any(each.__module__.startswith("penstock.") for each in type(loader).__mro__)


def num_workers_of(loader: Any) -> int:
    """Its own workers; what a plan's loader shows are torch's, of which it has none."""
    return int(loader._run.num_workers if loads_plan(loader) else loader.num_workers)


def wait_until_idle(is_idle: Callable[[], bool], *, seconds: float) -> None:
    """Wait until `is_idle()`, for at most `seconds`."""
    end = time.monotonic() + seconds
    while not is_idle() and time.monotonic() < end:
        time.sleep(0.005)

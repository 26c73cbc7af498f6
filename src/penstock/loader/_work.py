"""What an engine computes, and how every worker computes it: one item into one slot, measuring the cost."""

from __future__ import annotations

import resource
import time
from typing import Any, NamedTuple, Protocol

from penstock.loader._layout import Batch, BatchLayout
from penstock.loader._memory import Arena

_READING_SECONDS = 0.005


class Work(Protocol):
    """Computes items, in any worker, in any order; small enough to be sent to workers."""

    def compute(self, item: Any, arena: Arena) -> Batch:
        """Compute one item; arrays taken from `arena` are handed over without a copy."""
        ...

    def announce(self, item: Any) -> None:
        """Tell the kernel what an item will read."""
        ...


class Computed(NamedTuple):
    """Where a batch lies, and what it took to compute it."""

    layout: BatchLayout
    produce_seconds: float
    cpu_seconds: float
    page_faults: int


class Computer:
    """Computes items in one thread.

    The kernel is asked what the thread used every few milliseconds, not for every batch: asking takes
    longer than some batches. In between the cost is reported as 0, and added to a later batch.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._last_reading = time.perf_counter()
        self._cpu_seconds, self._page_faults = _used()

    def compute(self, item: Any, arena: Arena) -> Computed:
        """Compute an item into a slot."""
        begin = time.perf_counter()
        arena.begin()
        layout = arena.lay_out(self._work.compute(item, arena))
        end = time.perf_counter()
        if end - self._last_reading < _READING_SECONDS:
            return Computed(layout, end - begin, 0.0, 0)
        before, faults_before = self._cpu_seconds, self._page_faults
        self._last_reading, (self._cpu_seconds, self._page_faults) = end, _used()
        return Computed(layout, end - begin, self._cpu_seconds - before, self._page_faults - faults_before)


def _used() -> tuple[float, int]:
    """(CPU seconds, major page faults) of this thread."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime, usage.ru_majflt

"""Computing one item into one slot, with what it cost: the same in every kind of worker."""

from __future__ import annotations

import resource
import time
from typing import Any, NamedTuple

from penstock.loader._memory import AnySlot, Arena, Layout
from penstock.loader._work import Work


class Computed(NamedTuple):
    """Where a batch lies, and what it took to get it there. A tuple, because it is pickled for every batch."""

    layout: Layout
    produce_seconds: float
    cpu_seconds: float
    page_faults: int


def compute(work: Work, item: Any, slot: AnySlot) -> Computed:
    """Compute an item into a slot."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
    arena = Arena(slot)
    layout = arena.lay_out(work.compute(item, arena))
    after = resource.getrusage(resource.RUSAGE_THREAD)
    cpu_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Computed(layout, time.perf_counter() - begin, cpu_seconds, after.ru_majflt - before.ru_majflt)

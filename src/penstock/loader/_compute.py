"""Computing one item into one slot, with what it cost: the same in every kind of worker."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

from penstock.loader._memory import Arena, Layout, Slot
from penstock.loader._work import Work


@dataclass(frozen=True, slots=True)
class Computed:
    """Where a batch lies, and what it took to get it there."""

    layout: Layout
    produce_seconds: float
    cpu_seconds: float
    page_faults: int


def compute(work: Work, item: Any, slot: Slot) -> Computed:
    """Compute an item into a slot."""
    begin, cpu, faults = time.perf_counter(), time.thread_time(), _page_faults()
    arena = Arena(slot)
    layout = arena.lay_out(work.compute(item, arena))
    return Computed(layout, time.perf_counter() - begin, time.thread_time() - cpu, _page_faults() - faults)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt

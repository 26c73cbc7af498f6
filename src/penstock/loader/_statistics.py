"""What a loader measured: plain numbers, always on, a few microseconds per step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from penstock.loader._engine import Result


@dataclass(slots=True, kw_only=True)
class LoaderStatistics:
    """Totals since the loader was made; divide by `num_batches` for means."""

    num_batches: int = 0
    """Batches handed over."""
    num_ready: int = 0
    """Batches that were ready when they were asked for: no waiting."""
    num_bytes: int = 0
    """Bytes of the arrays handed over."""
    wait_seconds: float = 0.0
    """Time the training thread waited in `next()`."""
    step_seconds: float = 0.0
    """Time between hand-overs that was spent outside the loader: the training step."""
    produce_seconds: float = 0.0
    """Time workers took to compute batches, summed over workers."""
    copy_seconds: float = 0.0
    """Time to turn arrays into tensors and bring them to the device."""
    worker_cpu_seconds: float = 0.0
    """Processor time of workers."""
    page_faults: int = 0
    """Pages that workers had to wait for from disk."""
    num_buffers: int = 0
    """Buffers there are now; batches that are held keep theirs."""
    num_buffers_in_use: int = 0
    """Buffers that hold a batch in use or in the making."""
    num_workers: int = 0
    """Workers now."""
    prefetch: int = 0
    """Batches computed ahead now."""

    @property
    def ready_share(self) -> float:
        """Share of batches that were ready when asked for: 1.0 means the loader keeps up."""
        return self.num_ready / self.num_batches if self.num_batches else 1.0


def count_computed(statistics: LoaderStatistics, result: Result) -> None:
    """Add what a worker's batch, or several of them in one piece, took to compute."""
    statistics.num_bytes += result.num_bytes
    statistics.produce_seconds += result.produce_seconds
    statistics.worker_cpu_seconds += result.cpu_seconds
    statistics.page_faults += result.page_faults


def count_handed_over(statistics: LoaderStatistics, begin: float, waited: float, left_at: float | None) -> float:
    """Add a batch that was asked for at `begin` and there at `waited`; the one before it was handed over at `left_at`.

    Returns the time now, at which this one is handed over.
    """
    now = time.perf_counter()
    statistics.num_batches += 1
    statistics.wait_seconds += waited - begin
    statistics.copy_seconds += now - waited
    if left_at is not None:
        statistics.step_seconds += begin - left_at
    return now

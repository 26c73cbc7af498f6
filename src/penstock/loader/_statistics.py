"""What a loader measured: plain numbers, always on, a few microseconds per step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class LoaderStatistics:
    """Totals since the loader was made or `reset`; divide by `num_batches` for means."""

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

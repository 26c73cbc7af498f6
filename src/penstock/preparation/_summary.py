"""What `prepare` hands back: counts, what was skipped, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A finished preparation."""

    path: Path
    num_samples: int
    """Samples in the dataset."""
    num_tokens: int
    """Elements of its column `tokens`; 0 where there is none."""
    num_shards: int
    num_bytes: int
    """Bytes of the shards."""
    num_files: int
    """Source files."""
    tasks_run: int
    """Tasks that this run did."""
    tasks_kept: int
    """Tasks that an earlier run had done."""
    raw_bytes: int
    """Bytes of sources that this run read."""
    skipped: Mapping[str, int]
    """Rows left out of the dataset, by reason."""
    seconds: Mapping[str, float]
    """Of this run: "total", "start_up" (until the first task could begin), "work", "commit"."""
    worker_seconds: Mapping[str, float]
    """Of all workers together: "read", "transform", "write"."""
    processor_seconds: float
    """Processor time of all workers together; much less than the above means that they waited."""
    peak_worker_bytes: int
    """Most memory that a worker had; 0 when none ran."""
    failures: Mapping[str, int]
    """Deaths of workers that were made good."""
    notes: tuple[str, ...]
    """Sentences that a person should see."""

    @property
    def bottleneck(self) -> str:
        """The stage that took most of the workers' time; "" when no worker ran."""
        return max(self.worker_seconds, key=lambda stage: self.worker_seconds[stage]) if self.tasks_run else ""

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and run.json."""
        return {**asdict(self), "path": str(self.path), "notes": list(self.notes), "bottleneck": self.bottleneck}

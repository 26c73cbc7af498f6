"""What `prepare` hands back: counts, what was skipped, and where the time went."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.preparation._progress import Counts
from penstock.preparation._record import TaskRecord
from penstock.preparation._settings import Settings
from penstock.shards import Manifest

STAGES = ("read", "transform", "write")


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
    processor_seconds: Mapping[str, float]
    """Processor time in the same stages; much less than the above means that they waited."""
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


@dataclass(slots=True)
class RunLedger:
    """What one run did itself, and when."""

    records: list[TaskRecord] = field(default_factory=list)
    """Of the tasks that this run did."""
    num_kept: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    _begin: float = field(default_factory=time.perf_counter)
    _ready: float | None = None
    _worked: float | None = None

    def mark_ready(self) -> None:
        """The first task can begin; only the first call counts."""
        self._ready = self._ready or time.perf_counter()

    def mark_worked(self) -> None:
        """All tasks are finished."""
        self._worked = time.perf_counter()

    def summarise(
        self, path: Path, manifest: Manifest, *, num_files: int, skipped: Mapping[str, int], notes: Sequence[str]
    ) -> Prepared:
        """What to hand back, for the dataset that `manifest` describes."""
        total = Counts()
        for record in self.records:
            total.add(record.counts)
        return Prepared(
            path=path,
            num_samples=manifest.num_samples,
            num_tokens=sum(shard.num_values.get("tokens", 0) for shard in manifest.shards),
            num_shards=len(manifest.shards),
            num_bytes=manifest.num_bytes,
            num_files=num_files,
            tasks_run=len(self.records),
            tasks_kept=self.num_kept,
            raw_bytes=total.raw_bytes,
            skipped=dict(skipped),
            seconds=self._seconds(),
            worker_seconds={stage: getattr(total, f"{stage}_seconds") for stage in STAGES},
            processor_seconds={stage: getattr(total, f"{stage}_processor_seconds") for stage in STAGES},
            peak_worker_bytes=max((record.peak_bytes for record in self.records), default=0),
            failures=dict(self.failures),
            notes=tuple(notes),
        )

    def _seconds(self) -> dict[str, float]:
        now = time.perf_counter()
        worked = self._worked or now
        ready = min(self._ready or worked, worked)
        parts = {"start_up": ready - self._begin, "work": worked - ready, "commit": now - worked}
        return {"total": now - self._begin, **parts}


def describe_run(settings: Settings, summary: Prepared) -> dict[str, Any]:
    """What run.json says: all that depends on time, host and workers."""
    return {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "python": platform.python_version(),
        "engine": settings.engine,
        "workers": settings.num_workers,
        **summary.to_json(),
    }

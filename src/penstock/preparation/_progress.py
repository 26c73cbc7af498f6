"""How far a preparation is: counts that workers add to, and the rates that follow from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_WINDOW_SECONDS = 10.0


@dataclass(slots=True)
class Counts:
    """What was done. Workers count for themselves; the parent adds up."""

    documents: int = 0
    """Samples written."""
    raw_bytes: int = 0
    """Bytes of the sources that were read."""
    tokens: int = 0
    """Elements of the column `tokens`, where there is one."""
    skipped: int = 0
    """Rows left out by `on_error="skip"`."""
    read_seconds: float = 0.0
    """Time in which workers read and parsed."""
    transform_seconds: float = 0.0
    """Time in which workers tokenised, decoded, or ran a function."""
    write_seconds: float = 0.0
    """Time in which workers copied, checksummed and wrote shards."""

    def add(self, other: Counts) -> None:
        """Add what another has counted."""
        for each in fields(Counts):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Counts:
        """What `to_json` gave."""
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a running preparation."""

    stage: str
    """"prepare"; with `shuffle` first "deal", then "gather"."""
    seconds: float
    """Since work began."""
    documents: int
    raw_bytes: int
    """Bytes done, those of earlier runs included."""
    total_bytes: int
    tokens: int
    skipped: int
    tasks: int
    """Tasks finished, those of earlier runs included."""
    total_tasks: int
    documents_per_second: float
    bytes_per_second: float
    tokens_per_second: float
    remaining_seconds: float | None
    """None until there is a rate to tell it from."""
    failures: Mapping[str, int]
    """For each worker that died, how often."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class Meter:
    """Adds up the counts of all workers and tells the rates over the last seconds."""

    stage: str
    total_bytes: int
    total_tasks: int
    on_progress: OnProgress | None = None
    interval_seconds: float = 0.2
    counts: Counts = field(default_factory=Counts)
    kept_bytes: int = 0
    """Bytes of tasks that an earlier run has finished."""
    tasks: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    _begin: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _history: list[tuple[float, int, int, int]] = field(default_factory=list)

    def add(self, counts: Counts) -> None:
        """Add what a worker has done since it last told."""
        self.counts.add(counts)
        self.tell()

    def fail(self, worker: str) -> None:
        """Count the death of a worker."""
        self.failures[worker] = self.failures.get(worker, 0) + 1
        self.tell(now=True)

    def tell(self, *, now: bool = False) -> None:
        """Call `on_progress`, but not more often than every `interval_seconds`."""
        moment = time.monotonic()
        if self.on_progress is None or (not now and moment - self._last < self.interval_seconds):
            return
        self._last = moment
        self.on_progress(self.look(moment))

    def look(self, moment: float) -> Progress:
        """The progress at a moment."""
        counts, done = self.counts, min(self.total_bytes, self.kept_bytes + self.counts.raw_bytes)
        documents, raw, tokens = self._rates(moment)
        return Progress(
            stage=self.stage,
            seconds=moment - self._begin,
            documents=counts.documents,
            raw_bytes=done,
            total_bytes=self.total_bytes,
            tokens=counts.tokens,
            skipped=counts.skipped,
            tasks=self.tasks,
            total_tasks=self.total_tasks,
            documents_per_second=documents,
            bytes_per_second=raw,
            tokens_per_second=tokens,
            remaining_seconds=(self.total_bytes - done) / raw if raw else None,
            failures=dict(self.failures),
        )

    def _rates(self, moment: float) -> tuple[float, float, float]:
        counts = self.counts
        self._history.append((moment, counts.documents, counts.raw_bytes, counts.tokens))
        while len(self._history) > 2 and self._history[1][0] < moment - _WINDOW_SECONDS:
            self._history.pop(0)
        first = self._history[0] if len(self._history) > 1 else (self._begin, 0, 0, 0)
        elapsed = max(1e-9, moment - first[0])
        return (
            (counts.documents - first[1]) / elapsed,
            (counts.raw_bytes - first[2]) / elapsed,
            (counts.tokens - first[3]) / elapsed,
        )

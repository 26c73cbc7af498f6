"""How far a preparation is: counts that workers add to, and the rates that follow from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
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
    read_processor_seconds: float = 0.0
    """Processor time in each of these; much less means waiting, for a disk or for other processes."""
    transform_processor_seconds: float = 0.0
    write_processor_seconds: float = 0.0

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
    finished: Counts = field(default_factory=Counts)
    """What the tasks that this run has finished add up to."""
    kept_bytes: int = 0
    """Bytes of tasks that an earlier run has finished."""
    tasks: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    _running: dict[str, Counts] = field(default_factory=dict)
    _begin: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _history: list[tuple[float, int, int, int]] = field(default_factory=list)

    def add(self, key: str, counts: Counts) -> None:
        """Add what a worker has done for a task since it last told."""
        self._running.setdefault(key, Counts()).add(counts)
        self.tell()

    def finish(self, key: str, counts: Counts) -> None:
        """Count a task as finished, with what it says itself."""
        self._running.pop(key, None)
        self.finished.add(counts)
        self.tasks += 1
        self.tell(now=self.tasks == self.total_tasks)

    def fail(self, keys: Iterable[str], worker: str) -> None:
        """Count the death of a worker; what it did for its tasks is undone."""
        for key in keys:
            self._running.pop(key, None)
        self.failures[worker] = self.failures.get(worker, 0) + 1
        self.tell(now=True)

    @property
    def counts(self) -> Counts:
        """All that is done, in tasks finished and running."""
        total = Counts()
        for counts in (self.finished, *self._running.values()):
            total.add(counts)
        return total

    def tell(self, *, now: bool = False) -> None:
        """Call `on_progress`, but not more often than every `interval_seconds`."""
        moment = time.monotonic()
        if self.on_progress is None or (not now and moment - self._last < self.interval_seconds):
            return
        self._last = moment
        self.on_progress(self.look(moment))

    def look(self, moment: float) -> Progress:
        """The progress at a moment."""
        counts = self.counts
        done = min(self.total_bytes, self.kept_bytes + counts.raw_bytes)
        documents, raw, tokens = self._rates(moment, counts)
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

    def _rates(self, moment: float, counts: Counts) -> tuple[float, float, float]:
        self._history.append((moment, counts.documents, counts.raw_bytes, counts.tokens))
        while len(self._history) > 2 and self._history[1][0] < moment - _WINDOW_SECONDS:
            self._history.pop(0)
        first = self._history[0] if len(self._history) > 1 else (self._begin, 0, 0, 0)
        elapsed = max(1e-9, moment - first[0])
        done = (counts.documents - first[1], counts.raw_bytes - first[2], counts.tokens - first[3])
        documents, raw, tokens = (max(0, each) / elapsed for each in done)  # a death takes back what was done
        return documents, raw, tokens

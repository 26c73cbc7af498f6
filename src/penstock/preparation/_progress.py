"""How far a preparation has come: what workers have counted, and the rates that follow from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_RATE_SECONDS = 10.0


@dataclass(slots=True)
class Counts:
    """What was done. Each worker counts for itself, and the parent adds it up."""

    documents: int = 0
    """Samples written."""
    raw_bytes: int = 0
    """Bytes of the sources that were read."""
    tokens: int = 0
    """Elements of the column `tokens`, if there is one."""
    skipped: int = 0
    """Rows left out by `on_error="skip"`."""
    read_seconds: float = 0.0
    """Time spent reading and parsing."""
    transform_seconds: float = 0.0
    """Time spent tokenizing, decoding, or running a function."""
    write_seconds: float = 0.0
    """Time spent copying, checksumming and writing shards."""
    read_processor_seconds: float = 0.0
    """CPU time of the same; much less means waiting, for a disk or for other processes."""
    transform_processor_seconds: float = 0.0
    write_processor_seconds: float = 0.0

    def add(self, other: Counts) -> None:
        """Add another worker's counts."""
        for each in fields(Counts):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a running preparation has come."""

    stage: str
    """"prepare"; with `shuffle` first "deal", then "gather"."""
    seconds: float
    """Time since the first task could start."""
    documents: int
    raw_bytes: int
    """Bytes done, including those of earlier runs."""
    total_bytes: int
    tokens: int
    skipped: int
    tasks: int
    """Tasks finished, including those of earlier runs."""
    total_tasks: int
    documents_per_second: float
    bytes_per_second: float
    tokens_per_second: float
    remaining_seconds: float | None
    """None until it can be estimated from a rate."""
    failures: Mapping[str, int]
    """How often each worker died."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class Meter:
    """Adds up the counts of all workers, and reports them with the rates of the last few seconds."""

    pass_name: str
    total_bytes: int
    total_tasks: int
    on_progress: OnProgress | None = None
    interval_seconds: float = 0.2
    finished: Counts = field(default_factory=Counts)
    """The sum of all tasks that this run finished."""
    kept_bytes: int = 0
    """Bytes of tasks that earlier runs finished."""
    tasks: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    _running: dict[str, Counts] = field(default_factory=dict)
    _begin: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _history: list[tuple[float, int, int, int]] = field(default_factory=list)

    def add(self, key: str, counts: Counts) -> None:
        """Add what a worker did for a task since its last report."""
        self._running.setdefault(key, Counts()).add(counts)
        self.tell()

    def finish(self, key: str, counts: Counts) -> None:
        """Count a task as finished, with its own counts."""
        self._running.pop(key, None)
        self.finished.add(counts)
        self.tasks += 1
        self.tell(now=self.tasks == self.total_tasks)

    def fail(self, keys: Iterable[str], worker: str) -> None:
        """Count the death of a worker, and subtract what it did for its tasks."""
        for key in keys:
            self._running.pop(key, None)
        self.failures[worker] = self.failures.get(worker, 0) + 1
        self.tell(now=True)

    @property
    def counts(self) -> Counts:
        """Everything done so far, in tasks finished and running."""
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
        self.on_progress(self._progress_at(moment))

    def _progress_at(self, moment: float) -> Progress:
        counts = self.counts
        done = min(self.total_bytes, self.kept_bytes + counts.raw_bytes)
        documents, raw, tokens = self._rates(moment, counts)
        return Progress(
            stage=self.pass_name,
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
        while len(self._history) > 2 and self._history[1][0] < moment - _RATE_SECONDS:
            self._history.pop(0)
        first = self._history[0] if len(self._history) > 1 else (self._begin, 0, 0, 0)
        elapsed = max(1e-9, moment - first[0])
        done = (counts.documents - first[1], counts.raw_bytes - first[2], counts.tokens - first[3])
        documents, raw, tokens = (max(0, each) / elapsed for each in done)  # after a death, it may be negative
        return documents, raw, tokens

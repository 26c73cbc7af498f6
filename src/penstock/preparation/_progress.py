"""How tasks run and report, and what a run makes of it: progress, rates, and where the time went.

job.open() -> runner                  once in each worker                      Meter.start
runner.run(task, tell) -> Attempt     `tell` after each batch: Told            Meter.add
attempt.finish() -> TaskRecord                                                 Meter.finish
a worker dies                         its tasks are tried again                Meter.lose
"""

import logging
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from penstock.errors import printable
from penstock.preparation._prepared import PHASES, Prepared
from penstock.preparation._records import Counts, TaskRecord, check_skipped, sum_counts
from penstock.preparation._work_folder import Attempt
from penstock.shapes import COUNT, find_mismatch
from penstock.shards import Manifest, classes_of
from penstock.workers import SentError

MAX_DEATHS = 3
"""After this many deaths on one task, it is taken to be the cause."""
_RATE_SECONDS = 10.0
_INTERVAL_SECONDS = 0.2
_log = logging.getLogger(__name__)

Tell = Callable[[Counts], None]
"""Called after each batch with what was done since the last call."""


class AnyTask(Protocol):
    """Plain data: the key of its result, about how many raw bytes it reads, and whether no other process can do it."""

    @property
    def key(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def needs_this_process(self) -> bool: ...


class Runner(Protocol):
    """Does tasks of one kind in one process."""

    def run(self, task: Any, tell: Tell) -> Attempt:
        """Do all of a task except the last step, `finish`, which another thread may do."""
        ...


class AnyJob(Protocol):
    """What all tasks of a pass have in common; picklable, sent once to each worker."""

    def open(self) -> Runner:
        """Load what tasks need."""
        ...


@dataclass(frozen=True, slots=True)
class Told:
    """From a worker: a task has got this far since its last report."""

    key: str
    counts: Counts


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """From a worker: a task, or opening the job, raised this; the process that started the run raises it again."""

    error: SentError


@dataclass(slots=True)
class Tally:
    """What a task has done: in total, and since its last report."""

    tell: Tell
    counts: Counts = field(default_factory=Counts)
    total: Counts = field(default_factory=Counts)
    _last: float = field(default_factory=time.perf_counter)
    _processor: float = field(default_factory=time.process_time)

    def charge(self, phase: Literal["read", "transform", "write"]) -> None:
        """End a phase: it is charged the time since the last one ended."""
        now, processor = time.perf_counter(), time.process_time()
        spent = {f"{phase}_seconds": now - self._last, f"{phase}_processor_seconds": processor - self._processor}
        for name, seconds in spent.items():
            setattr(self.counts, name, getattr(self.counts, name) + seconds)
        self._last, self._processor = now, processor

    def report(self) -> None:
        """Report what was done since the last report."""
        self.total.add(self.counts)
        self.tell(self.counts)
        self.counts = Counts()


def peak_memory() -> int:
    """The most memory this process ever had, in bytes.

    Without /proc it is `ru_maxrss`, which may be that of the process that started this one.
    """
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) << 10
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


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


class _Pass:
    """How far one pass has come."""

    def __init__(self, name: str, tasks: Sequence[AnyTask], finished: Mapping[str, TaskRecord]) -> None:
        self.name = name
        self.total_tasks = len(tasks)
        self.total_bytes = sum(task.num_bytes for task in tasks)
        self.tasks = len(finished)
        self.kept_bytes = sum(task.num_bytes for task in tasks if task.key in finished)
        self.done = Counts()
        """The sum of all tasks that this run finished."""
        self.running: dict[str, Counts] = {}
        self.begin = time.monotonic()
        self._history: list[tuple[float, Counts]] = []

    def progress_at(self, moment: float, failures: Mapping[str, int]) -> Progress:
        """How far it is, with the rates of the last few seconds."""
        counts = Counts()
        for each in (self.done, *self.running.values()):
            counts.add(each)
        raw_bytes = min(self.total_bytes, self.kept_bytes + counts.raw_bytes)
        documents, raw, tokens = self._rates(moment, counts)
        return Progress(
            stage=self.name,
            seconds=moment - self.begin,
            documents=counts.documents,
            raw_bytes=raw_bytes,
            total_bytes=self.total_bytes,
            tokens=counts.tokens,
            skipped=counts.skipped,
            tasks=self.tasks,
            total_tasks=self.total_tasks,
            documents_per_second=documents,
            bytes_per_second=raw,
            tokens_per_second=tokens,
            remaining_seconds=(self.total_bytes - raw_bytes) / raw if raw else None,
            failures=dict(failures),
        )

    def _rates(self, moment: float, counts: Counts) -> tuple[float, float, float]:
        self._history.append((moment, counts))
        while len(self._history) > 2 and self._history[1][0] < moment - _RATE_SECONDS:
            self._history.pop(0)
        since, then = self._history[0] if len(self._history) > 1 else (self.begin, Counts())
        elapsed = max(1e-9, moment - since)
        done = (counts.documents - then.documents, counts.raw_bytes - then.raw_bytes, counts.tokens - then.tokens)
        documents, raw, tokens = (max(0, each) / elapsed for each in done)  # after a death, it may be negative
        return documents, raw, tokens


class Meter:
    """What one run does itself: it hears of all that happens to tasks, and tells the user how far they have come."""

    def __init__(self, most_skipped_rows: int | None, on_progress: OnProgress | None) -> None:
        self.num_kept = 0
        """Tasks that earlier runs had done."""
        self._most_skipped_rows = most_skipped_rows
        self._on_progress = on_progress
        self.finished: dict[str, TaskRecord] = {}
        """Tasks that this run finished, by key."""
        self._failures: dict[str, int] = {}
        self._pass = _Pass("prepare", (), {})
        self.on_finished: Callable[[TaskRecord], None] = lambda record: None
        """Called with each task that this run finishes."""
        self._skipped: dict[str, int] = {}
        self._last_told = 0.0
        self._begin = time.perf_counter()
        self._ready: float | None = None
        self._worked: float | None = None

    def begin_pass(
        self, name: str, tasks: Sequence[AnyTask], finished: Mapping[str, TaskRecord], skipped: Mapping[str, int]
    ) -> None:
        """Begin "prepare"; with a shuffle first "deal", then "gather".

        Args:
            tasks: All tasks of the pass.
            finished: Those of them that earlier runs finished.
            skipped: Rows, by reason, that the kept tasks of the dataset skipped earlier.
        """
        self._pass = _Pass(name, tasks, finished)
        self._tell(now=True)
        self._skip(skipped, *(record.skipped for record in finished.values()))

    def start(self) -> None:
        """The first task can start; only the first call counts."""
        self._ready = self._ready or time.perf_counter()

    def add(self, key: str, counts: Counts) -> None:
        """Add what a worker did for a task since its last report."""
        self.start()
        self._pass.running.setdefault(key, Counts()).add(counts)
        self._tell()

    def finish(self, record: TaskRecord) -> None:
        """Count a task as finished.

        Raises:
            FormatError: more rows were skipped than allowed.
        """
        self.start()
        self.finished[record.key] = record
        self._pass.running.pop(record.key, None)
        self._pass.done.add(record.counts)
        self._pass.tasks += 1
        self._tell(now=self._pass.tasks == self._pass.total_tasks)
        self._skip(record.skipped)
        self.on_finished(record)

    def lose(self, worker: str, how: str, keys: Iterable[str]) -> None:
        """Count the death of a worker, and subtract what it did for its tasks."""
        _log.warning("%s %s; trying again", worker, printable(how))  # it names a file
        for key in keys:
            self._pass.running.pop(key, None)
        self._failures[worker] = self._failures.get(worker, 0) + 1
        self._tell(now=True)

    def end(self) -> None:
        """All tasks of all passes are finished."""
        self._worked = time.perf_counter()

    def _skip(self, *by_reasons: Mapping[str, int]) -> None:
        self._skipped = sum_counts([self._skipped, *by_reasons])
        check_skipped(self._skipped, self._most_skipped_rows)

    def _tell(self, *, now: bool = False) -> None:
        """Call `on_progress`, but not more often than every `_INTERVAL_SECONDS`."""
        moment = time.monotonic()
        if self._on_progress is None or (not now and moment - self._last_told < _INTERVAL_SECONDS):
            return
        self._last_told = moment
        self._on_progress(self._pass.progress_at(moment, self._failures))

    def summarise(
        self, path: Path | str, manifest: Manifest, *, num_files: int, skipped: Mapping[str, int], notes: Sequence[str]
    ) -> Prepared:
        """The summary of this run and of the dataset that `manifest` describes."""
        total = Counts()
        for record in self.finished.values():
            total.add(record.counts)
        noticed = manifest.attributes.get("noticed", {})
        return Prepared(
            path=path,
            num_samples=manifest.num_samples,
            num_tokens=sum(shard.num_values.get("tokens", 0) for shard in manifest.shards),
            num_shards=len(manifest.shards),
            num_bytes=manifest.num_bytes,
            num_files=num_files,
            tasks_run=len(self.finished),
            tasks_kept=self.num_kept,
            raw_bytes=total.raw_bytes,
            skipped=dict(skipped),
            noticed={} if find_mismatch(noticed, {str: COUNT}) else dict(noticed),
            classes=classes_of(manifest.attributes),
            seconds=self._seconds(),
            worker_seconds={phase: getattr(total, f"{phase}_seconds") for phase in PHASES},
            processor_seconds={phase: getattr(total, f"{phase}_processor_seconds") for phase in PHASES},
            peak_worker_bytes=max((record.peak_bytes for record in self.finished.values()), default=0),
            failures=dict(self._failures),
            notes=tuple(notes),
        )

    def _seconds(self) -> dict[str, float]:
        now = time.perf_counter()
        worked = self._worked or now
        # Workers may be done before their first report arrives, but took at least as long as they say.
        longest = max((record.counts.busy_seconds for record in self.finished.values()), default=0.0)
        ready = max(self._begin, min(self._ready or worked, worked - longest))
        parts = {"start_up": ready - self._begin, "work": worked - ready, "commit": now - worked}
        return {"total": now - self._begin, **parts}

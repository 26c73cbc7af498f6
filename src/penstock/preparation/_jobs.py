"""What every kind of task shares: how it runs, what it reports, and how it counts its time and memory.

job.open() -> runner, once in each worker           reported as   Opened
runner.run(task, tell) -> Attempt                   reported as   Told, after each batch
attempt.finish() -> TaskRecord                      reported as   Done
a worker dies                                       reported as   Lost; its tasks are tried again
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from penstock.preparation._attempt import Attempt
from penstock.preparation._progress import Counts
from penstock.preparation._task_record import TaskRecord
from penstock.workers import SentError

Tell = Callable[[Counts], None]
"""Called after each batch with what was done since the last call."""
AnyTask = TypeVar("AnyTask", bound="Keyed", contravariant=True)


class Keyed(Protocol):
    """A task: plain data with a key under which its result is kept."""

    @property
    def key(self) -> str:
        """Name of the result."""
        ...

    @property
    def num_bytes(self) -> int:
        """About how many raw bytes it reads."""
        ...

    @property
    def needs_this_process(self) -> bool:
        """Whether no other process can do it."""
        ...


class Runner(Protocol[AnyTask]):
    """Does tasks of one kind in one process."""

    def run(self, task: AnyTask, tell: Tell) -> Attempt:
        """Do all of a task except the last step, `finish`, which another thread may do."""
        ...


class AnyJob(Protocol):
    """What all tasks of a pass have in common; picklable, sent once to each worker."""

    def open(self) -> Runner[Any]:
        """Load what tasks need."""
        ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A worker has opened the job."""


@dataclass(frozen=True, slots=True)
class Told:
    """A task has got this far since its last report."""

    key: str
    counts: Counts


@dataclass(frozen=True, slots=True)
class Done:
    """A task is finished."""

    record: TaskRecord


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task, or opening the job, raised this in a worker; it is raised again in the process that started the run."""

    error: SentError


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker died; its tasks will be tried again."""

    worker: str
    how: str
    keys: tuple[str, ...]
    """The tasks it had; none if it was starting."""


Listen = Callable[[Opened | Told | Done | Lost], None]
"""Called with everything that happens; may raise to stop the run."""

MAX_DEATHS = 3
"""After this many deaths on one task, it is taken to be the cause."""


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


def no_store(name: str, chunks: list[memoryview | bytes]) -> int:
    """The `store` of a writer that has no task yet."""
    raise AssertionError(f"{name} was written outside of a task")

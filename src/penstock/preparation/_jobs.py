"""What every kind of task shares: how it runs, what is heard of it, and how it counts its time and memory.

job.open() -> runner, once in each worker           heard as   Opened
runner.run(task, tell) -> Attempt                   heard as   Told, after each batch
attempt.finish() -> TaskRecord                      heard as   Done
a worker dies                                       heard as   Lost; its tasks are tried again
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
from penstock.workers import PackedError

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
        """Raw bytes, about."""
        ...

    @property
    def needs_this_process(self) -> bool:
        """Whether no other process can do it."""
        ...


class Runner(Protocol[AnyTask]):
    """Something opened in one process that does tasks of one kind."""

    def run(self, task: AnyTask, tell: Tell) -> Attempt:
        """Do all of a task but the last step, `finish`, which another thread may do."""
        ...


class AnyJob(Protocol):
    """What is the same for all tasks of a pass; picklable, sent once to each worker."""

    def open(self) -> Runner[Any]:
        """Load what tasks need."""
        ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A worker has opened the job."""


@dataclass(frozen=True, slots=True)
class Told:
    """This was done for a task since the last time."""

    key: str
    counts: Counts


@dataclass(frozen=True, slots=True)
class Done:
    """A task is finished."""

    record: TaskRecord


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task, or opening the job, raised this in a worker; it is raised again where the run was started."""

    error: PackedError


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker died; its tasks will be tried again."""

    worker: str
    how: str
    keys: tuple[str, ...]
    """The tasks it had; none when it was starting."""


Listen = Callable[[Opened | Told | Done | Lost], None]
"""Hears of everything that happens; may raise to stop the run."""

MAX_DEATHS = 3
"""Deaths over one task until it is taken for the cause."""


@dataclass(slots=True)
class Tally:
    """What a task has done: in all, and since it last told."""

    tell: Tell
    counts: Counts = field(default_factory=Counts)
    total: Counts = field(default_factory=Counts)
    _last: float = field(default_factory=time.perf_counter)
    _processor: float = field(default_factory=time.process_time)

    def charge(self, phase: Literal["read", "transform", "write"]) -> None:
        """End a phase: the time since the last one ended is its own."""
        now, processor = time.perf_counter(), time.process_time()
        spent = {f"{phase}_seconds": now - self._last, f"{phase}_processor_seconds": processor - self._processor}
        for name, seconds in spent.items():
            setattr(self.counts, name, getattr(self.counts, name) + seconds)
        self._last, self._processor = now, processor

    def report(self) -> None:
        """Tell what was done since the last report."""
        self.total.add(self.counts)
        self.tell(self.counts)
        self.counts = Counts()


def peak_memory() -> int:
    """Most memory this process ever had, in bytes.

    Without /proc it is `ru_maxrss`, which may be that of the process that started this one.
    """
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) << 10
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def no_store(name: str, chunks: list[memoryview | bytes]) -> int:
    """Where a writer's shards go before its first task has said where."""
    raise AssertionError(f"no task has said where {name} goes")

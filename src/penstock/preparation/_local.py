"""Tasks on processes of this machine, and in this very process for data that cannot leave it.

NOTE [who outlives whom]
  The parent holds each worker's life-line; when it ends in any way, the workers end (`_worker.py`).
  A worker that ends is noticed by the end of its connection. Its task goes back to the front of the queue,
  for a fresh worker; a task that has killed three is the likely culprit, and the run stops. Nothing else needs
  undoing: what a dead worker wrote is in an attempt that no record names.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any, Protocol, Self

from penstock.errors import WorkerDied
from penstock.preparation._messages import Done, Failed, Freed, Open, Opened, Run, Told, unpack_error
from penstock.preparation._processes import WorkerProcess, explain_death
from penstock.preparation._progress import Counts
from penstock.preparation._stages import AnyJob, Keyed
from penstock.preparation._work import WorkFolder

MAX_DEATHS = 3


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker died; its task will be tried again."""

    worker: str
    how: str
    keys: tuple[str, ...]
    """The tasks it had; none when it was starting."""


Listen = Callable[[Opened | Told | Done | Lost], None]
"""Hears of everything that happens; may raise to stop the run."""


class Engine(Protocol):
    """Something that gets tasks done."""

    def run(self, job: AnyJob, tasks: Sequence[Keyed], listen: Listen) -> None:
        """Do all tasks, in any order; return when each has been heard of as `Done`."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalEngine:
    """Worker processes, started at once so that they import while the parent plans."""

    def __init__(self, num_workers: int, work: WorkFolder) -> None:
        self._num_threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
        self._work = work
        self._workers: list[WorkerProcess] = []
        self._deaths: collections.Counter[str] = collections.Counter()
        try:
            for number in range(num_workers):
                self._workers.append(WorkerProcess(number, self._num_threads))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.pop().stop()

    def run(self, job: AnyJob, tasks: Sequence[Keyed], listen: Listen) -> None:
        """Do all tasks. Large ones come first, so that the last to end is a small one.

        Raises:
            WorkerDied: a task, or the start, has killed several workers.
            Exception: whatever a task raised.
        """
        waiting = collections.deque(sorted(tasks, key=lambda task: -task.num_bytes))
        opening = _pack_job(job)
        for worker in self._workers:
            self._send(worker, opening)
        num_left = len(waiting)
        while num_left:
            for ready in connection.wait([worker.connection for worker in self._workers]):
                worker = next(each for each in self._workers if each.connection is ready)
                message = self._receive(worker)
                if message is None:
                    listen(self._replace(worker, waiting, opening))
                elif isinstance(message, Failed):
                    raise unpack_error(message, f"{worker.name}, process {worker.process.pid}")
                elif isinstance(message, Freed):
                    self._give_task(worker, waiting)
                else:
                    num_left -= self._note(worker, message, waiting)
                    listen(message)

    def _note(self, worker: WorkerProcess, message: Opened | Told | Done, waiting: collections.deque[Keyed]) -> int:
        """Keep book of a message; return how many tasks it says are finished."""
        if isinstance(message, Opened):
            self._give_task(worker, waiting)
        elif isinstance(message, Done):
            del worker.tasks[message.record.key]
            return 1
        return 0

    def _give_task(self, worker: WorkerProcess, waiting: collections.deque[Keyed]) -> None:
        if waiting:
            task = waiting.popleft()
            worker.tasks[task.key] = task
            self._send(worker, Run(task))

    def _send(self, worker: WorkerProcess, message: Open | Run) -> None:
        with contextlib.suppress(OSError):  # it has died; its end of the connection says so at the next wait
            worker.connection.send(message)

    def _receive(self, worker: WorkerProcess) -> Any:
        """The next message of a worker; None when it is gone."""
        try:
            return worker.connection.recv()
        except (EOFError, OSError):
            return None

    def _replace(self, worker: WorkerProcess, waiting: collections.deque[Keyed], opening: Open) -> Lost:
        """Put a dead worker's tasks back and start another worker in its place."""
        how = worker.ending()
        tasks = list(worker.tasks.values())
        doing, key = (f"preparing {tasks[-1]}", tasks[-1].key) if tasks else ("starting", "")
        self._deaths[key] += 1
        pid = worker.process.pid
        worker.stop()
        if self._deaths[key] >= MAX_DEATHS:
            raise WorkerDied(explain_death(worker.name, pid, how, doing, self._deaths[key]))
        for task in tasks:
            waiting.appendleft(task)
            self._remove_attempts(task.key)
        fresh = WorkerProcess(worker.number, self._num_threads)
        self._workers[self._workers.index(worker)] = fresh
        self._send(fresh, opening)
        return Lost(worker.name, f"{how} while {doing}", tuple(worker.tasks))

    def _remove_attempts(self, key: str) -> None:
        for folder in (self._work.path / "attempts").glob(f"{key}-*"):
            shutil.rmtree(folder, ignore_errors=True)


class InlineEngine:
    """Tasks in this process, for data that is an object of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(self, job: AnyJob, tasks: Sequence[Keyed], listen: Listen) -> None:
        """Do all tasks, one after another."""
        runner = job.open()
        listen(Opened())
        for task in tasks:
            listen(Done(runner.run(task, functools.partial(_pass_on, listen, task.key)).finish()))


def _pass_on(listen: Listen, key: str, counts: Counts) -> None:
    listen(Told(key, counts))


def _pack_job(job: AnyJob) -> Open:
    try:
        packed = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The transform cannot be sent to worker processes: {error}. "
            "Define it at the top of a module, or name it, as in 'package.module:function'."
        ) from None
    return Open(packed, _describe_main() if b"__main__" in packed else None)


def _describe_main() -> dict[str, Any]:
    """How a worker imports the script that this process runs, as multiprocessing does it."""
    from multiprocessing import spawn

    main: dict[str, Any] = spawn.get_preparation_data("penstock-worker")
    main.pop("authkey", None)  # for multiprocessing's own servers, and not to be sent around
    if not any(key.startswith("init_main") for key in main):
        raise ValueError(
            "The transform is a function of an interactive session, which worker processes cannot import. "
            "Put it into a module, and name it as in 'package.module:function'."
        )
    return main

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
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from types import TracebackType
from typing import Any, Protocol, Self

from penstock.preparation._errors import WorkerDied
from penstock.preparation._messages import Done, Failed, Open, Opened, Run, Told, unpack_error
from penstock.preparation._progress import Counts
from penstock.preparation._stages import AnyJob, Keyed
from penstock.preparation._work import WorkFolder

MAX_DEATHS = 3
_THREAD_SETTINGS = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker died; its task will be tried again."""

    worker: str
    how: str
    key: str
    """The task it was at; "" when it was starting."""


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


class _Worker:
    """One process, and the task it is at."""

    def __init__(self, number: int, num_threads: int) -> None:
        self.name = f"worker {number}"
        self.number = number
        self.task: Keyed | None = None
        self.connection, theirs = Pipe(duplex=True)
        lifeline, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(  # noqa: S603 our own interpreter and code
                [sys.executable, "-c", _start_code(theirs.fileno(), lifeline)],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                env=_environment(num_threads),
            )
        except BaseException:
            os.close(self._lifeline)
            self.connection.close()
            raise
        finally:
            os.close(lifeline)
            theirs.close()

    def stop(self) -> int:
        """End the process, whatever it does, and return how it ended."""
        if not self.connection.closed:
            self.connection.close()
            os.close(self._lifeline)
            self.process.kill()
        return self.process.wait(_STOP_SECONDS)

    def ending(self) -> str:
        """How a process that closed its connection ended, in words."""
        try:
            code = self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        if code >= 0:
            return f"ended with code {code}"
        return f"was killed by {signal.Signals(-code).name}"


class LocalEngine:
    """Worker processes, started at once so that they import while the parent plans."""

    def __init__(self, num_workers: int, work: WorkFolder) -> None:
        self._num_threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
        self._work = work
        self._workers: list[_Worker] = []
        self._deaths: collections.Counter[str] = collections.Counter()
        try:
            for number in range(num_workers):
                self._workers.append(_Worker(number, self._num_threads))
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
                else:
                    num_left -= isinstance(message, Done)
                    if isinstance(message, (Opened, Done)):
                        self._give_task(worker, waiting)
                    listen(message)

    def _give_task(self, worker: _Worker, waiting: collections.deque[Keyed]) -> None:
        worker.task = waiting.popleft() if waiting else None
        if worker.task is not None:
            self._send(worker, Run(worker.task))

    def _send(self, worker: _Worker, message: Open | Run) -> None:
        with contextlib.suppress(OSError):  # it has died; its end of the connection says so at the next wait
            worker.connection.send(message)

    def _receive(self, worker: _Worker) -> Any:
        """The next message of a worker; None when it is gone."""
        try:
            return worker.connection.recv()
        except (EOFError, OSError):
            return None

    def _replace(self, worker: _Worker, waiting: collections.deque[Keyed], opening: Open) -> Lost:
        """Put a dead worker's task back and start another worker in its place."""
        how = worker.ending()
        doing = "starting" if worker.task is None else f"preparing {worker.task}"
        key = "" if worker.task is None else worker.task.key
        self._deaths[key] += 1
        pid = worker.process.pid
        worker.stop()
        if self._deaths[key] >= MAX_DEATHS:
            raise WorkerDied(_explain_death(worker.name, pid, how, doing, self._deaths[key]))
        if worker.task is not None:
            waiting.appendleft(worker.task)
            self._remove_attempts(key)
        fresh = _Worker(worker.number, self._num_threads)
        self._workers[self._workers.index(worker)] = fresh
        self._send(fresh, opening)
        return Lost(worker.name, f"{how} while {doing}", key)

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
            listen(Done(runner.run(task, functools.partial(_pass_on, listen, task.key))))


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


def _start_code(connection_descriptor: int, lifeline: int) -> str:
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from penstock.preparation._worker import main; "
        f"main({connection_descriptor}, {lifeline}, {os.getpid()})"
    )


def _environment(num_threads: int) -> dict[str, str]:
    """Ours, with libraries told how many threads are theirs: workers are the parallelism here."""
    threads = {name: str(num_threads) for name in _THREAD_SETTINGS if name not in os.environ}
    return {**os.environ, "TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false", **threads}


def _explain_death(name: str, pid: int, how: str, doing: str, count: int) -> str:
    memory = _memory_used()
    reason = " (out of memory?)" if "SIGKILL" in how else ""
    return (
        f"{name} (process {pid}) {how}{reason} while {doing}, the {count}. time. "
        f"System memory is {memory} used now. Finished tasks are kept: run it again with fewer workers, "
        "or with a smaller shard_bytes after --overwrite."
    )


def _memory_used() -> str:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    total, free = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return f"{100 * (1 - free / total):.0f} %"

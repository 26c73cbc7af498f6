"""Tasks on worker processes of this machine.

    LocalEngine (here)                         RunTasks (in a worker process)
    Pickled(job), once for each job ------>    opens it; imports the user's script only if it needs a function from it
                                     <-----    Ready for a task
    a task ------------------------------->    reads, transforms, writes
                                     <-----    Told, after each batch
                                     <-----    Ready for another task, while a thread syncs this one's shards
                                     <-----    TaskRecord: it is finished
                                     <-----    TaskFailed: the error, raised again here

NOTE [who outlives whom]
  However this process ends, the workers end with it: see the life-line in `penstock.workers`.
  The end of a worker shows up as the end of its channel. Its tasks go back to the front of the queue, for a
  fresh worker; a task that has killed three is the likely culprit, and the run stops. Nothing else needs undoing:
  what a dead worker wrote is in an attempt that no record names.
"""

import collections
import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from penstock.errors import PenstockError, WorkerDied, printable
from penstock.machine import thread_settings, usable_cpus
from penstock.preparation._progress import MAX_DEATHS, AnyJob, AnyTask, Meter, Runner, TaskFailed, Tell, Told
from penstock.preparation._records import Counts, TaskRecord
from penstock.preparation._work_folder import Attempt, WorkFolder
from penstock.workers import (
    Channel,
    Crew,
    Patience,
    Pickled,
    SentError,
    WorkerProcess,
    describe_death,
    describe_ending,
    describe_silence,
    guard_life_line,
    is_crash,
)

_THREAD_SETTINGS = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# pyarrow's allocator returns memory to the system 10 ms after it was freed. A worker needs it again for the next batch,
# and fresh pages cost as much as reading parquet into them: 2.2 s per GB with kept pages, 3.4 s without.
_MEMORY_SETTINGS = {"MIMALLOC_PURGE_DELAY": "-1"}
_LOOK_AROUND_SECONDS = 1.0
_OTHERWISE = "name the function, as in 'package.module:function'."
_log = logging.getLogger(__name__)


def worker_settings(num_threads: int) -> dict[str, str]:
    """A worker's environment variables: how many threads each library may use, and to keep freed memory.

    Settings of this process win, except for the tokenizers library, whose own choice depends on how it was started.
    """
    memory = {name: os.environ.get(name, value) for name, value in _MEMORY_SETTINGS.items()}
    parallelism = {"TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false"}
    return {**memory, **thread_settings(num_threads, _THREAD_SETTINGS), **parallelism}


@dataclass(frozen=True, slots=True)
class _Ready:
    """From a worker: it has opened the job, or written a task's shards, which it syncs while it does another."""


@dataclass(frozen=True, slots=True)
class RunTasks:
    """The worker's program."""

    def run(self, channel: Channel, life_line: int) -> None:
        """Open the jobs and do the tasks that it is sent, until the channel ends."""
        guard_life_line(life_line)
        runner: Runner | None = None
        finisher = _Finisher(channel)
        while True:
            message, _ = channel.receive()
            answer: _Ready | TaskFailed
            try:
                if isinstance(message, Pickled):
                    runner = message.load().open()
                else:
                    assert runner is not None
                    finisher.take(runner.run(message, _teller(channel, message.key)))
                answer = _Ready()
            except BaseException as error:  # noqa: BLE001 whatever it is, the parent raises it
                answer = TaskFailed(SentError.pack(error))
            channel.send(answer)


class _Finisher:
    """Syncs finished tasks, one at a time, while the next one is running."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: queue.Queue[Attempt] = queue.Queue(maxsize=1)
        threading.Thread(target=self._work, name="penstock-finisher", daemon=True).start()

    def take(self, attempt: Attempt) -> None:
        """Take over a task; waiting for a disk that cannot keep up counts as writing time."""
        begin = time.perf_counter()
        self._waiting.join()
        attempt.record.counts.write_seconds += time.perf_counter() - begin
        self._waiting.put(attempt)

    def _work(self) -> None:
        while True:
            attempt = self._waiting.get()
            answer: TaskRecord | TaskFailed
            try:
                answer = attempt.finish()
            except BaseException as error:  # noqa: BLE001 whatever it was, the parent raises it
                answer = TaskFailed(SentError.pack(error))
            with contextlib.suppress(ConnectionError):  # the parent is gone, and this process soon will be
                self._channel.send(answer)
            self._waiting.task_done()


def _teller(channel: Channel, key: str) -> Tell:
    def tell(counts: Counts) -> None:
        channel.send(Told(key, counts))

    return tell


@dataclass(slots=True, eq=False)
class _TaskWorker:
    """A worker process, and its tasks."""

    process: WorkerProcess
    seat: int
    """Its number among those that work at the same time; a worker that replaces a dead one inherits it."""
    tasks: dict[str, AnyTask] = field(default_factory=dict)
    """Unfinished tasks; the last one is running, and the one before it may still be syncing."""
    has_opened: bool = False
    """Whether it has opened the current job."""
    patience: Patience = field(default_factory=Patience)
    """How long it has been silent."""

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"worker {self.seat}"

    @property
    def doing(self) -> str:
        """What it is doing, in words; "" if it is waiting for a task."""
        if self.tasks:
            return f"preparing {list(self.tasks.values())[-1]}"
        return "" if self.has_opened else "starting"


class LocalEngine:
    """Worker processes, started at once so that they import while the parent plans."""

    def __init__(self, num_workers: int, work: WorkFolder) -> None:
        self._work = work
        self._crew = Crew(
            RunTasks(),
            "spawn",
            environment=worker_settings(max(1, usable_cpus() // num_workers)),
            warm_up=_warm_up,
            otherwise=_OTHERWISE,
        )
        self._workers: dict[int, _TaskWorker] = {}
        self._deaths: collections.Counter[str] = collections.Counter()
        try:
            for seat in range(num_workers):
                self._start(seat)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        self._crew.close()

    def run(self, job: AnyJob, tasks: Sequence[AnyTask], meter: Meter) -> None:
        """Do all tasks.

        Raises:
            WorkerDied: a task, or the start, has killed several workers.
            Exception: whatever a task raised.
        """
        waiting = collections.deque(tasks)
        pickled = Pickled.pack(job, otherwise=_OTHERWISE)
        for worker in self._workers.values():
            worker.has_opened = False
            worker.patience.restart()
            worker.process.send(pickled)
        num_left = len(waiting)
        while num_left:
            for process in self._crew.wait(_LOOK_AROUND_SECONDS):
                worker = self._workers[process.number]
                try:
                    message = process.receive()
                except EOFError:
                    self._replace(worker, waiting, pickled, meter)
                    continue
                worker.patience.restart()
                if isinstance(message, TaskFailed):
                    raise message.error.rebuild(f"in {worker.name}, process {worker.process.pid}")
                if isinstance(message, _Ready):
                    worker.has_opened = True
                    self._give_task(worker, waiting)
                    meter.start()
                elif isinstance(message, Told):
                    meter.add(message.key, message.counts)
                elif isinstance(message, TaskRecord):
                    del worker.tasks[message.key]
                    num_left -= 1
                    meter.finish(message)
            self._warn_of_silent_workers()

    def _warn_of_silent_workers(self) -> None:
        for worker in self._workers.values():
            is_busy = worker.tasks or not worker.has_opened
            if is_busy and worker.patience.is_report_due():
                pid = self._crew.find_pid(worker.process)
                doing, seconds = f"silent while {worker.doing}", worker.patience.seconds
                _log.warning("%s", printable(describe_silence(worker.name.capitalize(), pid, doing, seconds)))

    def _start(self, seat: int) -> _TaskWorker:
        worker = _TaskWorker(self._crew.start(), seat)
        self._workers[worker.process.number] = worker
        return worker

    def _give_task(self, worker: _TaskWorker, waiting: collections.deque[AnyTask]) -> None:
        if waiting:
            task = waiting.popleft()
            worker.tasks[task.key] = task
            worker.process.send(task)

    def _replace(
        self, worker: _TaskWorker, waiting: collections.deque[AnyTask], pickled: Pickled, meter: Meter
    ) -> None:
        """Put a dead worker's tasks back and start another worker in its place."""
        code = self._crew.remove_dead(worker.process)
        del self._workers[worker.process.number]
        tasks = list(worker.tasks.values())
        doing = worker.doing or "waiting"
        key = tasks[-1].key if tasks else ""
        self._deaths[key] += 1
        if self._deaths[key] >= MAX_DEATHS:
            raise WorkerDied(_explain_death(worker, code, doing, self._deaths[key] - 1))
        for task in tasks:
            waiting.appendleft(task)
            with contextlib.suppress(PenstockError, OSError):  # the next run removes them
                self._work.remove_attempts(f"{task.key}-")
        self._start(worker.seat).process.send(pickled)
        meter.lose(worker.name, f"{describe_ending(code)} while {doing}", worker.tasks)


def _explain_death(worker: _TaskWorker, code: int | None, doing: str, num_before: int) -> str:
    """Why a run stops after workers died, and what to do."""
    death = describe_death(worker.name.capitalize(), worker.process.pid, code, doing, num_before=num_before)
    advice = "fix the error it printed to stderr, and run it again."
    if is_crash(code):
        advice = "compiled code crashed; run it again with PYTHONFAULTHANDLER=1 to see where."
    elif code == -signal.SIGKILL:
        advice = "run it again with fewer workers, or with a smaller shard_bytes after --overwrite."
    return f"{death}Finished tasks are kept: {advice}"


def _warm_up() -> None:
    """Nothing: these workers are not forked."""

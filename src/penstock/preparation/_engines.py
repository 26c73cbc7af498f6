"""Run the tasks that are left on the engine that the settings name, and keep count meanwhile.

    Workforce.execute -> LocalEngine          worker processes on this machine (`_local.py`)
                         RayEngine            a cluster
                         InlineTaskEngine     this process, for data that cannot leave it

**On a cluster,** a Ray worker opens the job once and keeps it for the tasks that follow. Retries are ours, with the
same limit as for local processes, so that a lost worker is counted and shown: Ray's own would hide it. Ray may still
run a task twice, if it wrongly believes a node dead; tasks are idempotent (`_work_folder.py`), so that is waste, not
damage. Every machine must see the destination under the same path, and have Penstock installed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from penstock.errors import WorkerDied, printable
from penstock.preparation._jobs import MAX_DEATHS, AnyJob, Done, Keyed, Listen, Lost, Opened, Runner, TaskFailed, Told
from penstock.preparation._local import LocalEngine, worker_settings
from penstock.preparation._progress import Counts, Meter, OnProgress
from penstock.preparation._settings import Settings
from penstock.preparation._skipping import check_skipped, sum_counts
from penstock.preparation._summary import RunLedger
from penstock.preparation._task_record import TaskRecord
from penstock.preparation._work_folder import WorkFolder
from penstock.workers import Cluster, SentError

_log = logging.getLogger(__name__)
_opened: dict[str, Runner[Any]] = {}


class TaskEngine(Protocol):
    """Something that does tasks."""

    def run(self, job: AnyJob, tasks: Sequence[Keyed], listen: Listen) -> None:
        """Do all tasks, in any order; return once each has been reported as `Done`."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...


class InlineTaskEngine:
    """Does tasks in this process, for data that is an object in it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, job: AnyJob, tasks: Sequence[Keyed], listen: Listen) -> None:
        """Do all tasks, one after another."""
        runner = job.open()
        listen(Opened())
        for task in tasks:
            listen(Done(runner.run(task, functools.partial(_pass_on, listen, task.key)).finish()))


def _pass_on(listen: Listen, key: str, counts: Counts) -> None:
    listen(Told(key, counts))


class Workforce:
    """Has tasks done by the engine that the settings name; `close` ends it."""

    def __init__(self, settings: Settings, work: WorkFolder, ledger: RunLedger, on_progress: OnProgress | None) -> None:
        self._settings = settings
        self._work = work
        self._ledger = ledger
        self._on_progress = on_progress
        self._stack = contextlib.ExitStack()
        self._engine: TaskEngine | None = None

    def close(self) -> None:
        """End the engine and all its workers."""
        self._stack.close()

    def start(self, num_tasks: int, *, local_only: bool) -> TaskEngine:
        """The engine of this run, started early so that workers import while the parent plans."""
        if self._engine is None:
            self._engine = self._stack.enter_context(self._choose_engine(num_tasks, local_only))
        return self._engine

    def _choose_engine(self, num_tasks: int, local_only: bool) -> TaskEngine:
        settings = self._settings
        if local_only:
            return InlineTaskEngine()
        if settings.engine == "ray":
            return RayEngine(None if settings.workers == "auto" else settings.workers, settings.address)
        return LocalEngine(max(1, min(settings.num_workers, num_tasks)), self._work)

    def execute(
        self,
        pass_name: str,
        job: AnyJob,
        tasks: Sequence[Keyed],
        finished: dict[str, TaskRecord],
        skipped: Mapping[str, int],
    ) -> None:
        """Do the tasks that are not in `finished`, and add their records to it.

        Args:
            pass_name: "prepare"; with a shuffle first "deal", then "gather".
            skipped: Rows, by reason, that the kept tasks of the dataset skipped earlier.
        """
        self._work.note_tasks(pass_name, {task.key: task.num_bytes for task in tasks})
        left = [task for task in tasks if task.key not in finished]
        meter = Meter(pass_name, sum(task.num_bytes for task in tasks), len(tasks), self._on_progress)
        meter.kept_bytes = sum(task.num_bytes for task in tasks if task.key in finished)
        meter.tasks = len(finished)
        meter.tell(now=True)

        def listen(event: Opened | Told | Done | Lost) -> None:
            self._ledger.mark_ready()
            if isinstance(event, Told):
                meter.add(event.key, event.counts)
            elif isinstance(event, Lost):
                _log.warning("%s %s; trying again", event.worker, printable(event.how))  # it names a file
                meter.fail(event.keys, event.worker)
            elif isinstance(event, Done):
                finished[event.record.key] = event.record
                self._ledger.records.append(event.record)
                meter.finish(event.record.key, event.record.counts)
                self._check_skipped(finished, skipped)

        if left:
            local_only = any(task.needs_this_process for task in left)
            self.start(len(left), local_only=local_only).run(job, left, listen)
        self._check_skipped(finished, skipped)
        self._ledger.failures.update(meter.failures)

    def _check_skipped(self, finished: Mapping[str, TaskRecord], skipped: Mapping[str, int]) -> None:
        by_reason = sum_counts([skipped, *(record.skipped for record in finished.values())])
        check_skipped(by_reason, self._settings.most_skipped_rows)


class RayEngine:
    """Does tasks on a cluster: the one this process already uses, the one at `address`, or a new one."""

    def __init__(self, num_workers: int | None, address: str | None) -> None:
        self._cluster = Cluster("engine='ray'", address, num_workers)
        self._ray = self._cluster.ray
        self._num_workers = num_workers

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cluster.__exit__(*exception)

    def run(self, job: AnyJob, tasks: Sequence[Keyed], listen: Listen) -> None:
        """Do all tasks; at most as many at once as there are workers.

        Raises:
            WorkerDied: a task has killed several workers.
            Exception: whatever a task raised.
        """
        ray = self._ray
        shared, token = ray.put(job), uuid.uuid4().hex
        environment = {"env_vars": worker_settings(num_threads=1)}
        remote = ray.remote(num_cpus=1, max_retries=0, runtime_env=environment)(_run_task)
        waiting = collections.deque(sorted(tasks, key=lambda task: -task.num_bytes))
        deaths: collections.Counter[str] = collections.Counter()
        running: dict[Any, Keyed] = {}
        limit = self._num_workers or self._cluster.num_cpus
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    task = waiting.popleft()
                    running[remote.remote(shared, token, task)] = task
                for reference in ray.wait(list(running), num_returns=1, timeout=1.0)[0]:
                    task = running.pop(reference)
                    result = self._result(reference, task, deaths)
                    if isinstance(result, Lost):
                        waiting.appendleft(task)
                    else:
                        listen(Told(task.key, result.record.counts))
                    listen(result)
        finally:
            self._cancel(running)

    def _result(self, reference: Any, task: Keyed, deaths: collections.Counter[str]) -> Done | Lost:
        errors = self._ray.exceptions
        lost = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)
        try:
            result = self._ray.get(reference)
        except lost as error:
            deaths[task.key] += 1
            how = f"{type(error).__name__} while preparing {task}"
            if deaths[task.key] >= MAX_DEATHS:
                raise WorkerDied(
                    f"{how}, like the {MAX_DEATHS - 1} before it. Finished tasks are kept: run it again with fewer "
                    "workers per node, or with a smaller shard_bytes after --overwrite."
                ) from error
            return Lost("ray worker", how, (task.key,))
        if isinstance(result, TaskFailed):
            raise result.error.rebuild("in a Ray worker")
        assert isinstance(result, Done)
        return result

    def _cancel(self, running: dict[Any, Keyed]) -> None:
        for reference in running:
            with contextlib.suppress(Exception):  # the cluster may be what failed
                self._ray.cancel(reference, force=True)


def _run_task(job: AnyJob, token: str, task: Keyed) -> Done | TaskFailed:
    """In a Ray worker: do a task with the job that this process opened, or opens now."""
    try:
        if token not in _opened:
            _opened.clear()
            _opened[token] = job.open()
        return Done(_opened[token].run(task, lambda counts: None).finish())
    except Exception as error:  # noqa: BLE001 whatever it is, the driver raises it
        return TaskFailed(SentError.pack(error))

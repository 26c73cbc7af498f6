"""Run the tasks that are left on the engine that the settings name, and keep count meanwhile.

    Workforce.execute -> LocalEngine          worker processes on this machine (`_local.py`)
                         RayEngine            a cluster
                         InlineTaskEngine     this process, for data that cannot leave it

**On a cluster,** a Ray worker opens the job once and keeps it for the tasks that follow. Retries are ours, with the
same limit as for local processes, so that a lost worker is counted and shown: Ray's own would hide it. Ray may still
run a task twice, if it wrongly believes a node dead; tasks are idempotent (`_work_folder.py`), so that is waste, not
damage. Every machine must see the destination under the same path, and have Penstock installed.
"""

import collections
import contextlib
import functools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from penstock.errors import WorkerDied
from penstock.preparation._local import LocalEngine, worker_settings
from penstock.preparation._progress import MAX_DEATHS, AnyJob, AnyTask, Meter, Runner, TaskFailed
from penstock.preparation._records import TaskRecord
from penstock.preparation._shipping import Shipment
from penstock.preparation._specification import Settings
from penstock.preparation._work_folder import WorkFolder
from penstock.workers import Cluster, SentError

_opened: dict[str, Runner] = {}


class TaskEngine(Protocol):
    """Something that does tasks."""

    def run(self, job: AnyJob, tasks: Sequence[AnyTask], meter: Meter) -> None:
        """Do all tasks, begun in this order; return once the meter has heard that each is finished."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...


class InlineTaskEngine:
    """Does tasks in this process, for data that is an object in it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, job: AnyJob, tasks: Sequence[AnyTask], meter: Meter) -> None:
        runner = job.open()
        meter.start()
        for task in tasks:
            meter.finish(runner.run(task, functools.partial(meter.add, task.key)).finish())


class Workforce:
    """Has tasks done by the engine that the settings name; `close` ends it."""

    def __init__(self, settings: Settings, work: WorkFolder, meter: Meter, shipment: Shipment | None) -> None:
        self._shipment = shipment
        self._settings = settings
        self._work = work
        self._meter = meter
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
        tasks: Sequence[AnyTask],
        finished: Mapping[str, TaskRecord],
        skipped: Mapping[str, int],
    ) -> list[TaskRecord]:
        """Do the tasks that are not in `finished`; return the records of all.

        Args:
            pass_name: "prepare"; with a shuffle first "deal", then "gather".
            skipped: Rows, by reason, that the kept tasks of the dataset skipped earlier.
        """
        self._work.note_tasks(pass_name, {task.key: task.num_bytes for task in tasks})
        if self._shipment is not None and pass_name in ("prepare", "gather"):
            finished = self._shipment.begin([task.key for task in tasks], finished)
            self._meter.on_finished = self._shipment.take
        left = [task for task in tasks if task.key not in finished]
        self._meter.begin_pass(pass_name, tasks, finished, skipped)
        if left:
            local_only = any(task.needs_this_process for task in left)
            if not local_only and self._shipment is None:  # large ones first, so that the last to end is a small one
                left.sort(key=lambda task: -task.num_bytes)
            self.start(len(left), local_only=local_only).run(job, left, self._meter)
        records = {**finished, **self._meter.finished}
        return [records[task.key] for task in tasks]


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

    def run(self, job: AnyJob, tasks: Sequence[AnyTask], meter: Meter) -> None:
        """Do all tasks; at most as many at once as there are workers.

        Raises:
            WorkerDied: a task has killed several workers.
            Exception: whatever a task raised.
        """
        ray = self._ray
        shared, token = ray.put(job), uuid.uuid4().hex
        environment = {"env_vars": worker_settings(num_threads=1)}
        remote = ray.remote(num_cpus=1, max_retries=0, runtime_env=environment)(_run_task)
        waiting = collections.deque(tasks)
        deaths: collections.Counter[str] = collections.Counter()
        running: dict[Any, AnyTask] = {}
        limit = self._num_workers or self._cluster.num_cpus
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    task = waiting.popleft()
                    running[remote.remote(shared, token, task)] = task
                for reference in ray.wait(list(running), num_returns=1, timeout=1.0)[0]:
                    task = running.pop(reference)
                    record = self._result(reference, task, deaths, meter)
                    if record is None:
                        waiting.appendleft(task)
                    else:
                        meter.finish(record)
        finally:
            self._cancel(running)

    def _result(
        self, reference: Any, task: AnyTask, deaths: collections.Counter[str], meter: Meter
    ) -> TaskRecord | None:
        """What the task made; None if its worker died."""
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
            meter.lose("ray worker", how, (task.key,))
            return None
        if isinstance(result, TaskFailed):
            raise result.error.rebuild("in a Ray worker")
        assert isinstance(result, TaskRecord)
        return result

    def _cancel(self, running: dict[Any, AnyTask]) -> None:
        for reference in running:
            with contextlib.suppress(Exception):  # the cluster may be what failed
                self._ray.cancel(reference, force=True)


def _run_task(job: AnyJob, token: str, task: AnyTask) -> TaskRecord | TaskFailed:
    """In a Ray worker: do a task with the job that this process opened, or opens now."""
    try:
        if token not in _opened:
            _opened.clear()
            _opened[token] = job.open()
        return _opened[token].run(task, lambda counts: None).finish()
    except Exception as error:  # noqa: BLE001 whatever it is, the driver raises it
        return TaskFailed(SentError.pack(error))

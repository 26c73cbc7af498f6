"""The same tasks on a Ray cluster.

A Ray worker opens the job once and keeps it for the tasks that follow. Retries are ours, with the same limit as
for local processes, so that a lost worker is counted and shown: Ray's own would hide it. Ray may still run a task
twice, if it wrongly believes a node dead; tasks are idempotent (`_work_folder.py`), so that is waste, not damage.

Every machine must see the destination under the same path, and have Penstock installed.
"""

from __future__ import annotations

import collections
import contextlib
import uuid
from collections.abc import Sequence
from typing import Any, Self

from penstock.errors import WorkerDied
from penstock.preparation._jobs import MAX_DEATHS, AnyJob, Done, Keyed, Listen, Lost, Runner, TaskFailed, Told
from penstock.preparation._local import worker_settings
from penstock.workers import Cluster, PackedError

_opened: dict[str, Runner[Any]] = {}


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
        return TaskFailed(PackedError.pack(error))

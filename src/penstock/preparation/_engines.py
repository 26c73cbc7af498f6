"""Run the tasks that are left on the engine that the settings name, and keep count meanwhile.

Workforce.execute -> LocalEngine          worker processes on this machine
                     RayEngine            a cluster
                     InlineTaskEngine     this process, for data that cannot leave it
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from penstock.errors import printable
from penstock.preparation._jobs import AnyJob, Done, Keyed, Listen, Lost, Opened, Told
from penstock.preparation._local import LocalEngine
from penstock.preparation._progress import Counts, Meter, OnProgress
from penstock.preparation._ray import RayEngine
from penstock.preparation._settings import Settings
from penstock.preparation._skipping import check_skipped, sum_counts
from penstock.preparation._summary import RunLedger
from penstock.preparation._task_record import TaskRecord
from penstock.preparation._work_folder import WorkFolder

_log = logging.getLogger(__name__)


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

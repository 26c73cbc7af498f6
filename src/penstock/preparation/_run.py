"""One run of `prepare`, under the destination's lock: survey, plan, run, commit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.filesystem import remove_if_present
from penstock.preparation._commit import merge_shuffled, stage_dataset, to_committed
from penstock.preparation._conversion import ConversionJob
from penstock.preparation._engines import Workforce
from penstock.preparation._plan import RunPlan, plan_run
from penstock.preparation._previous import CommittedTask
from penstock.preparation._progress import OnProgress
from penstock.preparation._settings import Settings
from penstock.preparation._shuffle import GatherJob, plan_gathering
from penstock.preparation._skipping import sum_skipped
from penstock.preparation._summary import Prepared, RunLedger, describe_run, note_changes
from penstock.preparation._survey import Group, Request, survey
from penstock.preparation._work_folder import WORK_NAME, WorkFolder, write_json
from penstock.shards import Manifest, Workspace

_log = logging.getLogger(__name__)


class Preparation:
    """What one run holds: the lock, the workers, and an account of what they did."""

    def __init__(self, destination: Path, settings: Settings, on_progress: OnProgress | None) -> None:
        self._work = WorkFolder(destination)
        self._ledger = RunLedger()
        self._workforce = Workforce(settings, self._work, self._ledger, on_progress)
        self._workspace = Workspace(destination, "overwrite", known_names=frozenset({WORK_NAME}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._workforce.close()
            self._work.remove_if_idle()
        finally:
            self._workspace.close()

    def run(self, request: Request) -> Prepared:
        """Prepare what is asked for, or find that it is up to date."""
        plan = plan_run(survey(request, self._workspace.previous, self._work, self._start_workers))
        _log.info("%s", plan.summary())
        self._ledger.num_kept = plan.num_kept
        if plan.is_up_to_date:
            return self._leave_as_it_is(plan)
        self._work.begin(plan.specification)
        fresh = self._run_tasks(plan)
        return self._commit(plan, fresh)

    def _start_workers(self, groups: Sequence[Group]) -> None:
        local_only = any(split.needs_this_process for group in groups for split in group)
        self._workforce.start(len(groups), local_only=local_only)

    def _leave_as_it_is(self, plan: RunPlan) -> Prepared:
        self._work.remove()
        manifest = self._workspace.previous
        assert manifest is not None
        return self._summarise(plan, manifest, plan.kept, ("Nothing to do: up to date.", *plan.notes))

    def _run_tasks(self, plan: RunPlan) -> list[CommittedTask]:
        """Do what is left to do, and return all new tasks with what they made."""
        if not plan.tasks:
            return []
        job = ConversionJob(
            destination=plan.destination,
            specification=plan.specification,
            transform=plan.transform,
            reading=plan.reading,
            on_error=plan.settings.on_error,
            max_skipped=plan.settings.max_skipped,
        )
        is_shuffled = plan.specification.shuffle is not None
        self._sweep(plan)
        finished = dict(plan.finished)
        skipped_before = sum_skipped(task.skipped for task in plan.kept)
        self._workforce.execute("deal" if is_shuffled else "prepare", job, plan.tasks, finished, skipped_before)
        records = [finished[task.key] for task in plan.tasks]
        made = [to_committed(task, record) for task, record in zip(plan.tasks, records, strict=True)]
        if not is_shuffled:
            return made
        buckets = plan_gathering(self._work, plan.specification, records)
        gathered = self._work.records(bucket.key for bucket in buckets)
        gather = GatherJob(destination=plan.destination, specification=plan.specification)
        self._workforce.execute("gather", gather, buckets, gathered, {})
        return [merge_shuffled(made, [gathered[bucket.key] for bucket in buckets])]

    def _sweep(self, plan: RunPlan) -> None:
        """Remove results of tasks that are not part of this run, of either pass."""
        kept = list(plan.finished.values())
        if plan.specification.shuffle is not None and not plan.left:
            dealt = [plan.finished[task.key] for task in plan.tasks]
            buckets = plan_gathering(self._work, plan.specification, dealt)
            kept += self._work.records(bucket.key for bucket in buckets).values()
        self._work.sweep(kept)

    def _commit(self, plan: RunPlan, fresh: Sequence[CommittedTask]) -> Prepared:
        notes = (*plan.transform.notes, *note_changes(plan.to_read), *plan.notes)
        self._ledger.mark_worked()
        tasks, manifest = stage_dataset(plan, fresh, self._workspace, self._work)
        summaries: list[Prepared] = []

        def finish() -> None:
            summaries.append(self._summarise(plan, manifest, tasks, notes))
            by = self._work.path / "run.json"
            remove_if_present(by)
            write_json(plan.destination / "run.json", describe_run(plan.settings, summaries[0]), by=by)
            self._work.remove()

        self._workspace.commit(manifest, before_release=finish)
        return summaries[0]

    def _summarise(
        self, plan: RunPlan, manifest: Manifest, tasks: Sequence[CommittedTask], notes: Sequence[str]
    ) -> Prepared:
        skipped = sum_skipped(task.skipped for task in tasks)
        return self._ledger.summarise(
            plan.destination, manifest, num_files=len(plan.files), skipped=skipped, notes=notes
        )

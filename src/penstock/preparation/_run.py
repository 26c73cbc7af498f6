"""One run of `prepare`, under the destination's lock: survey, plan, run, commit.

If the dataset is split, every part is its own run, and all of them hold their locks at the same time. The first reads
the sources, and its tasks also make the samples of the other parts: each of those then finds its tasks finished, as
after an interruption. So a part that lags behind, whatever stopped it, catches up by itself.

**The commit.** Shards are linked into place, not moved, so a run that is killed while committing finds its finished
tasks again. They are named in the order of tasks, so names depend on neither workers nor chance; shards of an earlier
run keep theirs, so that processes that have the dataset open can go on reading.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptionError, PenstockError, counted, first_few
from penstock.packing import PACKING_VERSION, PackingSettings, build_pack_index, index_name
from penstock.preparation._conversion import ConversionJob, Target
from penstock.preparation._engines import Workforce
from penstock.preparation._plan import PACKED_COLUMN, RunPlan, plan_run
from penstock.preparation._prepared import Prepared, describe_run
from penstock.preparation._progress import Meter, OnProgress
from penstock.preparation._records import TaskRecord, check_share_skipped, merge_examples, merge_records, sum_counts
from penstock.preparation._shipping import Shipment, final_name, open_shipment
from penstock.preparation._shuffle import GatherJob, plan_gathering
from penstock.preparation._survey import Group, Request, SourcePreview, finished_tasks, survey
from penstock.preparation._tasks import Task
from penstock.preparation._work_folder import WORK_NAME, WorkFolder
from penstock.schema import offsets_of
from penstock.shards import Manifest, ShardEntry, Workspace, origins_to_json, pack_provenance, read_lengths
from penstock.sources import SourceFile, changed_since

_log = logging.getLogger(__name__)


def run_all(requests: Sequence[Request], on_progress: OnProgress | None) -> list[Prepared]:
    """Prepare one dataset, or all parts of a split, from the same sources."""
    preview = SourcePreview(requests[0])
    with contextlib.ExitStack() as stack:
        shipments = [stack.enter_context(open_shipment(request)) for request in requests]
        runs = [
            stack.enter_context(_Run(request, preview, on_progress, shipment))
            for request, shipment in zip(requests, shipments, strict=True)
        ]
        stack.callback(_tidy, runs)
        first, *others = runs
        first.decide(starts_workers=True)
        for other in others:
            other.decide(starts_workers=False)
            other.begin()
        first.work(others)
        for other in others:
            other.find_finished()
            other.work()
        return [run.commit() for run in runs]


def _tidy(runs: Sequence[_Run]) -> None:
    """Remove `.preparing` if there is nothing in it to continue; do not fail if it cannot be removed.

    The parts of a split are continued together, so that tasks that gave one of them no sample are not done again.
    """
    try:
        for run in runs:
            run.stop()
        if not any(run.work_folder.holds_samples() for run in runs):
            for run in runs:
                run.work_folder.remove()
    except (PenstockError, OSError) as error:
        _log.warning("%s: left for the next run to clean up: %s", runs[0].work_folder.path, error)


class _Run:
    """What one run holds: the lock, the workers, the plan, and what was done."""

    def __init__(
        self, request: Request, preview: SourcePreview, on_progress: OnProgress | None, shipment: Shipment | None
    ) -> None:
        self._request = request
        self._shipment = shipment
        self._preview = preview
        self._plan: RunPlan | None = None
        self._fresh: list[TaskRecord] = []
        self.work_folder = WorkFolder(request.destination)
        self._meter = Meter(request.settings.most_skipped_rows, on_progress)
        self._workforce = Workforce(request.settings, self.work_folder, self._meter, shipment)
        self._workspace = Workspace(request.destination, "overwrite", known_names=frozenset({WORK_NAME}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            self._workspace.close()

    def stop(self) -> None:
        """End the workers."""
        self._workforce.close()

    @property
    def plan(self) -> RunPlan:
        """What `decide` decided."""
        assert self._plan is not None
        return self._plan

    def decide(self, *, starts_workers: bool) -> None:
        """Survey the sources and the destination, and plan what to do; `starts_workers` during the survey."""
        self.work_folder.refuse_links()
        on_groups = self._start_workers if starts_workers else _ignore
        self._plan = plan_run(
            survey(self._request, self._preview, self._workspace.previous, self.work_folder, on_groups)
        )

    def _start_workers(self, groups: Sequence[Group]) -> None:
        local_only = any(split.needs_this_process for group in groups for split in group)
        self._workforce.start(len(groups), local_only=local_only)

    def begin(self) -> None:
        """Make the work folder, so that another run's tasks can leave this one's results there."""
        if not self.plan.is_up_to_date:
            self.work_folder.begin(self.plan.specification)

    def find_finished(self) -> None:
        """Note which tasks another run has finished since `decide`."""
        plan = self.plan
        finished = finished_tasks(plan.tasks, plan.specification, plan.settings, self.work_folder)
        self._plan = dataclasses.replace(plan, finished=finished)

    def work(self, others: Sequence[_Run] = ()) -> None:
        """Do the tasks; those that the others share, for them as well."""
        _log.info("%s", self.plan.summary())
        self._meter.num_kept = self.plan.num_kept
        if not self.plan.is_up_to_date:
            self.begin()
            plans = [other.plan for other in others if not other.plan.is_up_to_date]
            if self._shipment is not None:
                self._shipment.expect(self.plan.specification.schema, self.plan.first_shard)
            self._fresh = _run_tasks(self.plan, self.work_folder, self._workforce, plans)
            self.stop()  # before the commit, because it can fail
            _check_share_skipped(self.plan, self._fresh)
            self._meter.end()

    def commit(self) -> Prepared:
        """Commit what was done, unless the dataset is up to date.

        After the commit, but still under the lock, write run.json and remove `.preparing`. By then the dataset is
        complete, so a failure of these is only a note.
        """
        plan = self.plan
        if plan.is_up_to_date:
            self.work_folder.remove()
            manifest = self._workspace.previous
            assert manifest is not None
            return self._summarise(manifest, plan.skipped, ("Nothing to do: up to date.", *plan.notes))
        notes = (*plan.transform.notes, *_note_changes(plan.to_read), *plan.notes)
        manifest, skipped = _fill_workspace(plan, self._fresh, self._workspace, self.work_folder)
        if self._shipment is not None:
            notes = (*notes, *self._shipment.deliver(manifest, self._workspace))
        summaries: list[Prepared] = []

        def finish() -> None:
            summary = self._summarise(manifest, skipped, notes)
            summaries.append(summary)
            try:
                self.work_folder.write_run(describe_run(plan.settings, summary))
                self.work_folder.remove()
            except (PenstockError, OSError) as error:
                note = f"The dataset is complete, but the run could not be recorded or cleaned up after: {error}"
                summaries.append(dataclasses.replace(summary, notes=(*summary.notes, note)))

        self._workspace.commit(manifest, before_release=finish)
        return summaries[-1]

    def _summarise(self, manifest: Manifest, skipped: Mapping[str, int], notes: Sequence[str]) -> Prepared:
        plan = self.plan
        where = self._request.url or plan.destination
        return self._meter.summarise(where, manifest, num_files=len(plan.files), skipped=skipped, notes=notes)


def _ignore(groups: Sequence[Group]) -> None:
    """Do not start workers yet."""


def _note_changes(files: Sequence[SourceFile]) -> list[str]:
    """A note if sources changed during the run; the dataset lists them as they were before, so a rerun reads them."""
    changed = changed_since(files)
    if not changed:
        return []
    return [f"{counted(len(changed), 'source file')} changed during the run ({first_few(changed, 1)}). Run it again."]


def _run_tasks(plan: RunPlan, work: WorkFolder, workforce: Workforce, others: Sequence[RunPlan]) -> list[TaskRecord]:
    """Do the tasks that are left, and return all new tasks with what they made.

    If the dataset is split, `others` are the plans of the other parts: tasks that they share make their samples, too.
    """
    if not plan.tasks:
        return []
    _sweep(plan, work)
    is_shuffled = plan.specification.shuffle is not None
    records = _convert(plan, others, workforce, "deal" if is_shuffled else "prepare")
    made = [record.with_files(task.splits) for task, record in zip(plan.tasks, records, strict=True)]
    return [merge_records(made, _gather(plan, work, workforce, records))] if is_shuffled else made


def _sweep(plan: RunPlan, work: WorkFolder) -> None:
    """Remove the results of tasks that are not part of this run, of either pass."""
    kept = list(plan.finished.values())
    if plan.specification.shuffle is not None and not plan.left:
        dealt = [plan.finished[task.key] for task in plan.tasks]
        buckets = plan_gathering(work, plan.specification, dealt)
        kept += work.records(bucket.key for bucket in buckets).values()
    work.sweep(kept)


def _convert(plan: RunPlan, others: Sequence[RunPlan], workforce: Workforce, pass_name: str) -> list[TaskRecord]:
    """Read, transform and write what is left of the plan."""
    job = ConversionJob(
        target=Target(destination=plan.destination, specification=plan.specification),
        others=tuple(Target(destination=each.destination, specification=each.specification) for each in others),
        transform=plan.transform,
        reading=plan.reading,
        on_error=plan.settings.on_error,
        max_skipped=plan.settings.most_skipped_rows,
    )
    return workforce.execute(pass_name, job, _with_keys_of(others, plan.tasks), plan.finished, plan.skipped)


def _with_keys_of(others: Sequence[RunPlan], tasks: Sequence[Task]) -> list[Task]:
    """The tasks, each with the keys of the tasks of other plans that read the same."""
    keys = [{(task.splits, task.first_split): task.key for task in plan.left} for plan in others]
    return [
        dataclasses.replace(task, keys_of_others=tuple(known.get((task.splits, task.first_split)) for known in keys))
        for task in tasks
    ]


def _gather(plan: RunPlan, work: WorkFolder, workforce: Workforce, dealt: Sequence[TaskRecord]) -> list[TaskRecord]:
    """The second pass of a shuffle."""
    buckets = plan_gathering(work, plan.specification, dealt)
    finished = work.records(bucket.key for bucket in buckets)
    job = GatherJob(destination=plan.destination, specification=plan.specification)
    return workforce.execute("gather", job, buckets, finished, {})


def _check_share_skipped(plan: RunPlan, fresh: Sequence[TaskRecord]) -> None:
    """Stop before the commit if too many rows of the dataset, kept tasks included, were skipped."""
    tasks = [task for task in (*plan.kept, *fresh) if not task.is_dropped]
    check_share_skipped(
        sum_counts(task.skipped for task in tasks),
        sum(split.num_samples for task in tasks for split in task.splits),
        plan.settings.max_skipped,
        (example for task in tasks for example in task.examples),
    )


def _fill_workspace(
    plan: RunPlan, fresh: Sequence[TaskRecord], workspace: Workspace, work: WorkFolder
) -> tuple[Manifest, dict[str, int]]:
    """Put all new files into the workspace; return the manifest to commit, and the rows skipped by reason."""
    tasks = [*plan.kept, *_adopt_shards(plan, fresh, workspace, work)]
    manifest = _build_manifest(plan, tasks)
    packing = _count_packed_rows(workspace, manifest, plan.settings.pack)
    entry, data = pack_provenance(_provenance_of(plan, tasks))
    workspace.add_file(entry.name, [data])
    manifest = dataclasses.replace(manifest, attributes={**manifest.attributes, **packing}, provenance=entry)
    return manifest, sum_counts(task.skipped for task in tasks)


def _adopt_shards(
    plan: RunPlan, fresh: Sequence[TaskRecord], workspace: Workspace, work: WorkFolder
) -> list[TaskRecord]:
    """Link the shards of new tasks into the workspace under their final names."""
    named: list[TaskRecord] = []
    if not fresh:
        return named
    number = plan.first_shard
    with work.open("ready") as ready, work.open("shipped") as shipped:
        for task in fresh:
            shards: list[ShardEntry] = []
            for shard in task.shards:
                name = final_name(number, shard)
                workspace.adopt_shard(ready if shipped.size(shard.name) is None else shipped, shard.name, name)
                _check_adopted(workspace.shard_path(name), shard)
                shards.append(dataclasses.replace(shard, name=name))
                number += 1
            named.append(dataclasses.replace(task, shards=tuple(shards)))
    return named


def _check_adopted(path: Path, shard: ShardEntry) -> None:
    """Refuse a file that took the shard's place since it was recorded; its checksums guard what is in it."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size != shard.num_bytes:
        raise CorruptionError(
            f"{path}: not the {shard.num_bytes:,} bytes of {shard.name} that a task wrote; another program must have "
            "replaced the file. Run it again."
        )


def _build_manifest(plan: RunPlan, tasks: Sequence[TaskRecord]) -> Manifest:
    """The manifest of the finished dataset, except for packing and provenance."""
    recipe = plan.specification.to_json()
    del recipe["columns"]  # the manifest has them
    attributes = {
        **plan.transform.attributes,
        "transform": recipe.pop("transform"),
        "skipped": _describe_skipped(tasks),
        "preparation": {
            "patterns": list(plan.patterns),
            "files": len(plan.files),
            "pack": list(plan.settings.pack),
            "recipe": recipe,
            "tasks": [task.to_entry() for task in tasks],
        },
    }
    if plan.reading.classes:
        attributes["classes"] = list(plan.reading.classes)
    if noticed := sum_counts(task.noticed for task in tasks):
        attributes["noticed"] = noticed
    shards = tuple(shard for task in tasks for shard in task.shards)
    return Manifest(plan.specification.schema, shards, attributes)


def _describe_skipped(tasks: Sequence[TaskRecord]) -> dict[str, Any]:
    by_reason = sum_counts(task.skipped for task in tasks)
    examples = merge_examples(example for task in tasks for example in task.examples)
    return {
        "rows": sum(by_reason.values()),
        "by_reason": by_reason,
        "first": [{"path": path, "row": row, "reason": why, "message": what} for path, row, why, what in examples],
    }


def _provenance_of(plan: RunPlan, tasks: Sequence[TaskRecord]) -> dict[str, Any]:
    """Which files there were, and which samples came from where."""
    return {
        "sources": [[file.path, file.num_bytes, file.identity] for file in plan.files],
        "origins": origins_to_json(split for task in tasks for split in task.splits),
    }


def _count_packed_rows(workspace: Workspace, manifest: Manifest, pack: Sequence[int]) -> dict[str, Any]:
    """The manifest's section on packing, so that a packed plan opens at once; empty if no length is given."""
    if not pack:
        return {}
    lengths = _Lengths(workspace, manifest)
    indexes: dict[str, Any] = {}
    for length in pack:
        settings = PackingSettings(length=length)
        shards = np.unique(lengths.starts)
        for edges in (None, shards):  # lanes pack shard by shard
            index = build_pack_index(lengths.read, manifest.num_samples, settings, edges)
            indexes[index_name(PACKED_COLUMN, settings, by_shard=edges is not None)] = index.to_json()
    return {"packing": {"version": PACKING_VERSION, "samples": manifest.num_samples, "indexes": indexes}}


class _Lengths:
    """Lengths of all documents, read from the shards one at a time."""

    def __init__(self, workspace: Workspace, manifest: Manifest) -> None:
        self._workspace = workspace
        self._manifest = manifest
        counts = [shard.num_samples for shard in manifest.shards]
        self.starts = offsets_of(counts)
        self._last: tuple[int, NDArray[np.int64]] | None = None

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of documents `begin` to `end`."""
        parts = [np.empty(0, np.int64)]
        number = int(np.searchsorted(self.starts, begin, side="right")) - 1
        while begin < end:
            first, last = int(self.starts[number]), min(end, int(self.starts[number + 1]))
            parts.append(self._of_shard(number)[begin - first : last - first])
            begin, number = last, number + 1
        return np.concatenate(parts)

    def _of_shard(self, number: int) -> NDArray[np.int64]:
        if self._last is None or self._last[0] != number:
            entry, schema = self._manifest.shards[number], self._manifest.schema
            path = self._workspace.shard_path(entry.name)
            self._last = (number, read_lengths(path, entry, schema, PACKED_COLUMN))
        return self._last[1]

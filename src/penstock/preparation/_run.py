"""One run of `prepare`, step by step, under the destination's lock."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import SchemaError
from penstock.filesystem import remove_if_present
from penstock.preparation._commit import (
    adopt_shards,
    build_manifest,
    describe_origins,
    made_task,
    next_number,
    shuffled_task,
    sum_skipped,
)
from penstock.preparation._decide import Basis, find_basis, wanted_recipe
from penstock.preparation._earlier import MadeTask
from penstock.preparation._engines import Workforce
from penstock.preparation._gather import GatherJob, plan_gathering
from penstock.preparation._inputs import expected_ratio, least_task_bytes, patterns_of, pin_reading
from penstock.preparation._jobs import Keyed
from penstock.preparation._notes import note_changes, note_gone, note_passed_over
from penstock.preparation._packs import check_packable, pack_attributes
from penstock.preparation._plan import Task, choose_task_bytes, group_splits, name_tasks
from penstock.preparation._probe import Probe, probe
from penstock.preparation._progress import OnProgress
from penstock.preparation._recipe import Recipe
from penstock.preparation._record import TaskRecord
from penstock.preparation._settings import Settings
from penstock.preparation._skipping import check_kept, check_skipped
from penstock.preparation._summary import Prepared, RunLedger, describe_run
from penstock.preparation._tasks import Job
from penstock.preparation._work import WORK_NAME, WorkFolder, write_json
from penstock.shards import Manifest, Workspace, pack_provenance
from penstock.sources import SourceFile, SourceOptions, Split, list_files, plan_splits
from penstock.transforms import Transform


class Preparation:
    """The state of one run: lock, engine, clocks and counts."""

    def __init__(self, destination: Path, settings: Settings, on_progress: OnProgress | None) -> None:
        self._destination = destination
        self._settings = settings
        self._run_name = uuid.uuid4().hex
        self._notes: list[str] = []
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

    def run(self, sources: Any, transform: Transform, reading: SourceOptions) -> Prepared:
        """Prepare, or find that all is done."""
        files = list_files(sources, reading)
        reading = pin_reading(reading, transform, files)
        wanted = wanted_recipe(transform, reading, self._settings)
        basis = find_basis(self._destination, self._workspace.previous, wanted, files, self._settings)
        earlier = basis.earlier
        kept = earlier.kept(files) if earlier is not None else []
        self._check_kept(kept)
        self._notes = [*note_passed_over(sources, reading), *note_gone(earlier, files)]
        if earlier is not None and earlier.is_current(files) and earlier.pack == self._settings.pack:
            self._work.remove()
            manifest = self._workspace.previous
            assert manifest is not None
            self._ledger.num_kept = sum(not task.is_dead for task in earlier.tasks)
            return self._summarise(manifest, files, earlier.tasks, ("Nothing to do: up to date.",))
        covered = {path for task in kept if not task.is_dead for path in task.paths}
        waiting = [file for file in files if file.path not in covered]
        return self._prepare(sources, transform, reading, files, waiting, kept, basis)

    def _check_kept(self, kept: Sequence[MadeTask]) -> None:
        skipped, settings = sum_skipped(kept), self._settings
        check_skipped(skipped, settings.max_skipped)
        examples = (example for task in kept for example in task.examples)
        check_kept(self._destination, settings.on_error, skipped, examples)

    def _prepare(
        self,
        sources: Any,
        transform: Transform,
        reading: SourceOptions,
        files: list[SourceFile],
        waiting: list[SourceFile],
        kept: list[MadeTask],
        basis: Basis,
    ) -> Prepared:
        self._ledger.num_kept = sum(not task.is_dead for task in kept)
        task_bytes = basis.recipe.task_bytes if basis.recipe else self._choose_task_bytes(transform, files)
        groups = group_splits(self._cut(waiting, reading, task_bytes), task_bytes) if waiting else []
        first_split = sum(len(task.splits) for task in kept)
        recipe, ready = basis.recipe, transform
        if recipe is None or not self._is_all_done(recipe, groups, files, first_split):
            if groups:
                local_only = any(split.needs_this_process for group in groups for split in group)
                self._workforce.start(len(groups), local_only=local_only)
            looked = self._look(transform, reading, files, groups, task_bytes)
            if recipe is not None and self._settings.overwrite and dict(recipe.columns) != looked.columns:
                return self._prepare(sources, transform, reading, files, files, [], Basis(None, None))
            recipe, ready = self._settle(basis.recipe, looked, transform, reading, task_bytes), looked.transform
        check_packable(recipe.schema, self._settings.pack)
        self._work.begin(recipe)
        job = Job(
            destination=self._destination,
            recipe=recipe,
            transform=ready,
            reading=reading,
            on_error=self._settings.on_error,
            max_skipped=self._settings.max_skipped,
        )
        tasks = self._name(recipe, groups, files, first_split)
        fresh = self._make(job, tasks, kept)
        notes = (*ready.notes, *note_changes(waiting))
        return self._commit(recipe, ready, sources, files, kept, fresh, notes)

    def _cut(self, files: Sequence[SourceFile], reading: SourceOptions, task_bytes: int) -> list[Split]:
        return plan_splits(files, reading, task_bytes, keep_damaged=self._settings.on_error == "skip")

    def _choose_task_bytes(self, transform: Transform, files: Sequence[SourceFile]) -> int:
        total = sum(max(0, file.num_bytes) for file in files)
        ratio, least = expected_ratio(transform), least_task_bytes(transform)
        return choose_task_bytes(total, self._settings.shard_bytes, ratio, least)

    def _name(
        self, recipe: Recipe, groups: Sequence[tuple[Split, ...]], files: Sequence[SourceFile], first_split: int
    ) -> list[Task]:
        return name_tasks(
            groups,
            {file.path: file for file in files},
            recipe_key=recipe.key,
            first_split=first_split,
            is_numbered=recipe.origins == "column",
            unknown=self._run_name,
        )

    def _is_all_done(
        self, recipe: Recipe, groups: Sequence[tuple[Split, ...]], files: Sequence[SourceFile], first_split: int
    ) -> bool:
        """Whether every task of the first pass was finished by an earlier run, so that no row need be looked at."""
        tasks = self._name(recipe, groups, files, first_split)
        return len(self._finished(tasks)) == len(tasks)

    def _finished(self, tasks: Sequence[Keyed]) -> dict[str, TaskRecord]:
        """Records of finished tasks; where rows may not be skipped, only of those that skipped none."""
        found = self._work.records(task.key for task in tasks)
        is_strict = self._settings.on_error == "raise"
        return {key: record for key, record in found.items() if not (is_strict and record.skipped)}

    def _look(
        self,
        transform: Transform,
        reading: SourceOptions,
        files: Sequence[SourceFile],
        groups: Sequence[tuple[Split, ...]],
        task_bytes: int,
    ) -> Probe:
        """Look at the first rows of all sources, whatever is left to do, so that a rerun sees the same."""
        splits = [split for group in groups for split in group]
        if not splits or splits[0].path != files[0].path:
            splits = self._cut(files[:1], reading, task_bytes) + splits
        return probe(transform, splits, reading, self._settings)

    def _settle(
        self, found: Recipe | None, looked: Probe, transform: Transform, reading: SourceOptions, task_bytes: int
    ) -> Recipe:
        recipe = Recipe(
            transform=transform.identity,
            columns=looked.columns,
            reading=reading.identity,
            shard_bytes=self._settings.shard_bytes,
            task_bytes=task_bytes,
            shuffle=self._settings.shuffle,
            origins=found.origins if found is not None else looked.origins,
        )
        if found is not None and dict(found.columns) != dict(looked.columns):
            raise SchemaError(
                f"{self._destination}: the dataset has the columns {found.columns}; the sources now give "
                f"{looked.columns}. Give overwrite=True (--overwrite) to replace it, another destination, "
                "or types in keep=."
            )
        return recipe if found is None else found

    def _make(self, job: Job, tasks: list[Task], kept: Sequence[MadeTask]) -> list[MadeTask]:
        """Do what is not done, and return all new tasks with what they made."""
        if not tasks:
            return []
        finished = self._finished(tasks)
        self._ledger.num_kept += len(finished)
        gather = []
        if job.recipe.shuffle is not None and len(finished) == len(tasks):
            gather = plan_gathering(self._destination, job.recipe, [finished[task.key] for task in tasks])
        self._work.sweep([*finished.values(), *self._work.records(task.key for task in gather).values()])
        stage = "prepare" if job.recipe.shuffle is None else "deal"
        self._workforce.execute(stage, job, tasks, finished, sum_skipped(kept))
        made = [made_task(task, finished[task.key]) for task in tasks]
        return made if job.recipe.shuffle is None else [self._gather(job, tasks, finished, made)]

    def _gather(
        self, job: Job, tasks: Sequence[Task], dealt: Mapping[str, TaskRecord], made: Sequence[MadeTask]
    ) -> MadeTask:
        buckets = plan_gathering(self._destination, job.recipe, [dealt[task.key] for task in tasks])
        finished = self._work.records(bucket.key for bucket in buckets)
        gathering = GatherJob(destination=self._destination, recipe=job.recipe)
        self._workforce.execute("gather", gathering, buckets, finished, {})
        return shuffled_task(made, [finished[bucket.key] for bucket in buckets])

    def _commit(
        self,
        recipe: Recipe,
        transform: Transform,
        sources: Any,
        files: Sequence[SourceFile],
        kept: Sequence[MadeTask],
        fresh: Sequence[MadeTask],
        notes: Sequence[str],
    ) -> Prepared:
        self._ledger.mark_worked()
        first = next_number(self._workspace.previous if kept else None)
        tasks = [*kept, *adopt_shards(self._workspace, self._work, fresh, first)]
        manifest = build_manifest(
            recipe,
            tasks,
            num_files=len(files),
            patterns=patterns_of(sources),
            pack=self._settings.pack,
            transform_attributes=transform.attributes,
        )
        manifest = self._with_provenance(self._with_packing(manifest), describe_origins(tasks, files))
        summary: list[Prepared] = []

        def finish() -> None:
            summary.append(self._summarise(manifest, files, tasks, notes))
            by = self._work.path / "run.json"
            remove_if_present(by)
            write_json(self._destination / "run.json", describe_run(self._settings, summary[0]), by=by)
            self._work.remove()

        self._workspace.commit(manifest, before_release=finish)
        return summary[0]

    def _with_packing(self, manifest: Manifest) -> Manifest:
        packing = pack_attributes(self._workspace, manifest, self._settings.pack)
        return dataclasses.replace(manifest, attributes={**manifest.attributes, **packing})

    def _with_provenance(self, manifest: Manifest, provenance: Mapping[str, Any]) -> Manifest:
        entry, data = pack_provenance(provenance)
        self._workspace.add_file(entry.name, [data])
        return dataclasses.replace(manifest, provenance=entry)

    def _summarise(
        self, manifest: Manifest, files: Sequence[SourceFile], tasks: Sequence[MadeTask], notes: Sequence[str]
    ) -> Prepared:
        return self._ledger.summarise(
            self._destination,
            manifest,
            num_files=len(files),
            skipped=sum_skipped(tasks),
            notes=(*notes, *self._notes),
        )

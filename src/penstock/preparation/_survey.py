"""What is there before a run: the sources, what an earlier run left, and the first rows. Reads only.

    list the files -> find what this run continues -> cut the files it must read -> read the first rows

Everything that `plan_run` decides from is gathered here, once. Each step asks only for what the ones before it have
not settled: a dataset that is up to date is not cut, and nobody reads rows when all tasks are finished.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import SchemaError
from penstock.preparation._committed import CommittedTask
from penstock.preparation._first_rows import FirstRows, read_first_rows
from penstock.preparation._parts import Part
from penstock.preparation._previous import Previous, find_previous, read_previous
from penstock.preparation._settings import Settings
from penstock.preparation._skipping import check_kept, check_skipped, sum_counts
from penstock.preparation._specification import Specification, asked_for
from penstock.preparation._task_record import TaskRecord
from penstock.preparation._tasks import group_splits, mix_files, name_tasks, pin_reading, task_bytes_for
from penstock.preparation._work_folder import WorkFolder
from penstock.shards import Manifest
from penstock.sources import (
    SourceFile,
    SourceOptions,
    Split,
    class_names,
    list_files,
    list_passed_over,
    plan_splits,
    types_in_first_rows,
)
from penstock.transforms import KeepColumns, Transform

Group = tuple[Split, ...]
"""Splits that will be one task."""
OnGroups = Callable[[Sequence[Group]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller of `prepare` asked for."""

    destination: Path
    sources: Any
    transform: Transform
    reading: SourceOptions
    settings: Settings
    part: Part | None = None
    """Of a split, the part to make; None makes one dataset of all samples."""
    run_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Stands in for the identity of sources that have none, so that no later run takes them for unchanged."""


class Glance:
    """A look at the sources that all parts made of them share: files are listed once, and first rows read once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._first_rows: dict[tuple[Split, ...], FirstRows] = {}

    @functools.cached_property
    def files(self) -> list[SourceFile]:
        """The sources, all of them."""
        return list_files(self._request.sources, self._request.reading)

    @functools.cached_property
    def passed_over(self) -> list[str]:
        """Files in the folders given that have no known format."""
        return list_passed_over(self._request.sources, self._request.reading)

    def first_rows(self, request: Request, splits: Sequence[Split]) -> FirstRows:
        """What the first rows of these splits show."""
        key = tuple(splits)
        if key not in self._first_rows:
            self._first_rows[key] = read_first_rows(
                request.transform, splits, request.reading, request.settings, is_part=request.part is not None
            )
        return self._first_rows[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything that a run's decisions depend on."""

    request: Request
    files: Sequence[SourceFile]
    """The sources, all of them."""
    passed_over: Sequence[str]
    """Files in the folders given that have no known format."""
    manifest: Manifest | None
    """The dataset at the destination."""
    previous: Previous | None
    """What this run continues; None when it starts from scratch."""
    kept: Sequence[CommittedTask]
    """Tasks of the dataset that stay in it."""
    task_bytes: int
    groups: Sequence[Group] = ()
    """The files that must be read, cut into tasks."""
    finished: Mapping[str, TaskRecord] = field(default_factory=dict)
    """Tasks that an interrupted run finished."""
    first_rows: FirstRows | None = None
    """None when no row had to be read."""
    numbers_as_text: tuple[str, ...] = ()
    """CSV columns that hold numbers and are stored as text, because nobody gave types."""

    @property
    def is_up_to_date(self) -> bool:
        """Whether the dataset is there already, exactly as asked for."""
        if self.manifest is None or self.previous is None:
            return False
        return self.previous.is_current(self.files) and self.previous.pack == self.request.settings.pack

    @property
    def mixes_files(self) -> bool:
        """Whether files are read in the order of a hash of their names: class folders, unless made otherwise before."""
        if self.previous is not None:
            return self.previous.specification.file_order == "hash"
        return self.request.settings.shuffle == "auto" and len(class_names(self.files)) > 1

    @property
    def to_read(self) -> list[SourceFile]:
        """Files that no kept task has read."""
        covered = {path for task in self.kept if not task.is_dropped for path in task.paths}
        return [file for file in self.files if file.path not in covered]

    @property
    def first_split(self) -> int:
        """Number of the first new split."""
        return sum(len(task.splits) for task in self.kept)


def survey(
    request: Request, glance: Glance, manifest: Manifest | None, work: WorkFolder, on_groups: OnGroups
) -> Survey:
    """Look at the sources and at the destination.

    Args:
        request: What is asked for.
        glance: What is known of the sources already.
        manifest: The dataset at the destination.
        work: Finished tasks of a run that was stopped.
        on_groups: Told of the tasks-to-be before the first rows are read, so that workers can start meanwhile.

    Raises:
        DatasetExists: something is there that this run cannot continue, and `overwrite` is not given.
        FormatError: tasks that would be kept have skipped rows, and that is not allowed.
        SchemaError: the columns have changed, and `overwrite` is not given.
    """
    request = dataclasses.replace(request, reading=pin_reading(request.reading, request.transform, glance.files))
    appended_to = read_previous(request.destination, manifest) if request.settings.append else None
    if appended_to is not None:
        request = dataclasses.replace(request, reading=_read_alike(request.reading, appended_to))
    files = [*(appended_to.sources_beside(glance.files) if appended_to is not None else ()), *glance.files]
    unfinished = work.specification()
    wanted = asked_for(request.transform, request.reading, request.settings, request.part)
    previous = find_previous(request.destination, manifest, unfinished, wanted, files, request.settings)
    found = _begin(request, files, glance, manifest, previous)
    if found.is_up_to_date:
        return found
    found = _look(found, glance, unfinished, work, on_groups)
    if _has_new_columns(found):
        return _look(_begin(request, files, glance, manifest, None), glance, unfinished, work, on_groups)
    return found


def _read_alike(reading: SourceOptions, previous: Previous) -> SourceOptions:
    """The options with classes and inferred types as the dataset has them, whatever the new sources show."""
    then = previous.specification.reading
    classes, types = then.get("classes"), then.get("types")
    if classes and reading.classes is not None and set(reading.classes) <= set(classes):
        reading = dataclasses.replace(reading, classes=tuple(classes))
    if types and isinstance(reading.types, Mapping) and reading.types.keys() == types.keys():
        reading = dataclasses.replace(reading, types=types)
    return reading


def _begin(
    request: Request,
    files: Sequence[SourceFile],
    glance: Glance,
    manifest: Manifest | None,
    previous: Previous | None,
) -> Survey:
    kept = previous.kept(files) if previous is not None else ()
    settings, skipped = request.settings, sum_counts(task.skipped for task in kept)
    check_skipped(skipped, settings.most_skipped_rows)
    check_kept(request.destination, settings.on_error, skipped, (each for task in kept for each in task.examples))
    return Survey(
        request=request,
        files=files,
        passed_over=glance.passed_over,
        manifest=manifest,
        previous=previous,
        kept=kept,
        task_bytes=(
            previous.specification.task_bytes
            if previous is not None
            else task_bytes_for(request.transform, files, settings.shard_bytes)
        ),
    )


def _look(
    found: Survey, glance: Glance, unfinished: Specification | None, work: WorkFolder, on_groups: OnGroups
) -> Survey:
    """Cut what must be read into tasks, see which of them are finished, and read the first rows."""
    to_read = found.to_read
    groups = _group(found, _cut(found, to_read)) if to_read else []
    finished = _find_finished(found, groups, unfinished, work)
    found = dataclasses.replace(found, groups=groups, finished=finished)
    if found.previous is not None and len(finished) == len(groups):
        return found
    if groups:
        on_groups(groups)
    request = found.request
    rows = glance.first_rows(request, _first_splits(found))
    return dataclasses.replace(found, first_rows=rows, numbers_as_text=_numbers_as_text(request, to_read))


def _numbers_as_text(request: Request, files: Sequence[SourceFile]) -> tuple[str, ...]:
    if request.reading.types is not None or not isinstance(request.transform, KeepColumns):
        return ()
    return tuple(types_in_first_rows(files, request.reading))


def _cut(found: Survey, files: Sequence[SourceFile]) -> list[Split]:
    keep_damaged = found.request.settings.on_error == "skip"
    if found.mixes_files:
        files = mix_files(files)
    return plan_splits(files, found.request.reading, found.task_bytes, keep_damaged=keep_damaged)


def _group(found: Survey, splits: Sequence[Split]) -> list[Group]:
    """Tasks-to-be; a trial is one, as only reading in order tells where it ends."""
    if found.request.settings.limit is not None:
        return [tuple(splits)]
    return group_splits(splits, found.task_bytes)


def _find_finished(
    found: Survey, groups: Sequence[Group], unfinished: Specification | None, work: WorkFolder
) -> dict[str, TaskRecord]:
    """Tasks that an interrupted run finished; where rows may not be skipped, only those that skipped none."""
    previous, request = found.previous, found.request
    if previous is None or unfinished is None or unfinished.to_json() != previous.specification.to_json():
        return {}
    tasks = name_tasks(
        groups,
        found.files,
        specification=previous.specification,
        first_split=found.first_split,
        run_name=request.run_name,
    )
    records = work.records(task.key for task in tasks)
    is_strict = request.settings.on_error == "raise"
    found_whole = ((task, records[task.key]) for task in tasks if task.key in records)
    return {
        task.key: record
        for task, record in found_whole
        if record.fits(previous.specification, len(task.splits)) and not (is_strict and record.skipped)
    }


def _first_splits(found: Survey) -> list[Split]:
    """Splits to read first rows from: always those of the first source, so that a rerun sees the same.

    Where sources are added to a dataset, its own may be gone: only the new ones are looked at.
    """
    splits = [split for group in found.groups for split in group]
    if found.request.settings.append and splits:
        return splits
    if not splits or splits[0].path != found.files[0].path:
        splits = _cut(found, found.files[:1]) + splits
    return splits


def _has_new_columns(found: Survey) -> bool:
    """Whether the sources no longer give the columns that are there, and these may be replaced."""
    if found.previous is None or found.first_rows is None:
        return False
    before, now = dict(found.previous.specification.columns), found.first_rows.columns
    if before == now:
        return False
    if not found.request.settings.overwrite:
        raise SchemaError(
            f"{found.request.destination}: the dataset has the columns {before}; the sources now give {now}. "
            "Pass overwrite=True (--overwrite) to replace it, choose another destination, or give types in keep=."
        )
    return True

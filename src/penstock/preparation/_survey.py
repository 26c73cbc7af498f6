"""What is there before a run: the sources, what an earlier run left, and the first rows. Only reads.

    list the files -> find what this run continues -> split the files it must read -> read the first rows

Everything that `plan_run` needs to decide is gathered here, once. Each step does only what the ones before it have
left open: if a dataset is up to date, no file is split, and if all tasks are finished, no row is read.
"""

import dataclasses
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import SchemaError
from penstock.preparation._first_rows import FirstRows, read_first_rows
from penstock.preparation._parts import Part
from penstock.preparation._previous import Previous, find_previous, read_previous
from penstock.preparation._records import TaskRecord, check_kept, check_skipped, sum_counts
from penstock.preparation._specification import Settings, Specification, requested_fields
from penstock.preparation._tasks import Task, group_splits, mix_files, name_tasks, pin_reading, task_bytes_for
from penstock.preparation._work_folder import WorkFolder
from penstock.shards import Manifest
from penstock.sources import (
    SourceFile,
    SourceOptions,
    Split,
    class_names,
    list_files,
    list_skipped,
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
    url: str | None = None
    """Where finished shards are sent; then `destination` is the URL's work folder (`_shipping.py`)."""
    part: Part | None = None
    """Which part of a split to make; None makes one dataset of all samples."""
    run_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Used as the identity of sources that have none, so that no later run takes them for unchanged."""


class SourcePreview:
    """The files and first rows of the sources, shared by all parts of a split: listed once, and read once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._first_rows: dict[tuple[Split, ...], FirstRows] = {}

    @functools.cached_property
    def files(self) -> list[SourceFile]:
        """All source files."""
        return list_files(self._request.sources, self._request.reading)

    @functools.cached_property
    def skipped_files(self) -> list[str]:
        """Files in the given folders whose format is unknown."""
        return list_skipped(self._request.sources, self._request.reading)

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
    """All source files."""
    skipped_files: Sequence[str]
    """Files in the given folders whose format is unknown."""
    manifest: Manifest | None
    """The dataset at the destination."""
    previous: Previous | None
    """What this run continues; None if it starts from scratch."""
    is_up_to_date: bool
    """Whether the dataset already exists, exactly as requested."""
    kept: Sequence[TaskRecord]
    """Tasks of the dataset that stay in it."""
    task_bytes: int
    groups: Sequence[Group] = ()
    """The splits of files that must be read, grouped into tasks."""
    finished: Mapping[str, TaskRecord] = field(default_factory=dict)
    """Tasks that an interrupted run finished."""
    first_rows: FirstRows | None = None
    """None if no row had to be read."""
    numbers_as_text: tuple[str, ...] = ()
    """CSV columns that hold numbers but are stored as text, because no types were given."""

    @property
    def mixes_files(self) -> bool:
        """Whether files are read in the order of a hash of their names: class folders, unless the dataset differs."""
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
    request: Request, preview: SourcePreview, manifest: Manifest | None, work: WorkFolder, on_groups: OnGroups
) -> Survey:
    """Look at the sources and at the destination.

    Args:
        request: What the caller wants.
        preview: Files and first rows of the sources.
        manifest: The dataset at the destination.
        work: Finished tasks of a run that was stopped.
        on_groups: Called with the future tasks before the first rows are read, so that workers can start meanwhile.

    Raises:
        DatasetExists: something is there that this run cannot continue, and `overwrite` is not set.
        FormatError: tasks that would be kept have skipped rows, and that is not allowed.
        SchemaError: the columns have changed, and `overwrite` is not set.
    """
    request = dataclasses.replace(request, reading=pin_reading(request.reading, request.transform, preview.files))
    appended_to = read_previous(request.destination, manifest) if request.settings.append else None
    if appended_to is not None:
        request = dataclasses.replace(request, reading=_read_alike(request.reading, appended_to))
    files = [*(appended_to.sources_beside(preview.files) if appended_to is not None else ()), *preview.files]
    wanted = requested_fields(request.transform, request.reading, request.settings, request.part)
    previous = find_previous(request.destination, manifest, work, wanted, files, request.settings, request.transform)
    found = _start(request, files, preview, manifest, previous)
    if found.is_up_to_date:
        return found
    found = _look_inside(found, preview, work, on_groups)
    if _has_new_columns(found):
        found = _start(request, files, preview, manifest, None)
        found = _look_inside(found, preview, work, on_groups)
    return found


def _read_alike(reading: SourceOptions, previous: Previous) -> SourceOptions:
    """The options with the dataset's classes and inferred types, whatever the new sources show."""
    then = previous.specification.reading
    classes, types = then.get("classes"), then.get("types")
    if classes and reading.classes is not None and set(reading.classes) <= set(classes):
        reading = dataclasses.replace(reading, classes=tuple(classes))
    if types and isinstance(reading.types, Mapping) and reading.types.keys() == types.keys():
        reading = dataclasses.replace(reading, types=types)
    return reading


def _start(
    request: Request,
    files: Sequence[SourceFile],
    preview: SourcePreview,
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
        skipped_files=preview.skipped_files,
        manifest=manifest,
        previous=previous,
        is_up_to_date=(
            manifest is not None
            and previous is not None
            and previous.pack == settings.pack
            and previous.is_current(files)
        ),
        kept=kept,
        task_bytes=(
            previous.specification.task_bytes
            if previous is not None
            else task_bytes_for(request.transform, files, settings.shard_bytes)
        ),
    )


def _look_inside(found: Survey, preview: SourcePreview, work: WorkFolder, on_groups: OnGroups) -> Survey:
    """Split what must be read into tasks, see which of them are finished, and read the first rows."""
    request, to_read = found.request, found.to_read
    groups = _group(found, _split(found, to_read)) if to_read else []
    finished = _find_finished(found, groups, work)
    rows: FirstRows | None = None
    as_text: tuple[str, ...] = ()
    if found.previous is None or len(finished) < len(groups):
        if groups:
            on_groups(groups)
        rows = preview.first_rows(request, _first_splits(found, groups))
        as_text = _numbers_as_text(request, to_read)
    return dataclasses.replace(found, groups=groups, finished=finished, first_rows=rows, numbers_as_text=as_text)


def _numbers_as_text(request: Request, files: Sequence[SourceFile]) -> tuple[str, ...]:
    if request.reading.types is not None or not isinstance(request.transform, KeepColumns):
        return ()
    names = types_in_first_rows(files, request.reading)
    return tuple(name for name in names if name and not name.startswith("__"))  # those are left out


def _split(found: Survey, files: Sequence[SourceFile]) -> list[Split]:
    keep_damaged = found.request.settings.on_error == "skip"
    if found.mixes_files:
        files = mix_files(files)
    return plan_splits(files, found.request.reading, found.task_bytes, keep_damaged=keep_damaged)


def _group(found: Survey, splits: Sequence[Split]) -> list[Group]:
    """Future tasks; a trial is a single one, because only reading in order shows where it ends."""
    if found.request.settings.limit is not None:
        return [tuple(splits)]
    return group_splits(splits, found.task_bytes)


def _find_finished(found: Survey, groups: Sequence[Group], work: WorkFolder) -> dict[str, TaskRecord]:
    """Tasks that an interrupted run finished."""
    previous, request, unfinished = found.previous, found.request, work.specification()
    if previous is None or unfinished is None or unfinished.to_json() != previous.specification.to_json():
        return {}
    tasks = name_tasks(
        groups,
        found.files,
        specification=previous.specification,
        first_split=found.first_split,
        run_name=request.run_name,
    )
    return finished_tasks(tasks, previous.specification, request.settings, work)


def finished_tasks(
    tasks: Sequence[Task], specification: Specification, settings: Settings, work: WorkFolder
) -> dict[str, TaskRecord]:
    """Those of the tasks that are finished, by key; if rows may not be skipped, only those that skipped none."""
    records = work.records(task.key for task in tasks)
    is_strict = settings.on_error == "raise"
    found = ((task, records[task.key]) for task in tasks if task.key in records)
    return {
        task.key: record
        for task, record in found
        if record.fits(specification, len(task.splits)) and not (is_strict and record.skipped)
    }


def _first_splits(found: Survey, groups: Sequence[Group]) -> list[Split]:
    """Splits to read first rows from: always those of the first source, so that a rerun sees the same.

    When appending, the dataset's own sources may be gone, so only the new ones are read.
    """
    splits = [split for group in groups for split in group]
    if found.request.settings.append and splits:
        return splits
    if not splits or splits[0].path != found.files[0].path:
        splits = _split(found, found.files[:1]) + splits
    return splits


def _has_new_columns(found: Survey) -> bool:
    """Whether the sources no longer give the dataset's columns, and the dataset may be replaced."""
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

"""All decisions of a run, as one pure function of what `survey` found; the result can be printed and compared.

Survey -> plan_run -> RunPlan: what is kept, what is already done, what is left to do, what will be removed
"""

import collections
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import SchemaError, counted, first_few
from penstock.packing import PackingSettings
from penstock.preparation._first_rows import FirstRows
from penstock.preparation._previous import Previous
from penstock.preparation._records import TaskRecord, sum_counts
from penstock.preparation._specification import Settings, Specification
from penstock.preparation._survey import Survey
from penstock.preparation._tasks import Task, name_tasks
from penstock.schema import Schema
from penstock.shards import Manifest
from penstock.sources import SourceFile, SourceOptions, is_data_name, without_secrets
from penstock.transforms import Transform

PACKED_COLUMN = "tokens"
_SHOWN_KINDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run will do."""

    destination: Path
    settings: Settings
    specification: Specification
    transform: Transform
    """The transform, after it has seen the first rows."""
    reading: SourceOptions
    patterns: tuple[str, ...]
    """The sources as given, for finding new files later."""
    files: tuple[SourceFile, ...]
    """All sources of the dataset."""
    to_read: tuple[SourceFile, ...]
    """Those that this run, or an interrupted one before it, reads."""
    kept: tuple[TaskRecord, ...]
    """Tasks of the dataset that stay in it."""
    tasks: tuple[Task, ...]
    """New tasks, in the order of their samples."""
    finished: Mapping[str, TaskRecord]
    """Those of them that an interrupted run finished, by key."""
    first_shard: int
    """Number of the first new shard."""
    removed: tuple[str, ...]
    """Shards of the dataset that the commit will remove."""
    is_up_to_date: bool
    notes: tuple[str, ...]
    """Sentences that the user should see."""

    @property
    def left(self) -> tuple[Task, ...]:
        """Tasks that remain to be done."""
        return tuple(task for task in self.tasks if task.key not in self.finished)

    @property
    def num_kept(self) -> int:
        """Tasks that earlier runs have done."""
        return sum(not task.is_dropped for task in self.kept) + len(self.finished)

    @property
    def skipped(self) -> dict[str, int]:
        """Rows that kept tasks have skipped, by reason."""
        return sum_counts(task.skipped for task in self.kept)

    def summary(self) -> str:
        """The plan in one sentence.

        "/data/corpus: 412 tasks to do, about 96,000,000,000 bytes; 3 tasks kept; 2 shards to be removed."
        """
        if self.is_up_to_date:
            return f"{self.destination}: up to date, {counted(self.num_kept, 'task')} kept."
        num_bytes = sum(task.num_bytes for task in self.left)
        parts = [f"{counted(len(self.left), 'task')} to do, about {counted(num_bytes, 'byte')}"]
        parts += [f"{counted(self.num_kept, 'task')} kept"] if self.num_kept else []
        parts += [f"{counted(len(self.removed), 'shard')} to be removed"] if self.removed else []
        return f"{self.destination}: {'; '.join(parts)}."


def plan_run(survey: Survey) -> RunPlan:
    """Decide everything about a run.

    Raises:
        SchemaError: row lengths for packing are given for data without documents of tokens, or the column that decides
            the parts of a split does not exist.
    """
    request, previous, rows = survey.request, survey.previous, survey.first_rows
    specification = previous.specification if previous is not None else _specify(survey)
    if request.part is not None:
        request.part.check(specification.schema)
    if not survey.is_up_to_date:
        _check_packable(specification.schema, request.settings.pack)
    return RunPlan(
        destination=request.destination,
        settings=request.settings,
        specification=specification,
        transform=rows.transform if rows is not None else request.transform,
        reading=request.reading,
        patterns=_patterns(survey),
        files=tuple(survey.files),
        to_read=tuple(survey.to_read),
        kept=tuple(survey.kept),
        tasks=name_tasks(
            survey.groups,
            survey.files,
            specification=specification,
            first_split=survey.first_split,
            run_name=request.run_name,
        ),
        finished=survey.finished,
        first_shard=_next_number(survey.manifest) if survey.kept else 0,
        removed=_removed(survey),
        is_up_to_date=survey.is_up_to_date,
        notes=(
            *_note_skipped_files(survey.skipped_files, request.reading),
            *_note_gone(previous, survey.files),
            *_note_numbers_as_text(survey.numbers_as_text),
            *_note_limit(specification.limit),
            *([] if survey.is_up_to_date else _note_permuted(request.settings, specification, rows)),
        ),
    )


def _specify(survey: Survey) -> Specification:
    """The specification of a run that starts from scratch."""
    request, rows = survey.request, survey.first_rows
    assert rows is not None
    return Specification(
        transform=request.transform.identity,
        columns=rows.columns,
        reading=request.reading.identity,
        shard_bytes=request.settings.shard_bytes,
        task_bytes=survey.task_bytes,
        shuffle=rows.shuffle,
        origins=rows.origins,
        hashes=True,
        file_order="hash" if survey.mixes_files else None,
        part=None if request.part is None else request.part.to_json(),
        limit=request.settings.limit,
    )


def _check_packable(schema: Schema, pack: Sequence[int]) -> None:
    """Refuse row lengths for data without documents of tokens, before any task runs."""
    if pack and not (PACKED_COLUMN in schema and schema[PACKED_COLUMN].is_ragged):
        raise SchemaError(f"pack={list(pack)} counts rows of a ragged column 'tokens'; the columns are {schema}.")
    for length in pack:
        PackingSettings(length=length)


def _patterns(survey: Survey) -> tuple[str, ...]:
    """Where to look for the sources; appended ones come after earlier ones."""
    given = _patterns_of(survey.request.sources)
    before = survey.previous.patterns if survey.previous is not None and survey.request.settings.append else ()
    return tuple(dict.fromkeys((*before, *given)))


def _patterns_of(sources: Any) -> tuple[str, ...]:
    """Absolute paths, globs, and URLs without signatures; nothing for objects in this process."""
    given = sources if isinstance(sources, (list, tuple)) else [sources]
    texts = [os.fspath(each) for each in given if isinstance(each, (str, os.PathLike))]
    absolute = (without_secrets(text) if "://" in text else os.path.abspath(os.path.expanduser(text)) for text in texts)
    return tuple(dict.fromkeys(absolute))


def _next_number(manifest: Manifest | None) -> int:
    """The first unused shard number of a dataset."""
    shards = manifest.shards if manifest is not None else ()
    return max((int(shard.name.split("-")[1]) + 1 for shard in shards), default=0)


def _removed(survey: Survey) -> tuple[str, ...]:
    """Shards that belong to no kept task; if there is nothing to do, all of them stay."""
    if survey.manifest is None or survey.is_up_to_date:
        return ()
    kept = {shard.name for task in survey.kept for shard in task.shards}
    return tuple(shard.name for shard in survey.manifest.shards if shard.name not in kept)


def _note_skipped_files(paths: Sequence[str], reading: SourceOptions) -> list[str]:
    """Notes if folders contain files that were not read, counted by extension."""
    private = [path for path in paths if is_data_name(path, reading)]
    unknown = [path for path in paths if not is_data_name(path, reading)]
    notes = []
    if unknown:
        notes.append(
            f"Skipped files with an unrecognised extension: {_kinds(unknown)} ({first_few(unknown, 1)}). "
            "If they are data, give them as paths with reading=SourceOptions(format=…), or --format."
        )
    if private:
        notes.append(
            f"Skipped files whose names, or whose folders' names, begin with an underscore: {_kinds(private)} "
            f"({first_few(private, 1)}). If they are data, give them as paths or by a glob, as in 'folder/*.txt'; "
            "images and sounds also by their format, as in --format images."
        )
    return notes


def _kinds(paths: Sequence[str]) -> str:
    kinds = collections.Counter(os.path.splitext(path)[1].lower() or "no extension" for path in paths)
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_SHOWN_KINDS))


def _note_permuted(settings: Settings, specification: Specification, rows: FirstRows | None) -> list[str]:
    """A note if samples are not in the order of the sources, and nobody requested that."""
    if settings.shuffle != "auto":
        return []
    keep = "shuffle=None (--no-shuffle) keeps the order of the sources."
    if specification.shuffle is not None:
        why = f" because column {rows.runs!r} comes in runs" if rows is not None and rows.runs is not None else ""
        return [f"Samples are stored permuted{why}: {keep}"]
    return [f"Files of class folders are stored with their classes mixed: {keep}"] if specification.file_order else []


def _note_gone(previous: Previous | None, files: Sequence[SourceFile]) -> list[str]:
    """A note if files of the dataset are no longer among the sources, or are empty."""
    gone = previous.gone(files) if previous is not None else []
    if not gone:
        return []
    how = "not given" if set(gone).isdisjoint(file.path for file in files) else "not given, or empty"
    were = f"was {how}; its" if len(gone) == 1 else f"were {how}; their"
    return [
        f"{counted(len(gone), 'source file')} from the previous run {were} samples were removed ({first_few(gone, 1)})."
    ]


def _note_limit(limit: int | None) -> list[str]:
    """A note on a trial."""
    if limit is None:
        return []
    return [f"A trial: only the first {counted(limit, 'sample')} of the sources, at most (limit=, --limit)."]


def _note_numbers_as_text(names: Sequence[str]) -> list[str]:
    """A note if CSV columns that hold numbers are stored as text."""
    if not names:
        return []
    shown = first_few([repr(name) for name in names], _SHOWN_KINDS)
    return [
        f"Stored as text, like all CSV fields without a type: {shown}. To store numbers, pass "
        'reading=SourceOptions(types="infer"), or --types infer.'
    ]

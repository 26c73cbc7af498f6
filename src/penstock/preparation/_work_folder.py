"""Finished tasks on disk, so that a run can stop at any moment and the next one continues.

    dest/.preparing/recipe.json            the specification that the tasks in here follow
    dest/.preparing/tasks.json             all tasks of the current pass, for progress reports
    dest/.preparing/attempts/KEY-…/        one attempt at one task; worthless until it finishes
    dest/.preparing/ready/shard-…          shards of finished tasks, synced
    dest/.preparing/dealt/shard-…          the same, between the two passes of a shuffle
    dest/.preparing/records/KEY.json       says that a task is finished, and what it made

    a task: write and sync shards in an attempt -> rename them into `ready` -> sync -> write its record

The record comes last, by an atomic rename, so a task is either finished or not there at all. Two attempts at
one task may overlap (when a cluster wrongly believes a worker dead): they write the same bytes under the same
names, and the second record equals the first. Whatever no record names is removed when a run starts, and the
whole folder is removed once the dataset is committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from penstock.errors import FormatError, PenstockError
from penstock.filesystem import AlignedBuffers, DirectFile, OpenFolder, storage_errors
from penstock.preparation._progress import Counts
from penstock.preparation._specification import Specification
from penstock.shapes import COUNT, Either, misfit
from penstock.shards import Runs, ShardEntry

Shelf = Literal["ready", "dealt"]
Example = tuple[str, int, str, str]
"""A bad row: path, row in its split, reason, message."""
WORK_NAME = ".preparing"
_SPECIFICATION_NAME = "recipe.json"
_TASKS_NAME = "tasks.json"
_SHELVES: tuple[Shelf, ...] = ("ready", "dealt")
_FOLDERS = ("attempts", "records", *_SHELVES)
# Shards are numbered by the key of their task until the commit: seven digits, and five for the shard.
_SHARDS_PER_TASK = 10**5
_TASK_NUMBERS = 10**7
_MAX_UNSYNCED = 4
_MAX_JSON_BYTES = 256 << 20
_KEY = re.compile("[0-9a-f]{32}")
_STAGES = frozenset({"prepare", "deal", "gather"})
_RECORD = {
    "key": _KEY,
    "shelf": frozenset(_SHELVES),
    "shards": [object],
    "splits": [(COUNT, Either(None, [(COUNT, COUNT, COUNT)]))],
    "skipped": {str: COUNT},
    "examples": [(str, int, str, str)],
    "counts": {field.name: float for field in dataclasses.fields(Counts)},
    "peak_bytes": COUNT,
}
"""The shape of a record, but for its shards, which check themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """What a finished task made."""

    key: str
    shelf: Shelf
    shards: tuple[ShardEntry, ...]
    splits: tuple[tuple[int, Runs], ...]
    """For each split, how many samples it gave, and from which of its rows."""
    skipped: Mapping[str, int]
    """Rows left out, by reason."""
    examples: tuple[Example, ...]
    """The first of them."""
    noticed: Mapping[str, int]
    """What the transform noticed in the rows that it used."""
    counts: Counts
    peak_bytes: int
    """The most memory the worker had used by then."""

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    def fits(self, specification: Specification, num_splits: int) -> bool:
        """Whether a task of that many splits could have made this; a stranger's task need not."""
        ragged = {column.name for column in specification.schema.columns if column.is_ragged}
        return (
            self.shelf == ("ready" if specification.shuffle is None else "dealt")
            and len(self.splits) == num_splits
            and sum(num_samples for num_samples, _ in self.splits) == self.num_samples
            and all(shard.num_values.keys() == ragged for shard in self.shards)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "key": self.key,
            "shelf": self.shelf,
            "shards": [shard.to_json() for shard in self.shards],
            "splits": [list(split) for split in self.splits],
            "skipped": dict(self.skipped),
            "examples": [list(example) for example in self.examples],
            "noticed": dict(self.noticed),
            "counts": self.counts.to_json(),
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """What `to_json` gave; `KeyError`, `TypeError`, `ValueError` or `AttributeError` if it is anything else."""
        if wrong := misfit(fields, _RECORD) or misfit(fields.get("noticed", {}), {str: COUNT}):
            raise ValueError(wrong)
        return cls(
            key=fields["key"],
            shelf=fields["shelf"],
            shards=tuple(ShardEntry.from_json(entry) for entry in fields["shards"]),
            splits=tuple((count, rows) for count, rows in fields["splits"]),
            skipped=fields["skipped"],
            examples=tuple((path, row, reason, message) for path, row, reason, message in fields["examples"]),
            noticed=fields.get("noticed", {}),
            counts=Counts.from_json(fields["counts"]),
            peak_bytes=fields["peak_bytes"],
        )


class Attempt:
    """One attempt at one task: `store` shards, `complete` it, then `finish`, which a second thread may do.

    As a context manager it removes what it wrote if the task fails.

    Shards are written as they come and synced at the end, so a slow disk does not hold up the processor
    (it took 0.2 s of every 1.2 s where this was measured).
    """

    def __init__(self, work: WorkFolder, key: str) -> None:
        self._work = work
        self.key = key
        self._before: tuple[Attempt, ...] = ()
        self._unsynced: list[DirectFile] = []
        self._record: TaskRecord | None = None
        self._name = f"{key}-{uuid.uuid4().hex[:12]}"
        self._folder = work.make_attempt(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.drop()

    @property
    def first_number(self) -> int:
        """Number of the first shard; a hash of the content makes its name unique."""
        return int(self.key[:12], 16) % _TASK_NUMBERS * _SHARDS_PER_TASK

    def store(self, name: str, chunks: list[memoryview | bytes]) -> int:
        """Write one shard; an error may surface later, in the next call or in `finish`."""
        if len(self._unsynced) >= _MAX_UNSYNCED:
            self._unsynced.pop(0).sync()
        pieces = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
        num_bytes = sum(map(len, pieces))
        file = DirectFile(self._folder.path / name, num_bytes, self._work.buffers, within=self._folder.descriptor)
        self._unsynced.append(file)
        for piece in pieces:
            file.write(piece)
        file.end()
        return num_bytes

    def complete(self, record: TaskRecord) -> None:
        """All shards are stored, and this is what they are."""
        self._record = record

    @property
    def record(self) -> TaskRecord:
        """What the task made."""
        assert self._record is not None
        return self._record

    def after(self, others: Iterable[Attempt]) -> Self:
        """The same attempt, which will finish these first: whoever finds its record finds theirs, too."""
        self._before = tuple(others)
        return self

    def finish(self) -> TaskRecord:
        """Make the shards durable and record the task as finished.

        Raises:
            StorageError: the disk is full or failing.
        """
        with self:
            for attempt in self._before:
                attempt.finish()
            self._publish(self.record)
        self.drop()
        return self.record

    def _publish(self, record: TaskRecord) -> None:
        while self._unsynced:
            self._unsynced.pop(0).sync()
        with self._work.open(record.shelf) as shelf:
            for shard in record.shards:
                self._folder.move(shard.name, shelf, shard.name)
            shelf.sync()
        with self._work.open("records") as records:
            _write_json(records, f"{record.key}.json", record.to_json(), by=self._folder)

    def drop(self) -> None:
        """Remove whatever the attempt left behind."""
        for attempt in self._before:
            attempt.drop()
        for file in self._unsynced:
            file.close()
        self._unsynced = []
        self._folder.close()
        with contextlib.suppress(PenstockError, OSError):  # the next run removes it
            self._work.remove_attempts(self._name)


class WorkFolder:
    """The folder `.preparing` of one destination. Nothing in it is reached through a link."""

    def __init__(self, destination: Path) -> None:
        self.path = destination / WORK_NAME
        self.buffers = AlignedBuffers()

    def open(self, *names: str) -> OpenFolder:
        """The folder, or one in it.

        Raises:
            FileNotFoundError: it is not there.
            FormatError: a link is there, or something else that is no folder.
        """
        return OpenFolder(self.path.parent, WORK_NAME, *names)

    def refuse_links(self) -> None:
        """Stop when a link, or anything else, is in place of a folder, before anything is read or written.

        Raises:
            FormatError: naming it.
        """
        for names in ((), *((name,) for name in _FOLDERS)):
            with contextlib.suppress(FileNotFoundError):
                self.open(*names).close()

    def specification(self) -> Specification | None:
        """The specification that the tasks in the folder follow; None when there is none that makes sense."""
        try:
            return Specification.from_json(self._read(_SPECIFICATION_NAME))
        except ValueError:
            return None

    def begin(self, specification: Specification) -> None:
        """Make the folder ready for tasks under `specification`, keeping those finished under the same one."""
        wanted, found = specification.to_json(), self.specification()
        is_another = found is None or found.to_json() != wanted
        if is_another:
            self.remove()
        with OpenFolder(self.path.parent) as destination:
            destination.make(WORK_NAME)
        with self.open() as work:
            for name in _FOLDERS:
                work.make(name)
            if is_another:
                self._write(work, _SPECIFICATION_NAME, wanted)
        self.remove_attempts("")

    def note_tasks(self, stage: str, tasks: Mapping[str, int]) -> None:
        """Write down the tasks of this pass and how many bytes each reads."""
        with self.open() as work:
            self._write(work, _TASKS_NAME, {"stage": stage, "tasks": dict(tasks)})

    def noted_tasks(self) -> tuple[str, dict[str, int]] | None:
        """The unfinished pass, and its tasks with their bytes; None when no task was started."""
        noted = self._read(_TASKS_NAME)
        if misfit(noted, {"stage": _STAGES, "tasks": {str: COUNT}}) or not all(map(_KEY.fullmatch, noted["tasks"])):
            return None
        return noted["stage"], noted["tasks"]

    def attempt(self, key: str) -> Attempt:
        """Start an attempt at a task."""
        return Attempt(self, key)

    def make_attempt(self, name: str) -> OpenFolder:
        """A new folder for an attempt."""
        with self.open("attempts") as attempts:
            with storage_errors(attempts.path / name, doing="created as a folder"):
                os.mkdir(name, dir_fd=attempts.descriptor)
            return self.open("attempts", name)

    def remove_attempts(self, prefix: str) -> None:
        """Remove all attempts whose names begin like this."""
        with self.open("attempts") as attempts:
            for name in attempts.names():
                if name.startswith(prefix):
                    attempts.remove(name)

    def records(self, keys: Iterable[str]) -> dict[str, TaskRecord]:
        """Records of the given tasks, as far as they are finished and their shards are all there."""
        try:
            with self.open("records") as records, self.open("ready") as ready, self.open("dealt") as dealt:
                shelves = {"ready": ready, "dealt": dealt}
                found = {key: _read_record(records, key) for key in keys}
                return {
                    key: record
                    for key, record in found.items()
                    if record is not None and _is_whole(record, shelves[record.shelf])
                }
        except (FileNotFoundError, FormatError):
            return {}

    def sweep(self, kept: Iterable[TaskRecord]) -> None:
        """Remove the results of tasks that are not part of this run."""
        records = list(kept)
        self._remove_others("records", {f"{record.key}.json" for record in records})
        for shelf in _SHELVES:
            names = {shard.name for record in records if record.shelf == shelf for shard in record.shards}
            self._remove_others(shelf, names | {"manifest.json"})  # the one of dealt shards

    def write_run(self, value: Any) -> None:
        """Write run.json, beside the dataset; it appears complete or not at all."""
        with OpenFolder(self.path.parent) as destination, self.open() as work:
            _write_json(destination, "run.json", value, by=work)

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        with OpenFolder(self.path.parent) as destination:
            destination.remove(WORK_NAME)

    def remove_if_idle(self) -> None:
        """Remove the folder when it holds no finished task, so there is nothing to continue."""
        try:
            with self.open("records") as records:
                is_idle = not records.names()
        except FileNotFoundError:
            is_idle = True
        if is_idle:
            self.remove()

    def _write(self, work: OpenFolder, name: str, value: Any) -> None:
        with self.open("attempts") as attempts:
            _write_json(work, name, value, by=attempts)

    def _read(self, name: str) -> Any:
        try:
            with self.open() as work:
                return _read_json(work, name)
        except (OSError, FormatError):
            return None

    def _remove_others(self, name: str, kept: set[str]) -> None:
        with self.open(name) as folder:
            for each in folder.names():
                if each not in kept:
                    folder.remove(each)


def _write_json(folder: OpenFolder, name: str, value: Any, *, by: OpenFolder) -> None:
    """Write a file that appears complete or not at all: first in another folder, on the same disk."""
    by.remove(name)
    by.create(name, [json.dumps(value).encode()])
    by.move(name, folder, name)
    folder.sync()


def _read_json(folder: OpenFolder, name: str) -> Any:
    """The content of a JSON file; None when it is missing, unreadable, too long, or no regular file."""
    try:
        with os.fdopen(folder.open(name), "rb") as file:
            # Python takes as much memory as it is told to read, so it is told the size.
            size = os.fstat(file.fileno()).st_size
            return json.loads(file.read(size)) if size <= _MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _read_record(records: OpenFolder, key: str) -> TaskRecord | None:
    """The record of a task; one that makes no sense counts as none, and the task is done again."""
    try:
        record = TaskRecord.from_json(_read_json(records, f"{key}.json"))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return record if record.key == key else None


def _is_whole(record: TaskRecord, shelf: OpenFolder) -> bool:
    return all(shelf.size(shard.name) == shard.num_bytes for shard in record.shards)

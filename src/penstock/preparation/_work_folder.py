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

from penstock.errors import StorageError
from penstock.filesystem import (
    AlignedBuffers,
    DirectFile,
    create_file,
    make_directory,
    open_regular,
    remove_tree,
    rename,
    storage_errors,
    sync_directory,
)
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
        self._key = key
        self._unsynced: list[DirectFile] = []
        self._record: TaskRecord | None = None
        self._folder = work.path / "attempts" / f"{key}-{uuid.uuid4().hex[:12]}"
        with storage_errors(self._folder, doing="created as a folder"):
            os.mkdir(self._folder)

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
        return int(self._key[:12], 16) % _TASK_NUMBERS * _SHARDS_PER_TASK

    def store(self, name: str, chunks: list[memoryview | bytes]) -> int:
        """Write one shard; an error may surface later, in the next call or in `finish`."""
        if len(self._unsynced) >= _MAX_UNSYNCED:
            self._unsynced.pop(0).sync()
        pieces = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
        num_bytes = sum(map(len, pieces))
        file = DirectFile(self._folder / name, num_bytes, self._work.buffers)
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

    def finish(self) -> TaskRecord:
        """Make the shards durable and record the task as finished.

        Raises:
            StorageError: the disk is full or failing.
        """
        with self:
            self._publish(self.record)
        self.drop()
        return self.record

    def _publish(self, record: TaskRecord) -> None:
        while self._unsynced:
            self._unsynced.pop(0).sync()
        shelf = self._work.path / record.shelf
        for shard in record.shards:
            rename(self._folder / shard.name, shelf / shard.name)
        sync_directory(shelf)
        write_json(self._work.path / "records" / f"{record.key}.json", record.to_json(), by=self._folder / "record")

    def drop(self) -> None:
        """Remove whatever the attempt left behind."""
        for file in self._unsynced:
            file.close()
        self._unsynced = []
        with contextlib.suppress(StorageError):  # the next run removes it
            remove_tree(self._folder)


class WorkFolder:
    """The folder `.preparing` of one destination."""

    def __init__(self, destination: Path) -> None:
        self.path = destination / WORK_NAME
        self.buffers = AlignedBuffers()

    def specification(self) -> dict[str, Any] | None:
        """The specification that the tasks in the folder follow; None when there is none."""
        found = read_json(self.path / _SPECIFICATION_NAME)
        return found if isinstance(found, dict) else None

    def begin(self, specification: Specification) -> None:
        """Make the folder ready for tasks under `specification`, keeping those finished under the same one."""
        wanted, found = specification.to_json(), self.specification()
        if self.path.exists() and found != wanted:
            remove_tree(self.path)
        for folder in (self.path, *(self.path / name for name in ("attempts", "records", *_SHELVES))):
            make_directory(folder)
        if found != wanted:
            write_json(self.path / _SPECIFICATION_NAME, wanted, by=self.path / "attempts" / _SPECIFICATION_NAME)
        self._clear_attempts()

    def note_tasks(self, stage: str, tasks: Mapping[str, int]) -> None:
        """Write down the tasks of this pass and how many bytes each reads."""
        noted = {"stage": stage, "tasks": dict(tasks)}
        write_json(self.path / _TASKS_NAME, noted, by=self.path / "attempts" / _TASKS_NAME)

    def noted_tasks(self) -> tuple[str, dict[str, int]] | None:
        """The unfinished pass, and its tasks with their bytes; None when no task was started."""
        noted = read_json(self.path / _TASKS_NAME)
        if misfit(noted, {"stage": _STAGES, "tasks": {str: COUNT}}) or not all(map(_KEY.fullmatch, noted["tasks"])):
            return None
        return noted["stage"], noted["tasks"]

    def attempt(self, key: str) -> Attempt:
        """Start an attempt at a task."""
        return Attempt(self, key)

    def records(self, keys: Iterable[str]) -> dict[str, TaskRecord]:
        """Records of the given tasks, as far as they are finished and their shards are all there."""
        found: dict[str, TaskRecord] = {}
        for key in keys:
            record = self._record(key)
            if record is not None and self._is_whole(record):
                found[key] = record
        return found

    def sweep(self, kept: Iterable[TaskRecord]) -> None:
        """Remove the results of tasks that are not part of this run."""
        records = list(kept)
        keys = {f"{record.key}.json" for record in records}
        _remove_others(self.path / "records", keys)
        for shelf in _SHELVES:
            names = {shard.name for record in records if record.shelf == shelf for shard in record.shards}
            _remove_others(self.path / shelf, names | {"manifest.json"})  # the one of dealt shards

    def shard_path(self, record: TaskRecord, shard: ShardEntry) -> Path:
        """Where a shard of a finished task is."""
        return self.path / record.shelf / shard.name

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        if self.path.exists():
            remove_tree(self.path)

    def remove_if_idle(self) -> None:
        """Remove the folder when it holds no finished task, so there is nothing to continue."""
        records = self.path / "records"
        if self.path.is_dir() and not (records.is_dir() and any(records.iterdir())):
            remove_tree(self.path)

    def _record(self, key: str) -> TaskRecord | None:
        """The record of a task; one that makes no sense counts as none, and the task is done again."""
        try:
            record = TaskRecord.from_json(read_json(self.path / "records" / f"{key}.json"))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return record if record.key == key else None

    def _is_whole(self, record: TaskRecord) -> bool:
        try:
            return all(self.shard_path(record, each).stat().st_size == each.num_bytes for each in record.shards)
        except OSError:
            return False

    def _clear_attempts(self) -> None:
        for attempt in list((self.path / "attempts").iterdir()):
            if attempt.is_dir():
                remove_tree(attempt)
            else:
                attempt.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, by: Path) -> None:
    """Write a file that appears complete or not at all: first under the name `by`, on the same disk."""
    create_file(by, [json.dumps(value).encode()])
    rename(by, path)
    sync_directory(path.parent)


def read_json(path: Path) -> Any:
    """The content of a JSON file; None when it is missing, unreadable, too long, or no regular file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            # Python takes as much memory as it is told to read, so it is told the size.
            size = os.fstat(file.fileno()).st_size
            return json.loads(file.read(size)) if size <= _MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _remove_others(folder: Path, kept: set[str]) -> None:
    for path in list(folder.iterdir()):
        if path.name not in kept:
            with storage_errors(path, doing="removed"):
                path.unlink(missing_ok=True)

"""Tasks on disk, so that a run can stop at any moment and the next one continues.

    dest/.preparing/recipe.json            the specification that the tasks in here follow
    dest/.preparing/tasks.json             all tasks of the current pass, for progress reports
    dest/.preparing/attempts/KEY-…/        one attempt at one task; worthless until it finishes
    dest/.preparing/ready/shard-…          shards of finished tasks, synced
    dest/.preparing/dealt/shard-…          the same, between the two passes of a shuffle
    dest/.preparing/shipped/shard-…        hollow: an object store has the shard (`_shipping.py`)
    dest/.preparing/records/KEY.json       says that a task is finished, and what it made

    a task: write and sync shards in an attempt -> rename them into `ready` -> sync -> write its record

The record comes last, by an atomic rename, so a task is either finished or not there at all. Two attempts at
one task may overlap (if a cluster wrongly believes a worker dead): they write the same bytes under the same
names, and the second record equals the first. Whatever no record names is removed when a run starts, and the
whole folder is removed once the dataset is committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from penstock.errors import FormatError, PenstockError, StorageError
from penstock.filesystem import (
    AlignedBuffers,
    DirectFile,
    OpenFolder,
    PositionedFile,
    is_url,
    local_path,
    storage_errors,
    user_cache,
)
from penstock.preparation._records import KEY, SHELVES, TaskRecord
from penstock.preparation._specification import Specification
from penstock.schema import Schema
from penstock.shapes import COUNT, find_mismatch
from penstock.shards import write_hollow

WORK_NAME = ".preparing"
_SPECIFICATION_NAME = "recipe.json"
_TASKS_NAME = "tasks.json"
_FOLDERS = ("attempts", "records", *SHELVES)
_MAX_JSON_BYTES = 256 << 20
_PASSES = frozenset({"prepare", "deal", "gather"})
# Until the commit, shards are numbered by the key of their task: seven digits, and five for the shard.
_SHARDS_PER_TASK = 10**5
_TASK_NUMBERS = 10**7
_MAX_UNSYNCED = 4


def folder_of(destination: str | os.PathLike[str]) -> Path:
    """The folder in which a destination is prepared: itself, or a URL's work folder.

    Raises:
        StorageError: the user has no home for work folders.
    """
    if not is_url(destination):
        return local_path(destination, "the destination").absolute()
    parts = urlsplit(os.fspath(destination))
    if (cache := user_cache("prepare")) is None:
        raise StorageError(f"{destination}: this user has no home for the work folder. Set XDG_CACHE_HOME.")
    names = [name for name in parts.path.split("/") if name not in ("", ".", "..")]
    return cache.joinpath(parts.scheme, parts.netloc, *names)


class WorkFolder:
    """The folder `.preparing` of one destination. Nothing in it is reached through a link."""

    def __init__(self, destination: Path) -> None:
        self.path = destination / WORK_NAME
        self.buffers = AlignedBuffers()

    def open(self, *names: str) -> OpenFolder:
        """The folder, or one in it.

        Raises:
            FileNotFoundError: it does not exist.
            FormatError: it is a link, or not a folder.
        """
        return OpenFolder(self.path.parent, WORK_NAME, *names)

    def refuse_links(self) -> None:
        """Stop before anything is read or written if a link, or anything else, is in place of a folder.

        Raises:
            FormatError: one is; the message names it.
        """
        for names in ((), *((name,) for name in _FOLDERS)):
            with contextlib.suppress(FileNotFoundError):
                self.open(*names).close()

    def specification(self) -> Specification | None:
        """The specification that the tasks in the folder follow; None if there is no valid one."""
        try:
            return Specification.from_json(self._read(_SPECIFICATION_NAME))
        except ValueError:
            return None

    def begin(self, specification: Specification) -> None:
        """Make the folder ready for tasks under `specification`, keeping those finished under the same one."""
        wanted, found = specification.to_json(), self.specification()
        is_different = found is None or found.to_json() != wanted
        if is_different:
            self.remove()
        with OpenFolder(self.path.parent) as destination:
            destination.make(WORK_NAME)
        with self.open() as work:
            for name in _FOLDERS:
                work.make(name)
            if is_different:
                self._write(work, _SPECIFICATION_NAME, wanted)
        self.remove_attempts("")

    def note_tasks(self, pass_name: str, tasks: Mapping[str, int]) -> None:
        """Write down the tasks of this pass and how many bytes each reads."""
        with self.open() as work:
            self._write(work, _TASKS_NAME, {"stage": pass_name, "tasks": dict(tasks)})

    def noted_tasks(self) -> tuple[str, dict[str, int]] | None:
        """The unfinished pass, and its tasks with their bytes; None if no task was started."""
        noted = self._read(_TASKS_NAME)
        shape = {"stage": _PASSES, "tasks": {str: COUNT}}
        if find_mismatch(noted, shape) or not all(map(KEY.fullmatch, noted["tasks"])):
            return None
        return noted["stage"], noted["tasks"]

    def make_attempt(self, name: str) -> OpenFolder:
        """A new folder for an attempt."""
        with self.open("attempts") as attempts:
            with storage_errors(attempts.path / name, doing="creating the folder"):
                os.mkdir(name, dir_fd=attempts.descriptor)
            return self.open("attempts", name)

    def remove_attempts(self, prefix: str) -> None:
        """Remove all attempts whose names begin with `prefix`."""
        with self.open("attempts") as attempts:
            for name in attempts.names():
                if name.startswith(prefix):
                    attempts.remove(name)

    def publish(self, record: TaskRecord, attempt: OpenFolder) -> None:
        """Take the synced shards of an attempt, and record their task as finished."""
        with self.open(record.shelf) as shelf:
            for shard in record.shards:
                attempt.move(shard.name, shelf, shard.name)
            shelf.sync()
        with self.open("records") as records:
            _write_json(records, f"{record.key}.json", record.to_json(), by=attempt)

    def ship(self, record: TaskRecord, schema: Schema) -> None:
        """Make the shards of a finished task hollow, because a store has them."""
        with (
            self.open("ready") as ready,
            self.open("shipped") as shipped,
            self.open("attempts") as attempts,
            self.open("records") as records,
        ):
            for shard in record.shards:
                attempts.remove(shard.name)
                whole = PositionedFile(ready.path / shard.name)
                write_hollow(attempts.path / shard.name, shard, schema, whole.read, within=attempts.descriptor)
                attempts.move(shard.name, shipped, shard.name)
            shipped.sync()
            _write_json(
                records, f"{record.key}.json", dataclasses.replace(record, shelf="shipped").to_json(), by=attempts
            )
            for shard in record.shards:
                ready.remove(shard.name)

    def records(self, keys: Iterable[str]) -> dict[str, TaskRecord]:
        """Records of those of the given tasks that are finished and whose shards are all there."""
        try:
            with contextlib.ExitStack() as stack:
                records = stack.enter_context(self.open("records"))
                found = {key: _read_record(records, key) for key in keys}
                used = {record.shelf for record in found.values() if record is not None}
                shelves = {shelf: stack.enter_context(self.open(shelf)) for shelf in used}
                return {
                    key: record
                    for key, record in found.items()
                    if record is not None and _has_all_shards(record, shelves[record.shelf])
                }
        except (FileNotFoundError, FormatError):
            return {}

    def sweep(self, kept: Iterable[TaskRecord]) -> None:
        """Remove the results of tasks that are not part of this run."""
        records = list(kept)
        self._remove_others("records", {f"{record.key}.json" for record in records})
        for shelf in SHELVES:
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

    def holds_samples(self) -> bool:
        """Whether a finished task made samples: without any, there is nothing to continue, and nothing to protect.

        Raises:
            FormatError: a link is in place of a folder.
        """
        self.refuse_links()
        try:
            with self.open("records") as records:
                keys = [name.removesuffix(".json") for name in records.names()]
        except FileNotFoundError:
            return False
        return any(record.num_samples for key in keys for record in self.records([key]).values())

    def _write(self, work: OpenFolder, name: str, value: Any) -> None:
        if work.size(name) is None:
            work.remove(name)  # something that a file cannot replace, if it is a folder
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
    """The contents of a JSON file; None if it is missing, unreadable, too long, or not a regular file."""
    try:
        with os.fdopen(folder.open(name), "rb") as file:
            # Python allocates as much memory as it is asked to read, so ask for the file's size.
            size = os.fstat(file.fileno()).st_size
            return json.loads(file.read(size)) if size <= _MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _read_record(records: OpenFolder, key: str) -> TaskRecord | None:
    """The record of a task; an invalid one counts as none, and the task is repeated."""
    try:
        record = TaskRecord.from_json(_read_json(records, f"{key}.json"))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return record if record.key == key else None


def _has_all_shards(record: TaskRecord, shelf: OpenFolder) -> bool:
    return all(shelf.size(shard.name) == shard.num_bytes for shard in record.shards)


class Attempt:
    """One attempt at one task: `store` shards, `complete` it, then `finish` it, possibly in a second thread.

    As a context manager it removes what it wrote if the task fails.

    Shards are written as they come and synced at the end, so that a slow disk does not hold up the CPU
    (syncing took 0.2 s of every 1.2 s where this was measured).
    """

    def __init__(self, work: WorkFolder, key: str) -> None:
        self._work = work
        self._key = key
        self._before: Sequence[Attempt] = ()
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
        return int(self._key[:12], 16) % _TASK_NUMBERS * _SHARDS_PER_TASK

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

    def complete(self, record: TaskRecord, *, after: Sequence[Attempt] = ()) -> Self:
        """Set the record, once all shards are stored. Attempts in `after` finish first: if its record exists, so do
        theirs.
        """
        self._record, self._before = record, after
        return self

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
            for attempt in self._before:
                attempt.finish()
            while self._unsynced:
                self._unsynced.pop(0).sync()
            self._work.publish(self.record, self._folder)
        self.drop()
        return self.record

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


def no_store(name: str, chunks: list[memoryview | bytes]) -> int:
    """The `store` of a writer that has no attempt yet."""
    raise AssertionError(f"{name} was written outside of a task")

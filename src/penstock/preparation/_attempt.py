"""One attempt at one task: shards are written to a folder of their own, and join those of finished tasks at the end."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from penstock.errors import PenstockError
from penstock.filesystem import DirectFile
from penstock.preparation._task_record import TaskRecord
from penstock.preparation._work_folder import WorkFolder

# Until the commit, shards are numbered by the key of their task: seven digits, and five for the shard.
_SHARDS_PER_TASK = 10**5
_TASK_NUMBERS = 10**7
_MAX_UNSYNCED = 4


class Attempt:
    """One attempt at one task: `store` shards, `complete` it, then `finish` it, possibly in a second thread.

    As a context manager it removes what it wrote if the task fails.

    Shards are written as they come and synced at the end, so that a slow disk does not hold up the CPU
    (syncing took 0.2 s of every 1.2 s where this was measured).
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
        """Set the record, once all shards are stored."""
        self._record = record

    @property
    def record(self) -> TaskRecord:
        """What the task made."""
        assert self._record is not None
        return self._record

    def after(self, others: Iterable[Attempt]) -> Self:
        """The same attempt, but it will finish these first: if its record exists, so do theirs."""
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

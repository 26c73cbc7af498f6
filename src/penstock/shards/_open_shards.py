"""The shards of a folder: which one holds a sample, which are open, and what must be checked before a read.

    sample -> find: shard and sample in it -> open_shard -> check its blocks -> the table says READY

The table is shared by all threads and only ever gains shards. To close some, a new table without them
replaces the old one; readers that still use the old one keep it alive, and with it the maps it points
into. So no read takes a lock, and no map disappears during a read.

Each open shard takes a descriptor, and the usual limit is 1,024 for everything the training script has open: all
datasets of the process together use at most half of it. The oldest shards are closed first: with
windows read in order, those are also the ones no longer needed.

After a fork the child starts with nothing open: maps would survive, but locks held by other threads of
the parent would never be released.
"""

import bisect
import os
import resource
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.filesystem import MappedFile
from penstock.schema import Column, offsets_of
from penstock.shards._blocks import Checks
from penstock.shards._manifest import Manifest
from penstock.shards._shard import Shard, fill_row, open_file, read_offsets
from penstock.shards._storage import READY, STATE, Table, column_slots, from_front, ranges

_LOOK_SECONDS = 0.1


class Supply(Protocol):
    """Has the files of a folder appear in it when they are needed, and removes some again that are not."""

    def obtain(self, name: str) -> None:
        """Return when the file is there; it may be removed again until it is held."""
        ...

    def hold(self, descriptor: int) -> bool:
        """Keep an open file until it is closed; False if it was removed before."""
        ...

    def is_evicted(self, name: str) -> bool:
        """Whether a file should be closed, so that it can be removed."""
        ...


class OpenShards:
    """Opens a shard when it is first needed; if `is_trusted`, blocks are never checked."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        io: Literal["map", "pread"],
        is_trusted: bool,
        supply: Supply | None = None,
    ) -> None:
        self._path, self.supply = path, supply
        self._manifest = manifest
        self.slots = column_slots(manifest.schema)
        self.starts = offsets_of([shard.num_samples for shard in manifest.shards])
        """Index of the first sample of each shard, and finally the number of samples."""
        self.num_samples = int(self.starts[-1])
        self.value_starts = {column.name: self._value_starts(column) for column in manifest.schema.stored.columns}
        self._fingerprint = manifest.fingerprint
        self._io = io
        self.is_trusted = is_trusted
        self._checks: dict[int, Checks] = {}
        self.reset()
        RESET_IN_CHILD.add(self)

    def reset(self) -> None:
        """Close every shard; the next read opens what it needs."""
        self._lock = threading.Lock()
        self._shards: dict[int, Shard] = {}
        self._watch: threading.Thread | None = None
        self.table = Table.empty(len(self._manifest.shards), len(self._manifest.schema.stored))

    def find(self, index: int) -> tuple[int, int]:
        """(shard, sample within the shard) of one index."""
        number = bisect.bisect_right(self.starts, index) - 1
        return number, index - int(self.starts[number])

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(shard, sample within the shard) of each index; negative ones count from the end."""
        indices = from_front(indices, self.num_samples)
        shard_of = np.searchsorted(self.starts, indices, side="right") - 1
        return shard_of, indices - self.starts[shard_of]

    def open_shard(self, number: int) -> Shard:
        """Shard `number`, opened if it is not open yet.

        Raises:
            DatasetChanged: the dataset was overwritten, moved or removed since it was opened.
            FormatError: the shard is missing or is not what the manifest says.
        """
        shard = self._shards.get(number)
        while shard is None:
            OPEN_FILES.make_room()
            if self.supply is not None:
                self._watch = self._watch or watch_evictions(self)
                self.supply.obtain(self._manifest.shards[number].name)
            with self._lock:
                shard = self._shards.get(number) or self._open(number)
        return shard

    def open_all(self, indices: NDArray[np.int64]) -> list[Shard]:
        """The shards that samples need. Who holds them waits for no other; who waits for one holds none."""
        numbers = np.unique(self.locate(indices)[0]).tolist()
        while True:
            for number in numbers:
                self.open_shard(number)
            found = [shard for number in numbers if (shard := self._shards.get(number)) is not None]
            if len(found) == len(numbers):
                return found

    def close_shards(self, numbers: set[int]) -> None:
        """Forget these shards; their files close when the last reader is done with them."""
        with self._lock:
            rows = self.table.rows.copy()
            rows[list(numbers)] = 0
            held = {number: shard for number, shard in self.table.held.items() if number not in numbers}
            self._shards = {number: shard for number, shard in self._shards.items() if number not in numbers}
            self.table = Table(rows, held)

    def close_evicted(self) -> None:
        """Forget the shards that take the room of others."""
        if self.supply is not None:
            names = {number: self._manifest.shards[number].name for number in list(self._shards)}
            if evicted := {number for number, name in names.items() if self.supply.is_evicted(name)}:
                self.close_shards(evicted)

    def is_at_hand(self, number: int) -> bool:
        """Whether a shard can be opened without waiting for it to be fetched."""
        return self.supply is None or number in self._shards

    def lengths(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of samples `begin` to `end` of a ragged column."""
        lengths = self._room_for(begin, end)
        for number, first, last in ranges(self.starts, begin, end):
            offsets = self._offsets(number, column, first, last)
            place = int(self.starts[number]) + first - begin
            np.subtract(offsets[1:], offsets[:-1], out=lengths[place : place + last - first])
        return lengths

    def _offsets(self, number: int, column: Column, first: int, last: int) -> NDArray[np.int64]:
        """Where samples `first` to `last` of a shard begin, and where the last ends; only parts of a shard open it."""
        entry = self._manifest.shards[number]
        if number not in self._shards and last - first == entry.num_samples and self.supply is None:
            path = f"{self._path}/{entry.name}"
            found = read_offsets(path, entry, self._manifest.schema, column, is_trusted=self.is_trusted)
            if found is not None:
                return found
        shard = self.open_shard(number)
        shard.file.check_size()
        if not self.is_trusted:
            shard.check_offsets(column, first, last)
        return shard.offsets(column, first, last)

    def _room_for(self, begin: int, end: int) -> NDArray[np.int64]:
        """A number for each of these samples; memory is only taken as it is filled, shard by shard."""
        try:
            return np.empty(end - begin, np.int64)
        except (MemoryError, ValueError):
            for number, _, _ in ranges(self.starts, begin, end):
                self.open_shard(number)  # raises where the manifest counts samples that the file has not
            raise

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check samples `begin` to `end` of a column now, so that no read has to."""
        if self.is_trusted:
            return
        for number, first, last in ranges(self.starts, begin, end):
            shard = self.open_shard(number)
            self.check_shard(shard, column, first, last)
            self._note_checked(column, number, shard)

    def prepare(self, column: Column, index: int, part: tuple[int, int] | None = None) -> None:
        """Open and check what one sample needs, or only some of its elements; or raise if something is wrong."""
        number, sample = self.find(index)
        shard = self.open_shard(number)
        self.check_shard(shard, column, sample, sample + 1, part)
        if not self.is_trusted:
            self._note_checked(column, number, shard)
        if column.is_ragged:
            shard.offsets(column, sample, sample + 1)

    def prepare_elements(self, column: Column, begin: int, end: int) -> None:
        """The same for elements `begin` to `end` of a column, whatever samples they belong to."""
        starts = self.value_starts[column.name]
        while begin < end:
            number = int(np.searchsorted(starts, begin, side="right")) - 1
            start, stop = starts[number : number + 2].tolist()
            shard, last = self.open_shard(number), min(end, stop)
            self.check_elements(shard, column, begin - start, last - start)
            self._note_checked(column, number, shard)
            begin = last

    def check_elements(self, shard: Shard, column: Column, begin: int, end: int) -> None:
        """Check the size of the file and, unless checking is off, elements `begin` to `end` of the shard."""
        shard.file.check_size()
        if not self.is_trusted:
            shard.check_values(column, begin, end)

    def sample_length(self, column: Column, index: int) -> int:
        """Elements of one ragged sample."""
        return int(self.lengths(column, index, index + 1)[0])

    def check_shard(
        self, shard: Shard, column: Column, begin: int, end: int, part: tuple[int, int] | None = None
    ) -> None:
        """Check the size of the file and, unless checking is off, samples `begin` to `end` of the shard, or a part."""
        shard.file.check_size()
        if not self.is_trusted:
            shard.check_samples(column, begin, end, part)

    def _note_checked(self, column: Column, number: int, shard: Shard) -> None:
        """Let readers know once the last window of a column is checked."""
        if self._io == "map" and shard.is_checked(column):
            with self._lock:
                if self._shards.get(number) is shard:
                    self.table.rows[number, self.slots[column.name] + STATE] = READY

    def _open(self, number: int) -> Shard | None:
        """Open a shard and note it, under the lock; None if it was removed again before it was open."""
        entry = self._manifest.shards[number]
        try:
            file = open_file(self._path, entry.name, io=self._io, fingerprint=self._fingerprint)
        except FormatError:
            if self.supply is None:
                raise
            return None
        if self.supply is not None and not self.supply.hold(file.descriptor):
            return None
        shard = Shard(file, entry, self._manifest.schema)
        checks = shard.blocks.checks
        known = self._checks.setdefault(number, checks)
        if known.identity == checks.identity:
            shard.blocks.checks = known
        else:
            self._checks[number] = checks
        self._shards[number] = shard
        OPEN_FILES.opened(self, number)
        if isinstance(shard.file, MappedFile):
            fill_row(self.table, number, shard, self.slots, is_trusted=self.is_trusted)
        return shard

    def _value_starts(self, column: Column) -> NDArray[np.int64]:
        if not column.is_ragged:
            return self.starts
        return offsets_of([shard.num_values[column.name] for shard in self._manifest.shards])


class Evicting(Protocol):
    """Who keeps files of a cache open."""

    def close_evicted(self) -> None:
        """Forget the files that take the room of others."""
        ...

    def reset(self) -> None:
        """Close every file; the next read opens what it needs."""
        ...


def watch_evictions(owner: Evicting) -> threading.Thread:
    """Look now and then for files to close: a reader that waits, or has nothing to do, keeps none from others."""
    thread = threading.Thread(target=_close_evicted, args=(weakref.ref(owner),), name="penstock-evicted", daemon=True)
    thread.start()
    return thread


def _close_evicted(reference: weakref.ref[Evicting]) -> None:
    while True:
        time.sleep(_LOOK_SECONDS)
        owner = reference()
        if owner is None:
            return
        owner.close_evicted()
        del owner


class Closing(Protocol):
    """Who opened files, and can close some of them."""

    def close_shards(self, numbers: set[int]) -> None:
        """Forget these files; they close when the last reader is done with them."""
        ...


class OpenFiles:
    """The open shards of all datasets, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reset()

    def reset(self) -> None:
        """Forget all of them (in a forked child)."""
        self._lock = threading.Lock()
        self._order: deque[tuple[weakref.ref[Closing], int]] = deque()

    def opened(self, owner: Closing, number: int) -> None:
        """Note that `owner` opened shard `number`."""
        with self._lock:
            self._order.append((weakref.ref(owner), number))

    def make_room(self) -> None:
        """Close the oldest shards if there are too many, a quarter at a time: every closing copies a table."""
        with self._lock:
            if len(self._order) <= self.limit:
                return
            oldest = [self._order.popleft() for _ in range(len(self._order) - self.limit * 3 // 4)]
        for owner in {reference() for reference, _ in oldest} - {None}:
            assert owner is not None
            owner.close_shards({number for reference, number in oldest if reference() is owner})


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 4096
    return max(16, min(4096, soft // 2))


OPEN_FILES = OpenFiles(_limit())


def pieces(indices: NDArray[np.int64], num_files: int) -> list[NDArray[np.int64]]:
    """Parts of a read, none of which needs more than a quarter of the files that may be open."""
    size = OPEN_FILES.limit // 4
    if len(indices) <= size or num_files <= size:
        return [indices]
    return [indices[begin : begin + size] for begin in range(0, len(indices), size)]


RESET_IN_CHILD: weakref.WeakSet[Evicting] = weakref.WeakSet()


def _reset_after_fork() -> None:
    OPEN_FILES.reset()
    for owner in list(RESET_IN_CHILD):
        owner.reset()


os.register_at_fork(after_in_child=_reset_after_fork)

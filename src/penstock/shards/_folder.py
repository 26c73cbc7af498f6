"""A dataset folder, open for reading: shards are opened when a sample of them is first wanted.

The table of addresses is shared by all threads and only ever gains shards. To close one, a new table
without it takes the place of the old; readers that still use the old one keep it, and with it the
maps it points into, alive. So no read takes a lock, and no map goes away under a read.

After a fork the child starts with nothing open: maps would survive, locks held by other threads of
the parent would not be released.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.filesystem import MappedFile
from penstock.schema import Column, Ragged, Schema
from penstock.shards._blocks import Checks
from penstock.shards._manifest import Manifest, read_manifest
from penstock.shards._open_files import OPEN_FILES
from penstock.shards._opening import Io, changed, open_file, resolve_io
from penstock.shards._places import Places, starts_of
from penstock.shards._positioned import read_fixed, read_ragged, read_spans, read_stream
from penstock.shards._provenance import read_provenance
from penstock.shards._shard import Shard
from penstock.shards._shard_row import fill_row
from penstock.shards._spans import Spans
from penstock.shards._table import (
    READY,
    STATE,
    Table,
    column_slots,
    gather_fixed,
    gather_lengths,
    gather_ragged,
    gather_spans,
    gather_stream,
)

Check = Literal["window", "open", "never"]

_folders: weakref.WeakSet[ShardFolder] = weakref.WeakSet()


class ShardFolder:
    """Random access to the samples of a dataset folder.

    Raises:
        DatasetChanged: another dataset is at this path than the one with `fingerprint`.
    """

    def __init__(self, path: Path, *, io: Io, check: Check, fingerprint: str | None = None) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self.fingerprint = self.manifest.fingerprint
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise changed(path, self.fingerprint, fingerprint)
        self.schema: Schema = self.manifest.schema
        self.io: Literal["map", "pread"] = resolve_io(io, path)
        self.check: Check = check
        self.places = Places([shard.num_samples for shard in self.manifest.shards])
        self.starts: NDArray[np.int64] = self.places.starts
        self.num_samples = self.places.num_samples
        self.value_starts = {column.name: self._value_starts(column) for column in self.schema.columns}
        self.slots = column_slots(self.schema)
        self._checks: dict[int, Checks] = {}
        self.reset()
        _folders.add(self)
        if check == "open":
            self._check_everything()

    def reset(self) -> None:
        """Close every shard; the next read opens what it needs."""
        self._lock = threading.Lock()
        self._shards: dict[int, Shard] = {}
        self.table = Table.empty(len(self.manifest.shards), len(self.schema))

    def read_fixed(self, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy samples of a fixed column into `out`, converting to its dtype."""
        read = gather_fixed if self.io == "map" else read_fixed
        read(self, column, indices, out)

    def read_ragged(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        """Samples of a ragged column, side by side."""
        read = gather_ragged if self.io == "map" else read_ragged
        parts = [read(self, column, indices[begin:end]) for begin, end in self._pieces(len(indices))]
        if len(parts) == 1:
            return parts[0]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([part.lengths for part in parts]))])
        return Ragged(np.concatenate([part.values for part in parts]), offsets, column.kind == "bytes")

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        """Copy parts of samples of a ragged column into the flat array `out`, converting to its dtype."""
        read = gather_spans if self.io == "map" else read_spans
        read(self, column, spans, out)

    def lengths_of(self, column: Column, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths of samples of a ragged column; indices count from the front."""
        if self.io == "map":
            return gather_lengths(self, column, indices)
        return np.array([self.sample_length(column, index) for index in indices.tolist()], np.int64)

    def read_stream(self, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy a row of consecutive elements from each of `firsts`, over the borders of samples and shards."""
        if self.io == "map":
            gather_stream(self, column, firsts, out)
        else:
            read_stream(self, column, self.value_starts[column.name], firsts, out)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return self.manifest.num_bytes

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What the manifest says beside the data."""
        return self.manifest.attributes

    def provenance(self) -> Mapping[str, Any]:
        """Where the samples came from.

        Raises:
            DatasetChanged: the dataset was overwritten since it was opened.
        """
        manifest = read_manifest(self.path)  # as it is now: the same samples may have been prepared from other files
        if manifest.fingerprint != self.fingerprint:
            raise changed(self.path, manifest.fingerprint, self.fingerprint)
        return read_provenance(self.path, manifest)

    def num_elements(self, column: Column) -> int:
        """Elements of a column in all samples."""
        return int(self.value_starts[column.name][-1])

    def value(self, column: Column, index: int) -> NDArray[Any]:
        """One sample of a column, read-only: a view of the map, or a private copy."""
        number, sample = self.places.place(index)
        shard = self.open_shard(number)
        shard.file.check_size()
        if self.check != "never":
            shard.check_samples(column, sample, sample + 1)
        if not column.is_ragged:
            return np.asarray(shard.values(column, sample, sample + 1)[0])
        begin, end = shard.offsets(column, sample, sample + 1).tolist()
        return shard.values(column, begin, end)

    def lengths(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of samples `begin` to `end` of a ragged column."""
        for number, _, _ in self.places.spans(begin, end):
            self.open_shard(number)  # counts are the manifest's until the files are seen: no memory by them before
        lengths = np.empty(end - begin, np.int64)
        for number, first, last in self.places.spans(begin, end):
            shard = self.open_shard(number)
            shard.file.check_size()
            if self.check != "never":
                shard.check_offsets(column, first, last)
            place = int(self.starts[number]) + first - begin
            lengths[place : place + last - first] = np.diff(shard.offsets(column, first, last))
        return lengths

    def announce(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are needed soon."""
        for number, first, last in self.places.spans(begin, end):
            shard = self.open_shard(number)
            shard.file.check_size()
            shard.announce_samples(column, first, last)

    def release(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are done with."""
        for number, first, last in self.places.spans(begin, end):
            self.open_shard(number).release_samples(column, first, last)

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check samples `begin` to `end` of a column now, so that no read has to."""
        if self.check == "never":
            return
        for number, first, last in self.places.spans(begin, end):
            shard = self.open_shard(number)
            shard.check_samples(column, first, last)
            self._note_checked(column, number, shard)

    def prepare(self, column: Column, index: int) -> None:
        """Open and check what one sample needs, or raise what is wrong with it."""
        number, sample = self.places.place(index)
        shard = self.open_shard(number)
        shard.file.check_size()
        if self.check != "never":
            shard.check_samples(column, sample, sample + 1)
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
        if self.check != "never":
            shard.check_values(column, begin, end)

    def sample_length(self, column: Column, index: int) -> int:
        """Elements of one ragged sample."""
        return int(self.lengths(column, index, index + 1)[0])

    def check_shard(self, shard: Shard, column: Column, begin: int, end: int) -> None:
        """Check the size of the file and, unless checking is off, samples `begin` to `end` of the shard."""
        shard.file.check_size()
        if self.check != "never":
            shard.check_samples(column, begin, end)

    def open_shard(self, number: int) -> Shard:
        """Shard `number`, opened when it is not.

        Raises:
            DatasetChanged: the dataset was overwritten since it was opened.
            FormatError: the shard is missing or is not what the manifest says.
        """
        shard = self._shards.get(number)
        if shard is None:
            OPEN_FILES.make_room()
            with self._lock:
                shard = self._shards.get(number)
                if shard is None:
                    shard = self._open(number)
                    self._shards[number] = shard
                    OPEN_FILES.opened(self, number)
                    self._enter_row(number, shard)
        return shard

    def close_shards(self, numbers: set[int]) -> None:
        """Forget these shards; their files close when the last reader is done with them."""
        with self._lock:
            rows = self.table.rows.copy()
            rows[list(numbers)] = 0
            held = {number: shard for number, shard in self.table.held.items() if number not in numbers}
            self._shards = {number: shard for number, shard in self._shards.items() if number not in numbers}
            self.table = Table(rows, held)

    def _open(self, number: int) -> Shard:
        entry = self.manifest.shards[number]
        file = open_file(self.path, entry.name, io=self.io, fingerprint=self.fingerprint)
        shard = Shard(file, entry, self.schema)
        checks = shard.blocks.checks
        known = self._checks.setdefault(number, checks)
        if known.identity == checks.identity:
            shard.blocks.checks = known
        else:
            self._checks[number] = checks
        return shard

    def _enter_row(self, number: int, shard: Shard) -> None:
        """Let readers find the shard in the table."""
        if isinstance(shard.file, MappedFile):
            fill_row(self.table, number, shard, self.slots, is_trusted=self.check == "never")

    def _note_checked(self, column: Column, number: int, shard: Shard) -> None:
        """Let readers know when the last window of a column was checked, and look ahead into the next shard."""
        if self.io == "map" and shard.is_checked(column):
            with self._lock:
                if self._shards.get(number) is shard:
                    self.table.rows[number, self.slots[column.name] + STATE] = READY
        self._go_on(number, shard.blocks.take_through())

    def _go_on(self, number: int, through: dict[str, int]) -> None:
        """Look ahead from the end of a shard into the next one."""
        if through and number + 1 < len(self.manifest.shards):
            with contextlib.suppress(PenstockError, OSError):  # whoever reads there will be told
                shard = self.open_shard(number + 1)
                for name, length in through.items():
                    shard.blocks.look_ahead(shard.layout.tensors[name], 0, length)

    def _check_everything(self) -> None:
        for column in self.schema.columns:
            self.check_samples(column, 0, self.num_samples)

    def _value_starts(self, column: Column) -> NDArray[np.int64]:
        if not column.is_ragged:
            return self.starts
        return starts_of([shard.num_values[column.name] for shard in self.manifest.shards])

    def _pieces(self, num_indices: int) -> list[tuple[int, int]]:
        """Cut a read so that no piece can need more than a quarter of the shards that may be open."""
        size = OPEN_FILES.limit // 4
        if num_indices <= size or len(self.manifest.shards) <= size:
            return [(0, num_indices)]
        return [(begin, min(begin + size, num_indices)) for begin in range(0, num_indices, size)]


def _reset_after_fork() -> None:
    OPEN_FILES.reset()
    for folder in list(_folders):
        folder.reset()


os.register_at_fork(after_in_child=_reset_after_fork)

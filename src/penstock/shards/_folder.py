"""A dataset folder, open for reading: shards are opened when a sample of them is first wanted.

The table of addresses is shared by all threads and only ever gains shards. To close one, a new table
without it takes the place of the old; readers that still use the old one keep it, and with it the
maps it points into, alive. So no read takes a lock, and no map goes away under a read.

After a fork the child starts with nothing open: maps would survive, locks held by other threads of
the parent would not be released.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DatasetChanged, FormatError
from penstock.filesystem import FileReader, MappedFile, PositionedFile, is_network_filesystem
from penstock.schema import Column, Ragged, Schema
from penstock.shards._layout import offsets_name, values_name
from penstock.shards._manifest import Manifest, read_manifest
from penstock.shards._open_files import OPEN_FILES
from penstock.shards._positioned import read_fixed, read_ragged
from penstock.shards._shard import Checks, Shard
from penstock.shards._table import (
    COUNT,
    FILE,
    OFFSETS,
    OPEN,
    READY,
    SIZE,
    STATE,
    VALUES,
    Table,
    column_slots,
    gather_fixed,
    gather_ragged,
)

Io = Literal["auto", "map", "pread"]
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
            raise self._changed(self.fingerprint, fingerprint)
        self.schema: Schema = self.manifest.schema
        self.io: Literal["map", "pread"] = _resolve(io, path)
        self.check: Check = check
        counts = [shard.num_samples for shard in self.manifest.shards]
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_samples = int(self.starts[-1])
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
        for begin, end in self._pieces(len(indices)):
            read(self, column, indices[begin:end], out[begin:end])

    def read_ragged(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        """Samples of a ragged column, side by side."""
        read = gather_ragged if self.io == "map" else read_ragged
        parts = [read(self, column, indices[begin:end]) for begin, end in self._pieces(len(indices))]
        if len(parts) == 1:
            return parts[0]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([part.lengths for part in parts]))])
        return Ragged(np.concatenate([part.values for part in parts]), offsets, column.kind == "bytes")

    def value(self, column: Column, index: int) -> NDArray[Any]:
        """One sample of a column, read-only: a view of the map, or a private copy."""
        shard, sample = self._shard_of(index)
        self.check_shard(shard, column, np.array([sample]))
        shard.file.check_size()
        if not column.is_ragged:
            return np.asarray(shard.values(column, sample, sample + 1)[0])
        begin, end = shard.offsets(column, sample, sample + 1).tolist()
        return shard.values(column, begin, end)

    def lengths(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of samples `begin` to `end` of a ragged column."""
        lengths = np.empty(end - begin, np.int64)
        for number, first, last in self._spans(begin, end):
            shard = self.open_shard(number)
            shard.file.check_size()
            if self.check != "never":
                shard.check_offsets(column, first, last)
            place = int(self.starts[number]) + first - begin
            lengths[place : place + last - first] = np.diff(shard.offsets(column, first, last))
        return lengths

    def announce(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are needed soon."""
        for number, first, last in self._spans(begin, end):
            self.open_shard(number).announce_samples(column, first, last)

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check samples `begin` to `end` of a column now, so that no read has to."""
        if self.check == "never":
            return
        for number, first, last in self._spans(begin, end):
            shard = self.open_shard(number)
            shard.check_range(column, first, last)
            self._mark(number, shard)

    def prepare(self, column: Column, indices: NDArray[np.int64]) -> Table:
        """Open and check what these samples need; the table returned has all of it."""
        shard_of, samples = self.locate(indices)
        numbers = np.unique(shard_of).tolist()
        shards = {number: self.open_shard(number) for number in numbers}
        for number, shard in shards.items():
            shard.file.check_size()
            self.check_shard(shard, column, samples[shard_of == number])
            self._mark(number, shard)
        return self.table

    def diagnose(self, column: Column, index: int) -> None:
        """Raise what is wrong with the file or the offsets of this sample, if anything is."""
        shard, sample = self._shard_of(index)
        shard.file.check_size()
        if column.is_ragged:
            shard.offsets(column, sample, sample + 1)

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(shard, sample within the shard) of each index; negative ones count from the end."""
        indices = np.where(indices < 0, indices + self.num_samples, indices)
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.num_samples):
            wrong = indices[(indices < 0) | (indices >= self.num_samples)][0]
            raise IndexError(f"Index {wrong} is out of range for {self.num_samples:,} samples.")
        shard_of = np.searchsorted(self.starts, indices, side="right") - 1
        return shard_of, indices - self.starts[shard_of]

    def check_shard(self, shard: Shard, column: Column, samples: NDArray[np.int64]) -> None:
        """Check samples of one shard, unless checking is off."""
        if self.check != "never":
            shard.check_samples(column, samples)

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
                    self._fill_row(number, shard)
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
        file: FileReader
        try:
            file = (MappedFile if self.io == "map" else PositionedFile)(self.path / entry.name)
        except FileNotFoundError:
            raise self._missing(entry.name) from None
        shard = Shard(file, entry, self.schema)
        known = self._checks.setdefault(number, shard.checks)
        if known.identity == shard.checks.identity:
            shard.checks = known
        else:
            self._checks[number] = shard.checks
        return shard

    def _fill_row(self, number: int, shard: Shard) -> None:
        if not isinstance(shard.file, MappedFile):
            return
        row = self.table.rows[number]
        row[FILE], row[SIZE] = shard.file.descriptor, shard.file.size
        data = shard.file.address + shard.entry.header_bytes
        for column in self.schema.columns:
            slot = self.slots[column.name]
            row[slot + VALUES] = data + shard.layout.tensors[values_name(column)].begin
            if column.is_ragged:
                row[slot + OFFSETS] = data + shard.layout.tensors[offsets_name(column)].begin
                row[slot + COUNT] = shard.entry.num_values[column.name]
        self.table.held[number] = shard
        for column in self.schema.columns:  # last: a reader acts on the state alone
            is_ready = self.check == "never" or shard.is_checked(column)
            row[self.slots[column.name] + STATE] = READY if is_ready else OPEN

    def _mark(self, number: int, shard: Shard) -> None:
        with self._lock:
            if self._shards.get(number) is shard and isinstance(shard.file, MappedFile):
                self._fill_row(number, shard)

    def _check_everything(self) -> None:
        for column in self.schema.columns:
            self.check_samples(column, 0, self.num_samples)

    def _shard_of(self, index: int) -> tuple[Shard, int]:
        shard_of, samples = self.locate(np.array([index]))
        return self.open_shard(int(shard_of[0])), int(samples[0])

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first sample, last sample) of each shard that holds samples `begin` to `end`."""
        number = int(np.searchsorted(self.starts, begin, side="right")) - 1
        while begin < end:
            start, stop = self.starts[number : number + 2].tolist()
            if stop > begin:
                yield number, begin - start, min(end, stop) - start
                begin = min(end, stop)
            number += 1

    def _pieces(self, num_indices: int) -> list[tuple[int, int]]:
        """Cut a read so that no piece can need more than a quarter of the shards that may be open."""
        size = OPEN_FILES.limit // 4
        if num_indices <= size or len(self.manifest.shards) <= size:
            return [(0, num_indices)]
        return [(begin, min(begin + size, num_indices)) for begin in range(0, num_indices, size)]

    def _missing(self, name: str) -> Exception:
        try:
            now = read_manifest(self.path).fingerprint
        except FileNotFoundError:
            now = "none"
        if now != self.fingerprint:
            return self._changed(now, self.fingerprint)
        return FormatError(f"{self.path / name}: the shard is missing. Restore it, or prepare the dataset again.")

    def _changed(self, found: str, expected: str) -> DatasetChanged:
        return DatasetChanged(
            f"{self.path}: the dataset has the fingerprint {found}, not {expected}: "
            "it was written again since it was opened. Open it anew."
        )


def _resolve(io: Io, path: Path) -> Literal["map", "pread"]:
    if io not in ("auto", "map", "pread"):
        raise ValueError(f"io={io!r}; the choices are 'auto', 'map' and 'pread'.")
    if io == "auto":
        return "pread" if is_network_filesystem(path) else "map"
    return io


def _reset_after_fork() -> None:
    OPEN_FILES.reset()
    for folder in list(_folders):
        folder.reset()


os.register_at_fork(after_in_child=_reset_after_fork)

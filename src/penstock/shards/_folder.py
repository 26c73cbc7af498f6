"""A dataset folder, open for reading: where each sample is, and what must be checked before it is read.

Reads are vectorised: from maps by compiled loops (`_table`), else by positioned reads (`_positioned`).
Both ask here for a shard (`_open_shards`), and for the checks that the first use of its blocks needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Ragged, Schema
from penstock.shards._manifest import Manifest, read_manifest
from penstock.shards._open_files import OPEN_FILES
from penstock.shards._open_shards import OpenShards
from penstock.shards._opening import Io, changed, resolve_io
from penstock.shards._places import Places, starts_of
from penstock.shards._positioned import read_fixed, read_ragged, read_spans, read_stream
from penstock.shards._provenance import read_provenance
from penstock.shards._shard import Shard
from penstock.shards._spans import Spans
from penstock.shards._table import Table, gather_fixed, gather_lengths, gather_ragged, gather_spans, gather_stream

Check = Literal["window", "open", "never"]


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
        self.shards = OpenShards(path, self.manifest, io=self.io, is_trusted=check == "never")
        self.slots = self.shards.slots
        if check == "open":
            self._check_everything()

    @property
    def table(self) -> Table:
        """Where the columns of all open shards are in memory."""
        return self.shards.table

    def open_shard(self, number: int) -> Shard:
        """Shard `number`, opened when it is not."""
        return self.shards.open_shard(number)

    def read_fixed(self, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy samples of a fixed column into `out`, converting to its dtype."""
        read = gather_fixed if self.io == "map" else read_fixed
        read(self, column, indices, out)

    def read_ragged(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        """Samples of a ragged column, side by side."""
        read = gather_ragged if self.io == "map" else read_ragged
        parts = [read(self, column, indices[begin:end]) for begin, end in self._pieces(len(indices))]
        return parts[0] if len(parts) == 1 else Ragged.concatenate(parts)

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
        self.check_shard(shard, column, sample, sample + 1)
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
            shard = self.open_shard(number)
            shard.file.check_size()
            shard.release_samples(column, first, last)

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check samples `begin` to `end` of a column now, so that no read has to."""
        if self.check == "never":
            return
        for number, first, last in self.places.spans(begin, end):
            shard = self.open_shard(number)
            self.check_shard(shard, column, first, last)
            self.shards.note_checked(column, number, shard)

    def prepare(self, column: Column, index: int) -> None:
        """Open and check what one sample needs, or raise what is wrong with it."""
        number, sample = self.places.place(index)
        shard = self.open_shard(number)
        self.check_shard(shard, column, sample, sample + 1)
        if self.check != "never":
            self.shards.note_checked(column, number, shard)
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
            self.shards.note_checked(column, number, shard)
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

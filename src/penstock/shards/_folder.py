"""A dataset folder, open for reading.

read_* -> gather_* (maps, kernels) or _pread_* -> OpenShards opens and checks what they need

`pread` is for file systems on which mapped pages may vanish; neighbouring samples are fetched by one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Ragged, Schema
from penstock.shards._gather import gather_fixed, gather_lengths, gather_ragged, gather_spans, gather_stream
from penstock.shards._manifest import Manifest, ShardEntry, read_manifest
from penstock.shards._open_shards import OpenShards, Supply, pieces
from penstock.shards._provenance import read_provenance
from penstock.shards._shard import Io, Shard, changed, resolve_io
from penstock.shards._storage import Spans, check_span, nest, ranges

Check = Literal["window", "open", "never"]


class ShardFolder:
    """Random access to the samples of a dataset folder.

    Raises:
        DatasetChanged: the dataset at this path does not have this `fingerprint`.
    """

    def __init__(
        self,
        path: Path,
        *,
        io: Io,
        check: Check,
        fingerprint: str | None = None,
        as_of: str | None = None,
        supply: Supply | None = None,
    ) -> None:
        self.path, self._as_of, self.supply = path, as_of, supply
        """`as_of` is the fingerprint of the first few shards; the folder is read as if it had only those."""
        self.manifest: Manifest = self._read_manifest()
        self.fingerprint = self.manifest.fingerprint
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise changed(path, self.fingerprint, fingerprint)
        self.schema: Schema = self.manifest.schema
        self.io: Literal["map", "pread"] = resolve_io(io, path)
        self.check: Check = check
        self.shards = OpenShards(path, self.manifest, io=self.io, is_trusted=check == "never", supply=supply)
        self.starts = self.shards.starts
        self.num_samples = self.shards.num_samples
        if check == "open":
            for column in self.schema.columns:
                self.check_samples(column, 0, self.num_samples)

    def read_fixed(self, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        read = gather_fixed if self.io == "map" else _pread_fixed
        read(self.shards, column, indices, out)

    def read_ragged(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        held = [] if self.supply is None else self.shards.open_all(indices)
        found = nest(column, (self._read_stored(part, indices) for part in column.stored), self.path)
        del held
        return found

    def _read_stored(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        read = gather_ragged if self.io == "map" else _pread_ragged
        parts = [read(self.shards, column, each) for each in pieces(indices, len(self.manifest.shards))]
        return parts[0] if len(parts) == 1 else Ragged.concatenate(parts)

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        read = gather_spans if self.io == "map" else _pread_spans
        read(self.shards, column, spans, out)

    def lengths_of(self, column: Column, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        column = column.stored[-1]
        if self.io == "map":
            return gather_lengths(self.shards, column, indices)
        return np.array([self.shards.sample_length(column, index) for index in indices.tolist()], np.int64)

    def read_stream(self, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        if self.io == "map":
            gather_stream(self.shards, column, firsts, out)
        else:
            _pread_stream(self.shards, column, firsts, out)

    @property
    def files(self) -> Sequence[ShardEntry]:
        """Its files, as a layer of shards numbers them."""
        return self.manifest.shards

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes

    @property
    def attributes(self) -> Mapping[str, Any]:
        return self.manifest.attributes

    def provenance(self) -> Mapping[str, Any]:
        """Where the samples came from.

        Raises:
            DatasetChanged: the dataset was overwritten since it was opened.
        """
        manifest = self._read_manifest()  # read again: the same samples may have been prepared from other files
        if manifest.fingerprint != self.fingerprint:
            raise changed(self.path, manifest.fingerprint, self.fingerprint)
        if self.supply is not None and manifest.provenance is not None:
            self.supply.obtain(manifest.provenance.name)
        return read_provenance(self.path, manifest)

    def _read_manifest(self) -> Manifest:
        manifest = read_manifest(self.path)
        if self._as_of is None:
            return manifest
        num_shards = next((count for each, count in manifest.as_it_grew() if each == self._as_of), None)
        if num_shards is None:
            raise changed(self.path, manifest.fingerprint, self._as_of)
        return manifest.first_shards(num_shards)

    def num_elements(self, column: Column) -> int:
        return int(self.shards.value_starts[column.name][-1])

    def value(self, column: Column, index: int) -> Any:
        if column.kind == "byte_strings":
            return self.read_ragged(column, np.array([index])).values
        number, sample = self.shards.find(index)
        shard = self.shards.open_shard(number)
        self.shards.check_shard(shard, column, sample, sample + 1)
        if not column.is_ragged:
            return np.asarray(shard.values(column, sample, sample + 1)[0])
        begin, end = shard.offsets(column, sample, sample + 1).tolist()
        return shard.values(column, begin, end)

    def lengths(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        return self.shards.lengths(column.stored[-1], begin, end)

    def will_need(self, column: Column, begin: int, end: int) -> None:
        for number, first, last in self._at_hand(begin, end):
            shard = self.shards.open_shard(number)
            shard.file.check_size()
            for part in column.stored:
                shard.will_need(part, first, last)

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        for number, first, last in self._at_hand(begin, end):
            shard = self.shards.open_shard(number)
            shard.file.check_size()
            for part in column.stored:
                shard.dont_need(part, first, last)

    def _at_hand(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        return (each for each in ranges(self.starts, begin, end) if self.shards.is_at_hand(each[0]))

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        for part in column.stored:
            self.shards.check_samples(part, begin, end)


def _pread_fixed(shards: OpenShards, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
    for shard, places, samples in _by_shard(shards, indices):
        for begin, end in _runs(samples):
            first, last = int(samples[begin]), int(samples[end - 1]) + 1
            shards.check_shard(shard, column, first, last)
            out[places[begin:end]] = shard.values(column, first, last)


def _pread_ragged(shards: OpenShards, column: Column, indices: NDArray[np.int64]) -> Ragged:
    parts: list[NDArray[Any]] = [np.empty(0)] * len(indices)
    for shard, places, samples in _by_shard(shards, indices):
        for begin, end in _runs(samples):
            first, last = int(samples[begin]), int(samples[end - 1]) + 1
            shards.check_shard(shard, column, first, last)
            edges = shard.offsets(column, first, last)
            values = shard.values(column, int(edges[0]), int(edges[-1]))
            pieces = np.split(values, edges[1:-1] - edges[0])
            for place, piece in zip(places[begin:end].tolist(), pieces, strict=True):
                parts[place] = piece
    values = np.concatenate(parts) if parts else np.empty((0, *column.shape), column.dtype)
    return Ragged.from_lengths(values, [len(part) for part in parts], column.kind == "bytes")


def _pread_spans(shards: OpenShards, column: Column, spans: Spans, out: NDArray[Any]) -> None:
    shard_of, samples = shards.locate(spans.indices)
    for place in np.lexsort((samples, shard_of)).tolist():
        shard, sample = shards.open_shard(int(shard_of[place])), int(samples[place])
        first, size, target = (int(part[place]) for part in (spans.firsts, spans.sizes, spans.targets))
        shards.check_shard(shard, column, sample, sample + 1, (first, first + size))
        begin, end = shard.offsets(column, sample, sample + 1).tolist()
        check_span(first, size, end - begin)
        out[target : target + size] = shard.values(column, begin + first, begin + first + size)


def _pread_stream(shards: OpenShards, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
    value_starts = shards.value_starts[column.name]
    for row, first in enumerate(firsts.tolist()):
        done, length = 0, out.shape[1]
        while done < length:
            number = int(np.searchsorted(value_starts, first + done, side="right")) - 1
            begin = first + done - int(value_starts[number])
            size = min(length - done, int(value_starts[number + 1]) - first - done)
            shard = shards.open_shard(number)
            shards.check_elements(shard, column, begin, begin + size)
            out[row, done : done + size] = shard.values(column, begin, begin + size)
            done += size


def _by_shard(
    shards: OpenShards, indices: NDArray[np.int64]
) -> Iterator[tuple[Shard, NDArray[np.int64], NDArray[np.int64]]]:
    """(shard, places in the result, samples in the shard) of each shard, in file order."""
    shard_of, samples = shards.locate(indices)
    order = np.lexsort((samples, shard_of))
    edges = np.flatnonzero(np.diff(shard_of[order])) + 1
    for places in np.split(order, edges) if len(order) else []:
        shard = shards.open_shard(int(shard_of[places[0]]))
        yield shard, places, samples[places]


def _runs(samples: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(begin, end) of each run of consecutive samples in a sorted array."""
    edges = [0, *(np.flatnonzero(np.diff(samples) != 1) + 1).tolist(), len(samples)]
    return itertools.pairwise(edges)

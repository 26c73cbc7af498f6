"""A dataset folder, open for reading.

read_* -> gather_* (maps, kernels) or _pread_* -> OpenShards opens and checks what they need

`pread` is for file systems on which mapped pages may vanish; neighbouring samples are fetched by one call.

Check every byte of a dataset against its checksums, and collect all faults.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DatasetChanged, FormatError, IncompleteDataset, PenstockError, StorageError, counted
from penstock.filesystem import PositionedFile, local_path
from penstock.schema import Column, Ragged, Schema
from penstock.shards._blocks import WINDOW_BYTES
from penstock.shards._gather import gather_fixed, gather_lengths, gather_ragged, gather_spans, gather_stream
from penstock.shards._layout import CHECKSUMS, num_blocks
from penstock.shards._manifest import FileEntry, Manifest, ShardEntry, read_manifest
from penstock.shards._open_shards import OpenShards, Supply, pieces
from penstock.shards._provenance import read_provenance, verify_provenance
from penstock.shards._shard import Io, Shard, changed, resolve_io
from penstock.shards._storage import Spans, check_span, nest

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
        """Copy samples of a fixed column into `out`, converting to its dtype."""
        read = gather_fixed if self.io == "map" else _pread_fixed
        read(self.shards, column, indices, out)

    def read_ragged(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        """Samples of a ragged column, side by side."""
        if self.supply is not None:
            self.shards.open_all(indices)
        return nest(column, (self._read_stored(part, indices) for part in column.stored), self.path)

    def _read_stored(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        read = gather_ragged if self.io == "map" else _pread_ragged
        parts = [read(self.shards, column, each) for each in pieces(indices, len(self.manifest.shards))]
        return parts[0] if len(parts) == 1 else Ragged.concatenate(parts)

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        """Copy parts of samples of a ragged column into the flat array `out`, converting to its dtype."""
        read = gather_spans if self.io == "map" else _pread_spans
        read(self.shards, column, spans, out)

    def lengths_of(self, column: Column, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths of samples of a ragged column; indices must not be negative."""
        column = column.stored[-1]
        if self.io == "map":
            return gather_lengths(self.shards, column, indices)
        return np.array([self.shards.sample_length(column, index) for index in indices.tolist()], np.int64)

    def read_stream(self, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy a row of consecutive elements from each of `firsts`, across samples and shards."""
        if self.io == "map":
            gather_stream(self.shards, column, firsts, out)
        else:
            _pread_stream(self.shards, column, firsts, out)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return self.manifest.num_bytes

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The manifest's attributes."""
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
        """Elements of a column in all samples."""
        return int(self.shards.value_starts[column.name][-1])

    def value(self, column: Column, index: int) -> Any:
        """One sample of a column, read-only: a view of the map, or a private copy."""
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
        """Lengths of samples `begin` to `end` of a ragged column."""
        return self.shards.lengths(column.stored[-1], begin, end)

    def will_need(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are needed soon."""
        for number, first, last in self._at_hand(begin, end):
            shard = self.shards.open_shard(number)
            shard.file.check_size()
            for part in column.stored:
                shard.will_need(part, first, last)

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are no longer needed."""
        for number, first, last in self._at_hand(begin, end):
            shard = self.shards.open_shard(number)
            shard.file.check_size()
            for part in column.stored:
                shard.dont_need(part, first, last)

    def _at_hand(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        return (each for each in self.shards.ranges(begin, end) if self.shards.is_at_hand(each[0]))

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check samples `begin` to `end` of a column now, so that no read has to."""
        for part in column.stored:
            self.shards.check_samples(part, begin, end)


def _pread_fixed(shards: OpenShards, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy samples of a fixed column into `out`, converting to its dtype."""
    for shard, places, samples in _by_shard(shards, indices):
        for begin, end in _runs(samples):
            first, last = int(samples[begin]), int(samples[end - 1]) + 1
            shards.check_shard(shard, column, first, last)
            out[places[begin:end]] = shard.values(column, first, last)


def _pread_ragged(shards: OpenShards, column: Column, indices: NDArray[np.int64]) -> Ragged:
    """Samples of a ragged column, side by side."""
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
    """Copy parts of samples of a ragged column into the flat array `out`."""
    shard_of, samples = shards.locate(spans.indices)
    for place in np.lexsort((samples, shard_of)).tolist():
        shard, sample = shards.open_shard(int(shard_of[place])), int(samples[place])
        shards.check_shard(shard, column, sample, sample + 1)
        begin, end = shard.offsets(column, sample, sample + 1).tolist()
        first, size, target = (int(part[place]) for part in (spans.firsts, spans.sizes, spans.targets))
        check_span(first, size, end - begin)
        out[target : target + size] = shard.values(column, begin + first, begin + first + size)


def _pread_stream(shards: OpenShards, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy a row of consecutive elements from each of `firsts`, across samples and shards."""
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


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read, and every fault found in it."""

    path: Path | str
    """The folder, or the URL."""
    num_shards: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    faults: tuple[str, ...] = field(default=())

    @property
    def is_sound(self) -> bool:
        """Whether nothing was wrong."""
        return not self.faults

    def __str__(self) -> str:
        if self.faults:
            return "\n".join([*self.faults, f"{self.path}: {counted(len(self.faults), 'fault')}."])
        read = f"{counted(self.num_samples, 'sample')} in {counted(self.num_shards, 'shard')}"
        return f"{self.path}: sound. {read}, {counted(self.num_bytes, 'byte')}."

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "path": str(self.path),
            "is_sound": self.is_sound,
            "shards": self.num_shards,
            "samples": self.num_samples,
            "bytes": self.num_bytes,
            "faults": list(self.faults),
        }


def verify_folder(
    path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Read every byte of the dataset at `path`; `on_progress` is called with (bytes done, bytes in all).

    Raises:
        DatasetChanged: a writer replaced the dataset meanwhile, so missing files may not be faults.
        IncompleteDataset: there is no dataset.
        StorageError: the manifest cannot be read.
    """
    folder = local_path(path, "a dataset")
    try:
        manifest = read_manifest(folder)
    except FormatError as error:
        return Verification(folder, faults=(str(error),))
    faults: list[str] = []
    if manifest.provenance is not None:
        faults += find_faults(folder, manifest.provenance, manifest.schema)
    done = 0
    for entry in manifest.shards:
        faults += find_faults(folder, entry, manifest.schema)
        done += entry.num_bytes
        if on_progress is not None:
            on_progress(done, manifest.num_bytes)
    if faults:
        _check_unchanged(folder, manifest)
    return Verification(folder, len(manifest.shards), manifest.num_samples, manifest.num_bytes, tuple(faults))


def _check_unchanged(folder: Path, manifest: Manifest) -> None:
    try:
        is_same = read_manifest(folder).file_names == manifest.file_names
    except IncompleteDataset:
        is_same = False
    except (FormatError, StorageError):  # not replaced but damaged, so report the faults
        return
    if not is_same:
        raise DatasetChanged(
            f"{folder}: the dataset was rewritten while it was being verified, so the result means nothing. "
            "Verify it again when its writer is done."
        )


def find_faults(folder: Path, entry: ShardEntry | FileEntry, schema: Schema) -> list[str]:
    """Read every byte of one file of a dataset; say what is wrong with it, each fault once."""
    if isinstance(entry, ShardEntry):
        return list(dict.fromkeys(_verify_shard(folder, entry, schema)))
    try:
        verify_provenance(folder, entry)
    except (PenstockError, OSError) as error:
        return [str(error)]
    return []


def _verify_shard(path: Path, entry: ShardEntry, schema: Schema) -> Iterator[str]:
    try:
        # Read, not mapped: a page that the disk cannot deliver is then a fault to list, not a signal.
        shard = Shard(PositionedFile(path / entry.name), entry, schema)
    except FileNotFoundError:
        yield f"{path / entry.name}: the shard is missing."
        return
    except (PenstockError, OSError) as error:
        yield str(error)
        return
    yield from _verify_blocks(shard)
    yield from _verify_offsets(shard)


def _verify_blocks(shard: Shard) -> Iterator[str]:
    for tensor in shard.layout.tensors.values():
        if tensor.name == CHECKSUMS:
            continue
        for block in range(num_blocks(tensor.num_bytes)):
            try:
                shard.blocks.check_block(tensor, block)
            except (PenstockError, OSError) as error:
                yield str(error)


def _verify_offsets(shard: Shard) -> Iterator[str]:
    step = WINDOW_BYTES // 8
    for column in shard.layout.schema.columns:
        for begin in range(0, shard.entry.num_samples if column.is_ragged else 0, step):
            try:
                _check_together(shard, column, begin, min(begin + step, shard.entry.num_samples))
            except (PenstockError, OSError) as error:
                yield str(error)


def _check_together(shard: Shard, column: Column, begin: int, end: int) -> None:
    """Raise if offsets decrease or leave their values, or if byte strings are not as long as their sizes say."""
    offsets = [shard.offsets(part, begin, end) for part in column.stored]
    if len(offsets) > 1:
        own, edges = offsets
        sizes = shard.values(column.stored[1], int(edges[0]), int(edges[-1]))
        strings = Ragged(np.broadcast_to(np.uint8(0), (int(own[-1] - own[0]),)), own - own[0], is_bytes=True)
        nest(column, (strings, Ragged(sizes, edges - edges[0])), shard.file.path)

"""What is wrong with the files of a dataset: every fault of a folder, or the damaged bytes of one copy of a file.

    verify_folder      every byte of a folder against its checksums, all faults in words
    DatasetContents    which files a manifest names, and which bytes of a copy are wrong: how a cache knows what arrived

Files are read, not mapped: a page that the disk cannot deliver is then a fault to list, not a signal.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DatasetChanged, FormatError, IncompleteDataset, PenstockError, StorageError, counted
from penstock.filesystem import PositionedFile, local_path
from penstock.schema import Column, Ragged, Schema
from penstock.shards._blocks import WINDOW_BYTES
from penstock.shards._layout import BLOCK_BYTES, CHECKSUMS, block_checksums, checksum, num_blocks
from penstock.shards._manifest import FileEntry, Manifest, ShardEntry, read_manifest
from penstock.shards._provenance import verify_provenance
from penstock.shards._shard import Shard
from penstock.shards._storage import nest

Span = tuple[int, int]


class DatasetContents:
    """The files of a dataset but the manifest: its shards in their order, then where they are from."""

    def __init__(self, manifest: Manifest) -> None:
        self._schema = manifest.schema
        self._entries = {shard.name: shard for shard in manifest.shards}
        self._provenance = manifest.provenance
        sizes = {name: shard.num_bytes for name, shard in self._entries.items()}
        if manifest.provenance is not None:
            sizes[manifest.provenance.name] = manifest.provenance.num_bytes
        self.sizes: Mapping[str, int] = sizes
        self.etags: Mapping[str, str] = {}

    def find_damage(self, path: Path, name: str) -> list[Span]:
        """The bytes of a file at `path` that are not those of file `name`."""
        file = PositionedFile(path)
        if name not in self._entries:
            assert self._provenance is not None
            is_right = checksum(file.read(0, file.size)) == self._provenance.checksum
            return [] if is_right else [(0, file.size)]
        try:
            shard = Shard(file, self._entries[name], self._schema)
        except PenstockError:
            return [(0, file.size)]
        return _joined(_damaged_blocks(shard))


def read_contents(folder: Path) -> DatasetContents:
    """What the manifest in `folder` names; the files need not be there."""
    return DatasetContents(read_manifest(folder))


def _damaged_blocks(shard: Shard) -> Iterator[Span]:
    start, table = shard.entry.header_bytes, shard.layout.tensors[CHECKSUMS]
    try:
        checksums = shard.blocks.checksums()
    except PenstockError:  # nothing can be told of the rest yet
        yield start + table.begin, start + table.end
        return
    for tensor in shard.layout.tensors.values():
        for begin in range(0, tensor.num_bytes if tensor is not table else 0, WINDOW_BYTES):
            data = shard.blocks.read(tensor, begin, min(begin + WINDOW_BYTES, tensor.num_bytes))
            first = tensor.first_block + begin // BLOCK_BYTES
            for number, found in enumerate(block_checksums(data).tolist()):
                if found != checksums[first + number]:
                    at = tensor.begin + begin + number * BLOCK_BYTES
                    yield start + at, start + min(at + BLOCK_BYTES, tensor.end)


def _joined(spans: Iterator[Span]) -> list[Span]:
    """Spans that touch each other, as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read, and every fault found in it."""

    path: Path | str
    """The folder, or the URL."""
    num_shards: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    faults: tuple[str, ...] = ()

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

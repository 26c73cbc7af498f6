"""Check every byte of a dataset against its checksums, and collect all faults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import DatasetChanged, FormatError, IncompleteDataset, PenstockError, StorageError, counted
from penstock.filesystem import PositionedFile, local_path
from penstock.schema import Schema
from penstock.shards._blocks import WINDOW_BYTES
from penstock.shards._checksums import num_blocks
from penstock.shards._layout import CHECKSUMS
from penstock.shards._manifest import Manifest, ShardEntry, read_manifest
from penstock.shards._provenance import verify_provenance
from penstock.shards._shard import Shard


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read, and every fault found in it."""

    path: Path
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


def verify(path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None) -> Verification:
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
        try:
            verify_provenance(folder, manifest.provenance)
        except (PenstockError, OSError) as error:
            faults.append(str(error))
    done = 0
    for entry in manifest.shards:
        faults.extend(dict.fromkeys(_verify_shard(folder, entry, manifest.schema)))  # each fault once
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
                shard.offsets(column, begin, min(begin + step, shard.entry.num_samples))
            except (PenstockError, OSError) as error:
                yield str(error)

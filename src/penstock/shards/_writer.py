"""Writing a dataset: samples in, shards out, all of it or nothing.

Memory is bounded by the buffer of one shard. Shards are cut by size alone, sample by sample, so the
same samples give the same files however they were handed in.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.schema import Ragged, Schema
from penstock.shards._buffers import ShardBuffer, batch_bytes, sample_bytes
from penstock.shards._checksums import block_checksums, checksum
from penstock.shards._convert import convert_batch, convert_sample
from penstock.shards._layout import CHECKSUMS, build_header, plan_layout
from penstock.shards._manifest import Manifest, ShardEntry
from penstock.shards._workspace import Mode, Workspace

DEFAULT_SHARD_BYTES = 256 << 20


class DatasetWriter:
    """Write samples into a folder of shards; the dataset appears when the block ends well.

    Leaving the block by an exception leaves what was there before.

    Args:
        path: Folder of the dataset; made when missing.
        columns: `{name: type}`, as in `{"tokens": "uint16[*]", "label": "int64", "jpeg": "bytes"}`.
        shard_bytes: A shard is closed before it grows past this. It is also the memory the writer takes.
        mode: "create" refuses an existing dataset, "append" adds to it, "overwrite" replaces it.
        attributes: JSON kept in the manifest: where the data comes from, its licence, its tokenizer.

    Raises:
        DatasetExists: `mode="create"` on a dataset, or the folder holds other files.
        WriterBusy: another writer is at work here.
        StorageError: the disk is full or failing; the previous dataset is intact.

    >>> import tempfile, penstock
    >>> folder = tempfile.mkdtemp()
    >>> with DatasetWriter(folder, {"tokens": "uint16[*]", "label": "int64"}) as writer:
    ...     writer.write({"tokens": [1, 2, 3], "label": 7})
    ...     writer.write_batch({"tokens": [[4], [5, 6]], "label": [8, 9]})
    >>> len(penstock.open(folder))
    3
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Mapping[str, str],
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        mode: Mode = "create",
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in ("create", "append", "overwrite"):
            raise ValueError(f"mode={mode!r}; the modes are 'create', 'append' and 'overwrite'.")
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes={shard_bytes}; a shard has at least one byte.")
        self.schema = Schema.parse(columns)
        self._attributes = _check_attributes(attributes)
        self._shard_bytes = shard_bytes
        self._buffer = ShardBuffer(self.schema, shard_bytes)
        self._workspace: Workspace | None = Workspace(Path(path).absolute(), mode)
        self._shards: list[ShardEntry] = []
        self._is_torn = False  # true once a write failed half way: columns may have got different samples
        if mode == "append":
            self._continue(self._workspace)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample: a value for every column.

        Raises:
            SchemaError: a column is missing, unknown, or the value does not fit it.
        """
        self._check_columns(sample)
        converted = {column.name: convert_sample(column, sample[column.name]) for column in self.schema.columns}
        added = sum(sample_bytes(column, converted[column.name]) for column in self.schema.columns)
        self._is_torn = True
        if self._buffer.num_samples and self._buffer.num_bytes + added > self._shard_bytes:
            self._finish_shard()
        self._buffer.append_sample(converted)
        self._is_torn = False

    def write_batch(self, columns: Mapping[str, Any]) -> None:
        """Add many samples: for every column an array, a `Ragged`, or a list with one value per sample.

        Raises:
            SchemaError: as `write`, or the columns differ in length.
        """
        self._check_columns(columns)
        batch = {column.name: convert_batch(column, columns[column.name]) for column in self.schema.columns}
        counts = {name: len(value) for name, value in batch.items()}
        num_samples = next(iter(counts.values()))
        if any(count != num_samples for count in counts.values()):
            raise SchemaError(f"Every column of a batch must have as many samples; these have {counts}.")
        self._is_torn = True
        self._append(batch, num_samples)
        self._is_torn = False

    def _append(self, batch: Mapping[str, Ragged | NDArray[Any]], num_samples: int) -> None:
        ends = np.cumsum(batch_bytes(self.schema, batch, num_samples))
        begin, used = 0, 0
        while begin < num_samples:
            room = self._shard_bytes - self._buffer.num_bytes
            end = int(np.searchsorted(ends, used + room, side="right"))
            if end <= begin and self._buffer.num_samples:
                self._finish_shard()
                continue
            end = max(end, begin + 1)  # one sample larger than a shard gets a shard of its own
            self._buffer.append_batch(batch, begin, end)
            begin, used = end, int(ends[end - 1])

    def close(self) -> None:
        """Make everything written so far the dataset. Called by the end of the `with` block."""
        if self._workspace is None:
            return
        try:
            self._check_usable()
            if self._buffer.num_samples:
                self._finish_shard()
            self._workspace.commit(Manifest(self.schema, tuple(self._shards), self._attributes))
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what was not committed; the previous dataset, if there was one, stays."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _continue(self, workspace: Workspace) -> None:
        previous = workspace.previous
        assert previous is not None
        if previous.schema != self.schema:
            self.abort()
            raise SchemaError(f"The dataset has the columns {previous.schema}; {self.schema} cannot be appended to it.")
        self._shards = list(previous.shards)
        self._attributes = {**previous.attributes, **self._attributes}

    def _check_usable(self) -> None:
        if self._workspace is None:
            raise ValueError("The writer is closed.")
        if not self._workspace.is_open:
            raise ValueError("A writer belongs to the process that made it; this one is a forked copy.")
        if self._is_torn:
            raise ValueError("An earlier write failed half way, so this writer cannot go on. Write the dataset again.")

    def _check_columns(self, given: Mapping[str, Any]) -> None:
        self._check_usable()
        if given.keys() != set(self.schema):
            missing = [name for name in self.schema if name not in given]
            unknown = [name for name in given if name not in self.schema]
            raise SchemaError(f"The columns are {self.schema}; missing here: {missing}, unknown: {unknown}.")

    def _finish_shard(self) -> None:
        assert self._workspace is not None
        buffer = self._buffer
        layout = plan_layout(self.schema, buffer.num_samples, buffer.num_values)
        tensors = dict(buffer.tensors())
        in_order = [name for name in layout.tensors if name != CHECKSUMS]
        table = np.concatenate([block_checksums(tensors[name]) for name in in_order]).astype("<u4").view(np.uint8)
        tensors[CHECKSUMS] = table
        header = build_header(layout, checksum(table))
        identity = hashlib.blake2b(header + table.tobytes(), digest_size=8).hexdigest()
        name = f"shard-{len(self._shards):06d}-{identity}.safetensors"
        chunks: list[memoryview | bytes] = [header, *(tensors[tensor].data for tensor in layout.tensors)]
        num_bytes = self._workspace.add_shard(name, chunks)
        entry = ShardEntry(name, buffer.num_samples, buffer.num_values, num_bytes, len(header), checksum(header))
        self._shards.append(entry)
        buffer.clear()


def _check_attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """A private copy, as it will come back from the manifest."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(attributes or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"attributes must be JSON, as the manifest is: {error}.") from None
    return copy

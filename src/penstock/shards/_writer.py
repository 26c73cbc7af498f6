"""Write a dataset: samples in, shards out, all or nothing.

Memory is bounded by the buffer of one shard. Shards are cut only by size, sample by sample, so the same samples give
the same files however they were handed in. The caller of a `ShardWriter` decides where files go: `store` gets the name
and the bytes. If the schema has sample hashes, they are computed here, so no caller has to know about them.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError, check_choice
from penstock.filesystem import local_path
from penstock.identity import digest
from penstock.schema import HASH_COLUMN, Column, Ragged, Schema
from penstock.shards._convert import convert_batch, convert_sample, hash_content, stored_columns
from penstock.shards._layout import (
    CHECKSUMS,
    block_checksums,
    build_header,
    checksum,
    offsets_name,
    plan_layout,
    values_name,
)
from penstock.shards._manifest import FileEntry, Manifest, ShardEntry, copy_attributes
from penstock.shards._workspace import Mode, Workspace

Store = Callable[[str, list[memoryview | bytes]], int]
"""Keeps a shard under a name and returns its size."""
_OFFSET_BYTES = 8


class ShardWriter:
    """Samples in, shards out. Memory is bounded by one shard.

    Args:
        schema: Columns of every sample.
        shard_bytes: A shard is closed before it grows past this.
        store: Called with the name and the bytes of each finished shard.
    """

    def __init__(self, schema: Schema, shard_bytes: int, store: Store) -> None:
        self.schema, self._stored = schema, schema.stored
        self.shards: list[ShardEntry] = []
        self._shard_bytes = shard_bytes
        self._store = store
        self._number = 0
        self._buffer = _ShardBuffer(self._stored, shard_bytes)

    def restart(self, store: Store, *, first_number: int) -> None:
        """Start over with new shards in the same memory: fresh pages would cost as much as the copy.

        Args:
            store: As for the constructor.
            first_number: Number in the name of the first shard.
        """
        self.shards = []
        self._store = store
        self._number = first_number
        self._buffer.clear()

    def append_sample(self, converted: Mapping[str, Any]) -> None:
        """Add one sample, converted by `convert_sample`."""
        if HASH_COLUMN in self.schema:
            hashed = hash_content(self.schema, {name: _alone(self.schema[name], converted[name]) for name in converted})
            converted = {**converted, HASH_COLUMN: hashed[0]}
        if self._stored is not self.schema:
            converted = _stored_sample(converted)
        added = sum(_sample_bytes(column, converted[column.name]) for column in self._stored.columns)
        if self._buffer.num_samples and self._buffer.num_bytes + added > self._shard_bytes:
            self._finish_shard()
        self._buffer.append_sample(converted)

    def append_batch(self, columns: Mapping[str, Any]) -> None:
        """Add many samples: an array, a `Ragged` or a list for every column of the schema.

        Raises:
            SchemaError: a value does not fit its column, or the columns differ in length.
        """
        self.append_converted(convert_columns(self.schema, columns))

    def append_converted(self, batch: Mapping[str, Ragged | NDArray[Any]]) -> None:
        """Add samples converted by `convert_columns`."""
        if HASH_COLUMN in self.schema:
            batch = {**batch, HASH_COLUMN: hash_content(self.schema, batch)}
        batch = stored_columns(batch)
        num_samples = len(next(iter(batch.values())))
        ends = np.cumsum(_batch_bytes(self._stored, batch, num_samples))
        begin, used = 0, 0
        while begin < num_samples:
            room = self._shard_bytes - self._buffer.num_bytes
            end = int(np.searchsorted(ends, used + room, side="right"))
            if end <= begin and self._buffer.num_samples:
                self._finish_shard()
                continue
            end = max(end, begin + 1)  # a sample larger than a shard gets its own shard
            self._buffer.append_batch(batch, begin, end)
            begin, used = end, int(ends[end - 1])

    def finish(self) -> tuple[ShardEntry, ...]:
        """Close the last shard and return the entries of all of them."""
        if self._buffer.num_samples:
            self._finish_shard()
        return tuple(self.shards)

    def _finish_shard(self) -> None:
        buffer = self._buffer
        layout = plan_layout(self.schema, buffer.num_samples, buffer.num_values)
        tensors = dict(buffer.tensors())
        in_order = [name for name in layout.tensors if name != CHECKSUMS]
        table = np.concatenate([block_checksums(tensors[name]) for name in in_order]).astype("<u4").view(np.uint8)
        tensors[CHECKSUMS] = table
        header = build_header(layout, checksum(table))
        name = f"shard-{self._number:06d}-{digest(header + table.tobytes(), 8)}.safetensors"
        chunks: list[memoryview | bytes] = [header, *(tensors[tensor].data for tensor in layout.tensors)]
        num_bytes = self._store(name, chunks)
        entry = ShardEntry(name, buffer.num_samples, buffer.num_values, num_bytes, len(header), checksum(header))
        self.shards.append(entry)
        self._number += 1
        buffer.clear()


def convert_columns(schema: Schema, columns: Mapping[str, Any]) -> dict[str, Ragged | NDArray[Any]]:
    """A batch as arrays of exactly the schema's dtypes and shapes.

    Raises:
        SchemaError: a column is missing or unknown, does not fit, or has a different number of samples.
    """
    schema = schema.shown
    check_names(schema, columns)
    batch = {column.name: convert_batch(column, columns[column.name]) for column in schema.columns}
    counts = {name: len(value) for name, value in batch.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(f"Every column of a batch must have the same number of samples; these have {counts}.")
    return batch


def check_names(schema: Schema, given: Iterable[str]) -> None:
    """Refuse values for anything but exactly the columns of the schema.

    Raises:
        SchemaError: columns are missing or unknown; the message names them.
    """
    names = set(given)
    if names != set(schema):
        missing = [name for name in schema if name not in names]
        unknown = [name for name in given if name not in schema]
        raise SchemaError(f"The columns are {schema}; missing here: {missing}, unknown: {unknown}.")


class _Growing:
    """An array to append to. Emptying it keeps its memory, so pages are faulted in only once."""

    def __init__(self, dtype: np.dtype[Any], item_shape: tuple[int, ...], limit: int) -> None:
        self._array = np.empty((0, *item_shape), dtype)
        self._limit = limit
        self.length = 0

    def append(self, items: NDArray[Any]) -> None:
        end = self.length + len(items)
        if end > len(self._array):
            # Double, but not past one shard: otherwise it could take the memory of two.
            grown = np.empty((max(end, min(2 * end, self._limit)), *self._array.shape[1:]), self._array.dtype)
            grown[: self.length] = self._array[: self.length]
            self._array = grown
        self._array[self.length : end] = items
        self.length = end

    def bytes(self) -> NDArray[np.uint8]:
        return self._array[: self.length].reshape(-1).view(np.uint8)


class _ShardBuffer:
    """The samples of the shard being filled, column by column, in arrays that grow once and are reused."""

    def __init__(self, schema: Schema, shard_bytes: int) -> None:
        self._schema = schema
        self._values = {
            column.name: _Growing(column.dtype, column.shape, shard_bytes // max(1, column.item_bytes))
            for column in schema.columns
        }
        limit = shard_bytes // _OFFSET_BYTES
        self._ends = {c.name: _Growing(np.dtype("<i8"), (), limit) for c in schema.columns if c.is_ragged}
        self.num_samples = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that the samples take in a shard, not counting header and checksums."""
        values = sum(self._values[c.name].length * c.item_bytes for c in self._schema.columns)
        return values + _OFFSET_BYTES * len(self._ends) * self.num_samples

    @property
    def num_values(self) -> dict[str, int]:
        """Elements in each ragged column."""
        return {name: self._values[name].length for name in self._ends}

    def append_sample(self, sample: Mapping[str, NDArray[Any]]) -> None:
        """Add one converted sample."""
        for column in self._schema.columns:
            value = sample[column.name]
            if column.is_ragged:
                self._values[column.name].append(value)
                self._ends[column.name].append(np.array([self._values[column.name].length]))
            else:
                self._values[column.name].append(value[None])
        self.num_samples += 1

    def append_batch(self, batch: Mapping[str, Ragged | NDArray[Any]], begin: int, end: int) -> None:
        """Add samples `begin` to `end` of a converted batch."""
        for name, value in batch.items():
            if isinstance(value, Ragged):
                offsets = value.offsets[begin : end + 1]
                ends = offsets[1:] - offsets[0] + self._values[name].length
                self._values[name].append(value.values[offsets[0] : offsets[-1]])
                self._ends[name].append(ends)
            else:
                self._values[name].append(value[begin:end])
        self.num_samples += end - begin

    def tensors(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Name and bytes of each tensor; offsets come with their leading zero."""
        for column in self._schema.columns:
            yield values_name(column), self._values[column.name].bytes()
            if column.is_ragged:
                ends = self._ends[column.name].bytes().view("<i8")
                yield offsets_name(column), np.concatenate([np.zeros(1, "<i8"), ends]).view(np.uint8)

    def clear(self) -> None:
        """Forget the samples, keep the memory."""
        for growing in [*self._values.values(), *self._ends.values()]:
            growing.length = 0
        self.num_samples = 0


def _alone(column: Column, value: Any) -> Ragged | NDArray[Any]:
    """One converted sample of a column as a batch of one."""
    batch: Ragged | NDArray[Any] = Ragged(value, np.array([0, len(value)])) if column.is_ragged else value[None]
    return batch


def _stored_sample(converted: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """One converted sample as shards hold it: see `Column.stored`."""
    stored: dict[str, NDArray[Any]] = {}
    for name, value in converted.items():
        if isinstance(value, Ragged):
            stored[name], stored[f"{name}.sizes"] = value.values, value.lengths
        else:
            stored[name] = value
    return stored


def _sample_bytes(column: Column, value: NDArray[Any]) -> int:
    """Bytes that one converted sample of a column takes in a shard."""
    return value.nbytes + (_OFFSET_BYTES if column.is_ragged else 0)


def _batch_bytes(schema: Schema, batch: Mapping[str, Ragged | NDArray[Any]], num_samples: int) -> NDArray[np.int64]:
    """Bytes that each sample of a converted batch takes in a shard."""
    total = np.zeros(num_samples, np.int64)
    for column in schema.columns:
        value = batch[column.name]
        if isinstance(value, Ragged):
            total += value.lengths * column.item_bytes + _OFFSET_BYTES
        else:
            total += column.item_bytes
    return total


DEFAULT_SHARD_BYTES = 256 << 20


class DatasetWriter:
    """Write samples into a folder of shards; the dataset appears when the block ends without an error.

    An exception leaves whatever was there before.

    Args:
        path: Folder of the dataset; created if missing.
        columns: `{name: type}`, as in `{"tokens": "uint16[*]", "label": "int64", "jpeg": "bytes"}`.
        shard_bytes: A shard is closed before it grows past this. It is also the memory the writer takes.
        mode: "create" refuses an existing dataset, "append" adds to it, "overwrite" replaces it.
        attributes: JSON kept in the manifest: where the data comes from, its licence, its tokenizer.

    Raises:
        DatasetExists: `mode="create"` on a dataset, or the folder holds other files.
        WriterBusy: another process is writing here.
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
        check_choice("mode", mode, get_args(Mode))
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes={shard_bytes}; a shard has at least one byte.")
        self.schema = Schema.parse(columns)
        """The columns that every sample must have."""
        self._stored = self.schema
        self._attributes = copy_attributes(attributes or {})
        self._workspace: Workspace | None = Workspace(local_path(path, "a dataset").absolute(), mode)
        if mode == "append":
            self._stored = self._schema_to_continue(self._workspace)
        self._writer = ShardWriter(self._stored, shard_bytes, self._workspace.add_file)
        self._previous: tuple[ShardEntry, ...] = ()
        self._provenance: FileEntry | None = None
        self._is_torn = False  # a write failed halfway, so columns may hold different samples
        if mode == "append":
            self._continue(self._workspace)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample: a value for every column.

        Raises:
            SchemaError: a column is missing, unknown, or the value does not fit it.
        """
        self._check_usable()
        check_names(self.schema, sample)
        converted = {column.name: convert_sample(column, sample[column.name]) for column in self.schema.columns}
        self._is_torn = True
        self._writer.append_sample(converted)
        self._is_torn = False

    def write_batch(self, columns: Mapping[str, Any]) -> None:
        """Add many samples: for every column an array, a `Ragged`, or a list with one value per sample.

        Raises:
            SchemaError: as `write`, or the columns differ in length.
        """
        self._check_usable()
        batch = convert_columns(self.schema, columns)
        self._is_torn = True
        self._writer.append_converted(batch)
        self._is_torn = False

    def close(self) -> None:
        """Make everything written so far the dataset. Called by the end of the `with` block."""
        if self._workspace is None:
            return
        try:
            self._check_usable()
            shards = (*self._previous, *self._writer.finish())
            self._workspace.commit(Manifest(self._stored, shards, self._attributes, self._provenance))
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what was not committed; the previous dataset, if any, stays."""
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

    def _schema_to_continue(self, workspace: Workspace) -> Schema:
        assert workspace.previous is not None
        stored = workspace.previous.schema
        if stored.shown != self.schema:
            self.abort()
            raise SchemaError(f"The dataset has the columns {stored.shown}; cannot append {self.schema}.")
        return stored

    def _continue(self, workspace: Workspace) -> None:
        previous = workspace.previous
        assert previous is not None
        self._previous = previous.shards
        self._writer.restart(workspace.add_file, first_number=len(previous.shards))
        self._attributes = {**previous.attributes, **self._attributes}
        self._provenance = previous.provenance

    def _check_usable(self) -> None:
        if self._workspace is None:
            raise ValueError("The writer is closed.")
        if not self._workspace.is_open:
            raise ValueError("A writer belongs to the process that made it; this one is a forked copy.")
        if self._is_torn:
            raise ValueError(
                "An earlier write failed halfway, so this writer cannot continue. Write the dataset again."
            )

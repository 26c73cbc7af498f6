"""From batches of samples to finished shard files, one buffer at a time.

Shards are cut by size alone, sample by sample, so the same samples give the same files however they
were handed in. Where a file goes is for the caller to say: `store` gets its name and its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.identity import digest
from penstock.schema import Ragged, Schema
from penstock.shards._buffers import ShardBuffer, batch_bytes, sample_bytes
from penstock.shards._checksums import block_checksums, checksum
from penstock.shards._convert import convert_batch
from penstock.shards._layout import CHECKSUMS, build_header, plan_layout
from penstock.shards._manifest import ShardEntry

Store = Callable[[str, list[memoryview | bytes]], int]
"""Keeps a shard under a name and returns its size."""


class ShardWriter:
    """Samples in, shards out. Memory is bounded by one shard.

    Args:
        schema: Columns of every sample.
        shard_bytes: A shard is closed before it grows past this.
        store: Called with the name and the bytes of each finished shard.
        first_number: Number in the name of the first shard.
    """

    def __init__(self, schema: Schema, shard_bytes: int, store: Store, *, first_number: int = 0) -> None:
        self.schema = schema
        self.shards: list[ShardEntry] = []
        self._shard_bytes = shard_bytes
        self._store = store
        self._number = first_number
        self._buffer = ShardBuffer(schema, shard_bytes)

    def restart(self, store: Store, *, first_number: int) -> None:
        """Forget everything and begin other shards, in the same memory: fresh pages cost as much as the copy."""
        self.shards = []
        self._store = store
        self._number = first_number
        self._buffer.clear()

    def append_sample(self, converted: Mapping[str, NDArray[Any]]) -> None:
        """Add one sample whose values `convert_sample` has made."""
        added = sum(sample_bytes(column, converted[column.name]) for column in self.schema.columns)
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
        """Add samples that `convert_columns` has made."""
        num_samples = len(next(iter(batch.values())))
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

    def finish(self) -> tuple[ShardEntry, ...]:
        """Close the last shard and return what there is to know of all of them."""
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
        SchemaError: a column is missing or unknown, does not fit, or has another number of samples.
    """
    check_names(schema, columns)
    batch = {column.name: convert_batch(column, columns[column.name]) for column in schema.columns}
    counts = {name: len(value) for name, value in batch.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(f"Every column of a batch must have as many samples; these have {counts}.")
    return batch


def check_names(schema: Schema, given: Iterable[str]) -> None:
    """Refuse values for other columns than those of the schema.

    Raises:
        SchemaError: naming what is missing and what is unknown.
    """
    names = set(given)
    if names != set(schema):
        missing = [name for name in schema if name not in names]
        unknown = [name for name in given if name not in schema]
        raise SchemaError(f"The columns are {schema}; missing here: {missing}, unknown: {unknown}.")

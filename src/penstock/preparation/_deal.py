"""The two passes of a shuffle: deal every sample to a place drawn by a key, then gather the places in order.

A sample's place is the image of its number under one keyed permutation of [0, 2**62): unique, so there
are no ties, and independent of workers. The first pass sorts what a task makes by place and stores it;
the second takes a range of places from all of these files, a contiguous stretch of each, and writes
the samples in order of place. A range is a bucket; how many there are is decided between the passes,
from the true size of the data. Each sample is written twice and read once: that is the whole price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.order import Permutation, derive_key
from penstock.preparation._recipe import Recipe
from penstock.schema import Column, Ragged, Schema
from penstock.shards import ShardEntry, ShardFolder, ShardWriter, Storage, convert_columns, storage_of_arrays

Int64 = NDArray[np.int64]
SHUFFLE_KEY = "shuffle_key"
NUM_PLACES = 1 << 62
# A task's samples are numbered from its first split's number times this.
_SAMPLES_PER_SPLIT = 1 << 38
_DEALT_BYTES = 96 << 20
_CHUNK_BYTES = 16 << 20
_FULLNESS = 0.95


def dealt_schema(recipe: Recipe) -> Schema:
    """Columns between the passes: those of the dataset, and the place."""
    return Schema.parse({**recipe.columns, SHUFFLE_KEY: "int64"})


class Dealer:
    """Collects the samples of a task and hands them to a writer sorted by place."""

    def __init__(self, writer: ShardWriter, *, seed: int, task_number: int) -> None:
        self._writer = writer
        self._places = Permutation(NUM_PLACES, derive_key(seed, "prepare"))
        self._number = task_number * _SAMPLES_PER_SPLIT
        self._batches: list[dict[str, Ragged | NDArray[Any]]] = []
        self._waiting_bytes = 0

    def append_batch(self, columns: Mapping[str, Any]) -> None:
        """Add samples."""
        num_samples = len(next(iter(columns.values())))
        places = self._places(np.arange(self._number, self._number + num_samples))
        self._number += num_samples
        batch = convert_columns(self._writer.schema, {**columns, SHUFFLE_KEY: places})
        self._batches.append(batch)
        self._waiting_bytes += sum(_num_bytes(column) for column in batch.values())
        if self._waiting_bytes >= _DEALT_BYTES:
            self._flush()

    def finish(self) -> tuple[ShardEntry, ...]:
        """Write what is waiting and return all shards."""
        self._flush()
        return self._writer.finish()

    def _flush(self) -> None:
        """Write one sorted shard of what has come."""
        if not self._batches:
            return
        columns = {name: _join([batch[name] for batch in self._batches]) for name in self._writer.schema}
        self._batches, self._waiting_bytes = [], 0
        places = columns[SHUFFLE_KEY]
        assert isinstance(places, np.ndarray)
        for batch in read_in_order(storage_of_arrays(columns), np.argsort(places), self._writer.schema):
            self._writer.append_converted(batch)
        self._writer.finish()


def order_of_bucket(folder: ShardFolder, low: int, high: int) -> Int64:
    """Samples of a folder of dealt shards whose place is in [low, high), in the order of their places."""
    begins, ends = _bounds(folder, low), _bounds(folder, high)
    indices = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
    places = np.empty(len(indices), np.int64)
    folder.read_fixed(folder.schema[SHUFFLE_KEY], indices, places)
    return indices[np.argsort(places)]


def read_in_order(storage: Storage, order: Int64, schema: Schema) -> Iterator[dict[str, Ragged | NDArray[Any]]]:
    """Samples `order` of a storage, some megabytes at a time."""
    num_bytes = sum(storage.num_elements(column) * column.item_bytes for column in storage.schema.columns)
    step = max(1, math.ceil(_CHUNK_BYTES * storage.num_samples / max(1, num_bytes)))
    for begin in range(0, len(order), step):
        indices = np.ascontiguousarray(order[begin : begin + step])
        yield {column.name: _read(storage, column, indices) for column in schema.columns}


def bucket_bounds(num_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Ranges of places that each hold about `bucket_bytes`, slightly less so that it rarely becomes two shards."""
    count = max(1, math.ceil(num_bytes / max(1, int(_FULLNESS * bucket_bytes))))
    borders = [number * NUM_PLACES // count for number in range(count + 1)]
    return list(itertools.pairwise(borders))


def _bounds(folder: ShardFolder, place: int) -> Int64:
    """In each shard, the index of the first sample whose place is not below `place`, by bisection in all at once."""
    low, high = folder.starts[:-1].copy(), folder.starts[1:].copy()
    found = np.empty(len(low), np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, folder.num_samples - 1)
        folder.read_fixed(folder.schema[SHUFFLE_KEY], middle, found)
        is_open = low < high
        low = np.where(is_open & (found < place), middle + 1, low)
        high = np.where(is_open & (found >= place), middle, high)
    return low


def _read(storage: Storage, column: Column, indices: Int64) -> Ragged | NDArray[Any]:
    if column.is_ragged:
        return storage.read_ragged(column, indices)
    out = np.empty((len(indices), *column.shape), column.dtype)
    storage.read_fixed(column, indices, out)
    return out


def _join(parts: list[Ragged | NDArray[Any]]) -> Ragged | NDArray[Any]:
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if not ragged:
        return np.concatenate(parts)  # type: ignore[arg-type]
    return Ragged.concatenate(ragged)


def _num_bytes(column: Ragged | NDArray[Any]) -> int:
    return column.values.nbytes + column.offsets.nbytes if isinstance(column, Ragged) else column.nbytes

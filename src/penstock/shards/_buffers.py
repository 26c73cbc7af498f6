"""Samples waiting to become a shard, column by column, in arrays that are grown once and reused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Ragged, Schema
from penstock.shards._layout import offsets_name, values_name

_OFFSET_BYTES = 8


class _Growing:
    """An array that is appended to. Emptying it keeps its memory: pages are faulted in once."""

    def __init__(self, dtype: np.dtype[Any], item_shape: tuple[int, ...], limit: int) -> None:
        self._array = np.empty((0, *item_shape), dtype)
        self._limit = limit
        self.length = 0

    def append(self, items: NDArray[Any]) -> None:
        end = self.length + len(items)
        if end > len(self._array):
            # Doubling, but not past one shard: twice a shard would be the price otherwise.
            grown = np.empty((max(end, min(2 * end, self._limit)), *self._array.shape[1:]), self._array.dtype)
            grown[: self.length] = self._array[: self.length]
            self._array = grown
        self._array[self.length : end] = items
        self.length = end

    def bytes(self) -> NDArray[np.uint8]:
        return self._array[: self.length].reshape(-1).view(np.uint8)


class ShardBuffer:
    """The samples of the shard being filled."""

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
        """Bytes that the samples take in a shard, header and checksums aside."""
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


def sample_bytes(column: Column, value: NDArray[Any]) -> int:
    """Bytes that one converted sample of a column takes in a shard."""
    return value.nbytes + _OFFSET_BYTES * column.is_ragged


def batch_bytes(schema: Schema, batch: Mapping[str, Ragged | NDArray[Any]], num_samples: int) -> NDArray[np.int64]:
    """Bytes that each sample of a converted batch takes in a shard."""
    total = np.zeros(num_samples, np.int64)
    for column in schema.columns:
        value = batch[column.name]
        if isinstance(value, Ragged):
            total += value.lengths * column.item_bytes + _OFFSET_BYTES
        else:
            total += column.item_bytes
    return total

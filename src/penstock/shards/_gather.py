"""Vectorised reads from memory: one call per column, whatever the number of samples and shards.

    gather_* -> kernel runs over the table -> DONE
                  | stops at a sample that is not open or not checked
                  v
                source.prepare(sample), then the kernel goes on from there

In the steady state it never stops.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Ragged
from penstock.shards import _kernels
from penstock.shards._storage import InMemory, Spans, check_span, nest

_BYTE = np.empty(0, np.uint8)


def gather_fixed(source: InMemory, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy samples of a fixed column into `out`, converting to its dtype."""
    if not (out.flags.c_contiguous and _is_compiled(column.dtype, out.dtype)):
        stored = np.empty(out.shape, column.dtype)
        gather_fixed(source, column, indices, stored)
        out[...] = stored
        return
    like, rows = _as_kernel_arrays(column, out)
    slot, place, indices = source.slots[column.name], 0, np.ascontiguousarray(indices)
    while True:
        table = source.table  # this reference keeps its maps alive while the kernel reads
        place = _kernels.gather(table.rows, source.starts, slot, indices, place, rows, like)
        if place == _kernels.DONE:
            return
        del table  # or it would keep others from evicting what it holds, while this waits for a shard
        source.prepare(column, _index_at(source, indices, place))


def gather_ragged(source: InMemory, column: Column, indices: NDArray[np.int64]) -> Ragged:
    """Samples of a ragged column, side by side."""
    addresses, offsets = np.empty(len(indices), np.int64), np.zeros(len(indices) + 1, np.int64)
    slot, place, held, indices = source.slots[column.name], 0, [], np.ascontiguousarray(indices)
    while True:
        held.append(source.table)  # every table that supplied an address must outlive the copy
        rows = held[-1].rows
        place = _kernels.locate(rows, source.starts, slot, indices, place, column.item_bytes, addresses, offsets[1:])
        if place == _kernels.DONE:
            break
        source.prepare(column, _index_at(source, indices, place))
    values = np.empty((int(offsets[-1]), *column.shape), column.dtype)
    if values.size:
        _kernels.copy_spans(addresses, offsets[1:] * column.item_bytes, values.reshape(-1).view(np.uint8))
    return Ragged(values, offsets, column.kind == "bytes")


def gather_lengths(source: InMemory, column: Column, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths of samples of a ragged column; indices must not be negative."""
    lengths = np.empty(len(indices), np.int64)
    slot, place, indices = source.slots[column.name], 0, np.ascontiguousarray(indices)
    while True:
        table = source.table
        place = _kernels.measure(table.rows, source.starts, slot, indices, place, lengths)
        if place == _kernels.DONE:
            return lengths
        del table
        source.prepare(column, int(indices[place]), (0, 0))


def gather_spans(source: InMemory, column: Column, spans: Spans, out: NDArray[Any]) -> None:
    """Copy parts of samples of a ragged column into the flat array `out`, converting to its dtype."""
    slot, place, like = source.slots[column.name], 0, _empty(column.dtype)
    arrays = tuple(map(np.ascontiguousarray, (spans.indices, spans.firsts, spans.sizes, spans.targets)))
    while True:
        table = source.table
        place = _kernels.gather_spans(table.rows, source.starts, slot, *arrays, place, out, like)
        if place == _kernels.DONE:
            return
        del table
        index, first, size = (int(each[place]) for each in (spans.indices, spans.firsts, spans.sizes))
        check_span(first, size, source.sample_length(column, index))
        source.prepare(column, index, (first, first + size))


def gather_stream(source: InMemory, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy a row of consecutive elements from each of `firsts`, across samples and shards."""
    slot, place, firsts = source.slots[column.name], 0, np.ascontiguousarray(firsts)
    starts, like = source.value_starts[column.name], _empty(column.dtype)
    while True:
        table = source.table
        place = _kernels.gather_stream(table.rows, starts, slot, firsts, place, out, like)
        if place == _kernels.DONE:
            return
        del table
        first = int(firsts[place])
        source.prepare_elements(column, first, first + out.shape[1])


class Gathered:
    """The reads of a storage whose columns have addresses."""

    def read_fixed(self: InMemory, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        gather_fixed(self, column, indices, out)

    def read_ragged(self: InMemory, column: Column, indices: NDArray[np.int64]) -> Ragged:
        return nest(column, (gather_ragged(self, part, indices) for part in column.stored), "the arrays")

    def read_spans(self: InMemory, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        gather_spans(self, column, spans, out)

    def lengths_of(self: InMemory, column: Column, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return gather_lengths(self, column.stored[-1], indices)

    def read_stream(self: InMemory, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        gather_stream(self, column, firsts, out)

    def provenance(self) -> Mapping[str, Any]:
        """Empty: nothing says where the samples came from."""
        return {}


def _index_at(source: InMemory, indices: NDArray[np.int64], place: int) -> int:
    """The index that stopped a kernel, as a non-negative one."""
    num_samples = int(source.starts[-1])
    if place < 0:
        raise IndexError(f"Index {indices[-2 - place]} is out of range for {num_samples:,} samples.")
    return int(indices[place]) % num_samples


@functools.cache
def _is_compiled(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether the kernels convert between these: not half, bfloat16, float8, complex or byte-swapped numbers."""
    return stored == wanted or all(
        dtype.isnative and (dtype.kind in "biu" or dtype.name in ("float32", "float64")) for dtype in (stored, wanted)
    )


def _as_kernel_arrays(column: Column, out: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(empty array of the dtype to read, `out` as rows): plain bytes if no conversion is needed."""
    if out.dtype == column.dtype:
        return _BYTE, out.reshape(-1).view(np.uint8).reshape(len(out), column.item_bytes)
    return _empty(column.dtype), out.reshape(len(out), column.num_items)


@functools.cache
def _empty(dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.empty(0, dtype)

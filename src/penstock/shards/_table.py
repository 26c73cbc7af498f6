"""Vectorised reads from memory: one call per column, whatever the number of samples and shards.

Anything that has its columns in memory, mapped shards or arrays, offers a `Table` and answers
`prepare` when a kernel meets a shard that is not open or not checked. The kernel runs again until it
is done; in the steady state that is once.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Ragged, Schema

FILE, SIZE, FIRST_COLUMN = 0, 1, 2
VALUES, OFFSETS, COUNT, STATE, COLUMN_WIDTH = 0, 1, 2, 3, 4
ABSENT, OPEN, READY = 0, 1, 2
_BYTE = np.empty(0, np.uint8)


@functools.cache
def kernels() -> ModuleType:
    """The compiled kernels; importing numba takes 0.4 s, so it waits for the first read."""
    from penstock.shards import _kernels

    return _kernels


class Table:
    """Addresses of every column of every shard, and the objects that keep them valid."""

    __slots__ = ("held", "rows")

    def __init__(self, rows: NDArray[np.int64], held: dict[int, object]) -> None:
        self.rows = rows
        self.held = held

    @classmethod
    def empty(cls, num_shards: int, num_columns: int) -> Table:
        """A table in which no shard is open."""
        return cls(np.zeros((num_shards, FIRST_COLUMN + COLUMN_WIDTH * num_columns), np.int64), {})


class InMemory(Protocol):
    """Columns that have addresses."""

    slots: dict[str, int]
    starts: NDArray[np.int64]
    """Number of the first sample of each shard, and behind them the number of samples."""
    table: Table

    def prepare(self, column: Column, indices: NDArray[np.int64]) -> Table:
        """Open and check what these samples need; the table returned has all of it."""
        ...

    def diagnose(self, column: Column, index: int) -> None:
        """Raise what is wrong with the file or the offsets of this sample, if anything is."""
        ...


def column_slots(schema: Schema) -> dict[str, int]:
    """Where the numbers of each column begin in a row of a table."""
    return {name: FIRST_COLUMN + COLUMN_WIDTH * place for place, name in enumerate(schema)}


def gather_fixed(source: InMemory, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy samples of a fixed column into `out`, converting to its dtype."""
    if not (out.flags.c_contiguous and _is_compiled(column.dtype, out.dtype)):
        stored = np.empty(out.shape, column.dtype)
        gather_fixed(source, column, indices, stored)
        out[...] = stored
        return
    like, rows = _as_kernel_arrays(column, out)
    slot = source.slots[column.name]
    table, state = source.table, READY
    while True:
        status = kernels().gather(table.rows, source.starts, slot, state, indices, rows, like)
        if status == -1:
            return
        table = _prepare_again(source, column, indices, status, state)
        state = OPEN


def gather_ragged(source: InMemory, column: Column, indices: NDArray[np.int64]) -> Ragged:
    """Samples of a ragged column, side by side."""
    slot = source.slots[column.name]
    addresses, offsets = np.empty(len(indices), np.int64), np.zeros(len(indices) + 1, np.int64)
    table, state = source.table, READY
    while True:
        status = kernels().locate(
            table.rows, source.starts, slot, state, indices, column.item_bytes, addresses, offsets[1:]
        )
        if status == -1:
            break
        table = _prepare_again(source, column, indices, status, state)
        state = OPEN
    values = np.empty((int(offsets[-1]), *column.shape), column.dtype)
    if values.size:
        raw = values.reshape(-1).view(np.uint8)
        kernels().copy_spans(addresses, offsets[1:] * column.item_bytes, raw, _BYTE)
    # The addresses were taken from this table; it must outlive the copy.
    del table
    return Ragged(values, offsets, column.kind == "bytes")


def _prepare_again(source: InMemory, column: Column, indices: NDArray[np.int64], status: int, state: int) -> Table:
    if status < -1:
        raise IndexError(f"Index {indices[-2 - status]} is out of range for {source.starts[-1]:,} samples.")
    if state == OPEN:  # prepared a moment ago: the file is at fault, or another thread closed the shard
        source.diagnose(column, int(indices[status]) % int(source.starts[-1]))
    return source.prepare(column, indices)


@functools.cache
def _is_compiled(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether the kernels convert between these; they have no half, bfloat16, float8 or complex numbers."""
    return stored == wanted or all(
        dtype.kind in "biu" or dtype.name in ("float32", "float64") for dtype in (stored, wanted)
    )


def _as_kernel_arrays(column: Column, out: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(empty array of the dtype to read, `out` as rows): plain bytes when no conversion is asked."""
    if out.dtype == column.dtype:
        return _BYTE, out.reshape(-1).view(np.uint8).reshape(len(out), column.item_bytes)
    return _empty(column.dtype), out.reshape(len(out), column.num_items)


@functools.cache
def _empty(dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.empty(0, dtype)

"""Where the arrays of a batch lie in the memory it was written to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Ragged, dtype_from_name, dtype_name

Batch = dict[str, Any]

_ALIGNMENT = 64


class PlacedArray(NamedTuple):
    """An array in a slot."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    end: int
    """Where its last byte ends."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.offset

    def view(self, memory: Any) -> NDArray[Any]:
        return np.ndarray(self.shape, dtype_from_name(self.dtype), memory, self.offset)


class PlacedRagged(NamedTuple):
    """A ragged column in a slot."""

    values: PlacedArray | PlacedRagged
    offsets: PlacedArray
    is_bytes: bool

    @property
    def end(self) -> int:
        return max(self.values.end, self.offsets.end)

    @property
    def num_bytes(self) -> int:
        return self.values.num_bytes + self.offsets.num_bytes

    def view(self, memory: Any) -> Ragged:
        return Ragged(self.values.view(memory), self.offsets.view(memory), self.is_bytes)


class PlacedMany(NamedTuple):
    """A list or dict with arrays in it, at any depth."""

    keys: list[Any] | None
    """The keys of a dict; None for a list."""
    parts: list[Any]
    """Its values: placed ones, and others as they are."""

    @property
    def end(self) -> int:
        return max(part.end for part in self.parts if isinstance(part, Placed))

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts if isinstance(part, Placed))

    def view(self, memory: Any) -> list[Any] | dict[Any, Any]:
        values = [part.view(memory) if isinstance(part, Placed) else part for part in self.parts]
        return values if self.keys is None else dict(zip(self.keys, values, strict=True))


Placed = PlacedArray | PlacedRagged | PlacedMany
"""What lies in a slot."""


class BatchLayout:
    """What a batch consists of, and where it lies in its slot; or several batches, as equal pieces of its arrays."""

    __slots__ = ("_parts", "_stacked", "end", "is_lasting", "num_bytes", "num_pieces")

    def __init__(self, parts: dict[str, Any], num_pieces: int = 1, *, is_lasting: bool = False) -> None:
        self._parts = parts
        self.is_lasting = is_lasting
        """Whether this object describes many batches; a worker process then sends it only once."""
        self.num_pieces = num_pieces
        self.end, self.num_bytes = 1, 0
        """Where the last byte ends, and bytes of all arrays."""
        for part in parts.values():  # made for every batch whose shapes vary, so without calls where there can be none
            if type(part) is PlacedArray:
                self.end, self.num_bytes = max(self.end, part.end), self.num_bytes + part.end - part.offset
            elif isinstance(part, Placed):
                self.end, self.num_bytes = max(self.end, part.end), self.num_bytes + part.num_bytes
        self._stacked: list[tuple[tuple[int, ...], np.dtype[Any], int]] = []
        """(shape, dtype, offset) of each array, with the pieces as its first dimension."""
        if num_pieces > 1:
            self._stacked = [
                ((num_pieces, part.shape[0] // num_pieces, *part.shape[1:]), dtype_from_name(part.dtype), part.offset)
                for part in parts.values()
            ]

    def pieces(self, memory: Any) -> list[Batch]:
        """The batches, their arrays based on `memory`."""
        if self._stacked:
            columns = [np.ndarray(shape, dtype, memory, offset) for shape, dtype, offset in self._stacked]
            return [dict(zip(self._parts, arrays, strict=True)) for arrays in zip(*columns, strict=True)]
        return [self.view(memory)] if self.num_pieces == 1 else [self.view(memory) for _ in range(self.num_pieces)]

    def view(self, memory: Any) -> Batch:
        """All of it, the arrays based on `memory`."""
        batch: Batch = {}
        for key, part in self._parts.items():
            if type(part) is PlacedArray:
                batch[key] = np.ndarray(part.shape, dtype_from_name(part.dtype), memory, part.offset)
            else:
                batch[key] = part.view(memory) if isinstance(part, Placed) else part
        return batch

    def __getitem__(self, key: str) -> Any:
        return self._parts[key]

    def __reduce__(self) -> tuple[type[BatchLayout], tuple[Any, ...]]:
        return BatchLayout, (self._parts, self.num_pieces)


def place_arrays(shapes: Mapping[str, tuple[tuple[int, ...], str]], num_pieces: int = 1) -> BatchLayout:
    """Where the arrays of batches lie whose shapes are known in advance: placed once, for any number of batches.

    With several pieces, the arrays hold the rows of that many batches, one after the other.
    """
    parts, end = {}, 0
    for key, (shape, dtype) in shapes.items():
        parts[key] = place_after(end, shape, dtype_from_name(dtype))
        end = parts[key].end
    return BatchLayout(parts, num_pieces, is_lasting=True)


def place_after(end: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PlacedArray:
    """An array placed after `end`, aligned."""
    begin = -(-end // _ALIGNMENT) * _ALIGNMENT
    return PlacedArray(begin, shape, dtype_name(dtype), begin + math.prod(shape) * dtype.itemsize)

"""A column as one endless line of tokens, cut anywhere."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, offsets_of
from penstock.shards import Spans, Storage


class Stream(Protocol):
    """Elements of all samples, one behind the other."""

    num_elements: int

    def read(self, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill each row of `out` with the elements from one of `firsts` on."""
        ...


class StorageStream:
    """All samples of a storage: they lie in a row already, so borders cost nothing."""

    def __init__(self, storage: Storage, column: Column) -> None:
        self._storage, self._column = storage, column
        self.num_elements = storage.num_elements(column)

    def read(self, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill each row of `out` with the elements from one of `firsts` on."""
        self._storage.read_stream(self._column, firsts, out)


class SelectedStream:
    """Chosen samples only: 8 bytes per sample say where each begins."""

    def __init__(self, storage: Storage, column: Column, chosen: NDArray[np.int64]) -> None:
        self._storage, self._column, self._chosen = storage, column, chosen
        if column.is_ragged:
            lengths = storage.lengths(column, 0, storage.num_samples)[chosen]
        else:
            lengths = np.ones(len(chosen), np.int64)
        self._starts = offsets_of(lengths)
        self.num_elements = int(self._starts[-1])

    def read(self, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill each row of `out` with the elements from one of `firsts` on."""
        length = out.shape[1]
        if not self._column.is_ragged:
            indices = self._chosen[(firsts[:, None] + np.arange(length)).reshape(-1)]
            self._storage.read_fixed(self._column, indices, out.reshape(-1))
            return
        spans = [self._spans(first, length, row * length) for row, first in enumerate(firsts.tolist())]
        if spans:
            parts = (np.concatenate(part) for part in zip(*spans, strict=True))
            self._storage.read_spans(self._column, Spans(*parts), out.reshape(-1))

    def _spans(self, first: int, length: int, target: int) -> tuple[NDArray[np.int64], ...]:
        """(samples, first elements, sizes, targets) that make up one row."""
        begin = int(np.searchsorted(self._starts, first, side="right")) - 1
        end = int(np.searchsorted(self._starts, first + length, side="left"))
        edges = np.clip(self._starts[begin : end + 1], first, first + length)
        sizes = np.diff(edges)
        return self._chosen[begin:end], edges[:-1] - self._starts[begin:end], sizes, target + edges[:-1] - first

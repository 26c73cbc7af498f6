"""The samples of a dataset where they are stored: what plans read from.

A dataset shows all samples of a storage in order, or those that its selections pick. This module knows the
difference, so that nobody else has to: index in the dataset in, bytes of the storage out. Whole datasets cost
nothing; picked samples cost 8 bytes each, computed when first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.identity import digest
from penstock.plan._selection import Selection
from penstock.plan._stream import SelectedStream, StorageStream, Stream
from penstock.schema import Column
from penstock.shards import Storage


class StoredSamples:
    """Samples of a storage, numbered as a dataset shows them."""

    def __init__(self, storage: Storage, selections: tuple[Selection, ...]) -> None:
        self.storage = storage
        self.selections = selections

    def __len__(self) -> int:
        return self.storage.num_samples if self._chosen is None else len(self._chosen)

    def digest(self, *more: str) -> str:
        """Identity of the samples and their order, and of what else is said about them."""
        parts = [self.storage.fingerprint, *(selection.identity for selection in self.selections), *more]
        return digest("\n".join(parts))

    @property
    def are_whole(self) -> bool:
        """Whether every stored sample is here, in stored order."""
        return self._chosen is None

    def locate(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where samples are in the storage; the indices are trusted."""
        return indices if self._chosen is None else self._chosen[indices]

    def locate_checked(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Where samples that somebody asks for are in the storage; negative indices count from the end.

        Raises:
            IndexError: an index is out of range; of a whole storage, the read that follows says so.
            TypeError: not a list of integers.
        """
        wanted = as_indices(indices)
        try:
            return self.locate(wanted)
        except IndexError:
            raise IndexError(f"An index is out of range for {len(self):,} samples.") from None

    def locate_one(self, index: int) -> int:
        """Where one sample is in the storage; negative indices count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"Index {index} is out of range for {len(self):,} samples.")
        return index % len(self) if self._chosen is None else int(self._chosen[index])

    def lengths(self, column: Column) -> NDArray[np.int64]:
        """Lengths of all samples of a ragged column."""
        lengths = self.storage.lengths(column, 0, self.storage.num_samples)
        return lengths if self._chosen is None else lengths[self._chosen]

    def lengths_between(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of samples `begin` to `end` of a ragged column."""
        if self._chosen is None:
            return self.storage.lengths(column, begin, end)
        return self.storage.lengths_of(column, self._chosen[begin:end])

    def announce(self, columns: Iterable[Column], begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` are needed soon; chosen samples are left to it."""
        if self._chosen is None:
            for column in columns:
                self.storage.announce(column, begin, end)

    def release(self, columns: Iterable[Column], begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` are done with; chosen samples are left to it."""
        if self._chosen is None:
            for column in columns:
                self.storage.release(column, begin, end)

    def stream(self, column: Column) -> Stream:
        """A column's samples, one behind the other."""
        if self._chosen is None:
            return StorageStream(self.storage, column)
        return SelectedStream(self.storage, column, self._chosen)

    @functools.cached_property
    def _chosen(self) -> NDArray[np.int64] | None:
        """Index in the storage of each sample, or None when they are all there in order."""
        chosen: NDArray[np.int64] | None = None
        for selection in self.selections:
            num_samples = self.storage.num_samples if chosen is None else len(chosen)
            picked = selection.indices(num_samples)
            chosen = picked if chosen is None else chosen[picked]
        return chosen


def as_indices(indices: ArrayLike) -> NDArray[np.int64]:
    """Indices that somebody gives, as one contiguous list.

    Raises:
        TypeError: not a list of integers.
        IndexError: a number that no index can be.
    """
    array = np.asarray(indices)
    if array.dtype == np.int64 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(
            f"Indices must be a list of integers; these are {array.dtype} of shape {list(array.shape)}.{_hint(array)}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise IndexError(f"Index {array.max()} is out of range.")
    return np.ascontiguousarray(array, np.int64)


def _hint(array: NDArray[np.generic]) -> str:
    if array.dtype == np.bool_:
        return " Use ds.filter(mask) for a mask."
    return " A whole column is ds[:]['name']." if array.dtype.kind == "U" else ""

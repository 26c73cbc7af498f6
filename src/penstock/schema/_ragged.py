"""Samples of uneven length, side by side in one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Sample `i` is `values[offsets[i]:offsets[i + 1]]`; byte strings come out as `bytes`.

    Values and offsets are arrays; in batches of a DataLoader, tensors.

    >>> ragged = Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3]))
    >>> [sample.tolist() for sample in ragged]
    [[5, 6], [], [7]]
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]
    is_bytes: bool = False

    @classmethod
    def from_lengths(cls, values: NDArray[Any], lengths: NDArray[Any] | Sequence[int], is_bytes: bool = False) -> Self:
        """Samples of these lengths, one after the other in `values`."""
        return cls(values, offsets_of(lengths), is_bytes)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Self:
        """The samples of all parts, of which there is at least one."""
        values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
        lengths = [part.lengths for part in parts]
        return cls.from_lengths(np.concatenate(values), np.concatenate(lengths), parts[0].is_bytes)

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """Copies of the samples at `indices`, which count from the front; the same object if they are all, in order.

        >>> [sample.tolist() for sample in Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3])).take(np.array([2, 0]))]
        [[7], [5, 6]]
        """
        lengths = self.lengths
        if (indices[1:] > indices[:-1]).all():  # a mask of bits is an eighth of a list of places
            if len(indices) == len(self):
                return self
            is_taken = np.zeros(len(self), bool)
            is_taken[indices] = True
            values = self.values[self.offsets[0] : self.offsets[-1]][np.repeat(is_taken, lengths)]
            return Ragged.from_lengths(values, lengths[indices], self.is_bytes)
        offsets = offsets_of(lengths[indices])
        places = np.repeat(self.offsets[indices] - offsets[:-1], lengths[indices]) + np.arange(offsets[-1])
        return Ragged(self.values[places], offsets, self.is_bytes)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each sample."""
        lengths: NDArray[np.int64] = self.offsets[1:] - self.offsets[:-1]
        return lengths

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any] | bytes:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Index {index} is out of range for {len(self)} samples.")
        index %= len(self)
        sample = self.values[self.offsets[index] : self.offsets[index + 1]]
        return sample.tobytes() if self.is_bytes else sample

    def __iter__(self) -> Iterator[NDArray[Any] | bytes]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        dtype = "bytes" if self.is_bytes else str(self.values.dtype).removeprefix("torch.")
        return f"Ragged({len(self)} samples, {len(self.values)} values of {dtype})"


def offsets_of(lengths: NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """Where each of these lengths begins when they stand side by side, and behind them where the last one ends.

    >>> offsets_of([2, 0, 1]).tolist()
    [0, 2, 2, 3]
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets

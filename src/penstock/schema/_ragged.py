"""Samples of uneven length, side by side in one array."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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

"""Which shard a sample lies in, and where in it: arithmetic on the number of samples of each shard."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


class Places:
    """Where the samples of a dataset lie."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.starts = starts_of(counts)
        self.num_samples = int(self.starts[-1])

    def place(self, index: int) -> tuple[int, int]:
        """(shard, sample within the shard) of one index."""
        number = bisect.bisect_right(self.starts, index) - 1
        return number, index - int(self.starts[number])

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first sample, last sample) of each shard that holds samples `begin` to `end`."""
        number = int(np.searchsorted(self.starts, begin, side="right")) - 1
        while begin < end:
            start, stop = self.starts[number : number + 2].tolist()
            if stop > begin:
                yield number, begin - start, min(end, stop) - start
                begin = min(end, stop)
            number += 1

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(shard, sample within the shard) of each index; negative ones count from the end."""
        indices = np.where(indices < 0, indices + self.num_samples, indices)
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.num_samples):
            wrong = indices[(indices < 0) | (indices >= self.num_samples)][0]
            raise IndexError(f"Index {wrong} is out of range for {self.num_samples:,} samples.")
        shard_of = np.searchsorted(self.starts, indices, side="right") - 1
        return shard_of, indices - self.starts[shard_of]


def starts_of(counts: Sequence[int]) -> NDArray[np.int64]:
    """Where each shard begins when they stand side by side, and behind them the end of the last."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

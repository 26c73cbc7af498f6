"""Reads by `pread`, for file systems on which a map could be pulled away.

Neighbouring samples are fetched by one call, straight into the place where they belong when no
conversion is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Ragged
from penstock.shards._shard import Shard


class OpensShards(Protocol):
    """What these functions need of a dataset folder."""

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(shard, sample within the shard) of each index."""
        ...

    def open_shard(self, number: int) -> Shard:
        """Shard `number`, opened when it is not."""
        ...

    def check_shard(self, shard: Shard, column: Column, samples: NDArray[np.int64]) -> None:
        """Check samples of one shard, unless checking is off."""
        ...


def read_fixed(folder: OpensShards, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy samples of a fixed column into `out`, converting to its dtype."""
    for shard, places, samples in _by_shard(folder, column, indices):
        for begin, end in _runs(samples):
            out[places[begin:end]] = shard.values(column, int(samples[begin]), int(samples[begin]) + end - begin)


def read_ragged(folder: OpensShards, column: Column, indices: NDArray[np.int64]) -> Ragged:
    """Samples of a ragged column, side by side."""
    parts: list[NDArray[Any]] = [np.empty(0)] * len(indices)
    for shard, places, samples in _by_shard(folder, column, indices):
        for begin, end in _runs(samples):
            first = int(samples[begin])
            edges = shard.offsets(column, first, first + end - begin)
            values = shard.values(column, int(edges[0]), int(edges[-1]))
            pieces = np.split(values, edges[1:-1] - edges[0])
            for place, piece in zip(places[begin:end].tolist(), pieces, strict=True):
                parts[place] = piece
    lengths = np.array([len(part) for part in parts], np.int64)
    values = np.concatenate(parts) if parts else np.empty((0, *column.shape), column.dtype)
    return Ragged(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), column.kind == "bytes")


def _by_shard(
    folder: OpensShards, column: Column, indices: NDArray[np.int64]
) -> Iterator[tuple[Shard, NDArray[np.int64], NDArray[np.int64]]]:
    """(shard, places in the result, samples in the shard) of each shard, checked, in file order."""
    shard_of, samples = folder.locate(indices)
    order = np.lexsort((samples, shard_of))
    edges = np.flatnonzero(np.diff(shard_of[order])) + 1
    for places in np.split(order, edges) if len(order) else []:
        shard = folder.open_shard(int(shard_of[places[0]]))
        folder.check_shard(shard, column, samples[places])
        yield shard, places, samples[places]


def _runs(samples: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Stretches of consecutive samples in a sorted array."""
    edges = [0, *(np.flatnonzero(np.diff(samples) != 1) + 1).tolist(), len(samples)]
    return itertools.pairwise(edges)

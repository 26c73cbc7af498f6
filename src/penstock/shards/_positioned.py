"""Reads by `pread`, for file systems on which mapped pages may vanish.

Neighbouring samples are fetched by one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Ragged
from penstock.shards._open_shards import OpenShards
from penstock.shards._shard import Shard
from penstock.shards._storage import Spans, check_span


def read_fixed(shards: OpenShards, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy samples of a fixed column into `out`, converting to its dtype."""
    for shard, places, samples in _by_shard(shards, indices):
        for begin, end in _runs(samples):
            first, last = int(samples[begin]), int(samples[end - 1]) + 1
            shards.check_shard(shard, column, first, last)
            out[places[begin:end]] = shard.values(column, first, last)


def read_ragged(shards: OpenShards, column: Column, indices: NDArray[np.int64]) -> Ragged:
    """Samples of a ragged column, side by side."""
    parts: list[NDArray[Any]] = [np.empty(0)] * len(indices)
    for shard, places, samples in _by_shard(shards, indices):
        for begin, end in _runs(samples):
            first, last = int(samples[begin]), int(samples[end - 1]) + 1
            shards.check_shard(shard, column, first, last)
            edges = shard.offsets(column, first, last)
            values = shard.values(column, int(edges[0]), int(edges[-1]))
            pieces = np.split(values, edges[1:-1] - edges[0])
            for place, piece in zip(places[begin:end].tolist(), pieces, strict=True):
                parts[place] = piece
    values = np.concatenate(parts) if parts else np.empty((0, *column.shape), column.dtype)
    return Ragged.from_lengths(values, [len(part) for part in parts], column.kind == "bytes")


def read_spans(shards: OpenShards, column: Column, spans: Spans, out: NDArray[Any]) -> None:
    """Copy parts of samples of a ragged column into the flat array `out`."""
    shard_of, samples = shards.locate(spans.indices)
    for place in np.lexsort((samples, shard_of)).tolist():
        shard, sample = shards.open_shard(int(shard_of[place])), int(samples[place])
        shards.check_shard(shard, column, sample, sample + 1)
        begin, end = shard.offsets(column, sample, sample + 1).tolist()
        first, size, target = (int(part[place]) for part in (spans.firsts, spans.sizes, spans.targets))
        check_span(first, size, end - begin)
        out[target : target + size] = shard.values(column, begin + first, begin + first + size)


def read_stream(shards: OpenShards, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy a row of consecutive elements from each of `firsts`, across samples and shards."""
    value_starts = shards.value_starts[column.name]
    for row, first in enumerate(firsts.tolist()):
        done, length = 0, out.shape[1]
        while done < length:
            number = int(np.searchsorted(value_starts, first + done, side="right")) - 1
            begin = first + done - int(value_starts[number])
            size = min(length - done, int(value_starts[number + 1]) - first - done)
            shard = shards.open_shard(number)
            shards.check_elements(shard, column, begin, begin + size)
            out[row, done : done + size] = shard.values(column, begin, begin + size)
            done += size


def _by_shard(
    shards: OpenShards, indices: NDArray[np.int64]
) -> Iterator[tuple[Shard, NDArray[np.int64], NDArray[np.int64]]]:
    """(shard, places in the result, samples in the shard) of each shard, in file order."""
    shard_of, samples = shards.locate(indices)
    order = np.lexsort((samples, shard_of))
    edges = np.flatnonzero(np.diff(shard_of[order])) + 1
    for places in np.split(order, edges) if len(order) else []:
        shard = shards.open_shard(int(shard_of[places[0]]))
        yield shard, places, samples[places]


def _runs(samples: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(begin, end) of each run of consecutive samples in a sorted array."""
    edges = [0, *(np.flatnonzero(np.diff(samples) != 1) + 1).tolist(), len(samples)]
    return itertools.pairwise(edges)

"""Which shards hold which samples of a dataset, through selections, joins and windows of series.

A layer lists shards with the samples that each holds, both in the dataset's own numbers and rising. Selections and
joins turn the layers of what is below them into their own; nothing but the manifests is read for it.

    folder, tars  one layer, from the manifest or the index
    chosen        the same shards, with the places of their samples among the chosen ones
    concat, zip   the layers of all parts
    unfold        each shard with all windows that touch it

Price: 32 bytes per shard; of samples chosen in no order, per run of samples in one shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset._joined import ConcatStorage, ZipStorage
from penstock.dataset._samples import Samples
from penstock.dataset._tokens import TokenStream
from penstock.dataset._unfolded import UnfoldedStorage
from penstock.schema import Column, offsets_of
from penstock.shards import ShardFolder, Storage, TarStorage

Int64 = NDArray[np.int64]
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayer:
    """Samples, or elements of a column, `begins[k]` to `ends[k]` are in shard `shards[k]` of a folder."""

    folder: ShardFolder | TarStorage
    shards: Int64
    begins: Int64
    ends: Int64

    def moved(self, begins: Int64, ends: Int64) -> ShardLayer:
        """The same shards for other samples; without those that have none."""
        kept = begins < ends
        return ShardLayer(self.folder, self.shards[kept], begins[kept], ends[kept])

    def find(self, begins: Int64, ends: Int64) -> tuple[Int64, Int64]:
        """(number of the range, shard) for every shard that holds samples `begins[k]` to `ends[k]`."""
        first = np.searchsorted(self.ends, begins, side="right")
        counts = np.maximum(np.searchsorted(self.begins, ends, side="left") - first, 0)
        numbers = np.repeat(np.arange(len(begins)), counts)
        starts = offsets_of(counts)[:-1]
        return numbers, self.shards[np.repeat(first - starts, counts) + np.arange(len(numbers))]


Layers = tuple[ShardLayer, ...]


def sample_layers(samples: Samples, names: Collection[str]) -> Layers:
    """The shards that hold these columns of the samples; none of samples that are not in shards."""
    layers = tuple(_stored(samples.storage, names))
    chosen = samples.chosen
    if chosen is None:
        return layers
    if bool((chosen[1:] >= chosen[:-1]).all()):
        edges = ((np.searchsorted(chosen, each) for each in (layer.begins, layer.ends)) for layer in layers)
        return tuple(layer.moved(*each) for layer, each in zip(layers, edges, strict=True))
    return tuple(_runs(layer, chosen) for layer in layers)


def element_layers(samples: Samples, column: Column, stream: TokenStream) -> Layers:
    """The shards that hold the elements of a column, laid end to end as in its stream."""
    if not column.is_ragged:
        return sample_layers(samples, (column.name,))
    if stream.starts is not None:
        starts = stream.starts
        layers = sample_layers(samples, (column.name,))
        # Not `moved`: samples without elements are looked up with those around them.
        return tuple(replace(layer, begins=starts[layer.begins], ends=starts[layer.ends]) for layer in layers)
    return tuple(_stored_elements(samples.storage, column))


def shard_edges(layers: Sequence[ShardLayer], num_places: int) -> Int64 | None:
    """Places at which shards begin, with 0 and `num_places`; where several hold a place, those of the largest folder.

    None where nothing is in shards, or each holds places in many runs.
    """
    taken: list[ShardLayer] = []
    for layer in sorted(layers, key=lambda layer: -layer.folder.num_bytes):
        held = (int(layer.begins[0]), int(layer.ends[-1])) if len(layer.shards) else (0, 0)
        if len(np.unique(layer.shards)) < len(layer.shards):
            return None
        if held[0] < held[1] and all(held[1] <= each.begins[0] or each.ends[-1] <= held[0] for each in taken):
            taken.append(layer)
    return np.unique([0, num_places, *np.concatenate([layer.begins for layer in taken])]) if taken else None


def _stored(storage: Storage, names: Collection[str]) -> Iterator[ShardLayer]:
    match storage:
        case ShardFolder() | TarStorage():
            starts = storage.starts
            layer = ShardLayer(storage, np.arange(len(starts) - 1), starts[:-1], starts[1:])
            yield layer.moved(layer.begins, layer.ends)
        case ConcatStorage():
            for part, start in zip(storage.parts, storage.starts.tolist(), strict=False):
                yield from (_shifted(layer, start) for layer in sample_layers(part, names))
        case ZipStorage():
            for part in storage.parts:
                own = [name for name in names if storage.owners[name] is part]
                yield from sample_layers(part, own) if own else ()
        case UnfoldedStorage():
            for layer in sample_layers(storage.steps, names):
                yield layer.moved(*storage.windows_touching(layer.begins, layer.ends))


def _stored_elements(storage: Storage, column: Column) -> Iterator[ShardLayer]:
    match storage:
        case ShardFolder():
            starts = storage.shards.value_starts[column.name]
            layer = ShardLayer(storage, np.arange(len(starts) - 1), starts[:-1], starts[1:])
            yield layer.moved(layer.begins, layer.ends)
        case ConcatStorage():
            edges = storage.element_starts(column)
            for part, start, end in zip(storage.parts, edges.tolist(), edges[1:].tolist(), strict=False):
                if part.are_whole:
                    yield from (_shifted(layer, start) for layer in _stored_elements(part.storage, column))
                else:  # where chosen samples begin takes their lengths, so: anywhere in the part
                    for layer in sample_layers(part, (column.name,)):
                        yield layer.moved(np.full_like(layer.begins, start), np.full_like(layer.ends, end))
        case ZipStorage():
            part = storage.owners[column.name]
            yield from _stored_elements(part.storage, column)


def _shifted(layer: ShardLayer, start: int) -> ShardLayer:
    return replace(layer, begins=layer.begins + start, ends=layer.ends + start)


def _runs(layer: ShardLayer, chosen: NDArray[np.integer[Any]]) -> ShardLayer:
    """Of samples chosen in no order: each run of them in the same shards."""
    parts: list[tuple[Int64, Int64, Int64]] = []
    for begin in range(0, len(chosen), _CHUNK):
        some = chosen[begin : begin + _CHUNK]
        first, last = np.searchsorted(layer.ends, some, side="right"), np.searchsorted(layer.begins, some, side="right")
        borders = np.flatnonzero((np.diff(first) != 0) | (np.diff(last) != 0)) + 1
        edges = np.concatenate([[0], borders, [len(some)]])
        counts = np.maximum(last[edges[:-1]] - first[edges[:-1]], 0)
        places = np.repeat(first[edges[:-1]] - offsets_of(counts)[:-1], counts) + np.arange(counts.sum())
        run_begins, run_ends = (np.repeat(edge + begin, counts) for edge in (edges[:-1], edges[1:]))
        parts.append((layer.shards[places], run_begins, run_ends))
    shards, begins, ends = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ShardLayer(layer.folder, shards, begins, ends)

"""A shuffle in two passes: deal every sample to a random position, then gather the positions in order.

    deal      a task's samples -> sorted by shuffle key -> `dealt` shards
    gather    one range of keys (a bucket) from all dealt shards -> samples in order of key -> `ready` shards

A sample's shuffle key is the image of its number under one keyed permutation of [0, 2**62): unique, so there are
no ties, and independent of workers. The first pass sorts a task's samples by key and stores them; in each of those
shards a bucket is one contiguous range. How many buckets there are is decided between the passes, from the actual
size of the data. Each sample is written twice and read once; that is the whole price.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.identity import digest_json
from penstock.order import Permutation, derive_key
from penstock.preparation._progress import Runner, Tally, Tell, peak_memory
from penstock.preparation._records import Counts, TaskRecord
from penstock.preparation._specification import Specification
from penstock.preparation._tasks import choose_task_bytes
from penstock.preparation._work_folder import Attempt, WorkFolder, no_store
from penstock.schema import Ragged, Schema, join_samples
from penstock.shards import (
    Manifest,
    ShardEntry,
    ShardFolder,
    ShardWriter,
    Storage,
    convert_columns,
    read_samples,
    samples_per_chunk,
    storage_of_arrays,
)

Int64 = NDArray[np.int64]
SHUFFLE_KEY = "shuffle_key"
_NUM_KEYS = 1 << 62
# A task's samples are numbered from its first split's number times this.
_SAMPLES_PER_SPLIT = 1 << 38
_DEALT_BYTES = 96 << 20
_CHUNK_BYTES = 16 << 20
# Buckets are slightly smaller than a shard, so that few of them spill into a second one.
_FULLNESS = 0.95


def dealt_schema(specification: Specification) -> Schema:
    """Columns between the passes: those of the dataset, and the shuffle key."""
    return Schema.parse({**specification.columns, SHUFFLE_KEY: "int64"})


class Dealer:
    """Collects the samples of a task and passes them to a writer, sorted by shuffle key."""

    def __init__(self, writer: ShardWriter, *, seed: int, first_split: int) -> None:
        self._writer = writer
        self._keys = Permutation(_NUM_KEYS, derive_key(seed, "prepare"))
        self._number = first_split * _SAMPLES_PER_SPLIT
        self._batches: list[dict[str, Ragged | NDArray[Any]]] = []
        self._waiting_bytes = 0

    def append_batch(self, columns: Mapping[str, Any]) -> None:
        """Add samples."""
        num_samples = len(next(iter(columns.values())))
        keys = self._keys(np.arange(self._number, self._number + num_samples))
        self._number += num_samples
        batch = convert_columns(self._writer.schema, {**columns, SHUFFLE_KEY: keys})
        self._batches.append(batch)
        self._waiting_bytes += sum(_num_bytes(column) for column in batch.values())
        if self._waiting_bytes >= _DEALT_BYTES:
            self._flush()

    def finish(self) -> tuple[ShardEntry, ...]:
        """Write what is still waiting and return all shards."""
        self._flush()
        return self._writer.finish()

    def _flush(self) -> None:
        """Write what has been collected as one sorted shard."""
        if not self._batches:
            return
        columns = {name: join_samples([batch[name] for batch in self._batches]) for name in self._writer.schema}
        self._batches, self._waiting_bytes = [], 0
        keys = columns[SHUFFLE_KEY]
        assert isinstance(keys, np.ndarray)
        for batch in _read_in_order(storage_of_arrays(columns), np.argsort(keys), self._writer.schema):
            self._writer.append_converted(batch)
        self._writer.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTask:
    """One bucket: the samples whose shuffle keys are in [low, high)."""

    key: str
    low: int
    high: int
    num_bytes: int
    needs_this_process: bool = False

    def __str__(self) -> str:
        return f"shuffle keys {self.low:,} to {self.high:,} ({self.num_bytes:,} bytes)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherJob:
    """What all buckets have in common."""

    destination: Path
    specification: Specification

    def open(self) -> Runner:
        """Open the dealt shards."""
        return _GatherRunner(self)


def plan_gathering(work: WorkFolder, specification: Specification, records: Sequence[TaskRecord]) -> list[GatherTask]:
    """Buckets for what the first pass dealt; a manifest makes those shards readable as one dataset."""
    shards = tuple(shard for record in records for shard in record.shards)
    with work.open("dealt") as dealt:
        dealt.remove("manifest.json")  # a killed run may have left one
        dealt.create("manifest.json", [Manifest(dealt_schema(specification), shards).to_bytes()])
    num_bytes = sum(shard.num_bytes - shard.header_bytes for shard in shards)
    bounds = _bucket_bounds(num_bytes, choose_task_bytes(num_bytes, specification.shard_bytes, 1.0))
    content = digest_json([specification.key, [shard.to_json() for shard in shards]])
    return [
        GatherTask(key=digest_json([content, low, high]), low=low, high=high, num_bytes=num_bytes // len(bounds))
        for low, high in bounds
        if shards
    ]


def _bucket_bounds(num_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Ranges of shuffle keys that hold about `bucket_bytes` each."""
    count = max(1, math.ceil(num_bytes / max(1, int(_FULLNESS * bucket_bytes))))
    borders = [number * _NUM_KEYS // count for number in range(count + 1)]
    return list(itertools.pairwise(borders))


class _GatherRunner:
    def __init__(self, job: GatherJob) -> None:
        self._specification = job.specification
        self._work = WorkFolder(job.destination)
        # The shards were written minutes ago, by this machine or a peer. Their checksums are checked anyway: this is
        # the only time they are ever read.
        self._folder = ShardFolder(self._work.path / "dealt", io="auto", check="window")
        self._writer = ShardWriter(self._specification.schema, self._specification.shard_bytes, no_store)

    def run(self, task: GatherTask, tell: Tell) -> Attempt:
        with Attempt(self._work, task.key) as attempt:
            self._writer.restart(attempt.store, first_number=attempt.first_number)
            return attempt.complete(self._write(task, Tally(tell)))

    def _write(self, task: GatherTask, tally: Tally) -> TaskRecord:
        order = _order_of_bucket(self._folder, task.low, task.high)
        for batch in _read_in_order(self._folder, order, self._specification.schema.shown):
            tally.charge("read")
            self._writer.append_converted(batch)
            tally.charge("write")
            _count(tally.counts, batch, task.num_bytes, len(order))
            tally.report()
        shards = self._writer.finish()
        tally.charge("write")
        tally.report()
        return TaskRecord(
            key=task.key,
            shelf="ready",
            shards=shards,
            splits=(),
            skipped={},
            examples=(),
            noticed={},
            counts=tally.total,
            peak_bytes=peak_memory(),
        )


def _count(counts: Counts, batch: dict[str, Ragged | NDArray[Any]], num_bytes: int, num_samples: int) -> None:
    counts.documents = len(next(iter(batch.values())))
    counts.raw_bytes = num_bytes * counts.documents // max(1, num_samples)
    tokens = batch.get("tokens")
    counts.tokens = len(tokens.values) if isinstance(tokens, Ragged) else 0


def _order_of_bucket(folder: ShardFolder, low: int, high: int) -> Int64:
    """Samples whose shuffle keys are in [low, high), in the order of their keys."""
    begins, ends = _find_key(folder, low), _find_key(folder, high)
    indices = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
    keys = np.empty(len(indices), np.int64)
    folder.read_fixed(folder.schema[SHUFFLE_KEY], indices, keys)
    return indices[np.argsort(keys)]


def _read_in_order(storage: Storage, order: Int64, schema: Schema) -> Iterator[dict[str, Ragged | NDArray[Any]]]:
    """Samples `order` of a storage, a few megabytes at a time."""
    step = samples_per_chunk(storage, storage.schema.columns, _CHUNK_BYTES)
    for begin in range(0, len(order), step):
        indices = np.ascontiguousarray(order[begin : begin + step])
        yield {column.name: read_samples(storage, column, indices) for column in schema.columns}


def _find_key(folder: ShardFolder, key: int) -> Int64:
    """In each shard, the index of the first sample whose shuffle key is at least `key`; bisects all shards at once."""
    low, high = folder.starts[:-1].copy(), folder.starts[1:].copy()
    found = np.empty(len(low), np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, folder.num_samples - 1)
        folder.read_fixed(folder.schema[SHUFFLE_KEY], middle, found)
        is_open = low < high
        low = np.where(is_open & (found < key), middle + 1, low)
        high = np.where(is_open & (found >= key), middle, high)
    return low


def _num_bytes(column: Ragged | NDArray[Any]) -> int:
    return column.values.nbytes + column.offsets.nbytes if isinstance(column, Ragged) else column.nbytes

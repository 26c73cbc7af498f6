"""The second pass of a shuffle as tasks: each writes one bucket of the permuted dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.filesystem import create_file, remove_if_present
from penstock.identity import digest_json
from penstock.preparation._deal import bucket_bounds, dealt_schema, order_of_bucket, read_in_order
from penstock.preparation._jobs import Clock, Runner, Tell, Written, no_store, peak_memory
from penstock.preparation._plan import choose_task_bytes
from penstock.preparation._progress import Counts
from penstock.preparation._recipe import Recipe
from penstock.preparation._record import TaskRecord
from penstock.preparation._work import Attempt, WorkFolder
from penstock.schema import Ragged
from penstock.shards import Manifest, ShardFolder, ShardWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTask:
    """The samples whose places are in [low, high)."""

    key: str
    low: int
    high: int
    num_bytes: int
    needs_this_process: bool = False

    def __str__(self) -> str:
        return f"shuffle places {self.low:,} to {self.high:,} ({self.num_bytes:,} bytes)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherJob:
    """What is the same for all buckets."""

    destination: Path
    recipe: Recipe

    def open(self) -> Runner[GatherTask]:
        """Open the dealt shards."""
        return _GatherRunner(self)


def plan_gathering(destination: Path, recipe: Recipe, records: Sequence[TaskRecord]) -> list[GatherTask]:
    """Buckets for what the first pass has dealt, whose shards become readable as one dataset."""
    shards = tuple(shard for record in records for shard in record.shards)
    _write_manifest(WorkFolder(destination).path / "dealt", Manifest(dealt_schema(recipe), shards))
    num_bytes = sum(shard.num_bytes - shard.header_bytes for shard in shards)
    bounds = bucket_bounds(num_bytes, choose_task_bytes(num_bytes, recipe.shard_bytes, 1.0))
    content = digest_json([recipe.key, [shard.to_json() for shard in shards]])
    return [
        GatherTask(key=digest_json([content, low, high]), low=low, high=high, num_bytes=num_bytes // len(bounds))
        for low, high in bounds
        if shards
    ]


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    path = folder / "manifest.json"
    remove_if_present(path)  # a killed run may have left one; the shards it names are the same or gone
    create_file(path, [manifest.to_bytes()])


class _GatherRunner:
    def __init__(self, job: GatherJob) -> None:
        self._recipe = job.recipe
        self._work = WorkFolder(job.destination)
        # Shards were written and synced minutes ago by this machine or a peer: their checksums are still compared,
        # because this is the only time that anybody reads them.
        self._folder = ShardFolder(self._work.path / "dealt", io="auto", check="window")
        self._writer = ShardWriter(self._recipe.schema, self._recipe.shard_bytes, no_store)

    def run(self, task: GatherTask, tell: Tell) -> Written:
        attempt = self._work.attempt(task.key)
        try:
            record = self._write(task, attempt, tell)
        except BaseException:
            attempt.drop()
            raise
        return Written(attempt, record)

    def _write(self, task: GatherTask, attempt: Attempt, tell: Tell) -> TaskRecord:
        schema, total, counts = self._recipe.schema, Counts(), Counts()
        clock = Clock(counts)
        writer = self._writer
        writer.restart(attempt.store, first_number=attempt.first_number)
        order = order_of_bucket(self._folder, task.low, task.high)
        for batch in read_in_order(self._folder, order, schema):
            clock.charge("read")
            writer.append_converted(batch)
            clock.charge("write")
            _count(counts, batch, task.num_bytes, len(order))
            total.add(counts)
            tell(counts)
            counts = clock.counts = Counts()
        shards = writer.finish()
        clock.charge("write")
        total.add(counts)
        tell(counts)
        return TaskRecord(
            key=task.key,
            shelf="ready",
            shards=shards,
            splits=(),
            skipped={},
            examples=(),
            counts=total,
            peak_bytes=peak_memory(),
        )


def _count(counts: Counts, batch: dict[str, Ragged | np.ndarray[Any, Any]], num_bytes: int, num_samples: int) -> None:
    counts.documents = len(next(iter(batch.values())))
    counts.raw_bytes = num_bytes * counts.documents // max(1, num_samples)
    tokens = batch.get("tokens")
    counts.tokens = len(tokens.values) if isinstance(tokens, Ragged) else 0

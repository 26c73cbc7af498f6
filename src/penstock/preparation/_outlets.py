"""Where the samples of a task go: one outlet for each dataset being made, which keeps those that belong to it.

    Target            a dataset to make: all samples, or one part of a split
    TargetWriter      writes it in one worker, task after task
    Outlet            its share of one task: shards, the rows they came from, the record

The record is the same as if the dataset had been made by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.preparation._attempt import Attempt
from penstock.preparation._jobs import Tally, no_store, peak_memory
from penstock.preparation._parts import Part
from penstock.preparation._shuffle import Dealer, dealt_schema
from penstock.preparation._skipping import Skipped
from penstock.preparation._specification import Specification
from penstock.preparation._task_record import TaskRecord
from penstock.preparation._tasks import Task
from penstock.preparation._work_folder import WorkFolder
from penstock.schema import Ragged, Schema, take_samples
from penstock.shards import OriginRuns, ShardEntry, ShardWriter, convert_columns
from penstock.sources import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One dataset that tasks make samples for."""

    destination: Path
    specification: Specification

    @property
    def part(self) -> Part | None:
        """Which part of a split it is, if any."""
        return None if self.specification.part is None else Part.from_json(self.specification.part)


class _Sink(Protocol):
    def append_batch(self, columns: Mapping[str, Any]) -> None: ...
    def finish(self) -> tuple[ShardEntry, ...]: ...


class TargetWriter:
    """Writes the samples of one dataset, task after task."""

    def __init__(self, target: Target) -> None:
        self.work = WorkFolder(target.destination)
        self._specification, self._part = target.specification, target.part
        # One for all tasks: its buffer is faulted in once (70 MB of tokens: 0.21 s of CPU time if fresh, 0.03 if not).
        self._writer = ShardWriter(_stored_schema(target.specification), target.specification.shard_bytes, no_store)

    def open(self, task: Task, attempt: Attempt) -> Outlet:
        """An outlet for the samples of a task."""
        self._writer.restart(attempt.store, first_number=attempt.first_number)
        seed = self._specification.shuffle
        dealer = None if seed is None else Dealer(self._writer, seed=seed, first_split=task.first_split)
        return Outlet(attempt.key, self._specification, self._part, dealer or self._writer)


class Outlet:
    """Takes the samples of one task that belong to one dataset, and records which rows they came from."""

    def __init__(self, key: str, specification: Specification, part: Part | None, sink: _Sink) -> None:
        self._key, self._specification, self._part, self._sink = key, specification, part, sink
        self._origins: list[OriginRuns] = []
        self.counts_bad_rows = part is None or part.is_largest

    def begin_split(self) -> None:
        """The next samples come from the next split."""
        self._origins.append(OriginRuns())

    def write(self, samples: MadeSamples) -> None:
        """Store the samples that belong to this dataset."""
        columns, rows = samples.columns, samples.rows
        if self._part is not None:
            columns, rows = samples.of(self._part, self._specification.schema)
        if len(rows):
            self._sink.append_batch(columns)
        self._origins[-1].add(rows)

    def finish(self, skipped: Skipped, noticed: Mapping[str, int], tally: Tally) -> TaskRecord:
        """Close the shards; return what was made, and what was skipped."""
        shards = self._sink.finish()
        tally.charge("write")
        is_traced = self._specification.origins == "manifest"
        return TaskRecord(
            key=self._key,
            shelf="ready" if self._specification.shuffle is None else "dealt",
            shards=shards,
            splits=tuple((runs.num_samples, runs.rows() if is_traced else None) for runs in self._origins),
            skipped=skipped.by_reason if self.counts_bad_rows else {},
            examples=tuple(skipped.examples) if self.counts_bad_rows else (),
            noticed=noticed if self.counts_bad_rows else {},
            counts=tally.total,
            peak_bytes=peak_memory(),
        )


class MadeSamples:
    """Samples of one batch, before it is decided which dataset they belong to."""

    def __init__(self, columns: Mapping[str, Any], rows: NDArray[np.int64], split: Split) -> None:
        self.columns = columns
        self.rows = rows
        """The row of the split that each came from."""
        self._split = split
        self._converted: dict[str, Ragged | NDArray[Any]] = {}
        self._keys: NDArray[np.uint64] | None = None

    def of(self, part: Part, schema: Schema) -> tuple[Mapping[str, Any], NDArray[np.int64]]:
        """The samples of a part, and their rows; keys are computed once for all parts of a split."""
        if self._keys is None:
            self._converted = convert_columns(schema, self.columns)
            paths = [self._split.path_of_row(row) for row in self.rows.tolist()] if part.by == "file" else ()
            self._keys = part.keys(schema, self._converted, paths)
        places = part.places(self._keys)
        return {name: take_samples(column, places) for name, column in self._converted.items()}, self.rows[places]


def _stored_schema(specification: Specification) -> Schema:
    return specification.schema if specification.shuffle is None else dealt_schema(specification)

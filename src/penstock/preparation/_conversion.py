"""One task in one worker: read, transform, write, and account for every row.

The same task gives the same bytes wherever it runs: splits are read in order, batches are cut as the source cuts
them, and shards are cut only by size. With a shuffle, samples go to a `Dealer` instead of straight into shards, and
carry their origin.

If the dataset is split into parts, a task makes the samples of all parts at once: each part has its own writer, with
its own shards and its own record in its own work folder, exactly as if it had been prepared alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError, printable
from penstock.preparation._parts import Part
from penstock.preparation._progress import Runner, Tally, Tell, peak_memory
from penstock.preparation._records import (
    Skipped,
    TaskRecord,
    locate,
    name_file_in_schema_errors,
    sum_counts,
    without_files,
)
from penstock.preparation._shuffle import Dealer, dealt_schema
from penstock.preparation._specification import OnError, Specification
from penstock.preparation._tasks import Task
from penstock.preparation._work_folder import Attempt, WorkFolder, no_store
from penstock.schema import Ragged, Schema, take_samples
from penstock.shards import ORIGIN_COLUMN, OriginRuns, ShardWriter, convert_columns
from penstock.sources import Records, SourceOptions, Split, read_split
from penstock.transforms import OpenTransform, Output, Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One dataset that tasks make samples for: all samples, or one part of a split."""

    destination: Path
    specification: Specification


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionJob:
    """What all tasks of a run have in common; picklable, sent once to each worker."""

    target: Target
    others: tuple[Target, ...] = ()
    """The other parts, if the dataset is split, in the order of `Task.keys_of_others`."""
    transform: Transform
    reading: SourceOptions
    on_error: OnError
    max_skipped: int | None

    def open(self) -> Runner:
        """Load what tasks need; called once in each worker."""
        return _TaskRunner(self)


class _TaskRunner:
    """Runs tasks of one job in this process; the transform is opened once."""

    def __init__(self, job: ConversionJob) -> None:
        self._job = job
        self._opened: OpenTransform = job.transform.open()
        self._writers = [_TargetWriter(target) for target in (job.target, *job.others)]

    def run(self, task: Task, tell: Tell) -> Attempt:
        """Do all of a task except the last step, which makes its shards durable.

        Raises:
            FormatError: a row or file is bad, and `on_error` is "raise".
            SchemaError: the transform's output does not fit the columns.
            StorageError: the disk is full or failing.
        """
        keys = (task.key, *(task.keys_of_others or (None,) * len(self._job.others)))
        pairs = [(writer, key) for writer, key in zip(self._writers, keys, strict=True) if key is not None]
        with contextlib.ExitStack() as stack:
            attempts = [stack.enter_context(writer.begin(key, task.first_split)) for writer, key in pairs]
            records = _TaskRun(self._job, self._opened, task, [writer for writer, _ in pairs], tell).run()
            for attempt, record in zip(attempts[1:], records[1:], strict=True):
                attempt.complete(record)
            return attempts[0].complete(records[0], after=attempts[1:])


class _TaskRun:
    """The state of one task while it runs."""

    def __init__(
        self, job: ConversionJob, opened: OpenTransform, task: Task, writers: Sequence[_TargetWriter], tell: Tell
    ) -> None:
        self._job = job
        self._opened = opened
        self._task = task
        self._skipped = Skipped(job.on_error, job.max_skipped)
        self._noticed: dict[str, int] = {}
        self._has_samples = False
        self._tally = Tally(tell)
        self._writers = writers
        limit = job.target.specification.limit
        self._num_left = limit if limit is not None else sys.maxsize

    def run(self) -> list[TaskRecord]:
        for number, split in enumerate(self._task.splits, self._task.first_split):
            self._run_split(number, split)
        records = [writer.finish(self._skipped, self._noticed, self._tally) for writer in self._writers]
        self._report()
        return records

    def _run_split(self, number: int, split: Split) -> None:
        for writer in self._writers:
            writer.begin_split()
        for records in self._read(split):
            self._tally.charge("read")
            output = self._transform(split, records)
            self._tally.charge("transform")
            rows = records.row_numbers()[output.sources]
            with name_file_in_schema_errors(split.path):
                self._write(number, split, output, rows)
            self._tally.charge("write")
            self._count(records, output)
        self._tally.charge("read")

    def _read(self, split: Split) -> Iterator[Records]:
        """Records of a split; if rows may be skipped, a damaged file ends it early."""
        num_rows = 0
        try:
            for records in read_split(split, self._job.reading) if self._num_left else ():
                num_rows = records.first_row + records.num_rows
                yield records
                if not self._num_left:
                    return
        except FormatError as error:
            self._skipped.add_file(split, num_rows, error)

    def _transform(self, split: Split, records: Records) -> Output:
        self._skipped.add(split, records.errors, are_all=not (self._has_samples or records.num_rows))
        if not records.num_rows:  # only bad rows: there may not even be columns
            return Output({}, np.empty(0, np.int64))
        try:
            with name_file_in_schema_errors(split.path):
                output = self._opened(records)
        except SchemaError:  # it already names its file
            raise
        except Exception as error:
            error.add_note(printable(f"while preparing {locate(split, records.first_row)} and the rows after it"))
            raise
        self._has_samples |= output.num_samples > 0
        self._skipped.add(split, output.errors, are_all=not self._has_samples)
        self._noticed = sum_counts([self._noticed, output.noticed])
        return output

    def _write(self, number: int, split: Split, output: Output, rows: NDArray[np.int64]) -> None:
        columns = dict(output.columns)
        specification = self._job.target.specification
        if specification.origins == "column":
            if ORIGIN_COLUMN in columns:
                raise SchemaError(f"The transform makes a column {ORIGIN_COLUMN!r}, a reserved name. Rename it.")
            columns[ORIGIN_COLUMN] = np.stack([np.full(len(rows), number, np.int64), rows], axis=1)
        if len(rows) > self._num_left:
            first = np.arange(self._num_left)
            converted = convert_columns(specification.schema, columns)
            columns, rows = {name: take_samples(each, first) for name, each in converted.items()}, rows[first]
        self._num_left -= len(rows)
        if len(rows):
            samples = _MadeSamples(columns, rows, split)
            for writer in self._writers:
                writer.write(samples)

    def _count(self, records: Records, output: Output) -> None:
        counts, tokens = self._tally.counts, output.columns.get("tokens")
        counts.documents += output.num_samples
        counts.raw_bytes += records.num_bytes
        counts.tokens += len(tokens.values) if isinstance(tokens, Ragged) else 0
        self._report()

    def _report(self) -> None:
        self._tally.counts.skipped = self._skipped.total - self._tally.total.skipped
        self._tally.report()


class _TargetWriter:
    """Writes the samples that belong to one dataset, task after task, and records which rows they came from.

    A record is the same as if the dataset had been made by itself.
    """

    def __init__(self, target: Target) -> None:
        specification = target.specification
        self._specification = specification
        self._part = None if specification.part is None else Part.from_json(specification.part)
        self._counts_bad_rows = self._part is None or self._part.is_largest
        self._work = WorkFolder(target.destination)
        stored = specification.schema if specification.shuffle is None else dealt_schema(specification)
        # One for all tasks: its buffer is faulted in once (70 MB of tokens: 0.21 s of CPU time if fresh, 0.03 if not).
        self._writer = ShardWriter(stored, specification.shard_bytes, no_store)
        self._sink: ShardWriter | Dealer = self._writer
        self._key = ""
        self._origins: list[OriginRuns] = []

    def begin(self, key: str, first_split: int) -> Attempt:
        """Begin a task."""
        attempt = Attempt(self._work, key)
        self._writer.restart(attempt.store, first_number=attempt.first_number)
        seed = self._specification.shuffle
        self._sink = self._writer if seed is None else Dealer(self._writer, seed=seed, first_split=first_split)
        self._key, self._origins = key, []
        return attempt

    def begin_split(self) -> None:
        """The next samples come from the next split."""
        self._origins.append(OriginRuns())

    def write(self, samples: _MadeSamples) -> None:
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
            splits=tuple(without_files(runs.num_samples, runs.rows() if is_traced else None) for runs in self._origins),
            skipped=skipped.by_reason if self._counts_bad_rows else {},
            examples=tuple(skipped.examples) if self._counts_bad_rows else (),
            noticed=noticed if self._counts_bad_rows else {},
            counts=tally.total,
            peak_bytes=peak_memory(),
        )


class _MadeSamples:
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
        mine = part.select(self._keys)
        return {name: take_samples(column, mine) for name, column in self._converted.items()}, self.rows[mine]

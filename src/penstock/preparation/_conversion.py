"""One task in one worker: read, transform, write, and account for every row.

The same task gives the same bytes wherever it runs: splits are read in order, batches are cut as the source cuts
them, and shards are cut by size alone. With a shuffle, samples go to a `Dealer` instead of straight into shards, and
carry their origin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.preparation._jobs import Runner, Tally, Tell, no_store, peak_memory
from penstock.preparation._settings import OnError
from penstock.preparation._shuffle import Dealer, dealt_schema
from penstock.preparation._skipping import Skipped, locate, name_file_in_schema_errors, sum_counts
from penstock.preparation._specification import Specification
from penstock.preparation._tasks import Task
from penstock.preparation._work_folder import Attempt, TaskRecord, WorkFolder
from penstock.schema import Ragged, Schema
from penstock.shards import ORIGIN_COLUMN, OriginRuns, ShardEntry, ShardWriter
from penstock.sources import Records, SourceOptions, Split, read_split
from penstock.transforms import OpenTransform, Output, Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionJob:
    """What all tasks of a run have in common; picklable, sent once to each worker."""

    destination: Path
    specification: Specification
    transform: Transform
    reading: SourceOptions
    on_error: OnError
    max_skipped: int | None

    def open(self) -> Runner[Task]:
        """Load what tasks need; called once in each worker."""
        return _TaskRunner(self)


class _Sink(Protocol):
    def append_batch(self, columns: Mapping[str, Any]) -> None: ...
    def finish(self) -> tuple[ShardEntry, ...]: ...


class _TaskRunner:
    """Runs tasks of one job in this process; the transform is opened once."""

    def __init__(self, job: ConversionJob) -> None:
        self._job = job
        self._opened: OpenTransform = job.transform.open()
        self._work = WorkFolder(job.destination)
        # One for all tasks: its buffer is faulted in once (70 MB of tokens: 0.21 s of CPU time fresh, 0.03 again).
        self._writer = ShardWriter(_stored_schema(job.specification), job.specification.shard_bytes, no_store)

    def run(self, task: Task, tell: Tell) -> Attempt:
        """Do all of a task but the last step, which makes its shards durable.

        Raises:
            FormatError: a row or file is bad, and `on_error` is "raise".
            SchemaError: the transform's output does not fit the columns.
            StorageError: the disk is full or failing.
        """
        with self._work.attempt(task.key) as attempt:
            self._writer.restart(attempt.store, first_number=attempt.first_number)
            attempt.complete(_TaskRun(self._job, self._opened, task, self._open_sink(task), tell).run())
        return attempt

    def _open_sink(self, task: Task) -> _Sink:
        seed = self._job.specification.shuffle
        return self._writer if seed is None else Dealer(self._writer, seed=seed, first_split=task.first_split)


class _TaskRun:
    """The state of one task while it runs."""

    def __init__(self, job: ConversionJob, opened: OpenTransform, task: Task, sink: _Sink, tell: Tell) -> None:
        self._job = job
        self._opened = opened
        self._task = task
        self._skipped = Skipped(job.on_error, job.max_skipped)
        self._noticed: dict[str, int] = {}
        self._tally = Tally(tell)
        self._sink = sink

    def run(self) -> TaskRecord:
        numbered = enumerate(self._task.splits, self._task.first_split)
        origins = [self._run_split(number, split) for number, split in numbered]
        shards = self._sink.finish()
        self._tally.charge("write")
        self._report()
        is_traced = self._job.specification.origins == "manifest"
        return TaskRecord(
            key=self._task.key,
            shelf="ready" if self._job.specification.shuffle is None else "dealt",
            shards=shards,
            splits=tuple((runs.num_samples, runs.rows() if is_traced else None) for runs in origins),
            skipped=self._skipped.by_reason,
            examples=tuple(self._skipped.examples),
            noticed=self._noticed,
            counts=self._tally.total,
            peak_bytes=peak_memory(),
        )

    def _run_split(self, number: int, split: Split) -> OriginRuns:
        runs = OriginRuns()
        for records in self._read(split):
            self._tally.charge("read")
            output = self._transform(split, records)
            self._tally.charge("transform")
            rows = records.row_numbers()[output.sources]
            with name_file_in_schema_errors(split.path):
                self._write(number, output, rows)
            runs.add(rows)
            self._tally.charge("write")
            self._count(records, output)
        self._tally.charge("read")
        return runs

    def _read(self, split: Split) -> Iterator[Records]:
        """Records of a split; where rows may be skipped, a damaged file ends it early."""
        num_rows = 0
        try:
            for records in read_split(split, self._job.reading):
                num_rows = records.first_row + records.num_rows
                yield records
        except FormatError as error:
            self._skipped.add_file(split, num_rows, error)

    def _transform(self, split: Split, records: Records) -> Output:
        self._skipped.add(split, records.errors)
        if not records.num_rows:  # nothing but bad rows: there may not even be columns
            return Output({}, np.empty(0, np.int64))
        try:
            with name_file_in_schema_errors(split.path):
                output = self._opened(records)
        except SchemaError:  # it names its file already
            raise
        except Exception as error:
            error.add_note(f"while preparing {locate(split, records.first_row)} and the rows after it")
            raise
        self._skipped.add(split, output.errors)
        self._noticed = sum_counts([self._noticed, output.noticed])
        return output

    def _write(self, split_number: int, output: Output, rows: NDArray[np.int64]) -> None:
        columns = dict(output.columns)
        if self._job.specification.origins == "column":
            if ORIGIN_COLUMN in columns:
                raise SchemaError(f"The transform makes a column {ORIGIN_COLUMN!r}, a reserved name. Rename it.")
            columns[ORIGIN_COLUMN] = np.stack([np.full(len(rows), split_number, np.int64), rows], axis=1)
        if output.num_samples:
            self._sink.append_batch(columns)

    def _count(self, records: Records, output: Output) -> None:
        counts, tokens = self._tally.counts, output.columns.get("tokens")
        counts.documents += output.num_samples
        counts.raw_bytes += records.num_bytes
        counts.tokens += len(tokens.values) if isinstance(tokens, Ragged) else 0
        self._report()

    def _report(self) -> None:
        self._tally.counts.skipped = self._skipped.total - self._tally.total.skipped
        self._tally.report()


def _stored_schema(specification: Specification) -> Schema:
    return specification.schema if specification.shuffle is None else dealt_schema(specification)

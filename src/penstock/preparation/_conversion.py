"""One task in one worker: read, transform, write, and account for every row.

The same task gives the same bytes wherever it runs: splits are read in order, batches are cut as the source cuts
them, and shards are cut only by size. With a shuffle, samples go to a `Dealer` instead of straight into shards, and
carry their origin.

If the dataset is split into parts, a task makes the samples of all parts at once: each part has its own outlet, with
its own shards and its own record in its own work folder, exactly as if it had been prepared alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError, printable
from penstock.preparation._attempt import Attempt
from penstock.preparation._jobs import Runner, Tally, Tell
from penstock.preparation._outlets import MadeSamples, Outlet, Target, TargetWriter
from penstock.preparation._settings import OnError
from penstock.preparation._skipping import Skipped, locate, name_file_in_schema_errors, sum_counts
from penstock.preparation._task_record import TaskRecord
from penstock.preparation._tasks import Task
from penstock.schema import Ragged, take_samples
from penstock.shards import ORIGIN_COLUMN, convert_columns
from penstock.sources import Records, SourceOptions, Split, read_split
from penstock.transforms import OpenTransform, Output, Transform


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

    def open(self) -> Runner[Task]:
        """Load what tasks need; called once in each worker."""
        return _TaskRunner(self)


class _TaskRunner:
    """Runs tasks of one job in this process; the transform is opened once."""

    def __init__(self, job: ConversionJob) -> None:
        self._job = job
        self._opened: OpenTransform = job.transform.open()
        self._writers = [TargetWriter(target) for target in (job.target, *job.others)]

    def run(self, task: Task, tell: Tell) -> Attempt:
        """Do all of a task except the last step, which makes its shards durable.

        Raises:
            FormatError: a row or file is bad, and `on_error` is "raise".
            SchemaError: the transform's output does not fit the columns.
            StorageError: the disk is full or failing.
        """
        keys = (task.key, *(task.keys_of_others or (None,) * len(self._job.others)))
        with contextlib.ExitStack() as stack:
            pairs = [(writer, key) for writer, key in zip(self._writers, keys, strict=True) if key is not None]
            attempts = [stack.enter_context(Attempt(writer.work, key)) for writer, key in pairs]
            outlets = [writer.open(task, attempt) for (writer, _), attempt in zip(pairs, attempts, strict=True)]
            records = _TaskRun(self._job, self._opened, task, outlets, tell).run()
            for attempt, record in zip(attempts, records, strict=True):
                attempt.complete(record)
        return attempts[0].after(attempts[1:])


class _TaskRun:
    """The state of one task while it runs."""

    def __init__(
        self, job: ConversionJob, opened: OpenTransform, task: Task, outlets: Sequence[Outlet], tell: Tell
    ) -> None:
        self._job = job
        self._opened = opened
        self._task = task
        self._skipped = Skipped(job.on_error, job.max_skipped)
        self._noticed: dict[str, int] = {}
        self._tally = Tally(tell)
        self._outlets = outlets
        limit = job.target.specification.limit
        self._num_left = limit if limit is not None else sys.maxsize

    def run(self) -> list[TaskRecord]:
        for number, split in enumerate(self._task.splits, self._task.first_split):
            self._run_split(number, split)
        records = [outlet.finish(self._skipped, self._noticed, self._tally) for outlet in self._outlets]
        self._report()
        return records

    def _run_split(self, number: int, split: Split) -> None:
        for outlet in self._outlets:
            outlet.begin_split()
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
        self._skipped.add(split, records.errors)
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
        self._skipped.add(split, output.errors)
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
            samples = MadeSamples(columns, rows, split)
            for outlet in self._outlets:
                outlet.write(samples)

    def _count(self, records: Records, output: Output) -> None:
        counts, tokens = self._tally.counts, output.columns.get("tokens")
        counts.documents += output.num_samples
        counts.raw_bytes += records.num_bytes
        counts.tokens += len(tokens.values) if isinstance(tokens, Ragged) else 0
        self._report()

    def _report(self) -> None:
        self._tally.counts.skipped = self._skipped.total - self._tally.total.skipped
        self._tally.report()

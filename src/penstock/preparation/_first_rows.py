"""The first rows, read before any worker starts a task: which columns come out, and whether rows map one to one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.errors import FormatError, SchemaError
from penstock.preparation._runs import find_runs
from penstock.preparation._settings import Settings
from penstock.preparation._shuffle import SHUFFLE_KEY
from penstock.preparation._skipping import locate, name_file_in_schema_errors
from penstock.shards import ORIGIN_COLUMN, ORIGIN_SPEC, storage_of_arrays
from penstock.sources import Records, SourceOptions, Split, peek_split
from penstock.transforms import Output, Transform

# How many splits are searched for a first sample; an empty file or two is nothing unusual.
_MAX_SPLITS = 16
_SEED = 0
"""Of a shuffle that nobody asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """What the first rows showed."""

    transform: Transform
    """The transform to run, after it has seen the rows itself."""
    columns: dict[str, str]
    """Columns of the dataset."""
    origins: Literal["manifest", "column"]
    shuffle: int | None
    """Seed to permute all samples by: as given, or found to be needed."""
    runs: str | None
    """The column that comes in runs, if that is why they are permuted."""


def read_first_rows(
    transform: Transform, splits: Sequence[Split], reading: SourceOptions, settings: Settings, *, is_part: bool
) -> FirstRows:
    """Read the first rows of the sources and show them to the transform; `is_part` if not all samples will be stored.

    Raises:
        SchemaError: no row of the first splits gives a sample, or a column has a reserved name.
    """
    peek = _Peek(splits, reading)
    try:
        ready = transform.before_run(peek.records())
        columns, output = ready.columns(), None
        if columns is None:
            output = _first_output(ready, peek)
            columns = _types_of(output)
    except SchemaError as error:
        with name_file_in_schema_errors(peek.path):
            raise error
    for name in (ORIGIN_COLUMN, SHUFFLE_KEY):
        if name in columns:
            raise SchemaError(
                f"The transform makes a column {name!r}, a reserved name. Rename it, or do not --keep it."
            )
    runs = find_runs(splits, reading, columns) if settings.shuffle == "auto" and settings.origins == "auto" else None
    shuffle = settings.shuffle if settings.shuffle != "auto" else (None if runs is None else _SEED)
    origins = _choose_origins(settings, shuffle is not None or is_part, output)
    if origins == "column":
        columns = {**columns, ORIGIN_COLUMN: ORIGIN_SPEC}
    return FirstRows(transform=ready, columns=columns, origins=origins, shuffle=shuffle, runs=runs)


def _choose_origins(settings: Settings, is_scattered: bool, output: Output | None) -> Literal["manifest", "column"]:
    if settings.origins != "auto":
        return settings.origins
    if is_scattered:  # neighbouring samples are of rows far apart
        return "column"
    is_one_to_one = output is None or bool((np.diff(output.sources) == 1).all())
    return "manifest" if is_one_to_one else "column"


class _Peek:
    """Rows of the first splits, read only as far as they are asked for."""

    def __init__(self, splits: Sequence[Split], reading: SourceOptions) -> None:
        self._splits = splits[:_MAX_SPLITS]
        self._reading = reading
        self.path = splits[0].path if splits else "The sources"
        """The file being read."""
        self.fault = ""
        """The first bad row or file, in words. Tasks report it, unless no good row is found at all."""

    def records(self) -> Iterator[Records]:
        """Batches that have rows."""
        for split in self._splits:
            self.path = split.path
            try:
                for records in peek_split(split, self._reading):
                    if records.errors:
                        self._note(f"{locate(split, records.errors[0].row)}: {records.errors[0].message}")
                    if records.num_rows:
                        yield records
            except FormatError as error:
                self._note(str(error))

    def _note(self, fault: str) -> None:
        self.fault = self.fault or fault


def _types_of(output: Output) -> dict[str, str]:
    types: dict[str, str] = {}
    for name, column in output.columns.items():
        try:
            types |= storage_of_arrays({name: column}).schema.to_json()
        except SchemaError as error:
            message = str(error) if repr(name) in str(error) else f"Column {name!r} of the transform: {error}"
            raise SchemaError(message) from error
    return types


def _first_output(transform: Transform, peek: _Peek) -> Output:
    opened = transform.open()
    for records in itertools.islice(peek.records(), _MAX_SPLITS):
        output = opened(records)
        if output.num_samples:
            return output
        if output.errors:
            error = output.errors[0]
            raise FormatError(
                f"{peek.path}: row {error.row:,}: {error.message} No sample before it shows which columns there are."
            )
    if peek.fault:
        raise FormatError(f"{peek.fault} No good row before it shows which columns there are.")
    raise SchemaError(
        f"{peek.path}: neither it nor the files before it have any rows, so the columns are unknown. Check the sources."
    )

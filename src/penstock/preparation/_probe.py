"""A look at the first rows, before any worker does: which columns come out, and whether rows map one to one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.errors import FormatError, SchemaError
from penstock.preparation._deal import SHUFFLE_KEY
from penstock.preparation._settings import Settings
from penstock.preparation._skipping import locate, schema_errors_named
from penstock.shards import ORIGIN_COLUMN, ORIGIN_SPEC, storage_of_arrays
from penstock.sources import Records, SourceOptions, Split, peek_split
from penstock.transforms import Output, Transform

# Splits looked into for a first sample; an empty file or two is nothing unusual.
_MAX_SPLITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the first rows have shown."""

    transform: Transform
    """The transform to run, after its own look at the rows."""
    columns: dict[str, str]
    origins: Literal["manifest", "column"]


def probe(transform: Transform, splits: Sequence[Split], reading: SourceOptions, settings: Settings) -> Probe:
    """Look at the first rows of the sources.

    Raises:
        SchemaError: no row of the first splits gives a sample, or a column has a name that is taken.
    """
    look = _Look(splits, reading)
    try:
        ready = transform.before_run(look.records())
        columns, output = ready.columns(), None
        if columns is None:
            output = _first_output(ready, look)
            columns = _types_of(output)
    except SchemaError as error:
        with schema_errors_named(look.path):
            raise error
    for name in (ORIGIN_COLUMN, SHUFFLE_KEY):
        if name in columns:
            raise SchemaError(
                f"The transform makes a column {name!r}, a name that `prepare` needs. Rename it, or do not --keep it."
            )
    origins = _choose_origins(settings, output)
    return Probe(transform=ready, columns=with_origin(columns, origins), origins=origins)


def with_origin(columns: dict[str, str], origins: Literal["manifest", "column"]) -> dict[str, str]:
    """Columns of the dataset for those that the transform makes."""
    return {**columns, ORIGIN_COLUMN: ORIGIN_SPEC} if origins == "column" else columns


def _choose_origins(settings: Settings, output: Output | None) -> Literal["manifest", "column"]:
    if settings.origins != "auto":
        return settings.origins
    if settings.shuffle is not None:
        return "column"
    is_one_to_one = output is None or bool((np.diff(output.sources) == 1).all())
    return "manifest" if is_one_to_one else "column"


class _Look:
    """Rows of the first splits, for as long as whoever looks has not seen enough."""

    def __init__(self, splits: Sequence[Split], reading: SourceOptions) -> None:
        self._splits = splits[:_MAX_SPLITS]
        self._reading = reading
        self.path = splits[0].path if splits else "The sources"
        """The file that is looked at."""
        self.fault = ""
        """The first bad row or file that was met, in words. It is for tasks to say so, unless no good row is found."""

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


def _first_output(transform: Transform, look: _Look) -> Output:
    opened = transform.open()
    for records in itertools.islice(look.records(), _MAX_SPLITS):
        output = opened(records)
        if output.num_samples:
            return output
        if output.errors:
            error = output.errors[0]
            raise FormatError(f"{look.path}: row {error.row:,}: {error.message} No sample shows the columns.")
    if look.fault:
        raise FormatError(f"{look.fault} No good row before it shows which columns there are.")
    raise SchemaError(
        f"{look.path}: no row in it, nor in files before it, so that the columns are unknown. Check the sources."
    )

"""A look at the first rows, before any worker does: which columns come out, and whether rows map one to one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.errors import FormatError, SchemaError
from penstock.preparation._deal import SHUFFLE_KEY
from penstock.preparation._recipe import ORIGIN_COLUMN, ORIGIN_SPEC
from penstock.preparation._settings import Settings
from penstock.preparation._transforms import Output, Transform
from penstock.shards import storage_of_arrays
from penstock.sources import Records, SourceOptions, Split, read_split

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
    ready = transform.before_run(_first_records(splits, reading))
    columns, output = ready.columns(), None
    if columns is None:
        output = _first_output(ready, splits, reading)
        columns = storage_of_arrays(dict(output.columns)).schema.to_json()
    for name in (ORIGIN_COLUMN, SHUFFLE_KEY):
        if name in columns:
            raise SchemaError(f"The transform makes a column {name!r}, a name that `prepare` needs. Rename it.")
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


def _first_records(splits: Sequence[Split], reading: SourceOptions) -> Iterator[Records]:
    """Rows of the first splits, until whoever looks has seen enough. What is wrong with them is for tasks to say."""
    for split in splits[:_MAX_SPLITS]:
        try:
            yield from (records for records in read_split(split, reading) if records.num_rows)
        except FormatError:
            continue


def _first_output(transform: Transform, splits: Sequence[Split], reading: SourceOptions) -> Output:
    opened = transform.open()
    for records in itertools.islice(_first_records(splits, reading), _MAX_SPLITS):
        output = opened(records)
        if output.num_samples:
            return output
        if output.errors:
            error = output.errors[0]
            raise FormatError(f"{splits[0].path}: row {error.row:,}: {error.message} No sample shows the columns.")
    raise SchemaError(
        f"The first {min(len(splits), _MAX_SPLITS)} parts of the sources gave no sample, so the columns are unknown. "
        "Check the sources and the transform."
    )

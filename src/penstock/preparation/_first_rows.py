"""The first rows, read before any worker starts a task.

They show which columns come out, and whether samples map to rows one to one. And whether the sources hold one class
after the other: a windowed shuffle mixes about a gigabyte at a time, so in smaller sources the order does not matter.
In larger ones, the first rows of eight splits are compared. If rows of one split share a label far more often than
rows of different splits, samples are permuted when they are written.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.preparation._records import locate, name_file_in_schema_errors
from penstock.preparation._shuffle import SHUFFLE_KEY
from penstock.preparation._specification import Settings
from penstock.schema import LABEL_COLUMNS
from penstock.shards import ORIGIN_COLUMN, ORIGIN_SPEC, storage_of_arrays
from penstock.sources import Records, SourceOptions, Split, peek_split
from penstock.transforms import Output, Transform

# How many splits are searched for a first sample; an empty file or two is not unusual.
_MAX_SPLITS = 16
_MIN_BYTES_FOR_RUNS = 1 << 30
_SPLITS_TO_COMPARE = 8
_ROWS_TO_COMPARE = 256
_IN_RUNS = 0.5
"""How much likelier rows of one split are to share a label, as a share of the possible excess."""
_SEED = 0
"""Seed of a shuffle that nobody requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """What the first rows showed."""

    transform: Transform
    """The transform to run, after it has seen the rows."""
    columns: dict[str, str]
    """Columns of the dataset."""
    origins: Literal["manifest", "column"]
    shuffle: int | None
    """Seed to permute all samples by, as given or because it is needed."""
    runs: str | None
    """The column that comes in runs, if that is why samples are permuted."""


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
    shuffle, runs = settings.shuffle, None
    if shuffle == "auto":
        runs = _find_runs(splits, reading, columns) if settings.origins == "auto" else None
        shuffle = None if runs is None else _SEED
    origins = _choose_origins(settings, shuffle is not None or is_part, output)
    if origins == "column":
        columns = {**columns, ORIGIN_COLUMN: ORIGIN_SPEC}
    return FirstRows(transform=ready, columns=columns, origins=origins, shuffle=shuffle, runs=runs)


def _choose_origins(settings: Settings, is_scattered: bool, output: Output | None) -> Literal["manifest", "column"]:
    if settings.origins != "auto":
        return settings.origins
    if is_scattered:  # neighbouring samples come from rows far apart
        return "column"
    is_one_to_one = output is None or bool((np.diff(output.sources) == 1).all())
    return "manifest" if is_one_to_one else "column"


class _Peek:
    """Rows of the first splits, read only as far as needed."""

    def __init__(self, splits: Sequence[Split], reading: SourceOptions) -> None:
        self._splits = splits[:_MAX_SPLITS]
        self._reading = reading
        self.path = splits[0].path if splits else "The sources"
        """The file being read."""
        self.fault = ""
        """The first bad row or file, in words. Tasks report it, so it matters only if there is no good row."""

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
                f"{peek.path}: row {error.row:,}: {error.message} No earlier row shows which columns there are."
            )
    if peek.fault:
        raise FormatError(f"{peek.fault} No earlier row shows which columns there are.")
    raise SchemaError(
        f"{peek.path}: neither this nor the files before it have any rows, so the columns are unknown. "
        "Check the sources."
    )


def _find_runs(splits: Sequence[Split], reading: SourceOptions, columns: Collection[str]) -> str | None:
    """The first of these columns of classes that comes in runs; None if there is none, or the sources are small."""
    names = [name for name in LABEL_COLUMNS if name in columns]
    if not names or sum(max(0, split.num_bytes) for split in splits) < _MIN_BYTES_FOR_RUNS or len(splits) < 2:
        return None
    chosen = {int(number) for number in np.linspace(0, len(splits) - 1, _SPLITS_TO_COMPARE)}
    peeks = [_peek_labels(splits[number], reading, names) for number in sorted(chosen)]
    return next((name for name in names if _comes_in_runs([peek[name] for peek in peeks if name in peek])), None)


def _peek_labels(split: Split, reading: SourceOptions, names: Sequence[str]) -> dict[str, list[str]]:
    """Labels of the first rows of a split; what is damaged is for its task to report."""
    try:
        records = next((each for each in peek_split(split, reading) if each.num_rows), None)
    except FormatError:
        return {}
    found = records.columns if records is not None else {}
    return {name: [str(label) for label in found[name][:_ROWS_TO_COMPARE]] for name in names if name in found}


def _comes_in_runs(splits: Sequence[Sequence[str]]) -> bool:
    """Whether labels do; `splits` are the first labels of each."""
    if len(splits) < 2:
        return False
    names, numbers = np.unique([label for labels in splits for label in labels], return_inverse=True)
    ends = np.cumsum([len(labels) for labels in splits])[:-1]
    within = np.mean([_alike(part, len(names)) for part in np.split(numbers, ends)])
    across = _alike(numbers, len(names))
    return across < 1 and bool((within - across) / (1 - across) > _IN_RUNS)


def _alike(numbers: NDArray[np.int64], num_labels: int) -> float:
    """How often two of these are the same."""
    shares = np.bincount(numbers, minlength=num_labels) / max(1, len(numbers))
    return float((shares**2).sum())

"""The contract of a transform: rows of raw data in, samples of the dataset out; and how rows are read.

A transform is a small, picklable description. `open()` turns it into the object that does the work, once per worker
process, so tokenizers and decoders are loaded where they are used. A transform must be a pure function of its rows: the
same rows give the same samples in any worker, so that the output is identical to the byte.

A row that cannot become a sample is listed in `Output.errors` and has no sample. Whether that stops the run is decided
elsewhere (`on_error`). Exceptions are for what makes every row wrong: a missing column, a tokenizer that
disagrees with its reference.

Readers of columns take all rows of a batch and mark the bad ones in a `BadRows`; the transform then drops them all at
once. A batch without any, the usual case, costs no Python per row: text stays the bytes that Arrow holds, side by
side, with offsets. UTF-8 is checked because the fast tokenizer trusts its input: text columns by the source's reader,
byte columns here. Arrow checks in place (20 GB/s for Python source, 1 GB/s for Japanese; decoding runs at 3 and 0.6);
rows are examined one by one only if the check fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError, did_you_mean, first_few
from penstock.schema import Ragged
from penstock.sources import Records, RowError

_EXCERPT = 60
_SHOWN_FIELDS = 8
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Samples made from one `Records`, column by column."""

    columns: Mapping[str, Any]
    """What `DatasetWriter.write_batch` takes: arrays, `Ragged`, lists of bytes; may be empty if there is no sample."""
    sources: NDArray[np.int64]
    """For each sample, the place in the records of the row it came from; never decreases."""
    errors: tuple[RowError, ...] = ()
    """Rows that gave no sample, in order; `row` is the row's number in the split, `path` is left empty."""
    noticed: Mapping[str, int] = field(default_factory=dict)
    """What the user should know about rows that did become samples: counts, by a word for each."""

    @property
    def num_samples(self) -> int:
        """Samples in every column."""
        return len(self.sources)


class OpenTransform(Protocol):
    """A transform loaded in one process."""

    def __call__(self, records: Records) -> Output:
        """Samples of these rows, in their order."""
        ...


class Transform(Protocol):
    """A description of how rows become samples; picklable, a few hundred bytes where possible."""

    __slots__ = ()

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the output, as JSON: kept in the manifest, and compared to detect stale data."""
        ...

    @property
    def attributes(self) -> dict[str, Any]:
        """What readers of the data need, as JSON for the manifest: tokenizer, vocabulary size, ids."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences to show about this run; they depend on what is installed, so they are not in the manifest."""
        return ()

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """Columns of the source that are read; None for all of them."""
        return None

    def columns(self) -> dict[str, str] | None:
        """Types of the output columns, as `DatasetWriter` takes them; None if only the first output will tell."""
        ...

    def before_run(self, sample: Iterable[Records]) -> Transform:
        """The transform to run, given some first rows; takes no more of `sample` than it needs."""
        ...

    def open(self) -> OpenTransform:
        """Load what is needed; called once in each worker process."""
        ...


class BadValue(ValueError):
    """A value that cannot be used, counted under `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BadRows:
    """Places of the rows that cannot become samples, each with the first reason found."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._reasons: dict[int, tuple[str, str]] = {}

    def add(self, place: int, reason: str, message: str) -> None:
        """Mark a row; the first reason given stands."""
        self._reasons.setdefault(int(place), (reason, message))

    def __contains__(self, place: int) -> bool:
        return place in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def good_places(self) -> NDArray[np.int64]:
        """Places of the rows that are left."""
        is_good = np.ones(self._records.num_rows, bool)
        is_good[list(self._reasons)] = False
        return np.flatnonzero(is_good)

    def errors(self) -> tuple[RowError, ...]:
        """What `Output.errors` holds; the caller, who knows the split, adds the path."""
        if not self._reasons:
            return ()
        rows = self._records.row_numbers()
        return tuple(RowError("", int(rows[place]), *self._reasons[place]) for place in sorted(self._reasons))


def row_bytes(rows: Ragged, place: int) -> memoryview:
    """Bytes of one row, not copied."""
    row: memoryview = rows.values[rows.offsets[place] : rows.offsets[place + 1]].data
    return row


def find_column(records: Records, name: str) -> Any:
    """A column of the records.

    Raises:
        SchemaError: there is no such column.
    """
    if name in records.columns:
        return records.columns[name]
    known = ", ".join(map(repr, records.columns)) or "none"
    guess = did_you_mean(name, records.columns) or " Name one of them."
    raise SchemaError(f"No column {name!r} in the source; its columns are {known}.{guess}")


def is_arrow(column: Any) -> bool:
    """Whether a column is a pyarrow array; does not import pyarrow."""
    return type(column).__module__.partition(".")[0] == "pyarrow"


def is_number(kind: Any) -> bool:
    """Whether an Arrow type is one of numbers, or of truth values."""
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def numbers_of(column: Any) -> NDArray[Any]:
    """The values of an Arrow column of numbers without nulls; `to_numpy` would import pandas, in half a second."""
    import pyarrow as pa

    if pa.types.is_boolean(column.type):  # eight to a byte, which DLPack cannot say
        return np.from_dlpack(column.cast(pa.uint8())).view(np.bool_)
    return np.from_dlpack(column)


def _is_arrow_text(column: Any) -> bool:
    """Whether the source's reader has already checked that this column is UTF-8."""
    return is_arrow(column) and str(column.type) in ("string", "large_string")


def read_bytes(records: Records, name: str, bad: BadRows) -> Ragged:
    """A column of strings or byte strings; nulls and values of other types are bad rows.

    Raises:
        SchemaError: the column is missing, or its type is not text.
    """
    if find_absent(records, [name]) is not None:  # the first rows had it
        for place in range(records.num_rows):
            bad.add(place, "null", f"There is no field {name!r}.{list_fields(records, name)}")
    return read_byte_column(name, find_column(records, name), bad)


def read_byte_column(name: str, column: Any, bad: BadRows) -> Ragged:
    """Like `read_bytes`, for a column that was already looked up."""
    return _read_arrow(name, column, bad) if is_arrow(column) else _read_list(name, column, bad)


def list_encoded(records: Records, name: str, bad: BadRows) -> list[memoryview]:
    """Encoded images, films or sounds, not copied."""
    column = find_column(records, name)
    rows = read_byte_column(name, _unwrap(name, column, bad) if is_arrow(column) else column, bad)
    return [row_bytes(rows, place) for place in range(len(rows))]


def _unwrap(name: str, column: Any, bad: BadRows) -> Any:
    """The column of bytes; Hugging Face stores an image as `{"bytes": …, "path": …}`, sometimes with only the path."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
        return column
    encoded = pc.struct_field(column, "bytes")
    if encoded.null_count and column.type.get_field_index("path") >= 0:
        for place, path in enumerate(pc.struct_field(column, "path").to_pylist()):
            if path is not None and not encoded[place].is_valid:
                bad.add(
                    place, "null", f"Column {name!r} has no bytes but the path {path!r}. Give the files themselves."
                )
    return encoded


def apply(
    work: Callable[[memoryview], _Made], encoded: Iterable[memoryview], bad: BadRows, complaint: str
) -> Iterator[_Made]:
    """The result of `work` for each value; if it refuses one, the row becomes bad, with the complaint."""
    for place, value in enumerate(encoded):
        if place in bad:
            continue
        try:
            made = work(value)
        except BadValue as error:
            bad.add(place, error.reason, f"{complaint}: {error}.")
        else:
            yield made


def find_absent(records: Records, names: Iterable[str]) -> str | None:
    """The first of these columns that no row has; None if there is none, or if the reader does not say."""
    absent = (name for name in names if records.known and name not in records.known)
    return next((name for name in absent if str(getattr(find_column(records, name), "type", "")) == "null"), None)


def list_fields(records: Records, name: str) -> str:
    """A sentence about the fields that there are, and the one that is probably meant; "" if the reader does not say."""
    fields = first_few([repr(field) for field in records.known], _SHOWN_FIELDS)
    return f" The fields are {fields}.{did_you_mean(name, records.known)}" if fields else ""


def read_text(records: Records, name: str, bad: BadRows) -> Ragged:
    """Like `read_bytes`, but rows that are not UTF-8 are bad, too."""
    rows = read_bytes(records, name, bad)
    if _is_arrow_text(records.columns[name]) or is_utf8(rows):
        return rows
    for place in range(len(rows)):
        try:
            str(row_bytes(rows, place), "utf-8")
        except UnicodeDecodeError as error:
            bad.add(place, "invalid_utf8", f"Column {name!r} is not UTF-8: {error.reason} at byte {error.start:,}.")
    # Bad rows keep their bytes here: callers select the good places before they use the text.
    return rows


def is_utf8(rows: Ragged) -> bool:
    """Whether every row is UTF-8 by itself."""
    import pyarrow as pa

    buffers = [None, pa.py_buffer(np.ascontiguousarray(rows.offsets)), pa.py_buffer(rows.values)]
    try:
        pa.Array.from_buffers(pa.large_string(), len(rows), buffers).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _read_arrow(name: str, column: Any, bad: BadRows) -> Ragged:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_null(kind):
        _mark_nulls(name, range(len(column)), bad)
        return Ragged(np.empty(0, np.uint8), np.zeros(len(column) + 1, np.int64))
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not (wide or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        raise SchemaError(f"Column {name!r} of the source is {kind}; it must be string or binary.")
    if column.null_count:
        _mark_nulls(name, np.flatnonzero(numbers_of(column.is_null())), bad)
        column = column.fill_null("" if "string" in str(kind) else b"")
    return _arrow_buffers(column, np.dtype("<i8" if wide else "<i4"))


def _arrow_buffers(column: Any, offset_dtype: np.dtype[Any]) -> Ragged:
    _, offset_buffer, value_buffer = column.buffers()
    if not len(column) or offset_buffer is None:
        return Ragged(np.empty(0, np.uint8), np.zeros(len(column) + 1, np.int64))
    offsets = np.frombuffer(offset_buffer, offset_dtype, len(column) + 1, column.offset * offset_dtype.itemsize)
    begin, end = int(offsets[0]), int(offsets[-1])
    values = np.empty(0, np.uint8) if value_buffer is None else np.frombuffer(value_buffer, np.uint8)[begin:end]
    return Ragged(values, offsets.astype(np.int64) - begin)


def _mark_nulls(name: str, places: Any, bad: BadRows) -> None:
    for place in places:
        bad.add(place, "null", f"Column {name!r} is null.")


def _read_list(name: str, column: list[Any], bad: BadRows) -> Ragged:
    try:
        data = b"".join(column)
        encoded: list[Any] = column
    except TypeError:
        encoded = [_encode(name, value, place, bad) for place, value in enumerate(column)]
        data = b"".join(encoded)
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return Ragged.from_lengths(np.frombuffer(data, np.uint8), lengths)


def _encode(name: str, value: Any, place: int, bad: BadRows) -> bytes:
    if isinstance(value, bytes):
        return value
    if value is None:
        bad.add(place, "null", f"Column {name!r} is null.")
    elif not isinstance(value, str):
        shown = repr(value)[:_EXCERPT]
        bad.add(place, "wrong_type", f"Column {name!r} holds {type(value).__name__} {shown}, not text or bytes.")
    else:
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            message = f"Column {name!r} has a lone surrogate at character {error.start:,}, which UTF-8 cannot encode."
            bad.add(place, "invalid_utf8", message)
    return b""

"""Columns of a CSV file: their names, if the first record is a header, and their types.

A file does not say whether its first line names the columns. Taking data for names silently loses a record, and
taking names for data adds one. So unless the user said which it is, the first record is compared with the rows below
it, column by column, and refused if there is doubt: a number above numbers is data, and text above nothing but numbers
is a name. The exception is tables with a column for each year: `country,1990,1991`.

Nor does a file say what separates its fields. If every line is one field and contains another common separator equally
often, the file would be read as a single column, so that is refused as well.

A type holds for a whole column, in every file and block: it is given, or inferred once from the first rows, and a later
field that does not fit is a bad row. Text is inferred to be a number only if it is written like one: "007" is an
identifier. Whole numbers are never inferred to be floats that would round them: identifiers of 20 digits stay text.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import FormatError, SchemaError, did_you_mean
from penstock.sources._arrow import arrow, bool_array, plain_values
from penstock.sources._files import ByteStream, read_exactly, without_mark
from penstock.sources._model import Records, RowError
from penstock.sources._options import FieldType, SourceOptions, is_tab_separated

_HEADER_BYTES = (4 << 10, 64 << 10, 1 << 20)
_ROWS_TO_COMPARE = 50
_KINDS = {
    "a number": re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?"),
    "a date": re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[/.]\d\d?[/.](\d\d){1,2}( .*)?"),
    "a URL": re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE),
    "a truth value": re.compile("true|false", re.IGNORECASE),
}
_YEAR = re.compile(r"[12]\d{3}")
_MOST_YEARS_APART = 10
_LONGEST_NAME = 200
_OTHER_DELIMITERS = ";\t|"
_WAYS_OUT = (
    "If it is a record, pass reading=SourceOptions(header=False) (--no-header), or names= (--names) for the columns; "
    "if it is the header, header=True (--header)."
)

_Record = Sequence[str]


@dataclass(frozen=True, slots=True)
class Header:
    """Names of the columns. `num_bytes` is where the first row begins; `rest` is what was read beyond that."""

    names: tuple[str, ...]
    num_bytes: int
    rest: bytes


def delimiter_of(path: str, options: SourceOptions) -> str:
    """What separates two fields."""
    return options.delimiter or ("\t" if is_tab_separated(path) else ",")


def read_header(stream: ByteStream, path: str, options: SourceOptions) -> Header:
    """Read the header from the start of a file, and as little more as possible.

    Raises:
        FormatError: the first record does not end.
        SchemaError: it may or may not be a header and nobody said which, it names a column twice, or it lacks a
            requested column.
    """
    data = b""
    for size in (min(options.batch_bytes, _HEADER_BYTES[0]), *_HEADER_BYTES):
        data += read_exactly(stream, size - len(data))
        if len(data) < size or size == _HEADER_BYTES[-1]:
            break
        try:
            header = _header_of(data, path, options, is_whole=False)
        except (FormatError, SchemaError):
            continue  # it may continue beyond what was read
        if header is not None:
            return header
    return _header_of(data, path, options, is_whole=True) or Header((), len(data), b"")


def _header_of(data: bytes, path: str, options: SourceOptions, *, is_whole: bool) -> Header | None:
    """The header, from the first bytes of a file; None if it may continue beyond them."""
    text = without_mark(data, path)
    lines = _Lines(text, options.encoding)
    records = _parse(lines, path, options)
    first = next(records, ())
    mark, end = len(data) - len(text), lines.num_bytes
    if not first or (end == len(text) and not is_whole):
        return None
    has_header = options.names is None if options.header is None else options.header
    names = options.names or (first if has_header else tuple(f"f{place}" for place in range(len(first))))
    rows = _some_rows(records, is_whole)
    if options.delimiter is None:
        _check_delimiter(first, rows, path, delimiter_of(path, options))
    if len(names) != len(first):
        raise SchemaError(f"{path}: names= has {len(names)} names, but the first line {len(first)} fields: {first}.")
    if options.header is None and options.names is None:
        _check_is_header(first, rows, path)
    elif options.header is None and options.names is not None:
        _check_is_data(first, rows, options.names, path)
    _check_names(names, path, options)
    start = mark + (end if has_header else 0)
    return Header(names, start, data[start:])


def _parse(lines: _Lines, path: str, options: SourceOptions) -> Iterator[tuple[str, ...]]:
    """Records that are not blank."""
    quoting: dict[str, Any] = {"quotechar": options.quote} if options.quote else {"quoting": csv.QUOTE_NONE}
    try:
        for fields in csv.reader(iter(lines), delimiter=delimiter_of(path, options), strict=True, **quoting):
            if fields:
                yield tuple(fields)
    except csv.Error as error:
        raise FormatError(f"{path}: the header cannot be read: {error}.") from error


def _some_rows(records: Iterator[tuple[str, ...]], is_whole: bool) -> list[tuple[str, ...]]:
    """Rows below the first record, to compare it with, without the last one if it may be incomplete."""
    rows: list[tuple[str, ...]] = []
    try:
        rows += itertools.islice(records, _ROWS_TO_COMPARE)
    except FormatError:  # reported when a reader gets there
        return rows
    return rows if is_whole or len(rows) == _ROWS_TO_COMPARE else rows[:-1]


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _check_names(names: tuple[str, ...], path: str, options: SourceOptions) -> None:
    if repeated := _repeated(names):
        raise SchemaError(
            f"{path}: the header names {', '.join(map(repr, repeated))} more than once. Give other names: names= "
            "(--names)."
        )
    asked_for = [*(options.columns or ()), *(options.types if isinstance(options.types, Mapping) else ())]
    for name in asked_for:
        if name not in names:
            hint = _guess_delimiter(names, _OTHER_DELIMITERS) or did_you_mean(name, names)
            raise SchemaError(
                f"{path}: no column {name!r}; the header has {', '.join(map(repr, names))}."
                f"{hint or _guess_delimiter(names, ' ')}"
            )


def _check_is_header(first: _Record, rows: Sequence[_Record], path: str) -> None:
    """Raise `SchemaError` if the first record may well be data; `rows` are some below it, if the file has more."""
    reason = next(_signs_of_data(first, rows), None)
    if reason is not None:
        raise SchemaError(f"{path}: the first line may be data rather than a header: {reason}. {_WAYS_OUT}")


def _check_delimiter(first: _Record, rows: Sequence[_Record], path: str, usual: str) -> None:
    """Raise `SchemaError` if no delimiter was given, and another than the usual one may separate the fields."""
    if len(first) > 1 or not rows:
        return
    lines = [usual.join(record) for record in (first, *rows)]
    are_numbers = all(_kind_of(word) == "a number" for line in lines[1:] for word in line.split(" "))
    for each in _OTHER_DELIMITERS + (" " if are_numbers else ""):  # words have spaces between them; numbers do not
        counts = {line.count(each) for line in lines}
        if len(counts) == 1 and counts != {0}:
            raise SchemaError(
                f"{path}: the first line is one field, and every line has {each!r} equally often. If that separates "
                f"fields, pass reading=SourceOptions(delimiter={each!r}) (--delimiter); if not, delimiter={usual!r}."
            )


def _guess_delimiter(names: Sequence[str], delimiters: str) -> str:
    """What to try if a column is missing because the whole header was taken for one name."""
    found = next((each for each in delimiters if len(names) == 1 and each in names[0]), None)
    return f" Are its fields separated by {found!r}? Then pass delimiter={found!r} (--delimiter)." if found else ""


def _check_is_data(first: _Record, rows: Sequence[_Record], names: Sequence[str], path: str) -> None:
    """Raise `SchemaError` if columns were named, but the first record may still be a header."""
    reason = next(_signs_of_names(first, rows, names), None)
    if reason is not None:
        raise SchemaError(
            f"{path}: names= gives the names of the columns, but the first line may be a header: {reason}. "
            "If it is, pass header=True (--header), and names= replaces it; if not, header=False (--no-header)."
        )


def _signs_of_data(first: _Record, rows: Sequence[_Record]) -> Iterator[str]:
    columns = list(_columns(first, rows))
    has_names = any(_stands_above_numbers(name, values) for name, values in columns)
    years = _years_in(columns)
    for name, values in columns:
        kind = None if name in years else _kind_of(name)
        if kind and (not rows or _share_of_kind(kind, values) > 0.5):
            yield f"{name!r:.40} is {kind}{', as are the values below it' if rows else ''}"
        elif name and name in values and not has_names:
            yield f"{name!r:.40} also occurs as a value in its column"
        elif len(name) > _LONGEST_NAME and not has_names:
            yield f"{name!r:.40}… is {len(name):,} characters long"
    if repeated := _repeated(first):
        yield f"it contains {', '.join(map(repr, repeated))} more than once"


def _signs_of_names(first: _Record, rows: Sequence[_Record], names: Sequence[str]) -> Iterator[str]:
    if set(first) & set(names):
        yield f"it contains {', '.join(repr(name) for name in first if name in names)}"
    for name, values in _columns(first, rows):
        if _stands_above_numbers(name, values):
            yield f"{name!r:.40} is above nothing but numbers"


def _years_in(columns: Sequence[tuple[str, list[str]]]) -> set[str]:
    """The names that are years; none unless they are evenly spaced, beside another name, and above other values."""
    years = [name for name, _ in columns if _YEAR.fullmatch(name)]
    steps = {int(later) - int(earlier) for earlier, later in itertools.pairwise(years)}
    come_evenly = len(steps) == 1 and 0 < min(steps) <= _MOST_YEARS_APART
    beside_name = any(name and _kind_of(name) is None and values for name, values in columns)
    below = [value for name, values in columns if name in years for value in values]
    above_others = bool(below) and sum(bool(_YEAR.fullmatch(value)) for value in below) <= len(below) / 4
    return set(years) if come_evenly and beside_name and above_others else set()


def _stands_above_numbers(name: str, values: Sequence[str]) -> bool:
    return bool(name) and _kind_of(name) is None and _share_of_kind("a number", values) == 1


def _columns(first: _Record, rows: Sequence[_Record]) -> Iterator[tuple[str, list[str]]]:
    """Each field of the first record, with the non-empty values below it."""
    whole = [row for row in rows if len(row) == len(first)]
    for place, name in enumerate(first):
        yield name.strip(), [row[place].strip() for row in whole if row[place].strip()]


def _kind_of(value: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(value)), None)


def _share_of_kind(kind: str, values: Sequence[str]) -> float:
    return sum(_kind_of(value) == kind for value in values) / len(values) if values else 0.0


class _Lines:
    """Lines for `csv.reader`, counting the bytes of those it took."""

    def __init__(self, data: bytes, encoding: str) -> None:
        self.num_bytes = 0
        self._data = data
        self._encoding = encoding

    def __iter__(self) -> Iterator[str]:
        for line in self._data.splitlines(keepends=True):
            self.num_bytes += len(line)
            yield line.decode(self._encoding, "replace")


_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[+-]?(nan|inf)", re.IGNORECASE)
_TRUTH_VALUE = re.compile("true|false", re.IGNORECASE)
_LARGEST_EXACT_FLOAT = 1 << 53
_MOST_DIGITS = 20
"""Of a 64-bit integer; Python refuses to read a number of thousands of digits."""


def infer_types(records: Records, options: SourceOptions) -> dict[str, FieldType]:
    """Type of each column of text that holds nothing but numbers or booleans."""
    found = {name: _infer(column.to_pylist(), options) for name, column in records.columns.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def _infer(values: Sequence[str], options: SourceOptions) -> FieldType | None:
    stripped = [value.strip() for value in values]
    known = [value for value in stripped if value not in options.null_values]
    if not known:
        return None
    is_filled = options.missing == "nan" and len(known) < len(values)
    if all(map(_WHOLE_NUMBER.fullmatch, known)):
        return _infer_whole(known, is_filled=is_filled)
    if all(map(_TRUTH_VALUE.fullmatch, known)):
        return "bool"
    numbers = [value for value in known if not _NO_NUMBER.fullmatch(value)]
    return "float64" if numbers and all(map(_NUMBER.fullmatch, numbers)) else None


def _infer_whole(values: Sequence[str], *, is_filled: bool) -> FieldType | None:
    """Type that holds each of these whole numbers exactly, and NaN beside them if some are missing."""
    if max(map(len, values)) > _MOST_DIGITS:
        return None
    numbers = [int(value) for value in values]
    low, high = min(numbers), max(numbers)
    if is_filled:
        return "float64" if max(-low, high) <= _LARGEST_EXACT_FLOAT else None
    if low >= -(1 << 63) and high < 1 << 63:
        return "int64"
    return "uint64" if low >= 0 and high < 1 << 64 else None


def with_types(records: Records, path: str, options: SourceOptions) -> Records:
    """Records of text with their columns converted to the types in the options; rows that do not fit become errors."""
    types = options.types if isinstance(options.types, Mapping) else {}
    kinds = {name: kind for name, kind in types.items() if name in records.columns and kind != "text"}
    if not kinds or not records.num_rows:
        return records
    rows = records.row_numbers()
    errors: dict[int, RowError] = {}
    columns = dict(records.columns)
    for name, kind in kinds.items():
        columns[name], misfits = _convert(columns[name], kind, options)
        for place, value in misfits.items():
            errors.setdefault(place, _misfit(path, int(rows[place]), name, kind, value))
    if not errors:
        return replace(records, columns=columns)
    keep = np.ones(records.num_rows, np.bool_)
    keep[list(errors)] = False
    columns = {name: column.filter(bool_array(keep)) for name, column in columns.items()}
    both = tuple(sorted((*records.errors, *errors.values()), key=lambda error: error.row))
    return replace(records, columns=columns, num_rows=int(keep.sum()), errors=both)


def _convert(column: Any, kind: str, options: SourceOptions) -> tuple[Any, dict[int, str]]:
    """A column converted to its type, and the values that do not fit, by their places."""
    pa, compute = arrow(), arrow("compute")
    stripped = compute.utf8_trim_whitespace(column)
    nulls = compute.is_in(stripped, value_set=plain_values(options.null_values).cast(column.type))
    present = compute.if_else(nulls, pa.nulls(1, column.type)[0], stripped)
    target = pa.bool_() if kind == "bool" else pa.type_for_alias(kind)
    misfits: dict[int, str] = {}
    try:
        converted = present.cast(target)
    except pa.ArrowInvalid:  # one value at a time, to find out which
        values = present.to_pylist()
        misfits = {place: value for place, value in enumerate(values) if not _fits(present[place : place + 1], target)}
        fitting = [None if place in misfits else value for place, value in enumerate(values)]
        converted = plain_values(fitting).cast(column.type).cast(target)
    if pa.types.is_floating(target):
        misfits |= _overflown(present, converted)
    if options.missing == "nan" and pa.types.is_floating(target):
        converted = converted.fill_null(float("nan"))
    return converted, misfits


def _overflown(texts: Any, numbers: Any) -> dict[int, str]:
    """Numbers too large for the type, by their places: Arrow reads them as infinite."""
    compute = arrow("compute")
    places = np.from_dlpack(compute.indices_nonzero(compute.is_inf(numbers))).tolist()
    found = {place: texts[place].as_py() for place in places}
    return {place: text for place, text in found.items() if _NUMBER.fullmatch(text.lstrip("+"))}


def _fits(text: Any, target: Any) -> bool:
    try:
        text.cast(target)
    except arrow().ArrowInvalid:
        return False
    return True


def _misfit(path: str, row: int, name: str, kind: str, value: str) -> RowError:
    message = f"column {name!r} of row {row} of the split holds {value!r:.60}; {kind} was expected (types=, --types)."
    return RowError(path, row, "wrong_type", message + _guess_cause(name, value))


def _guess_cause(name: str, value: str) -> str:
    if _NUMBER.fullmatch(value):
        better = "text" if _WHOLE_NUMBER.fullmatch(value) or math.isinf(float(value)) else "float64"
        return f" Is it right? Then the column needs another type: types={{{name!r}: {better!r}}}."
    return " Is it missing? Then name it in null_values (--null-values)." if len(value) < 10 else ""

"""The first record of a CSV file: the names of the columns, if it is a header, and where the rows begin.

A file does not say whether its first line names the columns. Taking data for names silently loses a record, and
taking names for data adds one. So unless the user said which it is, the first record is compared with the rows below
it, column by column, and refused if there is doubt: a number above numbers is data, and text above nothing but numbers
is a name. The exception is tables with a column for each year: `country,1990,1991`.

Nor does a file say what separates its fields. If every line is one field and contains another common separator equally
often, the file would be read as a single column, so that is refused as well.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import FormatError, SchemaError, did_you_mean
from penstock.sources._files import ByteStream, read_exactly, without_mark
from penstock.sources._options import SourceOptions, is_tab_separated

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
            raise SchemaError(
                f"{path}: no column {name!r}; the header has {', '.join(map(repr, names))}."
                f"{_guess_delimiter(names) or did_you_mean(name, names)}"
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


def _guess_delimiter(names: Sequence[str]) -> str:
    """What to try if a column is missing because the whole header was taken for one name."""
    found = next((each for each in _OTHER_DELIMITERS if len(names) == 1 and each in names[0]), None)
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

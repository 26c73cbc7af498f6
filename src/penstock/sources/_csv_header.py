"""The first record of a CSV file: the names of the columns, if it is a header, and where the rows begin."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import FormatError, SchemaError, did_you_mean
from penstock.sources._csv_doubt import check_delimiter, check_is_data, check_is_header, guess_delimiter
from penstock.sources._files import ByteStream, read_exactly, without_mark
from penstock.sources._formats import is_tab_separated
from penstock.sources._options import SourceOptions

_HEADER_BYTES = (4 << 10, 64 << 10, 1 << 20)
_ROWS_TO_COMPARE = 50


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
        check_delimiter(first, rows, path, delimiter_of(path, options))
    if len(names) != len(first):
        raise SchemaError(f"{path}: names= has {len(names)} names, but the first line {len(first)} fields: {first}.")
    _check_doubt(first, rows, path, options)
    _check(names, path, options)
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


def _check_doubt(first: tuple[str, ...], rows: list[tuple[str, ...]], path: str, options: SourceOptions) -> None:
    if options.header is None and options.names is None:
        check_is_header(first, rows, path)
    elif options.header is None and options.names is not None:
        check_is_data(first, rows, options.names, path)


def _check(names: tuple[str, ...], path: str, options: SourceOptions) -> None:
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise SchemaError(
            f"{path}: the header names {', '.join(map(repr, repeated))} more than once. Give other names: names= "
            "(--names)."
        )
    asked_for = [*(options.columns or ()), *(options.types if isinstance(options.types, Mapping) else ())]
    for name in asked_for:
        if name not in names:
            raise SchemaError(
                f"{path}: no column {name!r}; the header has {', '.join(map(repr, names))}."
                f"{guess_delimiter(names) or did_you_mean(name, names)}"
            )


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

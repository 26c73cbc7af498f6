"""The first record of a CSV file: the names of its columns, and where the rows begin."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import FormatError, SchemaError
from penstock.sources._files import ByteStream, read_exactly, without_mark
from penstock.sources._formats import is_tab_separated
from penstock.sources._options import SourceOptions

_OTHER_DELIMITERS = ";\t|"
_HEADER_BYTES = (4 << 10, 64 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class Header:
    """Names of the columns. `num_bytes` is where the first row begins; `rest` was read beyond it."""

    names: tuple[str, ...]
    num_bytes: int
    rest: bytes


def delimiter_of(path: str, options: SourceOptions) -> str:
    """What stands between two fields."""
    return options.delimiter or ("\t" if is_tab_separated(path) else ",")


def read_header(stream: ByteStream, path: str, options: SourceOptions) -> Header:
    """Read the header from the start of a file, and as little of the file as holds it.

    Raises:
        FormatError: it does not end, or names a column twice.
        SchemaError: a column asked for is not in it.
    """
    data = b""
    for size in (min(options.batch_bytes, _HEADER_BYTES[0]), *_HEADER_BYTES):
        data += read_exactly(stream, size - len(data))
        if len(data) < size or size == _HEADER_BYTES[-1]:
            break
        try:
            header = _header_of(data, path, options)
        except (FormatError, SchemaError):
            continue  # it may go on behind what was read
        if header.rest:
            return header
    return _header_of(data, path, options)


def _header_of(data: bytes, path: str, options: SourceOptions) -> Header:
    text = without_mark(data, path)
    lines = _Lines(text, options.encoding)
    names = _parse(lines, path, options)
    _check(names, path, options)
    start = len(data) - len(text) + lines.num_bytes
    return Header(names, start, data[start:])


def _parse(lines: _Lines, path: str, options: SourceOptions) -> tuple[str, ...]:
    quoting: dict[str, Any] = {"quotechar": options.quote} if options.quote else {"quoting": csv.QUOTE_NONE}
    try:
        for names in csv.reader(iter(lines), delimiter=delimiter_of(path, options), strict=True, **quoting):
            if names:  # a blank line before the header is none
                return tuple(names)
    except csv.Error as error:
        raise FormatError(f"{path}: the header cannot be read: {error}.") from error
    return ()


def _check(names: tuple[str, ...], path: str, options: SourceOptions) -> None:
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise FormatError(f"{path}: the header names {', '.join(map(repr, repeated))} more than once. Rename one.")
    for name in options.columns or ():
        if names and name not in names:
            raise SchemaError(
                f"{path}: no column {name!r}; the header has {', '.join(map(repr, names))}.{_guess(names)}"
            )


def _guess(names: tuple[str, ...]) -> str:
    """What to try when the whole header was taken for one name."""
    found = next((each for each in _OTHER_DELIMITERS if len(names) == 1 and each in names[0]), None)
    return f" Do its fields end with {found!r}? Then pass delimiter={found!r} (--delimiter)." if found else ""


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

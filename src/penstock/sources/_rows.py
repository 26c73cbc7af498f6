"""One split in, records as Python dicts out, from any block on.

A block's place is enough to begin there again: a byte of the (uncompressed) file, or for parquet the
number of its first row within the split. Records are the same wherever reading begins.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from penstock.errors import FormatError, SchemaError
from penstock.sources._arrow import arrow
from penstock.sources._blocks import Block, ByteStream, SeekableBytes, read_exactly
from penstock.sources._chain import ByteRange, blocks_of_range, blocks_to_end, go_to, last_border_of
from penstock.sources._csv import has_line_records, read_csv_blocks
from penstock.sources._csv_header import Header, delimiter_of, read_header
from penstock.sources._files import open_stream
from penstock.sources._formats import compression_of, format_of
from penstock.sources._json_objects import read_objects
from penstock.sources._model import Records, RowError, SourceFile, Split
from penstock.sources._options import SourceOptions
from penstock.sources._quotes import ends_in_quotes, last_quoted_border
from penstock.sources._reading import read_split
from penstock.sources._text import separator_of
from penstock.sources._text_rows import read_document, read_documents

_HEADER_BYTES = (4 << 10, 64 << 10, 1 << 20)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Records of one block."""

    place: int
    """Where the block begins: what `read_rows` can begin at."""
    values: list[dict[str, Any]]
    errors: tuple[RowError, ...] = ()
    """Rows that are not among the values."""
    first_row: int = 0
    """Number that errors give to the first row of the block."""

    def before_first_error(self) -> list[dict[str, Any]]:
        """The values that stand before the first of the errors."""
        return self.values[: min(error.row for error in self.errors) - self.first_row]


def read_rows(split: Split, options: SourceOptions, place: int | None = None) -> Iterator[Rows]:
    """Records of a split in order, from the block at `place` on, or from its start.

    The split is a range of bytes or a whole file (jsonl, csv, text), or row groups (parquet).

    Raises:
        FormatError: the file is truncated or damaged, or a record is longer than `max_record_bytes`.
        SchemaError: it lacks a column of `options.columns`.
        StorageError: it is gone, or shorter than when it was listed.
        DatasetChanged: no record begins at `place`.
    """
    return _READERS[split.format](split, options, place)


def why_whole(file: SourceFile, options: SourceOptions) -> str:
    """Why a file cannot be entered in its middle, in a few words; "" when it can."""
    kind = format_of(file.path, options)
    if compression_of(file.path) is not None and kind != "parquet":
        return "is compressed"
    if not file.is_seekable or file.num_bytes < 0:
        return "is on a server that gives no ranges"
    if kind == "csv" and not has_line_records(options):
        return "may have newlines in quoted fields"
    return "is one record" if kind == "text" and options.text_unit == "file" else ""


def _read_jsonl(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    for block in _line_blocks(split, options, b"\n", place):
        yield Rows(block.offset, *read_objects(block, split.path, options.columns))


def _read_text(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    if options.text_unit == "file":
        with open_stream(split.path, options) as stream:
            yield Rows(0, *read_document(stream, split.path, options))
        return
    for block in _line_blocks(split, options, separator_of(options), place):
        yield Rows(block.offset, *read_documents(block, split.path, options))


def _read_csv(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    with open_stream(split.path, options) as stream:
        header = _read_header(stream, split, options)
        if not header.names:
            return
        find_blocks = _csv_line_blocks if has_line_records(options) else _quoted_blocks
        for block in find_blocks(stream, header, split, options, place):
            yield from _rows_of_csv(block, header, split.path, options)


def _read_parquet(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    place = place or 0
    for records in read_split(split, options):
        if records.first_row >= place:
            yield Rows(records.first_row, _as_dicts(records), records.errors, records.first_row)
        elif records.first_row + records.num_rows + len(records.errors) > place:  # blocks were cut in another way
            is_due = (records.row_numbers() >= place).tolist()
            errors = tuple(error for error in records.errors if error.row >= place)
            yield Rows(place, list(itertools.compress(_as_dicts(records), is_due)), errors, place)


def _rows_of_csv(block: Block, header: Header, path: str, options: SourceOptions) -> Iterator[Rows]:
    values: list[dict[str, Any]] = []
    errors: list[RowError] = []
    for records in read_csv_blocks(iter([block]), header, path, options):
        values += _as_dicts(records)
        where = f" Rows are counted from byte {block.offset:,}."
        errors += [replace(error, message=error.message + where) for error in records.errors]
    yield Rows(block.offset, values, tuple(errors))


def _as_dicts(records: Records) -> list[dict[str, Any]]:
    if not records.columns:
        return []
    if any(isinstance(column, list) for column in records.columns.values()):
        columns = [column if isinstance(column, list) else column.to_pylist() for column in records.columns.values()]
        return [dict(zip(records.columns, row, strict=True)) for row in zip(*columns, strict=True)]
    together = arrow().StructArray.from_arrays(list(records.columns.values()), list(records.columns))
    values: list[dict[str, Any]] = together.to_pylist()  # 3 times as fast as a dict of each row
    return values


def _line_blocks(split: Split, options: SourceOptions, separator: bytes, place: int | None) -> Iterator[Block]:
    with open_stream(split.path, options) as stream:
        if hasattr(stream, "seek"):
            yield from _range_blocks(stream, split, options, separator, place)
        else:
            go_to(stream, split.path, place or 0)
            yield from blocks_to_end(stream, split.path, options, place or 0, b"", last_border_of(separator))


def _csv_line_blocks(
    stream: ByteStream, header: Header, split: Split, options: SourceOptions, place: int | None
) -> Iterator[Block]:
    """Blocks of lines behind a header."""
    if not hasattr(stream, "seek"):
        entry = _behind_header(stream, header, split.path, place)
        return blocks_to_end(stream, split.path, options, *entry, last_border_of(b"\n"))
    if split.begin >= header.num_bytes:
        return _range_blocks(stream, split, options, b"\n", place)
    split, data = replace(split, begin=header.num_bytes), header.rest if place is None else b""
    return _range_blocks(stream, split, options, b"\n", header.num_bytes if place is None else place, data)


def _range_blocks(
    stream: ByteStream,
    split: Split,
    options: SourceOptions,
    separator: bytes,
    place: int | None,
    data: bytes = b"",
) -> Iterator[Block]:
    if max(split.begin, place or 0) >= split.end:
        return iter(())
    chosen = ByteRange(cast(SeekableBytes, stream), split.begin, split.end, separator)
    return blocks_of_range(chosen, options, place, data)


def _quoted_blocks(
    stream: ByteStream, header: Header, split: Split, options: SourceOptions, place: int | None
) -> Iterator[Block]:
    """Blocks behind a header that end outside of quotes."""
    assert options.quote is not None
    marks = options.quote.encode(), delimiter_of(split.path, options).encode()
    entry = _behind_header(stream, header, split.path, place)
    data = b""
    for block in blocks_to_end(stream, split.path, options, *entry, lambda data: last_quoted_border(data, *marks)):
        data = block.data
        yield block
    if ends_in_quotes(data, *marks):
        raise FormatError(
            f"{split.path}: the last record opens a quote that is never closed, and took the rest of the file with it. "
            "Repair that record, or pass quote=None when quotes are ordinary characters."
        )


def _behind_header(stream: ByteStream, header: Header, path: str, place: int | None) -> tuple[int, bytes]:
    """Where a whole file is read from, and what was read from there on with its header."""
    place = max(place or 0, header.num_bytes)
    here = header.num_bytes + len(header.rest)
    if place > here:
        go_to(stream, path, place, here)
    return place, header.rest[place - header.num_bytes :]


def _read_header(stream: ByteStream, split: Split, options: SourceOptions) -> Header:
    """The header, from as little of the file as holds it; the stream stands behind what was read."""
    data = b""
    for size in (min(options.batch_bytes, _HEADER_BYTES[0]), *_HEADER_BYTES):
        data += read_exactly(stream, size - len(data))
        is_all = len(data) < size or size == _HEADER_BYTES[-1]
        with contextlib.suppress(*(() if is_all else (FormatError, SchemaError))):  # of a header that goes on
            header = read_header(io.BytesIO(data), split.path, options)
            if is_all or header.rest:
                return header
    raise AssertionError("the last size takes what comes")


_READERS: dict[str, Callable[[Split, SourceOptions, int | None], Iterator[Rows]]] = {
    "csv": _read_csv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "text": _read_text,
}

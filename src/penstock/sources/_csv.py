"""CSV and TSV by pyarrow, every field as text unless its column has a type.

pyarrow must not guess types: a column would be numbers in one block and text in the next. All fields are read as
bytes and then checked to be text, so one bad byte costs one row; types are applied afterwards (see `_csv_columns`). An
empty field is an empty string.

If a quoted field may hold a newline, only a reader that starts at the top knows which newlines end a
record, so the file is one split, read as a stream. Without quotes, or if the user says that quoted fields hold no
newlines (`quoted_newlines=False`), any byte range can be read.

A quote opens a field only at the beginning of the field; anywhere else outside of quotes it is a character. In data
that follows this rule, a newline is outside of quotes if and only if the number of quotes before it is even, which
numpy counts in one go. Only data with stray quotes is scanned field by field.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.sources._arrow import arrow, as_text, dicts_of, records_of_batch
from penstock.sources._blocks import Block, ByteRange, Entry, OnLong, Separated, blocks_to_end
from penstock.sources._columnar import cut_batch
from penstock.sources._csv_columns import Header, delimiter_of, read_header, with_types
from penstock.sources._files import ByteStream, as_seekable, open_stream, skip_to
from penstock.sources._model import Records, RowError, Rows, Split
from penstock.sources._options import SourceOptions

_BLOCK_GROWTH = 4
_TAIL_BYTES = 64
_SMALLEST_BLOCK_BYTES = 16
_NEWLINE, _RETURN = b"\n\r"
_NOT_BLANK = re.compile(rb"[^\r\n]")


@dataclass(frozen=True, slots=True)
class Quoted:
    """Every CSV record ends with a newline outside of quotes."""

    quote: bytes
    delimiter: bytes

    @property
    def reach(self) -> int:
        return 0

    def may_be_in(self, data: bytes) -> bool:
        return True

    def last(self, data: bytes) -> int:
        if self.quote not in data:
            return data.rfind(b"\n") + 1
        edges, place = _edges(data, self.quote, self.delimiter), len(data)
        while (place := data.rfind(b"\n", 0, place)) >= 0:
            num_before = int(np.searchsorted(edges, place))
            if num_before % 2 == 0:
                return place + 1
            place = int(edges[num_before - 1])  # the quote that opened before it
        return 0

    def are_open_after(self, data: bytes) -> bool:
        """Whether a quote is still open at the end of `data`, in a record that has swallowed newlines."""
        is_open = len(_edges(data, self.quote, self.delimiter)) % 2 == 1
        return is_open and b"\n" in data[self.last(data) :]


def _edges(data: bytes, quote: bytes, delimiter: bytes) -> NDArray[np.int64]:
    """Quotes that open and close a field, alternating; two in a row within a field may close and reopen it."""
    values = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(values == quote[0])
    opening = quotes[::2]
    before = values[opening[opening > 0] - 1]
    may_precede = np.zeros(256, np.bool_)  # a table, in which looking up is 4 times as fast as `np.isin`
    may_precede[[delimiter[0], _NEWLINE, _RETURN, quote[0]]] = True
    if may_precede[before].all():
        return quotes
    return np.fromiter(_edges_one_by_one(data, quote, delimiter), np.int64)


def _edges_one_by_one(data: bytes, quote: bytes, delimiter: bytes) -> Iterator[int]:
    for match in _quoted_field(quote, delimiter).finditer(data):
        yield match.start()
        if match[1]:
            yield match.start(1)


@functools.lru_cache(maxsize=8)
def _quoted_field(quote: bytes, delimiter: bytes) -> re.Pattern[bytes]:
    """A quoted field, and the quote that closes it, if any does."""
    mark, other = re.escape(quote), re.escape(delimiter)
    return re.compile(rb"(?:\A|(?<=[%b\r\n]))%b(?:[^%b]++|%b%b)*+(%b|\Z)" % (other, mark, mark, mark, mark, mark))


def has_line_records(options: SourceOptions) -> bool:
    """Whether every newline of a CSV file ends a record, so that it can be cut by bytes."""
    return options.quote is None or not options.quoted_newlines


def read_csv(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of a split, which is a whole file if quoted fields may hold newlines."""
    if not has_line_records(options):
        yield from _read_quoted(split.path, options)
        return
    with open_stream(split.path, options) as stream:
        header = read_header(stream, split.path, options)
        if header.names:
            blocks = _line_blocks(stream, header, split, options, None, on_long="drop")
            yield from _records_of_blocks(blocks, header, split.path, options)


def read_csv_rows(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    """The same records as dicts, from blocks at which reading can resume."""
    with open_stream(split.path, options) as stream:
        header = read_header(stream, split.path, options)
        if not header.names:
            return
        if has_line_records(options):
            blocks = _line_blocks(stream, header, split, options, place, on_long="raise")
        else:
            blocks = _quoted_blocks(stream, header, split.path, options, place)
        for block in blocks:
            yield _rows_of_block(block, header, split.path, options)


def _line_blocks(
    stream: ByteStream, header: Header, split: Split, options: SourceOptions, place: int | None, on_long: OnLong
) -> Iterator[Block]:
    """Blocks of lines after a header."""
    file = as_seekable(stream)
    if file is None or split.end < 0:
        entry = _enter_after_header(stream, header, split.path, place)
        return blocks_to_end(stream, split.path, options, entry, Separated(b"\n"), on_long)
    first, known = split.begin, None
    if first <= header.num_bytes:  # where it ends is known, and need not be looked for: "\r" alone may end it
        first = header.num_bytes
        if place is None:
            place, known = first, Entry(first, header.rest)
    return ByteRange(file, first, split.end, b"\n").blocks(options, place, on_long, known)


def _quoted_blocks(
    stream: ByteStream, header: Header, path: str, options: SourceOptions, place: int | None
) -> Iterator[Block]:
    """Blocks after a header, each of which ends outside of quotes."""
    assert options.quote is not None
    quotes = Quoted(options.quote.encode(), delimiter_of(path, options).encode())
    data = b""
    for block in blocks_to_end(
        stream, path, options, _enter_after_header(stream, header, path, place), quotes, on_long="raise"
    ):
        data = block.data
        yield block
    if quotes.are_open_after(data):
        raise _unclosed(path)


def _enter_after_header(stream: ByteStream, header: Header, path: str, place: int | None) -> Entry:
    """Where to start reading a whole file, and what was already read from there on along with its header."""
    place = max(place or 0, header.num_bytes)
    here = header.num_bytes + len(header.rest)
    if place > here:
        skip_to(stream, path, place, here)
    return Entry(place, header.rest[place - header.num_bytes :])


def _rows_of_block(block: Block, header: Header, path: str, options: SourceOptions) -> Rows:
    values: list[dict[str, Any]] = []
    errors: list[RowError] = []
    for records in _records_of_blocks(iter([block]), header, path, options):
        values += dicts_of(records)
        where = f" Rows are counted from byte {block.offset:,}."
        errors += [replace(error, message=error.message + where) for error in records.errors]
    return Rows(block.offset, values, tuple(errors), end=block.offset + len(block.data))


def _records_of_blocks(blocks: Iterator[Block], header: Header, path: str, options: SourceOptions) -> Iterator[Records]:
    numbering = _Numbering(path)
    for block in blocks:
        if block.dropped_bytes:
            yield numbering.too_long(block)
        elif _NOT_BLANK.search(block.data):
            numbering.base = numbering.next_row
            numbering.num_bytes_read += len(block.data)
            table = arrow("csv").read_csv(
                arrow().BufferReader(block.data),
                **_settings(header, path, options, numbering, block_bytes=len(block.data), newlines=False),
            )
            for batch in table.select(list(options.columns or header.names)).to_batches():
                yield from numbering.records(batch, options)
            yield from numbering.flush()


def _read_quoted(path: str, options: SourceOptions) -> Iterator[Records]:
    """Records of a whole file by pyarrow's own stream, which finds the ends of records as it parses.

    It needs every record to fit in two of its blocks. If one does not, reading starts over with larger blocks, skipping
    the rows that were already handed out.
    """
    numbering = _Numbering(path)
    block_bytes = max(options.batch_bytes, _SMALLEST_BLOCK_BYTES)
    invalid = arrow().ArrowInvalid  # named before it is needed, as in `explain_damage`
    while True:
        try:
            with open_stream(path, options) as stream:
                yield from _read_stream(stream, path, options, numbering, block_bytes)
            return
        except invalid as error:
            if "straddl" not in str(error) or block_bytes >= options.max_record_bytes:
                raise _unreadable(path, numbering.next_row, error, options) from error
        block_bytes = min(block_bytes * _BLOCK_GROWTH, options.max_record_bytes)


def _read_stream(
    stream: ByteStream, path: str, options: SourceOptions, numbering: _Numbering, block_bytes: int
) -> Iterator[Records]:
    header = read_header(stream, path, options)
    rows = _AfterHeader(header.rest, stream)
    if not header.names or not rows.has_rows():
        return
    numbering.start_over()
    settings = _settings(header, path, options, numbering, block_bytes=block_bytes, newlines=True)
    last_value = b""
    for batch in arrow("csv").open_csv(arrow().PythonFile(rows, "r"), **settings):
        if batch.num_rows:
            last_value = batch.column(header.names[-1])[-1].as_py()
        numbering.num_bytes_read = max(numbering.num_bytes_read, header.num_bytes + rows.num_bytes)
        yield from numbering.records(batch.select(list(options.columns or header.names)), options)
    yield from numbering.flush()
    if _is_unclosed(last_value, rows.tail, options):
        raise _unclosed(path)


def _unclosed(path: str) -> FormatError:
    return FormatError(
        f"{path}: the last record opens a quote that is never closed, and swallows the rest of the file. "
        "Repair that record, or pass quote=None if quotes are ordinary characters."
    )


def _is_unclosed(last_value: bytes, tail: bytes, options: SourceOptions) -> bool:
    """Whether the file ended inside a quoted field: the field holds newlines, and the file ends with it, unquoted."""
    assert options.quote is not None
    quote = options.quote.encode()
    value, end = last_value.rstrip(b"\r\n"), tail.rstrip(b"\r\n")
    if b"\n" not in last_value or end.endswith(quote):
        return False
    end = end.replace(2 * quote, quote)
    return value.endswith(end) or end.endswith(quote + value)


def _unreadable(path: str, row: int, error: Exception, options: SourceOptions) -> FormatError:
    if "straddl" in str(error):
        return FormatError(
            f"{path}: the record at row {row} does not end within {options.max_record_bytes:,} bytes. "
            "Either a quote is never closed there, or max_record_bytes is too small."
        )
    return FormatError(f"{path}: pyarrow cannot read the file from row {row} on: {error}")


def _settings(
    header: Header, path: str, options: SourceOptions, numbering: _Numbering, *, block_bytes: int, newlines: bool
) -> dict[str, Any]:
    csv, binary = arrow("csv"), arrow().binary()
    wanted = dict.fromkeys((*(options.columns or header.names), header.names[-1]))  # the last shows an open quote
    return {
        "read_options": csv.ReadOptions(use_threads=False, block_size=block_bytes, column_names=list(header.names)),
        "parse_options": csv.ParseOptions(
            delimiter=delimiter_of(path, options),
            quote_char=options.quote or False,
            newlines_in_values=newlines,
            invalid_row_handler=numbering.on_bad_row,
        ),
        "convert_options": csv.ConvertOptions(
            column_types=dict.fromkeys(header.names, binary), include_columns=list(wanted)
        ),
    }


class _Numbering:
    """Numbers the rows, knowing of bad ones only by the numbers that pyarrow reports."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.next_row = 0
        self.base = 0
        """Number of the row that pyarrow calls 1."""
        self.num_bytes_read = 0
        self._num_bytes_told = 0
        self._pending: list[RowError] = []
        self._num_good = 0
        self._num_to_skip = 0

    def start_over(self) -> None:
        """The file is read again from the top: skip what was already handed out."""
        self._num_to_skip = self._num_good
        self._pending.clear()

    def on_bad_row(self, bad: Any) -> str:
        """pyarrow found a row with too few or too many fields."""
        row = self.base + bad.number - 1
        if row >= self.next_row:
            message = (
                f"row {row} of the split has {bad.actual_columns} fields, but the header has {bad.expected_columns}: "
                f"{bad.text[:80]!r}."
            )
            self._pending.append(RowError(self.path, row, "wrong_fields", message))
        return "skip"

    def records(self, batch: Any, options: SourceOptions) -> Iterator[Records]:
        """Records of the next good rows."""
        skipped = min(self._num_to_skip, batch.num_rows)
        self._num_to_skip -= skipped
        for piece in cut_batch(batch.slice(skipped), options.batch_bytes):
            if piece.num_rows:
                errors = self._errors_among(piece.num_rows)
                num_bytes = self.num_bytes_read - self._num_bytes_told
                self._num_bytes_told = self.num_bytes_read
                yield self._number(_as_text_batch(piece, options.encoding), errors, num_bytes, options)
                self._num_good += piece.num_rows

    def flush(self) -> Iterator[Records]:
        """Bad rows after the last good one."""
        if self._pending:
            errors = tuple(self._pending)
            self._pending = []
            yield Records({}, self.next_row, 0, errors)
            self.next_row += len(errors)

    def too_long(self, block: Block) -> Records:
        """A row that was dropped while it was being read."""
        self.next_row += 1
        return block.too_long(self.path, self.next_row - 1, "line")

    def _errors_among(self, num_rows: int) -> tuple[RowError, ...]:
        """Bad rows before the last of the next `num_rows` good ones."""
        end = self.next_row + num_rows
        count = 0
        while count < len(self._pending) and self._pending[count].row < end + count:
            count += 1
        errors, self._pending = tuple(self._pending[:count]), self._pending[count:]
        return errors

    def _number(self, batch: Any, errors: tuple[RowError, ...], num_bytes: int, options: SourceOptions) -> Records:
        first_row = self.next_row
        self.next_row += batch.num_rows + len(errors)
        records = records_of_batch(batch, first_row, self.path, num_bytes=num_bytes, errors=errors)
        return with_types(records, self.path, options)


def _as_text_batch(batch: Any, encoding: str) -> Any:
    columns = [as_text(column, encoding) for column in batch.columns]
    return arrow().RecordBatch.from_arrays(columns, names=batch.schema.names)


class _AfterHeader:
    """A stream after its header, in the form that pyarrow wants; it remembers how the file ends.

    No read ends between "\\r" and "\\n": pyarrow would drop the "\\n", even inside a quoted field.
    """

    closed = False

    def __init__(self, first: bytes, stream: ByteStream) -> None:
        self.tail = b""
        self.num_bytes = 0
        self._first = first
        self._stream = stream

    def has_rows(self) -> bool:
        """Whether anything but blank lines follows; pyarrow treats an empty stream as an error."""
        while not self._first.strip(b"\r\n"):
            self._first = self._stream.read(1 << 20)
            if not self._first:
                return False
        return True

    def read(self, num_bytes: int = -1) -> bytes:
        """At most `num_bytes`, and none only at the end."""
        if len(self._first) < num_bytes:  # whole blocks: a record must not span three of pyarrow's
            self._first += self._stream.read(num_bytes - len(self._first))
        data = self._first[:num_bytes]
        if data.endswith(b"\r") and len(data) > 1:
            data = data[:-1]
        self._first = self._first[len(data) :]
        self.num_bytes += len(data)
        self.tail = (self.tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

"""Plain files: text by files, lines or separators; images and sounds, one record each, as they are stored.

A block of a text file is cut into lines or separated documents by one vectorised split; for dicts, it is decoded at
once and cut by `str.split`, and only a block that does not decode is examined document by document. A document's bytes
are kept as they are, except for a byte-order mark at the start of the file and the "\\r" of a line that ends with
"\\r\\n". Empty lines are empty documents; what follows the last separator is a document unless it is empty.

Of a group of files that are one record each, a damaged one is just one bad row; the rest is still read. A file's class
is the folder it is in. Decoding is a transform's job.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from penstock.errors import FormatError
from penstock.sources._arrow import arrow, as_text, binary_array, plain_values, records_of_batch, text_array
from penstock.sources._blocks import Block, record_blocks
from penstock.sources._files import open_stream, read_exactly, without_mark
from penstock.sources._model import Records, RowError, Rows, Split
from penstock.sources._options import COLUMN_OF_FILES, SourceOptions

Clean = Callable[[bytes, str], bytes]
"""Strips from a file's content, given its path, what is not part of the record; `FormatError` if it is not a record."""


@dataclass(slots=True)
class FileBatch:
    """Whole files, in the order of their rows."""

    first_row: int
    rows: list[int] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    num_bytes: int = 0


def batches_of_files(split: Split, options: SourceOptions, clean: Clean) -> Iterator[FileBatch]:
    """The files of a split, read whole and cleaned, about `batch_bytes` at a time."""
    batch = FileBatch(0)
    for row, path in enumerate(split.paths):
        _add(batch, row, path, options, clean)
        if batch.num_bytes >= options.batch_bytes:
            yield batch
            batch = FileBatch(row + 1)
    if batch.rows or batch.errors:
        yield batch


def read_files(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Images or sounds of a group, about `batch_bytes` at a time."""
    for batch in batches_of_files(split, options, lambda content, path: content):
        columns = _columns(batch, split)
        yield Records(
            {name: columns[name] for name in options.columns or columns},
            batch.first_row,
            len(batch.rows),
            tuple(batch.errors),
            batch.num_bytes,
        )


def _columns(batch: FileBatch, split: Split) -> dict[str, Any]:
    paths = text_array([split.paths[row] for row in batch.rows])
    columns: dict[str, Any] = {COLUMN_OF_FILES[split.format]: batch.contents, "path": paths}
    if split.labels:
        columns["label"] = plain_values([split.labels[row] for row in batch.rows])
        columns["class"] = text_array([split.class_names[row] for row in batch.rows])
    return columns


def _add(batch: FileBatch, row: int, path: str, options: SourceOptions, clean: Clean) -> None:
    limit = options.max_record_bytes
    try:
        with open_stream(path, options) as stream:
            content = read_exactly(stream, limit + 1)
        batch.num_bytes += len(content)
        cleaned = clean(content, path)
    except FormatError as error:
        message = str(error).removeprefix(f"{path}: ")
        batch.errors.append(RowError(path, row, "damaged_file", message))
        return
    if len(content) > limit:
        message = f"the file has more than max_record_bytes={limit:,} bytes."
        batch.errors.append(RowError(path, row, "too_long", message))
    else:
        batch.rows.append(row)
        batch.contents.append(cleaned)


_Document = TypeVar("_Document", str, bytes)


def read_text(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Documents with their paths."""
    if options.text_unit == "file":
        for batch in batches_of_files(split, options, without_mark):
            yield _records_of_files(batch, split, options)
        return
    row = 0
    for block in record_blocks(split, options, _separator(options), None, on_long="drop"):
        records = _read_block(block, row, split.path, options)
        row += records.num_rows + len(records.errors)
        if records.num_rows or records.errors:
            yield records


def read_text_rows(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    """Documents as dicts, without their paths."""
    if options.text_unit == "file":
        with open_stream(split.path, options) as stream:
            data = read_exactly(stream, options.max_record_bytes + 1)
        if len(data) > options.max_record_bytes:
            limit = options.max_record_bytes
            raise FormatError(f"{split.path}: the file has more than max_record_bytes={limit:,} bytes.")
        yield _decode_each([without_mark(data, split.path)], 0, len(data), split.path, options)
        return
    for block in record_blocks(split, options, _separator(options), place, on_long="raise"):
        yield _decode_block(block, split.path, options)


def _separator(options: SourceOptions) -> bytes:
    """What ends a document within a file."""
    return b"\n" if options.separator is None else options.separator.encode(options.encoding)


def _content(block: Block, path: str, separator: bytes) -> bytes:
    """The block reduced to documents and separators."""
    data = without_mark(block.data, path) if block.offset == 0 else block.data
    return data.replace(b"\r\n", b"\n") if separator == b"\n" and b"\r" in data else data


def _read_block(block: Block, row: int, path: str, options: SourceOptions) -> Records:
    if block.dropped_bytes:
        return block.too_long(path, row, "document")
    separator = _separator(options)
    texts = as_text(_split(_content(block, path, separator), separator), options.encoding)
    return records_of_batch(_with_paths(texts, [path] * len(texts)), row, path, num_bytes=len(block.data))


def _split(data: bytes, separator: bytes) -> Any:
    """Documents of a block as a binary array."""
    if separator in data:  # then the block ends with one; only the end of the file may lack it
        data = data[: -len(separator)]
    elif not data:
        return binary_array([])
    return arrow("compute").split_pattern(binary_array([data]), separator).values


def _decode_block(block: Block, path: str, options: SourceOptions) -> Rows:
    separator = _separator(options)
    data, end = _content(block, path, separator), block.offset + len(block.data)
    try:
        texts = data.decode(options.encoding).split(separator.decode(options.encoding))
    except UnicodeDecodeError:
        return _decode_each(_without_end(data.split(separator)), block.offset, end, path, options)
    return Rows(block.offset, [{"text": text} for text in _without_end(texts)], end=end)


def _without_end(documents: list[_Document]) -> list[_Document]:
    """The documents without the empty one after the last separator, if any."""
    return documents if documents[-1] else documents[:-1]


def _decode_each(documents: list[bytes], offset: int, end: int, path: str, options: SourceOptions) -> Rows:
    values, errors = [], []
    for row, document in enumerate(documents):
        try:
            values.append({"text": document.decode(options.encoding)})
        except UnicodeDecodeError as error:
            message = f"document {row}, counted from byte {offset:,}, is not {options.encoding}: {error.reason}."
            errors.append(RowError(path, row, "invalid_utf8", message))
    return Rows(offset, values, tuple(errors), end=end)


def _records_of_files(batch: FileBatch, split: Split, options: SourceOptions) -> Records:
    paths = [split.paths[row] for row in batch.rows]
    texts = as_text(binary_array(batch.contents), options.encoding)
    table = _with_paths(texts, paths)
    records = records_of_batch(
        table, batch.first_row, split.path, num_bytes=batch.num_bytes, errors=tuple(batch.errors)
    )
    return replace(records, errors=tuple(replace(error, path=split.paths[error.row]) for error in records.errors))


def _with_paths(texts: Any, paths: list[str]) -> Any:
    return arrow().RecordBatch.from_arrays([texts, text_array(paths)], names=["text", "path"])

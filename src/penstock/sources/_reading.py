"""One split in, records out: which reader reads which format, by columns and as dicts.

Every format has a reader that gives columns, for `prepare`. Those that a stream reads have one that gives dicts too,
from any block on: a block's place is enough to begin there again. It is a byte of the (uncompressed) file, or for
parquet the number of the block's first row within the split. Records are the same wherever reading begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from penstock.sources._arrow import check_memory
from penstock.sources._columnar import read_ipc, read_parquet, read_parquet_rows
from penstock.sources._csv import has_line_records, read_csv, read_csv_rows
from penstock.sources._formats import compression_of, format_of
from penstock.sources._jsonl import read_jsonl, read_jsonl_rows
from penstock.sources._model import Records, Rows, SourceFile, Split
from penstock.sources._objects import peek_object, read_object
from penstock.sources._options import SourceOptions
from penstock.sources._text import read_text, read_text_rows
from penstock.sources._webdataset import read_webdataset
from penstock.sources._whole_files import read_files

_Batch = TypeVar("_Batch", Records, Rows)
ReadColumns = Callable[[Split, SourceOptions], Iterator[Records]]
ReadRows = Callable[[Split, SourceOptions, int | None], Iterator[Rows]]


@dataclass(frozen=True, slots=True)
class _Reader:
    """How one format is read."""

    columns: ReadColumns
    rows: ReadRows | None = None
    """None for formats that have no streams."""
    peek: ReadColumns | None = None
    """For a look at the first records, where reading would use them up."""


_READERS = {
    "arrow": _Reader(read_ipc),
    "csv": _Reader(read_csv, read_csv_rows),
    "audio": _Reader(read_files),
    "images": _Reader(read_files),
    "jsonl": _Reader(read_jsonl, read_jsonl_rows),
    "object": _Reader(read_object, peek=peek_object),
    "parquet": _Reader(read_parquet, read_parquet_rows),
    "text": _Reader(read_text, read_text_rows),
    "webdataset": _Reader(read_webdataset),
}


def read_split(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of one split, in order; the same every time.

    Raises:
        FormatError: the file is truncated or damaged.
        SchemaError: it lacks a column of `options.columns`.
        StorageError: it is gone, or a remote store did not answer `max_attempts` times.
        MemoryError: there was too little memory, whatever the file holds.
    """
    return _named(_READERS[split.format].columns(split, options), split.path)


def peek_split(split: Split, options: SourceOptions) -> Iterator[Records]:
    """As `read_split`, for a look at the first records: any split can still be read afterwards."""
    reader = _READERS[split.format]
    return _named((reader.peek or reader.columns)(split, options), split.path)


def read_rows(split: Split, options: SourceOptions, place: int | None = None) -> Iterator[Rows]:
    """Records of a split in order, from the block at `place` on, or from its start.

    The split is a range of bytes or a whole file (jsonl, csv, text), or row groups (parquet).

    Raises:
        FormatError: the file is truncated or damaged, or a record is longer than `max_record_bytes`.
        SchemaError: it lacks a column of `options.columns`.
        StorageError: it is gone, or shorter than when it was listed.
        DatasetChanged: no record begins at `place`.
        MemoryError: there was too little memory, whatever the file holds.
    """
    read = _READERS[split.format].rows
    assert read is not None, f"{split.format} has no streams"
    return _named(read(split, options, place), split.path)


def _named(batches: Iterator[_Batch], path: str) -> Iterator[_Batch]:
    """The batches, with the file named should memory run out."""
    try:
        yield from batches
    except MemoryError as error:
        check_memory(error, path)


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

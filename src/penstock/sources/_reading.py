"""One split in, records out: which reader reads which format, by columns and as dicts.

Every format has a reader that gives columns, for `prepare`. Formats that can be streamed also have one that gives
dicts, from any block on: a block's place is all it takes to resume there. It is a byte of the (uncompressed) file, or
for parquet the number of the block's first row within the split. Records are the same wherever reading begins.

Types of CSV columns that are to be inferred are resolved once, from the first rows, before any split is read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.sources._arrow import check_memory
from penstock.sources._columnar import read_ipc, read_parquet, read_parquet_rows
from penstock.sources._csv import read_csv, read_csv_rows
from penstock.sources._csv_types import infer_types
from penstock.sources._jsonl import read_jsonl, read_jsonl_rows
from penstock.sources._model import Records, Rows, SourceFile, Split
from penstock.sources._objects import peek_object, read_object
from penstock.sources._options import FieldType, SourceOptions, format_of
from penstock.sources._text import read_text, read_text_rows
from penstock.sources._webdataset import read_webdataset
from penstock.sources._whole_files import read_files

_Batch = TypeVar("_Batch", Records, Rows)
ReadColumns = Callable[[Split, SourceOptions], Iterator[Records]]
ReadRows = Callable[[Split, SourceOptions, int | None], Iterator[Rows]]
_MAX_FILES_FOR_TYPES = 16
"""How many files are searched for a first row; an empty file or two is not unusual."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """How one format is read."""

    columns: ReadColumns
    rows: ReadRows | None = None
    """None for formats that cannot be streamed."""
    peek: ReadColumns | None = None
    """For a peek at the first records, if reading would use them up."""


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
        StorageError: it is gone, or a remote store did not answer in `max_attempts` attempts.
        MemoryError: there was too little memory; the file may be fine.
    """
    return _name_file(_READERS[split.format].columns(split, options), split.path)


def peek_split(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Like `read_split`, for a peek at the first records: any split can still be read afterwards."""
    reader = _READERS[split.format]
    return _name_file((reader.peek or reader.columns)(split, options), split.path)


def read_rows(split: Split, options: SourceOptions, place: int | None = None) -> Iterator[Rows]:
    """Records of a split in order, from the block at `place` on, or from the start.

    The split is a range of bytes or a whole file (jsonl, csv, text), or row groups (parquet).

    Raises:
        FormatError: the file is truncated or damaged, or a record is longer than `max_record_bytes`.
        SchemaError: it lacks a column of `options.columns`.
        StorageError: it is gone, or shorter than when it was listed.
        DatasetChanged: no record begins at `place`.
        MemoryError: there was too little memory; the file may be fine.
    """
    read = _READERS[split.format].rows
    assert read is not None, f"{split.format} cannot be streamed"
    return _name_file(read(split, options, place), split.path)


def _name_file(batches: Iterator[_Batch], path: str) -> Iterator[_Batch]:
    """The batches; if memory runs out, the error names the file."""
    try:
        yield from batches
    except MemoryError as error:
        check_memory(error, path)


def resolve_types(files: Sequence[SourceFile], options: SourceOptions) -> SourceOptions:
    """The options with inferred types in place of `types="infer"`, so that all readers of the files use the same."""
    if options.types != "infer":
        return options
    return dataclasses.replace(options, types=types_in_first_rows(files, options))


def types_in_first_rows(files: Sequence[SourceFile], options: SourceOptions) -> dict[str, FieldType]:
    """Columns of CSV files whose first rows hold numbers or booleans, with their types."""
    as_text = dataclasses.replace(options, types=None)
    csv_files = (file for file in files if format_of(file.path, options) == "csv")
    for file in itertools.islice(csv_files, _MAX_FILES_FOR_TYPES):
        whole = Split("csv", file.path, 0, -1, max(file.num_bytes, 0))
        for records in read_csv(whole, as_text):
            if records.num_rows:
                return infer_types(records, options)
    return {}

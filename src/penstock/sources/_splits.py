"""How files are cut into splits, and which reader reads a split of which format, by columns and as dicts.

Line formats can be cut at any byte (see `_blocks`), so no file is opened for it; parquet and Arrow files are cut by
their footers. A file in which reading cannot start in the middle is one split: compressed files, tars, CSV with quoted
newlines, files on a server without ranges. Small files that are one record each are grouped.

Every format has a reader that gives columns, for `prepare`. Formats that can be streamed also have one that gives
dicts, from any block on: a block's place is all it takes to resume there. It is a byte of the (uncompressed) file, or
for parquet the number of the block's first row within the split. Records are the same wherever reading begins.

Types of CSV columns that are to be inferred are resolved once, from the first rows, before any split is read.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import FormatError
from penstock.sources._arrow import check_memory
from penstock.sources._columnar import read_ipc, read_parquet, read_parquet_rows, split_ipc, split_parquet
from penstock.sources._csv import has_line_records, read_csv, read_csv_rows
from penstock.sources._csv_columns import infer_types
from penstock.sources._jsonl import read_jsonl, read_jsonl_rows
from penstock.sources._model import Records, Rows, SourceFile, Split, byte_ranges, runs
from penstock.sources._objects import peek_object, read_object, split_object
from penstock.sources._options import COLUMN_OF_FILES, FieldType, SourceOptions, compression_of, format_of, is_object
from penstock.sources._plain_files import read_files, read_text, read_text_rows
from penstock.sources._webdataset import read_webdataset

# An assumption, not a measurement: text compresses to about a quarter. Tasks are sized by the uncompressed data.
_COMPRESSION_RATIO = 4
_MOST_FILES = 10_000
# Added to each file's size, so that a million empty files are not one split.
_FILE_BYTES = 4096


def class_names(files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Image classes in the order of their numbers, for `SourceOptions.classes` of a later run."""
    return tuple(sorted({file.class_name for file in files if file.class_name}))


def plan_splits(
    files: Sequence[SourceFile], options: SourceOptions, target_bytes: int, *, keep_damaged: bool = False
) -> list[Split]:
    """Splits of about `target_bytes` that together hold every record of `files` once, in order.

    With `keep_damaged`, a file that cannot be cut because it is damaged is one split, which raises when it is read.

    Raises:
        FormatError: a parquet or Arrow file is damaged, and `keep_damaged` is not set.
        SchemaError: a file lacks a column of `options.columns`.
        StorageError: a file cannot be read.
    """
    if target_bytes < 1:
        raise ValueError(f"target_bytes={target_bytes}; it must be at least 1.")
    labels = _labels(files, options)
    splits: list[Split] = []
    for is_grouped, run in itertools.groupby(files, key=lambda file: _is_one_record(file, options)):
        if is_grouped:
            splits += _group(list(run), labels, options, target_bytes)
        else:
            for file in run:
                splits += _split_or_keep(file, options, target_bytes, keep_damaged)
    return splits


def _split_or_keep(file: SourceFile, options: SourceOptions, target_bytes: int, keep_damaged: bool) -> list[Split]:
    try:
        return _split_file(file, options, target_bytes)
    except FormatError:
        if not keep_damaged:
            raise
        return [Split(str(format_of(file.path, options)), file.path, 0, -1, max(file.num_bytes, 0))]


def _is_one_record(file: SourceFile, options: SourceOptions) -> bool:
    kind = format_of(file.path, options)
    return kind in COLUMN_OF_FILES or (kind == "text" and options.text_unit == "file")


def _split_file(file: SourceFile, options: SourceOptions, target_bytes: int) -> list[Split]:
    kind = format_of(file.path, options)
    assert kind is not None, "list_files names a format for every file"
    if kind == "parquet":
        return split_parquet(file, options, target_bytes)
    if kind == "arrow":
        return split_ipc(file, options, target_bytes)
    if is_object(file.path):
        return split_object(file, target_bytes)
    if kind == "webdataset" or why_unsplittable(file, options):
        return [Split(kind, file.path, 0, file.num_bytes, _expected_bytes(file))]
    return [Split(kind, file.path, begin, end, end - begin) for begin, end in byte_ranges(file.num_bytes, target_bytes)]


def why_unsplittable(file: SourceFile, options: SourceOptions) -> str:
    """Why reading cannot start in the middle of a file, in a few words; "" if it can."""
    kind = format_of(file.path, options)
    if compression_of(file.path) is not None and kind != "parquet":
        return "is compressed"
    if not file.is_seekable or file.num_bytes < 0:
        return "is on a server that does not support ranges"
    if kind == "csv" and not has_line_records(options):
        return "may have newlines in quoted fields"
    return "is one record" if kind == "text" and options.text_unit == "file" else ""


def _expected_bytes(file: SourceFile) -> int:
    return max(file.num_bytes, 0) * (_COMPRESSION_RATIO if compression_of(file.path) else 1)


def _group(
    files: list[SourceFile], labels: dict[str, int], options: SourceOptions, target_bytes: int
) -> Iterator[Split]:
    sizes = [max(file.num_bytes, 0) + _FILE_BYTES for file in files]
    for begin, end in runs(sizes, target_bytes):
        for first in range(begin, end, _MOST_FILES):
            chosen = files[first : min(first + _MOST_FILES, end)]
            yield _split_of_group(chosen, labels, options)


def _split_of_group(files: list[SourceFile], labels: dict[str, int], options: SourceOptions) -> Split:
    classes = tuple(file.class_name for file in files) if labels and files[0].class_name else ()
    return Split(
        format=str(format_of(files[0].path, options)),
        path=files[0].path,
        begin=0,
        end=len(files),
        num_bytes=sum(_expected_bytes(file) for file in files),
        paths=tuple(file.path for file in files),
        class_names=classes,
        labels=tuple(labels[name] for name in classes),
    )


def _labels(files: Sequence[SourceFile], options: SourceOptions) -> dict[str, int]:
    """Number of each class; empty if no file is in a class folder."""
    found = class_names(files)
    if not found:
        return {}
    own = (file for file in files if format_of(file.path, options) in COLUMN_OF_FILES)
    stray = next((file.path for file in own if not file.class_name), None)
    if stray is not None:
        raise ValueError(f"{stray}: this file is not in a class folder, but others are. Move it, or pass a glob.")
    classes = found if options.classes is None else options.classes
    for name in found:
        if name not in classes:
            raise ValueError(f"The class {name!r} is not one of classes={classes!r:.200}. Add it at the end.")
    return {name: number for number, name in enumerate(classes)}


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
    "video": _Reader(read_files),
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

"""Groups of files that are one record each: text documents, and images and sounds as they are stored.

A damaged file is just one bad row; the rest of its group is still read. A file's class is the folder it is in.
Decoding is a transform's job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import FormatError
from penstock.sources._arrow import arrow, text_array
from penstock.sources._files import open_stream, read_exactly
from penstock.sources._model import Records, RowError, Split
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
    pa = arrow()
    paths = text_array([split.paths[row] for row in batch.rows])
    columns: dict[str, Any] = {COLUMN_OF_FILES[split.format]: batch.contents, "path": paths}
    if split.labels:
        columns["label"] = pa.array([split.labels[row] for row in batch.rows], pa.int64())
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

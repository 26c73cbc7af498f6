"""Groups of files that are one record each: text documents and images.

A file that is damaged is one bad row, like any other that is wrong: the others of its group are none the worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.sources._blocks import read_exactly
from penstock.sources._files import open_stream
from penstock.sources._model import RowError, Split
from penstock.sources._options import SourceOptions

Clean = Callable[[bytes, str], bytes]
"""Takes from a file's content, given its path, what is no part of the record; `FormatError` when there is no record."""


@dataclass(slots=True)
class FileBatch:
    """Whole files, in the order of their rows."""

    first_row: int
    rows: list[int] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def row_numbers(self) -> NDArray[np.int64] | None:
        """Row of each file, or None when none is missing."""
        return np.array(self.rows, np.int64) if self.errors else None


def batches_of_files(split: Split, options: SourceOptions, clean: Clean) -> Iterator[FileBatch]:
    """The files of a split, read whole and made clean, about `batch_bytes` at a time."""
    batch = FileBatch(0)
    for row, path in enumerate(split.paths):
        _add(batch, row, path, options, clean)
        if batch.num_bytes >= options.batch_bytes:
            yield batch
            batch = FileBatch(row + 1)
    if batch.rows or batch.errors:
        yield batch


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

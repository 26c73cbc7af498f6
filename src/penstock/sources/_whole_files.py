"""Groups of files that are one record each: text documents and images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.sources._blocks import read_exactly
from penstock.sources._files import open_stream
from penstock.sources._model import RowError, Split
from penstock.sources._options import SourceOptions


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


def batches_of_files(split: Split, options: SourceOptions) -> Iterator[FileBatch]:
    """The files of a split, read whole, about `batch_bytes` at a time."""
    batch = FileBatch(0)
    for row, path in enumerate(split.paths):
        _add(batch, row, path, options)
        if batch.num_bytes >= options.batch_bytes:
            yield batch
            batch = FileBatch(row + 1)
    if batch.rows or batch.errors:
        yield batch


def _add(batch: FileBatch, row: int, path: str, options: SourceOptions) -> None:
    limit = options.max_record_bytes
    with open_stream(path, options) as stream:
        content = read_exactly(stream, limit + 1)
    batch.num_bytes += len(content)
    if len(content) > limit:
        message = f"the file has more than max_record_bytes={limit:,} bytes."
        batch.errors.append(RowError(path, row, "too_long", message))
    else:
        batch.rows.append(row)
        batch.contents.append(content)

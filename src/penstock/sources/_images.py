"""Image files as they are stored, with the class that their folder gives. Decoding is a transform's work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.sources._arrow import arrow
from penstock.sources._model import Records, Split
from penstock.sources._options import SourceOptions
from penstock.sources._whole_files import FileBatch, batches_of_files


def read_images(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Images of a group, about `batch_bytes` at a time."""
    for batch in batches_of_files(split, options, lambda content, path: content):
        columns = _columns(batch, split)
        yield Records(
            {name: columns[name] for name in options.columns or columns},
            batch.first_row,
            len(batch.rows),
            tuple(batch.errors),
            batch.row_numbers,
            batch.num_bytes,
        )


def _columns(batch: FileBatch, split: Split) -> dict[str, Any]:
    pa = arrow()
    columns: dict[str, Any] = {"image": batch.contents, "path": pa.array([split.paths[row] for row in batch.rows])}
    if split.labels:
        columns["label"] = pa.array([split.labels[row] for row in batch.rows], pa.int64())
        columns["class"] = pa.array([split.class_names[row] for row in batch.rows])
    return columns

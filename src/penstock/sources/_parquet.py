"""Parquet by row groups: the footer says where they are, and batches stream out of each.

Checksums of pages are verified where the writer put them in (pyarrow does neither by default). Column
chunks are read through a buffer, so memory is the pages at hand and not the row group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from penstock.errors import StorageError
from penstock.sources._arrow import arrow, check_columns, cut_batch, named_damage, records_of_batch
from penstock.sources._cutting import runs
from penstock.sources._files import arrow_file, open_anywhere
from penstock.sources._model import Records, SourceFile, Split
from penstock.sources._options import SourceOptions

_LOCAL_BUFFER_BYTES = 1 << 20
_MOST_ROWS = 65_536


def split_parquet(file: SourceFile, options: SourceOptions, target_bytes: int) -> list[Split]:
    """Runs of row groups of about `target_bytes`, counted without compression."""
    with _open(file.path, options) as parquet:
        check_columns(parquet.schema_arrow.names, file.path, options.columns)
        sizes = [_group_bytes(parquet.metadata.row_group(group), options) for group in range(parquet.num_row_groups)]
    splits = []
    for begin, end in runs(sizes, target_bytes):
        splits.append(Split("parquet", file.path, begin, end, sum(sizes[begin:end])))
    return splits


def read_parquet(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of a run of row groups; an `end` of -1 is the end of the file."""
    row = 0
    with _open(split.path, options) as parquet:
        for group in range(split.begin, parquet.num_row_groups if split.end < 0 else split.end):
            if group >= parquet.num_row_groups:
                raise StorageError(
                    f"{split.path}: row group {group} is gone. The file changed; list the sources again."
                )
            for batch in _batches(parquet, group, split.path, options):
                yield records_of_batch(batch, row, split.path)
                row += batch.num_rows


@contextlib.contextmanager
def _open(path: str, options: SourceOptions) -> Iterator[Any]:
    parquet = arrow("parquet")
    with open_anywhere(path, options) as file, named_damage(path, "parquet"):
        buffer_bytes = max(options.batch_bytes, _LOCAL_BUFFER_BYTES)
        yield parquet.ParquetFile(
            arrow_file(file), pre_buffer=False, buffer_size=buffer_bytes, page_checksum_verification=True
        )


def _batches(parquet: Any, group: int, path: str, options: SourceOptions) -> Iterator[Any]:
    metadata = parquet.metadata.row_group(group)
    check_columns(parquet.schema_arrow.names, path, options.columns)
    columns = None if options.columns is None else list(options.columns)
    bytes_per_row = max(1, _group_bytes(metadata, options) // max(1, metadata.num_rows))
    num_rows = min(max(1, options.batch_bytes // bytes_per_row), _MOST_ROWS)
    for batch in parquet.iter_batches(batch_size=num_rows, row_groups=[group], columns=columns, use_threads=False):
        yield from cut_batch(batch, options.batch_bytes)


def _group_bytes(metadata: Any, options: SourceOptions) -> int:
    """Bytes of the wanted columns of a row group, without compression."""
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    wanted = None if options.columns is None else set(options.columns)
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if wanted is None or chunk.path_in_schema.split(".", 1)[0] in wanted
    )

"""Parquet by row groups, and Arrow IPC by record batches: files that say where their rows are.

A parquet footer says where row groups are, and batches stream out of each. Checksums of pages are verified where the
writer put them in (pyarrow does neither by default). Column chunks are read through a buffer, so memory is the pages
at hand and not the row group.

Arrow IPC comes as files with a footer, and as streams without one, which is what Hugging Face datasets write. A local
file is mapped, so batches outside the split cost nothing to step over, not even in a stream. One that is elsewhere is
read from start to end, as one split. Every batch is validated in full before it is given (see `_arrow`): a damaged
one can crash the process (2 of 200 bit flips, reliability notes).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import StorageError
from penstock.filesystem import is_network_filesystem
from penstock.sources._arrow import arrow, check_columns, cut_batch, dicts_of, named_damage, records_of_batch
from penstock.sources._files import arrow_file, open_anywhere
from penstock.sources._model import Records, Rows, SourceFile, Split, runs
from penstock.sources._options import SourceOptions
from penstock.sources._remote import is_remote

_LOCAL_BUFFER_BYTES = 1 << 20
_MOST_ROWS = 65_536
_MAGIC = b"ARROW1"


def split_parquet(file: SourceFile, options: SourceOptions, target_bytes: int) -> list[Split]:
    """Runs of row groups of about `target_bytes`, counted without compression."""
    with _open_parquet(file.path, options) as parquet:
        check_columns(parquet.schema_arrow.names, file.path, options.columns)
        sizes = [_group_bytes(parquet.metadata.row_group(group), options) for group in range(parquet.num_row_groups)]
    splits = []
    for begin, end in runs(sizes, target_bytes):
        splits.append(Split("parquet", file.path, begin, end, sum(sizes[begin:end])))
    return splits


def read_parquet(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of a run of row groups; an `end` of -1 is the end of the file."""
    row = 0
    with _open_parquet(split.path, options) as parquet:
        for group in range(split.begin, parquet.num_row_groups if split.end < 0 else split.end):
            if group >= parquet.num_row_groups:
                raise StorageError(
                    f"{split.path}: row group {group} is gone. The file changed; list the sources again."
                )
            for batch in _batches(parquet, group, split.path, options):
                yield records_of_batch(batch, row, split.path)
                row += batch.num_rows


def read_parquet_rows(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    """The same records as dicts; a place is the number of a row."""
    place = place or 0
    for records in read_parquet(split, options):
        if records.first_row >= place:
            yield Rows(records.first_row, dicts_of(records), records.errors, records.first_row)
        elif records.first_row + records.num_rows + len(records.errors) > place:  # batches were cut in another way
            is_due = (records.row_numbers() >= place).tolist()
            errors = tuple(error for error in records.errors if error.row >= place)
            yield Rows(place, list(itertools.compress(dicts_of(records), is_due)), errors, place)


def split_ipc(file: SourceFile, options: SourceOptions, target_bytes: int) -> list[Split]:
    """Runs of record batches of about `target_bytes`."""
    if is_remote(file.path):
        return [Split("arrow", file.path, 0, -1, max(file.num_bytes, 0))]
    with _open_ipc(file.path, options) as batches:
        sizes = [batch.nbytes for batch in batches]
    return [Split("arrow", file.path, begin, end, sum(sizes[begin:end])) for begin, end in runs(sizes, target_bytes)]


def read_ipc(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of a run of batches; an `end` of -1 is the end of the file."""
    row = 0
    with _open_ipc(split.path, options) as batches:
        for number, batch in enumerate(batches):
            if 0 <= split.end <= number:
                return
            if number >= split.begin:
                for piece in cut_batch(batch, options.batch_bytes):
                    yield records_of_batch(piece, row, split.path)
                    row += piece.num_rows


@contextlib.contextmanager
def _open_parquet(path: str, options: SourceOptions) -> Iterator[Any]:
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


@contextlib.contextmanager
def _open_ipc(path: str, options: SourceOptions) -> Iterator[Iterator[Any]]:
    """The batches of a file with the wanted columns, checked as far as their buffers go."""
    with open_anywhere(path, options) as file, named_damage(path, "Arrow"), contextlib.closing(_source(file)) as source:
        yield _batches_of_ipc(source, path, options)


def _source(file: Any) -> Any:
    pa = arrow()
    is_local = not is_remote(file.path)
    if is_local and file.size and not is_network_filesystem(Path(file.path)):
        return pa.memory_map(file.path)
    return pa.OSFile(file.path) if is_local else pa.PythonFile(file, "r")


def _batches_of_ipc(source: Any, path: str, options: SourceOptions) -> Iterator[Any]:
    ipc = arrow("ipc")
    is_file = source.read(len(_MAGIC)) == _MAGIC
    source.seek(0)
    reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
    check_columns(reader.schema.names, path, options.columns)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        batch.validate()
        yield batch if options.columns is None else batch.select(list(options.columns))

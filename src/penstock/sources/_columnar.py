"""Parquet by row groups, and Arrow IPC by record batches: files that say where their rows are.

A parquet footer says where row groups are, and batches are streamed from each. Page checksums are verified if the
writer stored them (by default pyarrow does neither). Column chunks are read through a buffer, so memory is the current
pages and not the row group. Batches are sized by what earlier ones took once decoded, and never so long that the
longest stored value, repeated in every row, would take more than 512 MB.

Arrow IPC comes as files with a footer, and as streams without one, which is what Hugging Face datasets write. A local
file is mapped, so batches outside the split cost nothing to skip, even in a stream. A remote one is read from start to
end, as one split. Every batch is validated in full before it is handed out (see `_arrow`): a damaged one can crash the
process (2 of 200 bit flips did).
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StorageError
from penstock.filesystem import is_network_filesystem
from penstock.sources._arrow import (
    arrow,
    check_columns,
    check_fields,
    dicts_of,
    explain_damage,
    is_text,
    records_of_batch,
    select_nested,
    stored_bytes,
    with_nan,
    with_roots,
)
from penstock.sources._files import arrow_file, open_anywhere
from penstock.sources._model import Records, Rows, SourceFile, Split, runs
from penstock.sources._options import SourceOptions
from penstock.sources._remote import is_remote

_LOCAL_BUFFER_BYTES = 1 << 20
_MOST_ROWS = 65_536
_FIRST_ROWS = 64
_GROWTH = 8
_MOST_DECODED_BYTES = 512 << 20
_MOST_BATCHES = 100
"""Decode a row group in up to this many batches rather than look for its longest value first."""
_PREFIXES = "DELTA_BYTE_ARRAY"
_MAGIC = b"ARROW1"


def split_parquet(file: SourceFile, options: SourceOptions, target_bytes: int) -> list[Split]:
    """Runs of row groups of about `target_bytes`, uncompressed."""
    with _open_parquet(file.path, options) as parquet:
        _check_columns(parquet.file.schema_arrow, file.path, options)
        groups = map(parquet.file.metadata.row_group, range(parquet.file.num_row_groups))
        sizes = [_group_bytes(group, options) for group in groups]
    return [Split("parquet", file.path, begin, end, sum(sizes[begin:end])) for begin, end in runs(sizes, target_bytes)]


def read_parquet(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of a run of row groups; an `end` of -1 is the end of the file."""
    row = 0
    with _open_parquet(split.path, options) as parquet:
        num_groups = parquet.file.num_row_groups
        for group in range(split.begin, num_groups if split.end < 0 else split.end):
            if group >= num_groups:
                raise StorageError(
                    f"{split.path}: row group {group} is gone. The file changed; list the sources again."
                )
            for batch in _batches(parquet, group, split.path, options):
                yield with_nan(records_of_batch(batch, row, split.path), options)
                row += batch.num_rows


def read_parquet_rows(split: Split, options: SourceOptions, place: int | None) -> Iterator[Rows]:
    """The same records as dicts; a place is the number of a row."""
    place = place or 0
    for records in read_parquet(split, options):
        if records.first_row >= place:
            yield Rows(records.first_row, dicts_of(records), records.errors, records.first_row)
        elif records.first_row + records.num_rows + len(records.errors) > place:  # batches were cut differently
            is_due = (records.row_numbers() >= place).tolist()
            errors = tuple(error for error in records.errors if error.row >= place)
            yield Rows(place, list(itertools.compress(dicts_of(records), is_due)), errors, place)


def split_ipc(file: SourceFile, options: SourceOptions, target_bytes: int) -> list[Split]:
    """Runs of record batches of about `target_bytes`."""
    if is_remote(file.path):
        return [Split("arrow", file.path, 0, -1, max(file.num_bytes, 0))]
    with _open_ipc(file.path, options) as batches:
        sizes = [stored_bytes(batch) for batch in batches]
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
                    yield with_nan(records_of_batch(piece, row, split.path), options)
                    row += piece.num_rows


class _Parquet(NamedTuple):
    """An open parquet file, and what it is read from, which can be opened again."""

    source: Any
    file: Any


def _parquet_file(source: Any, options: SourceOptions, **settings: Any) -> Any:
    buffer_bytes = max(options.batch_bytes, _LOCAL_BUFFER_BYTES)
    return arrow("parquet").ParquetFile(
        source, pre_buffer=False, buffer_size=buffer_bytes, page_checksum_verification=True, **settings
    )


def _check_columns(schema: Any, path: str, options: SourceOptions) -> None:
    check_columns(schema.names, path, options.columns)
    check_fields(schema, options.columns, path)


@contextlib.contextmanager
def _open_parquet(path: str, options: SourceOptions) -> Iterator[_Parquet]:
    with open_anywhere(path, options) as file, explain_damage(path, "parquet"):
        source = arrow_file(file)
        yield _Parquet(source, _parquet_file(source, options))


def _batches(parquet: _Parquet, group: int, path: str, options: SourceOptions) -> Iterator[Any]:
    """Batches of a row group, of about `batch_bytes` each."""
    _check_columns(parquet.file.schema_arrow, path, options)
    return join_batches(_small_batches(parquet, group, path, options), options.batch_bytes)


def _small_batches(parquet: _Parquet, group: int, path: str, options: SourceOptions) -> Iterator[Any]:
    """Batches as they are decoded, sized so that each takes about `batch_bytes`, judging by the one before."""
    wanted = None if options.columns is None else list(options.columns)
    most = _most_rows(parquet, group, options)
    num_rows = min(most, _FIRST_ROWS)
    for batch in parquet.file.iter_batches(batch_size=num_rows, row_groups=[group], columns=wanted, use_threads=False):
        yield batch if wanted is None else select_nested(batch, wanted, path)
        fitting = options.batch_bytes * batch.num_rows // max(1, decoded_bytes(batch))
        num_rows = max(1, min(fitting, _GROWTH * num_rows, most))
        parquet.file.reader.set_batch_size(num_rows)


def _most_rows(parquet: _Parquet, group: int, options: SourceOptions) -> int:
    """Rows of a row group that can be decoded at once even if all of them hold the longest stored value.

    No value is longer than everything stored; if that bound makes too many batches, look for the longest value.

    Sizes in the footer are those of encoded pages, in which a value shared by many rows counts once: a file of 50 kB
    held 7 GB.
    """
    metadata = parquet.file.metadata.row_group(group)
    num_rows = max(1, int(metadata.num_rows))
    most = min(max(1, options.batch_bytes * num_rows // max(1, _group_bytes(metadata, options))), _MOST_ROWS)
    for chunk in filter(_shares_values, _wanted_chunks(metadata, options)):
        values_per_row = max(1, int(chunk.num_values) // num_rows)
        fitting = _MOST_DECODED_BYTES // max(1, values_per_row * chunk.total_uncompressed_size)
        if num_rows > _MOST_BATCHES * fitting:  # looking costs less than so many batches
            fitting = _MOST_DECODED_BYTES // max(1, values_per_row * _longest_value(parquet, group, chunk, options))
        most = max(1, min(most, fitting))
    return most


def _shares_values(chunk: Any) -> bool:
    """Whether a few stored bytes of a column can represent long values in many rows."""
    return "BYTE_ARRAY" in chunk.physical_type and any(
        encoding.endswith("DICTIONARY") or encoding == _PREFIXES for encoding in chunk.encodings
    )


def _longest_value(parquet: _Parquet, group: int, chunk: Any, options: SourceOptions) -> int:
    """Length of the longest value in a column's dictionary; if it has none, the size of everything stored."""
    name = chunk.path_in_schema
    if _PREFIXES in chunk.encodings or chunk.physical_type != "BYTE_ARRAY":
        return int(chunk.total_uncompressed_size)
    peeking = _parquet_file(parquet.source, options, metadata=parquet.file.metadata, read_dictionary=[name])
    batch = next(peeking.iter_batches(batch_size=1, row_groups=[group], columns=[name], use_threads=False), None)
    longest = 0 if batch is None else longest_in_dictionary(batch.column(0))
    return longest or int(chunk.total_uncompressed_size)


def _group_bytes(metadata: Any, options: SourceOptions) -> int:
    """Uncompressed bytes of the wanted columns of a row group."""
    return sum(int(chunk.total_uncompressed_size) for chunk in _wanted_chunks(metadata, options))


def _wanted_chunks(metadata: Any, options: SourceOptions) -> Iterator[Any]:
    """Metadata of the columns of a row group that are read."""
    wanted = None if options.columns is None else set(with_roots(options.columns))
    for number in range(metadata.num_columns):
        chunk = metadata.column(number)
        if wanted is None or chunk.path_in_schema.split(".", 1)[0] in wanted:
            yield chunk


@contextlib.contextmanager
def _open_ipc(path: str, options: SourceOptions) -> Iterator[Iterator[Any]]:
    """The batches of a file with the wanted columns; only their buffers are validated yet."""
    with (
        open_anywhere(path, options) as file,
        explain_damage(path, "Arrow"),
        contextlib.closing(_source(file)) as source,
    ):
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
    _check_columns(reader.schema, path, options)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        batch.validate()
        yield batch if options.columns is None else select_nested(batch, options.columns, path)


def cut_batch(batch: Any, max_bytes: int) -> Iterator[Any]:
    """Slices of a batch, each of at most about `max_bytes` once it is plain (see `plain_array`), without copying."""
    shared = [column for column in batch.columns if _is_shared(column)]
    lengths = sum((_row_lengths(column) for column in shared), np.zeros(batch.num_rows, np.int64))
    yield from _cut(batch, lengths, max_bytes)


def join_batches(batches: Iterable[Any], wanted_bytes: int) -> Iterator[Any]:
    """Batches of about `wanted_bytes` once plain: small ones are joined unless they share values, large ones cut."""
    waiting: list[Any] = []
    num_bytes = 0
    for batch in batches:
        size = decoded_bytes(batch)
        if waiting and (num_bytes + size > wanted_bytes or any(map(_is_shared, batch.columns))):
            yield from cut_batch(_joined(waiting), wanted_bytes)
            waiting, num_bytes = [], 0
        waiting.append(batch)
        num_bytes += size
    if waiting:
        yield from cut_batch(_joined(waiting), wanted_bytes)


def _joined(batches: list[Any]) -> Any:
    return batches[0] if len(batches) == 1 else arrow().concat_batches(batches)


def decoded_bytes(batch: Any) -> int:
    """Bytes of a batch once its columns are plain (see `plain_array`)."""
    return sum(int(_row_lengths(column).sum()) if _is_shared(column) else column.nbytes for column in batch.columns)


def longest_in_dictionary(column: Any) -> int:
    """Length of the longest value of a dictionary, which may be inside lists or structs; 0 if there is none."""
    types = arrow().types
    while not types.is_dictionary(column.type):
        if types.is_struct(column.type):
            column = column.field(0)
        elif hasattr(column, "values"):
            column = column.values
        else:
            return 0
    return int(_value_lengths(column.dictionary).max(initial=0))


def _cut(batch: Any, lengths: NDArray[np.int64], max_bytes: int) -> Iterator[Any]:
    plain = sum(column.nbytes for column in batch.columns if not _is_shared(column))
    if batch.num_rows <= 1 or plain + int(lengths.sum()) <= 2 * max_bytes:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _cut(batch.slice(0, middle), lengths[:middle], max_bytes)
    yield from _cut(batch.slice(middle), lengths[middle:], max_bytes)


def _is_shared(column: Any) -> bool:
    """Whether many rows may share one stored value, so that `nbytes` says nothing about their size."""
    pa = arrow()
    return bool(pa.types.is_dictionary(column.type)) or column.type in (pa.string_view(), pa.binary_view())


def _row_lengths(column: Any) -> NDArray[np.int64]:
    """About how many bytes each row of a column of shared values has; the column is not validated yet."""
    pa = arrow()
    if isinstance(column, pa.ChunkedArray):
        return np.concatenate([np.empty(0, np.int64), *map(_row_lengths, column.chunks)])
    if not pa.types.is_dictionary(column.type):
        return _value_lengths(column)
    lengths = _value_lengths(column.dictionary)
    if not len(lengths):
        return np.zeros(len(column), np.int64)
    indices = np.from_dlpack(column.indices.fill_null(0))
    chosen: NDArray[np.int64] = lengths[np.clip(indices, 0, len(lengths) - 1)]
    return chosen


def _value_lengths(values: Any) -> NDArray[np.int64]:
    pa = arrow()
    if values.type in (pa.string_view(), pa.binary_view()):  # a view has 16 bytes; the first four are its length
        views = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)
        return _at_least_0(views[values.offset : values.offset + len(values), 0])
    if _is_text_or_binary(values.type):
        return _at_least_0(np.from_dlpack(arrow("compute").binary_length(values).fill_null(0)))
    return np.full(len(values), values.nbytes // max(1, len(values)) + 1, np.int64)


def _at_least_0(lengths: NDArray[Any]) -> NDArray[np.int64]:
    return np.maximum(lengths.astype(np.int64), 0)


def _is_text_or_binary(kind: Any) -> bool:
    types = arrow().types
    return is_text(kind) or bool(types.is_binary(kind) or types.is_large_binary(kind))

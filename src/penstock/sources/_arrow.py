"""pyarrow, imported when first needed, and what every Arrow reader does with a batch.

Files are not trusted. Arrow's readers do not check that text is UTF-8, nor that IPC offsets stay inside
their buffers, and either ends in a crash or in garbage far from here. So each batch is validated
in full (text at 10 GB/s) before anyone sees it. Only a batch that fails is examined row by row.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, MissingExtra, PenstockError, SchemaError, did_you_mean
from penstock.sources._model import Records, RowError, rows_around
from penstock.sources._options import SourceOptions

_MAX_STRING_BYTES = (1 << 31) - 1  # offsets of `string` have 32 bits
_OUT_OF_MEMORY = "out of memory while reading"
_MEMORY_MESSAGES = ("Cannot allocate memory", "not enough memory")  # mmap's, and zstd's


def arrow(submodule: str = "") -> Any:
    """pyarrow, or one of its modules.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{submodule}" if submodule else "pyarrow")
    except ImportError as error:
        raise MissingExtra("Reading raw data needs pyarrow: pip install pyarrow") from error


# NOTE [without pandas]
#   `pa.array(list)` and `to_numpy` import pandas, where it is installed, to see whether they deal with one of its
#   objects: half a second in every process that prepares. So text goes to Arrow by its buffers, and numbers come
#   from it through DLPack.


def text_array(values: Sequence[str]) -> Any:
    """Strings as an Arrow array of `string`, like `pa.array(values)`; see NOTE [without pandas]."""
    pa = arrow()
    encoded = list(map(str.encode, values))
    if sum(map(len, encoded)) > _MAX_STRING_BYTES:
        return pa.array(values)
    return _array_of_bytes(encoded, pa.string(), np.int32)


def binary_array(values: Sequence[bytes]) -> Any:
    """Byte strings as an Arrow array of `large_binary`; a single one is not copied."""
    return _array_of_bytes(values, arrow().large_binary(), np.int64)


def plain_values(values: Sequence[Any]) -> Any:
    """The same as `pa.array(values)`; for text, int64 and float64 without pandas (see the NOTE)."""
    pa = arrow()
    kinds = set(map(type, values))
    if kinds == {str}:
        return text_array(values)
    if kinds == {float}:
        return _array_of_numbers(np.array(values, np.float64), pa.float64())
    if kinds == {int} and min(values) >= -(1 << 63) and max(values) < 1 << 63:
        return _array_of_numbers(np.array(values, np.int64), pa.int64())
    return pa.array(values)


def _array_of_numbers(numbers: NDArray[Any], kind: Any) -> Any:
    return arrow().Array.from_buffers(kind, len(numbers), [None, arrow().py_buffer(numbers)])


def _array_of_bytes(values: Sequence[bytes], kind: Any, offset_dtype: type[np.signedinteger[Any]]) -> Any:
    pa = arrow()
    offsets = np.zeros(len(values) + 1, offset_dtype)
    np.cumsum(np.fromiter(map(len, values), offset_dtype, len(values)), out=offsets[1:])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))])


def records_of_batch(
    batch: Any, first_row: int, path: str, *, num_bytes: int | None = None, errors: tuple[RowError, ...] = ()
) -> Records:
    """Checked records of a RecordBatch or Table whose rows are numbered from `first_row`.

    With `errors`, those rows are not in the batch, and the numbers of the others skip them.
    """
    rows = rows_around(first_row, batch.num_rows, errors)
    columns = {name: plain_array(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    size = stored_bytes(batch) if num_bytes is None else num_bytes
    keep, found = _find_invalid(columns, rows, path)
    if found:
        columns = {name: column.filter(arrow().array(keep)) for name, column in columns.items()}
        rows, errors = rows[keep], tuple(sorted((*errors, *found), key=lambda error: error.row))
    return Records(columns, first_row, len(rows), errors, size)


def with_nan(records: Records, options: SourceOptions) -> Records:
    """The records, with NaN for what is missing in columns of floats if the options say so."""
    if options.missing != "nan":
        return records
    pa = arrow()
    filled = {
        name: column.fill_null(pa.scalar(float("nan"), column.type))
        for name, column in records.columns.items()
        if pa.types.is_floating(column.type) and column.null_count
    }
    return replace(records, columns={**records.columns, **filled})


def dicts_of(records: Records) -> list[dict[str, Any]]:
    """The records as one dict each."""
    if not records.columns:
        return []
    if any(isinstance(column, list) for column in records.columns.values()):
        columns = [column if isinstance(column, list) else column.to_pylist() for column in records.columns.values()]
        return [dict(zip(records.columns, row, strict=True)) for row in zip(*columns, strict=True)]
    together = arrow().StructArray.from_arrays(list(records.columns.values()), list(records.columns))
    values: list[dict[str, Any]] = together.to_pylist()  # 3 times as fast as building a dict per row
    return values


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


def stored_bytes(batch: Any) -> int:
    """Bytes of a batch as it is; older Arrow cannot measure views, whose buffers are then counted whole."""
    try:
        return int(batch.nbytes)
    except arrow().ArrowException:
        return int(batch.get_total_buffer_size())


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


def plain_array(column: Any) -> Any:
    """One array without chunks, dictionaries or views."""
    pa = arrow()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_dictionary(column.type):
        column = _cast(column, column.type.value_type)
    if column.type == pa.string_view():
        return _cast(column, pa.large_string())
    if column.type == pa.binary_view():
        return _cast(column, pa.large_binary())
    return column


def _cast(column: Any, kind: Any) -> Any:
    column.validate(full=True)  # the cast would follow an index out of bounds
    return column.cast(kind)


@contextlib.contextmanager
def explain_damage(path: str, kind: str) -> Iterator[None]:
    """Turn pyarrow's errors about the contents of a file into a `FormatError` that names it.

    Raises:
        MemoryError: there was too little memory. That is not the file's fault, so it must not be skipped for it.
    """
    # Named before they are needed: a reader that is still open when Python ends can no longer import anything.
    damage = (arrow().ArrowException, OSError, EOFError, MemoryError)
    try:
        yield
    except (PenstockError, FileNotFoundError, PermissionError):
        raise
    except damage as error:
        check_memory(error, path)
        raise FormatError(
            f"{path}: the {kind} file is truncated or damaged ({error}). Fetch or write it again."
        ) from error


def check_memory(error: BaseException, path: str) -> None:
    """Raise `MemoryError` if that is what `error` means, however its library words it."""
    text = str(error)
    if _OUT_OF_MEMORY in text:
        raise error
    if isinstance(error, MemoryError) or any(message in text for message in _MEMORY_MESSAGES):
        raise MemoryError(
            f"{path}: {_OUT_OF_MEMORY} ({text or type(error).__name__}). The file may be fine, so it is not skipped. "
            "Give the process more memory, use fewer workers (--workers), or lower SourceOptions.batch_bytes."
        ) from error


def check_columns(names: Sequence[str], path: str, wanted: Sequence[str] | None) -> None:
    """Raise `SchemaError` unless the file has every wanted column, and no name twice."""
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if list(names).count(name) > 1})
        raise SchemaError(f"{path}: more than one column is called {', '.join(map(repr, repeated))}. Rename one.")
    for name in wanted or ():
        if name not in names and name.partition(".")[0] not in names:
            is_partition = f"/{name}=" in path
            hint = " Values in folder names are not columns." if is_partition else did_you_mean(name, names)
            raise SchemaError(f"{path}: no column {name!r}; the file has {', '.join(map(repr, names))}.{hint}")


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is a string of any width."""
    types = arrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def as_binary(column: Any) -> Any:
    """The same bytes without the promise that they are UTF-8."""
    pa = arrow()
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


def _find_invalid(
    columns: dict[str, Any], rows: NDArray[np.int64], path: str
) -> tuple[NDArray[np.bool_], list[RowError]]:
    """Which rows are valid, and an error for each that is not."""
    keep = np.ones(len(rows), np.bool_)
    errors = []
    for name, column in columns.items():
        for place in _invalid_places(name, column, path):
            if keep[place]:
                errors.append(_invalid_text(path, int(rows[place]), name))
            keep[place] = False
    return keep, errors


def _invalid_places(name: str, column: Any, path: str) -> list[int]:
    """Rows of a column that hold invalid UTF-8; `FormatError` if anything else is wrong."""
    invalid = arrow().ArrowInvalid
    try:
        column.validate(full=True)
        return []
    except invalid as error:
        if not is_text(column.type):
            raise FormatError(f"{path}: column {name!r} is damaged: {error}. Restore the file.") from error
    try:
        as_binary(column).validate(full=True)
    except invalid as error:
        raise FormatError(f"{path}: column {name!r} is damaged: {error}. Restore the file.") from error
    return _places_of_bad_text(as_binary(column))


def _places_of_bad_text(values: Any) -> list[int]:
    return [place for place, value in enumerate(values.to_pylist()) if value is not None and not is_utf8(value)]


def as_text(column: Any, encoding: str) -> Any:
    """Bytes as text, unchecked: `records_of_batch` finds what is not text."""
    pa = arrow()
    if encoding == "utf-8":
        return column.view(pa.large_string() if pa.types.is_large_binary(column.type) else pa.string())
    encoded = [None if value is None else _transcode(value, encoding) for value in column.to_pylist()]
    return pa.array(encoded, pa.large_binary()).view(pa.large_string())


def _transcode(value: bytes, encoding: str) -> bytes:
    try:
        return value.decode(encoding).encode()
    except UnicodeDecodeError:
        return b"\xff" + value  # UTF-8 never begins like this, so the row will be found


def is_utf8(value: bytes) -> bool:
    """Whether bytes are text."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _invalid_text(path: str, row: int, name: str) -> RowError:
    return RowError(
        path,
        row,
        "invalid_utf8",
        f"column {name!r} of row {row} of the split is not valid text (UTF-8, or the encoding given).",
    )

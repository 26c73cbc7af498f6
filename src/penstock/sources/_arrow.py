"""pyarrow, imported when first needed, and what every Arrow reader does with a batch.

Files are not trusted. Arrow's readers do not check that text is UTF-8, nor that IPC offsets stay inside
their buffers, and either ends in a crash or in garbage far from here. So each batch is validated
in full (text at 10 GB/s) before anyone sees it. Only a batch that fails is examined row by row.

Columns may be inside columns: "conversation.turns" is the field `turns` of the column `conversation`. A column with
exactly that name takes precedence: CSV files have `sepal.length`, and tars have members `seg.png`.
"""

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The same as `pa.array(values)`; for text, int64, float64 and bool without pandas (see the NOTE)."""
    pa = arrow()
    kinds = set(map(type, values))
    if kinds == {type(None)}:
        return pa.nulls(len(values))
    if type(None) in kinds and (kind := (kinds - {type(None)}).pop()) in (str, float, int, bool) and len(kinds) == 2:
        filled = plain_values([kind() if value is None else value for value in values])
        is_valid = np.array([value is not None for value in values])
        return pa.Array.from_buffers(filled.type, len(values), [_bits(is_valid), *filled.buffers()[1:]])
    if kinds == {str}:
        return text_array(values)
    if kinds == {float}:
        return _array_of_numbers(np.array(values, np.float64), pa.float64())
    if kinds == {int} and min(values) >= -(1 << 63) and max(values) < 1 << 63:
        return _array_of_numbers(np.array(values, np.int64), pa.int64())
    return bool_array(np.array(values)) if kinds == {bool} else pa.array(values)


def bool_array(values: NDArray[np.bool_]) -> Any:
    """The same as `pa.array(values)`, without pandas."""
    return arrow().Array.from_buffers(arrow().bool_(), len(values), [None, _bits(values)])


def _bits(values: NDArray[np.bool_]) -> Any:
    return arrow().py_buffer(np.packbits(values, bitorder="little"))


def array_or_list(values: list[Any]) -> Any:
    """An Arrow array, or the list itself if its values have no common type."""
    pa = arrow()
    try:
        return plain_values(values)
    except MemoryError:  # one of pyarrow's exceptions, too
        raise
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return values


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
        columns = {name: column.filter(bool_array(keep)) for name, column in columns.items()}
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


def stored_bytes(batch: Any) -> int:
    """Bytes of a batch as it is; older Arrow cannot measure views, whose buffers are then counted whole."""
    try:
        return int(batch.nbytes)
    except arrow().ArrowException:
        return int(batch.get_total_buffer_size())


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


def top_level(name: str, known: Iterable[str]) -> str:
    """The column that a name is in: one of `known`, or the name itself if it is in none of them."""
    root = name.partition(".")[0]
    return root if name not in known and root in known else name


def with_roots(names: Sequence[str]) -> tuple[str, ...]:
    """The names, and every column that they may be in."""
    return tuple(dict.fromkeys(each for name in names for each in (name, name.partition(".")[0])))


def names_within(types: Mapping[str, Any]) -> Iterator[str]:
    """Names of columns of these Arrow types, and of the fields in them."""
    for name, kind in types.items():
        yield name
        if kind is not None and arrow().types.is_struct(kind):
            yield from names_within({f"{name}.{field.name}": field.type for field in kind})


def fields_within(item: Mapping[Any, Any]) -> Iterator[str]:
    """Names of the fields of a record, and of those in them."""
    for name, value in item.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from (f"{name}.{field}" for field in fields_within(value))


def value_at(item: Mapping[str, Any], name: str) -> Any:
    """A value of a record; None if it has none.

    >>> value_at({"a": {"b": 1}, "c.d": 2}, "a.b"), value_at({"c.d": 2}, "c.d"), value_at({"a": 3}, "a.b")
    (1, 2, None)
    """
    if name in item or "." not in name:
        return item.get(name)
    found: Any = item
    for field in name.split("."):
        found = found.get(field) if isinstance(found, Mapping) else None
    return found


def select_nested(batch: Any, names: Sequence[str], path: str) -> Any:
    """An Arrow batch with these columns, top-level or nested."""
    columns = [dig(batch.column(top_level(name, batch.schema.names)), name, path, batch.schema.names) for name in names]
    return arrow().RecordBatch.from_arrays(columns, names=list(names))


def check_fields(schema: Any, names: Sequence[str] | None, path: str) -> None:
    """Refuse names of fields that an Arrow schema does not have.

    Raises:
        SchemaError: a field is missing; the message says which, and where.
    """
    for name in names or ():
        if name not in schema.names:
            _walk(schema.field(top_level(name, schema.names)).type, name, path)


def _walk(kind: Any, name: str, path: str) -> None:
    for field in name.split(".")[1:]:
        if not arrow().types.is_struct(kind) or kind.get_field_index(field) < 0:
            fields = [each.name for each in kind] if arrow().types.is_struct(kind) else []
            raise SchemaError(
                f"{path}: no column {name!r}: there is no field {field!r} in values of type {kind}."
                f"{did_you_mean(field, fields)}"
            )
        kind = kind.field(field).type


def dig(column: Any, name: str, path: str, known: Iterable[str]) -> Any:
    """The column called `name`, extracted from the one that contains it.

    Raises:
        SchemaError: there is no such field.
    """
    if name in known:
        return column
    _walk(column.type, name, path)
    for field in name.split(".")[1:]:
        column = arrow("compute").struct_field(column, field)
    return column

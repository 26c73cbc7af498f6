"""pyarrow, imported when it is first needed, and what every Arrow reader does with a batch.

Files are not trusted. Arrow's readers do not check that text is UTF-8, nor that IPC offsets stay inside
their buffers, and both end in a crash or in garbage far from here; so each batch is validated
in full (10 GB/s for text here) before anyone sees it. Only a batch that fails is looked at row by row.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, MissingExtra, PenstockError, SchemaError
from penstock.sources._model import Records, RowError


def arrow(submodule: str = "") -> Any:
    """pyarrow, or one of its modules.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{submodule}" if submodule else "pyarrow")
    except ImportError as error:
        raise MissingExtra("Reading raw data needs pyarrow: pip install pyarrow") from error


def records_of_batch(
    batch: Any, first_row: int, path: str, *, num_bytes: int | None = None, errors: tuple[RowError, ...] = ()
) -> Records:
    """Checked records of a RecordBatch or Table whose rows are numbered from `first_row`.

    With `errors`, those rows are not in the batch, and the numbers of the others skip them.
    """
    rows = _rows_around(first_row, batch.num_rows, errors)
    columns = {name: plain_array(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    size = batch.nbytes if num_bytes is None else num_bytes
    keep, found = _find_invalid(columns, rows, path)
    if found:
        columns = {name: column.filter(arrow().array(keep)) for name, column in columns.items()}
        rows, errors = rows[keep], tuple(sorted((*errors, *found), key=lambda error: error.row))
    return Records(columns, first_row, len(rows), errors, rows if errors else None, size)


def dicts_of(records: Records) -> list[dict[str, Any]]:
    """The records as one dict each."""
    if not records.columns:
        return []
    if any(isinstance(column, list) for column in records.columns.values()):
        columns = [column if isinstance(column, list) else column.to_pylist() for column in records.columns.values()]
        return [dict(zip(records.columns, row, strict=True)) for row in zip(*columns, strict=True)]
    together = arrow().StructArray.from_arrays(list(records.columns.values()), list(records.columns))
    values: list[dict[str, Any]] = together.to_pylist()  # 3 times as fast as a dict of each row
    return values


def cut_batch(batch: Any, max_bytes: int) -> Iterator[Any]:
    """Pieces of a batch of at most about `max_bytes`, without copying."""
    if batch.num_rows <= 1 or batch.nbytes <= 2 * max_bytes:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from cut_batch(batch.slice(0, middle), max_bytes)
    yield from cut_batch(batch.slice(middle), max_bytes)


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
    column.validate(full=True)  # the cast would follow an index that leads outside
    return column.cast(kind)


@contextlib.contextmanager
def named_damage(path: str, kind: str) -> Iterator[None]:
    """Errors of pyarrow about the content of a file, as a `FormatError` that names it."""
    try:
        yield
    except (PenstockError, FileNotFoundError, PermissionError):
        raise
    except (arrow().ArrowException, OSError, EOFError) as error:
        raise FormatError(
            f"{path}: the {kind} file is truncated or damaged ({error}). Fetch or write it again."
        ) from error


def check_columns(names: Sequence[str], path: str, wanted: Sequence[str] | None) -> None:
    """Raise `SchemaError` unless the file has every column that is wanted, and each name once."""
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if list(names).count(name) > 1})
        raise SchemaError(f"{path}: more than one column is called {', '.join(map(repr, repeated))}. Rename one.")
    for name in wanted or ():
        if name not in names:
            partition = " Values in the names of folders are no columns." if f"/{name}=" in path else ""
            raise SchemaError(f"{path}: no column {name!r}; the file has {', '.join(map(repr, names))}.{partition}")


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
    """Which rows are sound, and an error for each that is not."""
    keep = np.ones(len(rows), np.bool_)
    errors = []
    for name, column in columns.items():
        for place in _invalid_places(name, column, path):
            if keep[place]:
                errors.append(_invalid_text(path, int(rows[place]), name))
            keep[place] = False
    return keep, errors


def _invalid_places(name: str, column: Any, path: str) -> list[int]:
    """Rows of a column that hold invalid UTF-8; `FormatError` when more than that is wrong."""
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
    """Bytes as text, unchecked: `records_of_batch` finds what is none."""
    pa = arrow()
    if encoding == "utf-8":
        return column.view(pa.large_string() if pa.types.is_large_binary(column.type) else pa.string())
    encoded = [None if value is None else _transcode(value, encoding) for value in column.to_pylist()]
    return pa.array(encoded, pa.large_binary()).view(pa.large_string())


def _transcode(value: bytes, encoding: str) -> bytes:
    try:
        return value.decode(encoding).encode()
    except UnicodeDecodeError:
        return b"\xff" + value  # no UTF-8 begins so: the row will be found


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


def _rows_around(first_row: int, num_rows: int, errors: tuple[RowError, ...]) -> NDArray[np.int64]:
    rows = np.arange(first_row, first_row + num_rows + len(errors), dtype=np.int64)
    return rows if not errors else np.delete(rows, [error.row - first_row for error in errors])

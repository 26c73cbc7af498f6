"""Samples as callers get them: one as a dict of values, or many as a dict of columns, by one gather each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import SchemaError
from penstock.samples._samples import Samples
from penstock.schema import Column, Ragged

Sample = dict[str, Any]
Columns = dict[str, NDArray[Any] | Ragged]

# A copy of this size costs about a microsecond; a view keeps the whole map alive.
_COPY_BYTES = 16 << 10


def read_sample(samples: Samples, index: int) -> Sample:
    """One sample; a negative index counts from the end."""
    stored = samples.locate_one(index)
    columns = samples.schema.columns
    return {column.name: _present(column, samples.storage.value(column, stored)) for column in columns}


def read_columns(samples: Samples, indices: ArrayLike, out: Mapping[str, NDArray[Any]] | None) -> Columns:
    """Many samples; fixed columns that `out` offers an array for are read into it.

    Raises:
        IndexError: an index is out of range.
        SchemaError: an array in `out` does not fit its column, or there is no such column.
    """
    wanted = samples.locate_checked(indices)
    for name in out or {}:
        samples.schema[name]
    columns: Columns = {}
    for column in samples.schema.columns:
        given = out.get(column.name) if out is not None else None
        if not column.is_ragged:
            columns[column.name] = filled = _output(column, len(wanted), given)
            samples.storage.read_fixed(column, wanted, filled)
        elif given is None:
            columns[column.name] = samples.storage.read_ragged(column, wanted)
        else:
            raise SchemaError(f"Column {column.name!r} is ragged; its size is not known beforehand.")
    return columns


def _output(column: Column, num_samples: int, given: NDArray[Any] | None) -> NDArray[Any]:
    """What a fixed column is read into: the array that is given for it, or a new one."""
    shape = (num_samples, *column.shape)
    if given is None:
        return np.empty(shape, column.dtype)
    if given.shape != shape or not _can_hold(column.dtype, given.dtype) or not given.flags.writeable:
        access = "" if given.flags.writeable else "read-only "
        raise SchemaError(
            f"Column {column.name!r}: out is {access}{given.dtype} of shape {list(given.shape)}; "
            f"writeable {column.dtype} (or wider) of shape {list(shape)} is needed."
        )
    return given


def _present(column: Column, value: NDArray[Any]) -> Any:
    """What a caller gets for one value: bytes, a number, a small copy, or a large view."""
    if column.kind == "bytes":
        return value.tobytes()
    if value.ndim == 0:
        return value[()]
    return value.copy() if value.nbytes <= _COPY_BYTES else value


@functools.cache
def _can_hold(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    return np.can_cast(stored, wanted, "safe")

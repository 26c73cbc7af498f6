"""Columns stored as they are: a label, a URL, a score beside the tokens; or all of them (`KeepColumns`).

Text and byte strings become "bytes", lists of byte strings "bytes[*]", numbers and booleans keep their dtype, lists of
numbers become ragged columns. A type must hold for the whole dataset, while a source may guess it again for each batch
(JSON does). So types come from the first rows, or from `keep={"score": "float32"}`, and a later value that does not fit
is a bad row, never a silent conversion.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.schema import Column, Ragged, common_dtype, exact_array, is_byte_strings
from penstock.sources import Records
from penstock.transforms._transform import (
    BadRows,
    Output,
    Transform,
    find_absent,
    find_column,
    is_arrow,
    is_number,
    list_fields,
    numbers_of,
    read_bytes,
)

Keep = Sequence[str] | Mapping[str, str]
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""numpy's names for what Arrow calls differently."""


_HINT_AT_NAN = " Missing floats of CSV, parquet, Arrow and data frames can be NaN: missing='nan' (--missing nan)."


def check_keep(keep: Keep, made: Iterable[str]) -> tuple[tuple[str, str | None], ...]:
    """Names to keep, with their types if given; refuses a name that the transform writes itself."""
    if isinstance(keep, str):
        raise TypeError(f"keep={keep!r} is one string; write keep=[{keep!r}].")
    pairs = tuple(keep.items()) if isinstance(keep, Mapping) else tuple((name, None) for name in keep)
    taken = set(made)
    for name, spec in pairs:
        Column.parse(name, spec or "bytes")
        if name in taken:
            raise ValueError(f"keep: {name!r} is a column that the transform writes itself, or is named twice.")
        taken.add(name)
    return pairs


class Keeping(Transform, Protocol):
    """A transform that also stores columns of the source; their types, unless given, come from the first rows."""

    __slots__ = ()
    keep: Keep | None
    _types: dict[str, str] | None

    def check_kept(self, made: Iterable[str] = ()) -> None:
        """Refuse to keep what the transform itself makes; take the types if all are given."""
        pairs = check_keep(self.keep or (), made)
        if self.keep is not None and all(spec for _, spec in pairs):
            object.__setattr__(self, "_types", dict(pairs))

    @property
    def kept_identity(self) -> list[list[str | None]] | None:
        """What is kept, as JSON."""
        return None if self.keep is None else [list(pair) for pair in check_keep(self.keep, ())]

    @property
    def types(self) -> dict[str, str] | None:
        """Types of the kept columns; None until they are known."""
        return self._types

    def choose_kept(self, first: Records) -> Keep:
        """What to keep of records like these."""
        return self.keep or ()

    def before_run(self, sample: Iterable[Records]) -> Self:
        """The same, with types inferred from the first records if they were not given."""
        first = next((records for records in sample if records.num_rows), None)
        if self._types is not None or first is None:
            return self
        ready = copy.copy(self)
        object.__setattr__(ready, "_types", infer_types(check_keep(ready.choose_kept(first), ()), first))
        return ready


class OpenKeeping:
    """Makes samples: nothing but what is kept, unless `make` adds to it."""

    def __init__(self, transform: Keeping) -> None:
        self._transform = transform

    def __call__(self, records: Records) -> Output:
        self._transform = self._transform.before_run([records])
        bad = BadRows(records)
        kept = read_kept(records, self._transform.types or {}, bad)
        made, noticed = self.make(records, bad)
        places = bad.good_places()
        return Output({**made, **take_kept(kept, places, records.num_rows)}, places, bad.errors(), noticed)

    def make(self, records: Records, bad: BadRows) -> tuple[dict[str, Any], dict[str, int]]:
        """Further columns of the good rows, and counts of what users should know."""
        return {}, {}


def infer_types(keep: Iterable[tuple[str, str | None]], records: Records) -> dict[str, str]:
    """Type of each kept column, inferred from these records if not given."""
    return {name: spec or _infer_kept(name, records) for name, spec in keep}


def _infer_kept(name: str, records: Records) -> str:
    column = find_column(records, name)
    if find_absent(records, [name]) is not None:
        raise SchemaError(
            f"Column {name!r} cannot be kept: the first rows have no such field.{list_fields(records, name)}"
        )
    return infer_type(name, column)


def infer_type(name: str, column: Any) -> str:
    """Type that can hold a column of the source.

    Raises:
        SchemaError: no column type can.
    """
    if is_arrow(column):
        return _infer_arrow(name, column)
    known = [value for value in column if value is not None]
    if known and all(isinstance(value, (str, bytes)) for value in known):
        return "bytes"
    if is_byte_strings(known):
        return "bytes[*]"
    if not known:
        return _refuse(name, _ONLY_NULLS)
    if all(type(value) is int for value in known):  # numpy would turn integers too large for int64 into floats
        kind = next((kind for kind in ("int64", "uint64") if _holds(kind, min(known), max(known))), None)
        return kind or _refuse(name, "integers of more than 64 bits")
    found = "values that are not numbers of one shape"
    try:
        arrays = [exact_array(value) for value in known]
        if any(map(_holds_numbers, arrays)):
            found = "integers that no 64-bit type holds exactly, beside the others"
        return _infer_arrays(name, arrays)
    except (ValueError, TypeError):  # objects, or arrays of several dtypes or shapes
        return _refuse(name, found)


_ONLY_NULLS = "nothing but nulls (is the name right? if so, give its type, as in keep={name: 'float32'})"


def _holds_numbers(array: NDArray[Any]) -> bool:
    """Whether an array of objects is one of numbers that have no common type."""
    return array.dtype.hasobject and all(isinstance(each, (int, float)) for each in array.ravel())


def _holds(kind: str, least: int, largest: int) -> bool:
    limits = np.iinfo(kind)
    return bool(limits.min <= least and largest <= limits.max)


def _infer_arrays(name: str, arrays: list[NDArray[Any]]) -> str:
    # An empty list is an array of float64, which says nothing about the column.
    dtype = common_dtype([array for array in arrays if array.shape != (0,)] or arrays)
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1:
        return Column(name, dtype, shapes.pop()).spec
    [inner] = {shape[1:] for shape in shapes if shape}
    return Column(name, dtype, inner, "ragged").spec


def _infer_arrow(name: str, column: Any) -> str:
    import pyarrow as pa

    kind, test = column.type, pa.types
    if test.is_null(kind):
        return _refuse(name, _ONLY_NULLS)
    if test.is_string(kind) or test.is_large_string(kind) or test.is_binary(kind) or test.is_large_binary(kind):
        return "bytes"
    if is_number(kind):
        return _name_of_number(kind)
    if (test.is_list(kind) or test.is_large_list(kind)) and _is_binary(kind.value_type):
        return "bytes[*]"
    if (test.is_list(kind) or test.is_large_list(kind)) and is_number(kind.value_type):
        return f"{_name_of_number(kind.value_type)}[*]"
    if test.is_fixed_size_list(kind) and is_number(kind.value_type):
        return f"{_name_of_number(kind.value_type)}[{kind.list_size}]"
    return _refuse(name, f"values of type {kind}")


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _name_of_number(kind: Any) -> str:
    """Name of the dtype of an Arrow type; Arrow itself would ask pandas, which may not be installed."""
    return _FLOATS.get(str(kind), str(kind))


def _refuse(name: str, found: str) -> str:
    raise SchemaError(
        f"Column {name!r} cannot be kept: its first rows hold {found}. Name the columns to keep without it "
        "(keep=, --keep), or turn it into numbers or text with a function."
    )


def read_kept(records: Records, types: Mapping[str, str], bad: BadRows) -> dict[str, Any]:
    """Kept columns over all rows, bad ones included."""
    return {name: _read_column(records, Column.parse(name, spec), bad) for name, spec in types.items()}


def take_kept(kept: Mapping[str, Any], places: NDArray[np.int64], num_rows: int) -> dict[str, Any]:
    """Kept columns at these places."""
    if len(places) == num_rows:
        return dict(kept)
    return {name: _take(column, places) for name, column in kept.items()}


def _take(column: Any, places: NDArray[np.int64]) -> Any:
    return column[places] if isinstance(column, np.ndarray) else [column[place] for place in places]


def _read_column(records: Records, column: Column, bad: BadRows) -> Any:
    if column.kind == "bytes":
        rows = read_bytes(records, column.name, bad)
        return Ragged(rows.values, rows.offsets, is_bytes=True)
    found = find_column(records, column.name)
    if column.kind == "byte_strings":
        return [_read_strings(column, value, place, bad) for place, value in enumerate(_listed(found))]
    fast = _read_numbers(found, column)
    return fast if fast is not None else _read_values(found, column, bad)


def _read_numbers(found: Any, column: Column) -> NDArray[Any] | None:
    """An Arrow column of exactly this dtype, without nulls; None if rows must be examined one by one."""
    if column.kind != "fixed" or column.shape or not is_arrow(found) or found.null_count or not is_number(found.type):
        return None
    array: NDArray[Any] = numbers_of(found)
    return array if array.dtype == column.dtype else None


def _read_values(found: Any, column: Column, bad: BadRows) -> Any:
    values = _listed(found)
    empty = np.zeros((0, *column.shape) if column.is_ragged else column.shape, column.dtype)
    samples = [_read_value(column, value, place, bad, empty) for place, value in enumerate(values)]
    if column.is_ragged:
        return samples
    return np.stack(samples) if samples else np.empty((0, *column.shape), column.dtype)


def _listed(found: Any) -> Any:
    return found.to_pylist() if is_arrow(found) else found


def _read_strings(column: Column, value: Any, place: int, bad: BadRows) -> list[bytes]:
    if isinstance(value, (list, tuple)) and all(isinstance(each, bytes) for each in value):
        return list(value)
    why = "is null" if value is None else f"holds {value!r:.60}; a list of byte strings was expected"
    bad.add(place, "null" if value is None else "wrong_type", f"Column {column.name!r} {why}.")
    return []


def _read_value(column: Column, value: Any, place: int, bad: BadRows, empty: NDArray[Any]) -> NDArray[Any]:
    if value is None:
        bad.add(place, "null", f"Column {column.name!r} is null.{_HINT_AT_NAN if column.dtype.kind == 'f' else ''}")
        return empty
    array = _convert(column, value)
    if array is None:
        message = (
            f"Column {column.name!r} holds {value!r:.60}; by the first rows, or keep=, {column.spec} was expected."
        )
        bad.add(place, "wrong_type", message)
        return empty
    return array


def _convert(column: Column, value: Any) -> NDArray[Any] | None:
    """The value in the column's dtype and shape; None if that would change it."""
    try:
        array = exact_array(value)
        with np.errstate(all="ignore"):
            converted = array.astype(column.dtype)
        shape = array.shape[1:] if column.is_ragged and array.ndim else array.shape
        # Floats may be rounded to the column's precision; everything else must come back unchanged.
        is_float = array.dtype.kind == "f" and column.dtype.kind in "fV"  # "V" is bfloat16 and the like
        keeps = _is_rounded if is_float else _is_exact
        is_same = array.dtype.kind in "biuf" and keeps(array, converted)
    except (ValueError, TypeError, OverflowError):
        return None
    if column.is_ragged and array.shape == (0,):
        return converted.reshape(0, *column.shape)
    return converted if is_same and shape == column.shape and (array.ndim or not column.is_ragged) else None


def _is_rounded(array: NDArray[Any], converted: NDArray[Any]) -> bool:
    """Whether floats are at most rounded: one too large for the column's dtype would become infinite."""
    return bool((np.isfinite(array) == np.isfinite(converted)).all())


def _is_exact(array: NDArray[Any], converted: NDArray[Any]) -> bool:
    """Whether the numbers are unchanged; numpy would round an integer before comparing it with a float."""
    if not np.array_equal(converted, array):
        return False
    if array.dtype.kind == "f" or converted.dtype.kind != "f":
        return True
    return bool(array.tolist() == converted.tolist())  # Python compares exactly


@dataclass(frozen=True, slots=True)
class KeepColumns(Keeping):
    """Store columns as they are; what `prepare` does when no transform is given.

    >>> KeepColumns({"score": "float32"}).columns()
    {'score': 'float32'}
    """

    keep: Keep | None = None
    """Names, or `{name: type}`; None keeps every column of the first rows except those starting with '__'."""
    _types: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)
    _left_out: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.check_kept()

    @property
    def identity(self) -> dict[str, Any]:
        return {"transform": "KeepColumns", "version": 1, "keep": self.kept_identity}

    @property
    def notes(self) -> tuple[str, ...]:
        names = ", ".join(map(repr, self._left_out))
        return (f"Left out {names}: a column needs a name, which must not start with '__'.",) if names else ()

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        return None if self.keep is None else tuple(self.keep)

    def columns(self) -> dict[str, str] | None:
        """Types as given, or as `before_run` found them."""
        return self._types

    def choose_kept(self, first: Records) -> Keep:
        """All columns, unless some are named; notes which are left out."""
        if self.keep is not None:
            return self.keep
        left_out = tuple(name for name in first.columns if _is_bookkeeping(name))
        object.__setattr__(self, "_left_out", left_out)
        names = [name for name in first.columns if name not in left_out]
        try:
            check_keep(names, ())
        except SchemaError as error:
            raise SchemaError(
                f"{error} Name the columns to keep (keep=, --keep), or rename it: in a CSV file with header=True and "
                "names= (--header --names), in a tar with typed_members=True (--typed-members), otherwise with a "
                "function."
            ) from None
        return names

    def open(self) -> _OpenKeepColumns:
        return _OpenKeepColumns(self)


def _is_bookkeeping(name: str) -> bool:
    """Whether a column is not part of the data: the index of pandas (unnamed in CSV), the keys of WebDataset."""
    return not name or name.startswith("__")


def _check_known(records: Records, types: Mapping[str, str]) -> None:
    """Raise if a column turns up that the first rows did not have: it would be dropped silently."""
    for name, column in records.columns.items():
        if name not in types and not _is_bookkeeping(name) and not _is_empty(column):
            raise SchemaError(
                f"Column {name!r} is not in the first rows; their columns are {', '.join(map(repr, types))}. "
                "Name the columns to keep (keep=, --keep); a row without one of them is a bad row."
            )


def _is_empty(column: Any) -> bool:
    """Whether every value is null."""
    if is_arrow(column):
        return bool(column.null_count == len(column))
    return all(value is None for value in column)


class _OpenKeepColumns(OpenKeeping):
    def make(self, records: Records, bad: BadRows) -> tuple[dict[str, Any], dict[str, int]]:
        if self._transform.keep is None:
            _check_known(records, self._transform.types or {})
        return {}, {}

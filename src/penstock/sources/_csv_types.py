"""Fields of CSV columns that have a type: numbers, booleans, and missing values among them.

A type holds for a whole column, in every file and block: it is given, or inferred once from the first rows, and a later
field that does not fit is a bad row. Text is inferred to be a number only if it is written like one: "007" is an
identifier. Whole numbers are never inferred to be floats that would round them: identifiers of 20 digits stay text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.sources._arrow import arrow
from penstock.sources._model import Records, RowError
from penstock.sources._options import FieldType, SourceOptions

_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[+-]?(nan|inf)", re.IGNORECASE)
_TRUTH_VALUE = re.compile("true|false", re.IGNORECASE)
_LARGEST_EXACT_FLOAT = 1 << 53
_MOST_DIGITS = 20
"""Of a 64-bit integer; Python refuses to read a number of thousands of digits."""


def infer_types(records: Records, options: SourceOptions) -> dict[str, FieldType]:
    """Type of each column of text that holds nothing but numbers or booleans."""
    found = {name: _infer(column.to_pylist(), options) for name, column in records.columns.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def _infer(values: Sequence[str], options: SourceOptions) -> FieldType | None:
    stripped = [value.strip() for value in values]
    known = [value for value in stripped if value not in options.null_values]
    if not known:
        return None
    is_filled = options.missing == "nan" and len(known) < len(values)
    if all(map(_WHOLE_NUMBER.fullmatch, known)):
        return _infer_whole(known, is_filled=is_filled)
    if all(map(_TRUTH_VALUE.fullmatch, known)):
        return "bool"
    numbers = [value for value in known if not _NO_NUMBER.fullmatch(value)]
    return "float64" if numbers and all(map(_NUMBER.fullmatch, numbers)) else None


def _infer_whole(values: Sequence[str], *, is_filled: bool) -> FieldType | None:
    """Type that holds each of these whole numbers exactly, and NaN beside them if some are missing."""
    if max(map(len, values)) > _MOST_DIGITS:
        return None
    numbers = [int(value) for value in values]
    low, high = min(numbers), max(numbers)
    if is_filled:
        return "float64" if max(-low, high) <= _LARGEST_EXACT_FLOAT else None
    if low >= -(1 << 63) and high < 1 << 63:
        return "int64"
    return "uint64" if low >= 0 and high < 1 << 64 else None


def with_types(records: Records, path: str, options: SourceOptions) -> Records:
    """Records of text with their columns converted to the types in the options; rows that do not fit become errors."""
    types = options.types if isinstance(options.types, Mapping) else {}
    kinds = {name: kind for name, kind in types.items() if name in records.columns and kind != "text"}
    if not kinds or not records.num_rows:
        return records
    rows = records.row_numbers()
    errors: dict[int, RowError] = {}
    columns = dict(records.columns)
    for name, kind in kinds.items():
        columns[name], misfits = _convert(columns[name], kind, options)
        for place, value in misfits.items():
            errors.setdefault(place, _misfit(path, int(rows[place]), name, kind, value))
    if not errors:
        return replace(records, columns=columns)
    keep = np.ones(records.num_rows, np.bool_)
    keep[list(errors)] = False
    columns = {name: column.filter(arrow().array(keep)) for name, column in columns.items()}
    both = tuple(sorted((*records.errors, *errors.values()), key=lambda error: error.row))
    return replace(records, columns=columns, num_rows=int(keep.sum()), errors=both)


def _convert(column: Any, kind: str, options: SourceOptions) -> tuple[Any, dict[int, str]]:
    """A column converted to its type, and the values that do not fit, by their places."""
    pa, compute = arrow(), arrow("compute")
    stripped = compute.utf8_trim_whitespace(column)
    nulls = compute.is_in(stripped, value_set=pa.array(options.null_values, column.type))
    present = compute.if_else(nulls, pa.scalar(None, column.type), stripped)
    target = pa.bool_() if kind == "bool" else pa.type_for_alias(kind)
    misfits: dict[int, str] = {}
    try:
        converted = present.cast(target)
    except pa.ArrowInvalid:  # one value at a time, to find out which
        values = present.to_pylist()
        misfits = {place: value for place, value in enumerate(values) if not _fits(value, target)}
        fitting = [None if place in misfits else value for place, value in enumerate(values)]
        converted = pa.array(fitting, column.type).cast(target)
    if pa.types.is_floating(target):
        misfits |= _overflown(present, converted)
    if options.missing == "nan" and pa.types.is_floating(target):
        converted = converted.fill_null(float("nan"))
    return converted, misfits


def _overflown(texts: Any, numbers: Any) -> dict[int, str]:
    """Numbers too large for the type, by their places: Arrow reads them as infinite."""
    infinite = np.flatnonzero(arrow("compute").is_inf(numbers).fill_null(False).to_numpy(zero_copy_only=False))
    found = {int(place): texts[int(place)].as_py() for place in infinite}
    return {place: text for place, text in found.items() if _NUMBER.fullmatch(text.lstrip("+"))}


def _fits(value: str | None, target: Any) -> bool:
    try:
        arrow().scalar(value, arrow().string()).cast(target)
    except arrow().ArrowInvalid:
        return False
    return True


def _misfit(path: str, row: int, name: str, kind: str, value: str) -> RowError:
    message = f"column {name!r} of row {row} of the split holds {value!r:.60}; {kind} was expected (types=, --types)."
    return RowError(path, row, "wrong_type", message + _guess_cause(name, value))


def _guess_cause(name: str, value: str) -> str:
    if _NUMBER.fullmatch(value):
        better = "text" if _WHOLE_NUMBER.fullmatch(value) or math.isinf(float(value)) else "float64"
        return f" Is it right? Then the column needs another type: types={{{name!r}: {better!r}}}."
    return " Is it missing? Then name it in null_values (--null-values)." if len(value) < 10 else ""

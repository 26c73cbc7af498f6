"""Which samples a filter keeps, by a mask or by conditions on columns.

Conditions read those columns and no other, some megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.samples._samples import Samples
from penstock.schema import Column, exact_array
from penstock.shards import read_samples, samples_per_chunk

_CHUNK_BYTES = 16 << 20
Condition = Callable[[Any], Any] | Any
"""A function of many values that gives a bool for each, a value, or a list of values."""


def find_samples(samples: Samples, conditions: Mapping[str, Condition]) -> NDArray[np.int64]:
    """Indices of the samples that fulfil all conditions, in order."""
    left = np.arange(len(samples))
    for name, condition in conditions.items():
        left = left[_fulfil(samples, samples.schema[name], condition, left)]
    return left


def find_true(mask: Any, num_samples: int) -> NDArray[np.int64]:
    """Indices of the samples for which a mask is true."""
    if callable(mask):
        raise TypeError(
            "filter() takes a mask, one bool per sample, as in ds.filter(ds.lengths('tokens') > 16); a function "
            "needs the name of its column, as in ds.filter(score=lambda score: score > 0.5)."
        )
    kept = np.asarray(mask)
    if kept.dtype != np.bool_ or kept.shape != (num_samples,):
        raise ValueError(f"The mask must be {num_samples:,} bools; it is {kept.dtype} of shape {list(kept.shape)}.")
    return np.flatnonzero(kept)


def _fulfil(samples: Samples, column: Column, condition: Condition, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
    step = samples_per_chunk(samples.storage, [column], _CHUNK_BYTES)
    test = condition if callable(condition) else _comparison(column, condition)
    kept = np.zeros(len(indices), bool)
    for begin in range(0, len(indices), step):
        chunk = indices[begin : begin + step]
        values = read_samples(samples.storage, column, samples.locate(chunk))
        kept[begin : begin + step] = _check(column, np.asarray(test(values)), len(chunk))
    return kept


def _check(column: Column, found: NDArray[Any], num_values: int) -> NDArray[np.bool_]:
    if found.dtype != np.bool_ or found.shape != (num_values,):
        raise ValueError(
            f"filter({column.name}=…): the function must give {num_values:,} bools for {num_values:,} values; it gave "
            f"{found.dtype} of shape {list(found.shape)}."
        )
    return found


def _comparison(column: Column, wanted: Any) -> Callable[[Any], NDArray[np.bool_]]:
    """A function that says which values of a column are the wanted one, or among those wanted."""
    chosen = list(wanted) if isinstance(wanted, (list, tuple, set, frozenset, np.ndarray, range)) else [wanted]
    if column.kind == "bytes":
        _check_kind(column, chosen, (str, bytes), "texts")
        texts = {text.encode() if isinstance(text, str) else text for text in chosen}
        return lambda values: np.array([value in texts for value in values], bool)
    if column.is_ragged or column.shape:
        raise SchemaError(f"filter({column.name}=…): the column is {column.spec}; give a function of its values.")
    _check_kind(column, chosen, (Real, np.bool_), "numbers")
    numbers = _as_stored(column.dtype, chosen)
    return lambda values: np.isin(np.asarray(values), numbers)


def _as_stored(dtype: np.dtype[Any], chosen: list[Any]) -> NDArray[Any]:
    """The numbers as a column holds them: floats rounded as it rounds them, others only if it holds them exactly.

    Left to numpy, 0.1 is not in a float32 column that holds it, and [1, 2**63 + 5] would be compared as floats.
    """
    given = exact_array(chosen)
    if given.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return given[(given >= limits.min) & (given <= limits.max)].astype(dtype)
    with np.errstate(over="ignore"):
        stored = [_convert(dtype, value) for value in chosen]
    return np.array([value for value in stored if value is not None], dtype)


def _convert(dtype: np.dtype[Any], value: Any) -> Any:
    """A number in this dtype; None if no sample can have it."""
    try:
        stored = np.array(value if dtype.kind in "fcV" else int(value)).astype(dtype)[()]
    except (ValueError, OverflowError):  # not a whole number, or one of more than 64 bits
        return None
    is_float = isinstance(value, (float, np.floating)) and dtype.kind in "fcV"
    keeps = np.isfinite(stored) == np.isfinite(value) if is_float else stored.item() == value
    return stored if keeps else None


def _check_kind(column: Column, chosen: list[Any], kinds: tuple[type, ...], expected: str) -> None:
    """Refuse values that a column cannot hold: no sample would have them."""
    for value in chosen:
        if not isinstance(value, kinds):
            raise SchemaError(
                f"filter({column.name}={value!r}): the column is {column.spec}; compare it with {expected}."
            )

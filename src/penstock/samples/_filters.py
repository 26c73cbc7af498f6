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
from penstock.schema import Column, Ragged
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
    kept = np.zeros(len(indices), bool)
    for begin in range(0, len(indices), step):
        chunk = indices[begin : begin + step]
        values = read_samples(samples.storage, column, samples.locate(chunk))
        kept[begin : begin + step] = _check(column, condition, values, len(chunk))
    return kept


def _check(column: Column, condition: Condition, values: Ragged | NDArray[Any], num_values: int) -> NDArray[np.bool_]:
    found = np.asarray(condition(values)) if callable(condition) else _compare(column, values, condition)
    if found.dtype != np.bool_ or found.shape != (num_values,):
        raise ValueError(
            f"filter({column.name}=…): the function must give {num_values:,} bools for {num_values:,} values; it gave "
            f"{found.dtype} of shape {list(found.shape)}."
        )
    return found


def _compare(column: Column, values: Ragged | NDArray[Any], wanted: Any) -> NDArray[np.bool_]:
    chosen = list(wanted) if isinstance(wanted, (list, tuple, set, frozenset, np.ndarray, range)) else [wanted]
    if column.kind == "bytes":
        _check_kind(column, chosen, (str, bytes), "texts")
        texts = {text.encode() if isinstance(text, str) else text for text in chosen}
        return np.array([value in texts for value in values], bool)
    if column.is_ragged or column.shape:
        raise SchemaError(f"filter({column.name}=…): the column is {column.spec}; give a function of its values.")
    _check_kind(column, chosen, (Real, np.bool_), "numbers")
    found: NDArray[np.bool_] = np.isin(np.asarray(values), chosen)
    return found


def _check_kind(column: Column, chosen: list[Any], kinds: tuple[type, ...], expected: str) -> None:
    """Refuse values that a column cannot hold: no sample would have them."""
    for value in chosen:
        if not isinstance(value, kinds):
            raise SchemaError(
                f"filter({column.name}={value!r}): the column is {column.spec}; compare it with {expected}."
            )

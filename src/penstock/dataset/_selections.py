"""Which samples a dataset keeps: by a mask, by conditions on columns, or by a split.

Conditions read those columns and no other, some megabytes at a time.

A split looks at one sample's key and the seed, and at nothing else. So a sample stays in its part when others are
added, removed or moved, however the data is stored. Samples with the same key are in the same part: copies of a
document never end up in both training and validation data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.dataset._samples import By, Samples
from penstock.errors import SchemaError, whole_number
from penstock.order import draw_shares, pick_numbers, share_ranges
from penstock.schema import Column, Schema, exact_array
from penstock.shards import content_columns, read_samples, samples_per_chunk

_CHUNK_BYTES = 16 << 20
Condition = Callable[[Any], Any] | Any
"""A function of many values that gives a bool for each, a value, or a list of values."""
_CHUNK, _NUMBERS = 1 << 20, 1 << 15  # numbers alone are drawn in the processor's cache
_WORDS = ("content", "index", "file")


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


@dataclass(frozen=True, slots=True)
class SplitPart:
    """The samples whose number from 0 to 1, drawn by key and seed, lies between two shares."""

    begin: float
    end: float
    seed: int
    by: By = "index"

    def indices(self, before: Samples) -> NDArray[np.integer[Any]]:
        dtype: type[np.integer[Any]] = np.uint32 if len(before) < 1 << 32 else np.int64
        found: NDArray[np.integer[Any]] = np.empty(len(before), dtype)  # memory is taken when it is written
        count, step = 0, _CHUNK if self.by != "index" else _NUMBERS
        for begin in range(0, len(before), step):
            inside = self._inside(before, begin, min(begin + step, len(before)))
            found[count : count + len(inside)] = inside
            count += len(inside)
        found.resize(count, refcheck=False)
        return found

    def _inside(self, before: Samples, begin: int, end: int) -> NDArray[np.int64]:
        """Which of the samples `begin` to `end` are of this part."""
        if self.by == "index":
            return pick_numbers(begin, end, self.seed, self.begin, self.end)
        shares = draw_shares(before.keys.of(self.by, before.locate(np.arange(begin, end))), self.seed)
        return np.flatnonzero((shares >= self.begin) & (shares < self.end)) + begin

    @property
    def identity(self) -> str:
        numbers = f"split {self.begin!r} {self.end!r} {self.seed}"
        return numbers if self.by == "index" else f"{numbers} by {self.by!r}"

    def to_json(self) -> list[Any]:
        by = list(self.by) if isinstance(self.by, tuple) else self.by
        return [self.begin, self.end, self.seed, *([] if by == "index" else [by])]

    @classmethod
    def from_json(cls, begin: float, end: float, seed: int, by: str | list[str] = "index") -> SplitPart:
        """The inverse of `to_json`."""
        known: Any = tuple(by) if isinstance(by, list) else by
        if not isinstance(known, tuple) and known not in _WORDS:
            raise ValueError(f"a split by {by!r}")
        return cls(float(begin), float(end), int(seed), known)


def split_parts(
    fractions: Mapping[str, float], seed: int, by: str | Sequence[str], samples: Samples
) -> dict[str, SplitPart]:
    """One part per name; together they take every sample exactly once.

    Raises:
        TypeError: the fractions have no names, or the seed is not an int.
        ValueError: a fraction is not positive, they do not add up to 1, `by` can mean two things, or the samples are
            a part of a split with the same seed.
    """
    ranges = share_ranges(fractions)
    seed, key = whole_number("split", "seed", seed), _as_by(by, samples.storage.schema)
    _check_seed(samples, seed, key)
    return {name: SplitPart(begin, end, seed, key) for name, (begin, end) in ranges.items()}


def _check_seed(samples: Samples, seed: int, by: By) -> None:
    """Refuse to split a part again by the seed and the keys that made it: its samples would all go the same way."""
    made: list[Any] = [(part.seed, part.by) for part in samples.selections if isinstance(part, SplitPart)]
    found: Any = samples.storage.attributes
    for field in ("preparation", "recipe", "part"):
        found = found.get(field) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        columns = found.get("by")
        made.append((found.get("seed"), tuple(columns) if isinstance(columns, list) else columns))

    def keys(by: Any) -> Any:
        return content_columns(samples.storage.schema) if by == "content" else by

    if by != "index" and (seed, keys(by)) in [(each, keys(known)) for each, known in made]:
        raise ValueError(
            f"split(seed={seed}): these samples are already a part of a split with that seed. It would draw the same "
            "number for each of them again, and give other shares than asked for. Use another seed."
        )


def _as_by(by: str | Sequence[str], schema: Schema) -> By:
    """What `by` means: one of three words, or columns."""
    if not isinstance(by, str):
        return tuple(by)
    if by not in _WORDS:
        return (by,)
    if by in schema:
        raise ValueError(
            f"split(by={by!r}): there is a column of that name, too. Write by=[{by!r}] to go by the column."
        )
    return cast(By, by)

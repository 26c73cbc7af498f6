"""What a batch holds after a map of rows: the values that the function returned, row by row, joined to columns.

    numbers, arrays, tensors    of one shape: an array with the rows side by side
                                of uneven length: a `Ragged`, as columns of uneven length are in any batch
                                uneven in another dimension: a list of arrays, one per row
    bytes                       a `Ragged` of byte strings
    str                         a list
    dict                        a dict of columns, by the same rules
    lists that are not arrays   a list of lists of arrays

A column of any length that happens to be even in a batch, the only row of the last one for example, is an array there:
`map(fn, ragged="boxes")` makes it a `Ragged` in every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.schema import Ragged, array_of_tensor, exact_array

Row = Mapping[str, Any]


def without_torch(value: Any) -> Any:
    """A tensor as an array of the same memory, so that it travels as arrays do; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    return array_of_tensor(value)


class RowResults:
    """Joins what one map returned; `name` is the map's, for errors, `ragged` are columns that are always `Ragged`."""

    def __init__(self, name: str, ragged: Collection[str]) -> None:
        self._name, self._ragged = name, ragged

    def join(
        self, results: Sequence[Row], given: Sequence[Row], before: Mapping[str, Any], within: str = ""
    ) -> dict[str, Any]:
        """One column for each key, of the results for the `given` rows of the columns `before`.

        `within` names the dict that they are in, followed by a dot.

        Raises:
            SchemaError: rows have other keys than each other, or values that do not go together.
        """
        keys = results[0].keys()
        for result in results:
            if result.keys() != keys:
                raise SchemaError(f"{self._name} returned {sorted(keys)} for one row and {sorted(result)} for another.")
        return {
            key: self._join(
                f"{within}{key}", [one[key] for one in results], [one.get(key) for one in given], before.get(key)
            )
            for key in keys
        }

    def _join(self, key: str, values: list[Any], given: list[Any], before: Any) -> Any:
        if isinstance(before, Ragged | list) and all(new is old for new, old in zip(values, given, strict=True)):
            return before  # given back as it was: uneven, even where no two rows differ
        if all(isinstance(value, Mapping) for value in values):
            is_dict = isinstance(before, dict)
            return self.join(values, given if is_dict else [{}] * len(values), before if is_dict else {}, f"{key}.")
        if all(isinstance(value, str) for value in values):
            return values
        if all(isinstance(value, bytes) for value in values):
            joined = np.frombuffer(bytearray().join(values), np.uint8)
            return Ragged.from_lengths(joined, [len(value) for value in values], is_bytes=True)
        arrays = [_as_array(value) for value in values]
        if any(array is None for array in arrays) and all(isinstance(value, list | tuple) for value in values):
            return [self._list(key, value) for value in values]
        return self._join_arrays(key, [self._checked(key, array) for array in _fill_in(values, arrays)])

    def _join_arrays(self, key: str, arrays: list[NDArray[Any]]) -> Any:
        first = arrays[0]
        other = next((array for array in arrays if array.dtype != first.dtype), None)
        if other is not None:
            raise SchemaError(
                f"{self._name} returned {key!r} as {_describe(first)} for one row and as {_describe(other)} for "
                "another; the numbers of a column are of one dtype."
            )
        is_even = all(array.shape == first.shape for array in arrays)
        has_lengths = all(array.ndim and array.shape[1:] == first.shape[1:] for array in arrays)
        if key in self._ragged and not has_lengths:
            raise SchemaError(
                f"{self._name} returned {key!r} as {_describe(first)}; rows of a ragged column differ in their first "
                "dimension only."
            )
        if is_even and key not in self._ragged:
            return np.stack(arrays)
        return Ragged.from_lengths(np.concatenate(arrays), [len(array) for array in arrays]) if has_lengths else arrays

    def _list(self, key: str, value: Any) -> Any:
        """A list as it is, but with arrays in place of what can be one."""
        array = _as_array(value)
        if array is None and isinstance(value, list | tuple):
            return [self._list(key, inner) for inner in value]
        return self._checked(key, array)

    def _checked(self, key: str, array: NDArray[Any] | None) -> NDArray[Any]:
        if array is None or array.dtype.kind not in "biufcV":
            found = "values that make no array" if array is None else str(array.dtype)
            raise SchemaError(
                f"{self._name} returned {found} for {key!r}; a column is made of numbers, bytes, str, or dicts."
            )
        return array


def _fill_in(values: list[Any], arrays: list[NDArray[Any] | None]) -> list[NDArray[Any] | None]:
    """The arrays; an empty list, which has no type of its own, gets that of the others."""
    is_empty = [isinstance(value, list) and not value for value in values]
    example = next((array for array, is_one in zip(arrays, is_empty, strict=True) if not is_one), None)
    if example is None or not example.ndim:
        return arrays
    nothing = np.empty((0, *example.shape[1:]), example.dtype)
    return [nothing if is_one else array for array, is_one in zip(arrays, is_empty, strict=True)]


def _as_array(value: Any) -> NDArray[Any] | None:
    try:
        return exact_array(without_torch(value))
    except ValueError:  # lists of uneven length
        return None


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"

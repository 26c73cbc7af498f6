"""Running users' functions on rows, the same way wherever and whenever they run.

`fn(row, rng)` gets a generator derived from seed and row number, and is a pure function of both.
`fn(row)` may use the global generators of random, numpy and torch: they are seeded for each row and
put back afterwards, so the row comes out the same everywhere and the caller's own streams are not
disturbed. That is not safe in threads (two would seed the same global generator), so a loader runs
such a function in processes unless it is marked `@penstock.pure`.

What a batch holds after a map of rows: the values that the function returned, row by row, joined to columns.

    numbers, arrays, tensors    of one shape: an array with the rows side by side
                                of uneven length: a `Ragged`, as columns of uneven length are in any batch
                                uneven in another dimension: a list of arrays, one per row
    bytes                       a `Ragged` of byte strings
    lists of bytes              a `Ragged` of several byte strings for each row
    str                         a list
    dict                        a dict of columns, by the same rules
    lists that are not arrays   a list of lists of arrays

A column of any length that happens to be even in a batch, the only row of the last one for example, is an array there:
`map(fn, ragged="boxes")` makes it a `Ragged` in every batch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError, printable
from penstock.identity import names_used
from penstock.order import derive_key
from penstock.plan._stages import Map
from penstock.schema import Ragged, array_of_tensor, exact_array, is_byte_strings

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
        if is_byte_strings(values):
            strings = self._join(key, [string for value in values for string in value], [], None)
            return Ragged.from_lengths(strings, [len(value) for value in values])
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


_PURE = "__penstock_pure__"
Function = TypeVar("Function", bound=Callable[..., Any])


def pure(function: Function) -> Function:
    """Mark a function of one argument as free of global state: it may run in threads, and nothing is seeded for it.

    >>> @pure
    ... def double(row):
    ...     return {"x": row["x"] * 2}
    """
    setattr(function, _PURE, True)
    return function


def is_pure(function: Callable[..., Any]) -> bool:
    """Whether a function needs no isolation: it takes a generator, or is marked."""
    return takes_generator(function) or is_marked_pure(function)


def is_marked_pure(function: Callable[..., Any]) -> bool:
    """Whether a function is marked `@penstock.pure`."""
    return bool(getattr(function, _PURE, False))


def takes_generator(function: Callable[..., Any]) -> bool:
    """Whether a function takes `(row, rng)` and not `(row)`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a C function without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    return len(needed) >= 2 or (len(positional) >= 2 and positional[1].name == "rng")


Replace = Callable[[int, Exception], dict[str, Any]]
"""Returns the row that replaces another, given its place in the batch and the error; or raises the error."""


def run_map(
    stage: Map,
    batch: Mapping[str, Any],
    rows: NDArray[np.int64],
    seed: int,
    describe: Callable[[int], str],
    replace: Replace,
) -> dict[str, Any]:
    """`batch` after one map stage.

    `rows` are the absolute numbers of its rows, `seed` is the stage's own; `describe` describes a row at fault, and
    `replace` gives the row that takes its place.
    """
    if stage.batched:
        first = int(rows[0]) if len(rows) else 0
        with _calling(stage.function, seed) as call:
            result = _checked(stage, call(dict(batch), first))
        return {key: without_torch(value) for key, value in result.items()}
    if not len(rows):
        return dict(batch)
    samples, results = list(_samples(batch, len(rows))), []
    given = [_copied(sample) for sample in samples]  # the function may change the one that it gets
    with _calling(stage.function, seed) as call:
        for place, (sample, row) in enumerate(zip(samples, rows.tolist(), strict=True)):
            try:
                results.append(_checked(stage, call(sample, row)))
            except Exception as error:  # noqa: BLE001 - `replace` raises it, or puts another row here
                error.add_note(printable(f"in {_name(stage)}, at {describe(row)}"))  # it names a source file
                results.append(replace(place, error))
    return RowResults(_name(stage), stage.ragged).join(results, given, batch)


@contextlib.contextmanager
def _calling(function: Callable[..., Any], seed: int) -> Iterator[Callable[[dict[str, Any], int], Any]]:
    """How to call a function with a value and its row number; worked out, and isolated, once per batch."""
    if takes_generator(function):
        yield lambda value, row: function(value, np.random.Generator(np.random.Philox(key=derive_key(seed, row))))
    elif is_marked_pure(function):
        yield lambda value, row: function(value)
    else:
        if "torch" not in sys.modules and "torch" in names_used(function) and importlib.util.find_spec("torch"):
            importlib.import_module("torch")  # a function that imports it would find a generator that was not seeded
        with _GlobalGenerators() as generators:

            def call(value: dict[str, Any], row: int) -> Any:
                generators.seed(derive_key(seed, row))
                return function(value)

            yield call


class _GlobalGenerators:
    """The global generators of random, numpy and torch, restored at the end.

    Saving and restoring takes 0.1 ms, so it is done once per batch, not per row.
    """

    def __enter__(self) -> _GlobalGenerators:
        self._kept = random.getstate(), np.random.get_state()
        self._kept_torch: Any = None
        return self

    def seed(self, key: int) -> None:
        """Begin the streams of one row."""
        random.seed(key)
        np.random.seed([key & 0xFFFFFFFF, key >> 32, 1])  # without the 1 its stream would equal that of `random`
        torch = sys.modules.get("torch")
        if torch is not None:  # it may have been imported by the row before
            if self._kept_torch is None:
                self._kept_torch = torch.random.get_rng_state()
            torch.random.default_generator.manual_seed(key & (2**63 - 1))

    def __exit__(self, *exception: object) -> None:
        random.setstate(self._kept[0])
        np.random.set_state(self._kept[1])
        if self._kept_torch is not None:
            sys.modules["torch"].random.set_rng_state(self._kept_torch)


def _samples(batch: Mapping[str, Any], num_rows: int) -> Iterator[dict[str, Any]]:
    columns = {name: value for name, value in batch.items() if _has_rows(value, num_rows)}
    if len(columns) < len(batch):
        whole = sorted(set(batch) - set(columns))
        raise SchemaError(
            f"{', '.join(whole)} belong to the whole batch, not to a row: after pack() or pad(), use "
            "map(fn, batched=True)."
        )
    return ({name: _row(value, row) for name, value in columns.items()} for row in range(num_rows))


def _has_rows(value: Any, num_rows: int) -> bool:
    if isinstance(value, dict):
        return all(_has_rows(inner, num_rows) for inner in value.values())
    is_column = isinstance(value, Ragged | list) or (isinstance(value, np.ndarray) and value.ndim > 0)
    return is_column and len(value) == num_rows


def first_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The first row of a batch of rows."""
    return next(_samples(batch, 1))


def _row(column: Any, row: int) -> Any:
    return {key: _row(inner, row) for key, inner in column.items()} if isinstance(column, dict) else column[row]


def _copied(row: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in row.items()}


def _checked(stage: Map, result: Any) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        raise TypeError(f"{_name(stage)} returned {type(result).__name__}; a map returns a dict of columns.")
    return dict(result)


def _name(stage: Map) -> str:
    return f"map({getattr(stage.function, '__qualname__', stage.function)})"

"""`FunctionTransform`: any Python function as a transform: a batch in, any number of samples out.

The function gets `{column: array or list}` and returns the same kind of dict; text becomes "bytes". If it returns as
many samples as it got rows, sample i came from row i. Otherwise it must say where each came from, in the key
`__source__`: places in the batch, never decreasing. Batches are about 4 MB of raw data and are cut the same way in
every run.

If the function raises, it is called again row by row. Rows that fail by themselves are bad rows, reported with the
function's own traceback, and the batch is tried once more without them. If no row does, the run stops.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError, TransformFailed
from penstock.identity import import_function, name_function, source_digest
from penstock.schema import Schema
from penstock.sources import Records
from penstock.transforms._transform import BadRows, OpenTransform, Output, Transform, is_arrow, is_number, numbers_of

VERSION = 1
SOURCE_KEY = "__source__"
BatchFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
_Made = tuple[dict[str, Any], NDArray[np.int64]]
"""Columns, and the place of each sample's row."""


@dataclass(frozen=True, slots=True)
class FunctionTransform(Transform):
    """Run a function over batches of rows.

    Raises:
        TypeError: it is not callable, or cannot be pickled.
        ValueError: it is not an import path, or there is nothing at it.

    >>> FunctionTransform("string:capwords").identity["function"]
    'string:capwords'
    """

    function: str | BatchFunction
    """A function that can be pickled, or "package.module:function", imported in each worker."""
    types: Mapping[str, str] | None = field(default=None, kw_only=True)
    """Types of the columns it returns; None infers them from its first output."""
    version: str = field(default="", kw_only=True)
    """Change it when the function's result changes for a reason that is not in its own code."""

    def __post_init__(self) -> None:
        if self.types is not None:
            Schema.parse(self.types)
        found = load_function(self.function)
        if isinstance(self.function, str):
            return
        try:
            pickle.dumps(found)
        except Exception as error:  # noqa: BLE001 (pickle raises what the object raises)
            raise TypeError(
                f"{name_function(found)} cannot be sent to workers: {error}. Define it at the top level of a module, "
                f"or name it as 'package.module:function'."
            ) from None

    @property
    def identity(self) -> dict[str, Any]:
        found = load_function(self.function)
        name = self.function if isinstance(self.function, str) else name_function(found)
        return {
            "transform": "FunctionTransform",
            "version": VERSION,
            "function": name,
            "code": source_digest(found),
            "function_version": self.version,
            "types": None if self.types is None else dict(self.types),
        }

    def columns(self) -> dict[str, str] | None:
        return None if self.types is None else dict(self.types)

    def before_run(self, sample: Iterable[Records]) -> FunctionTransform:
        """The same: functions are not called before the run."""
        return self

    def open(self) -> OpenTransform:
        return _OpenFunction(load_function(self.function))


def load_function(function: str | BatchFunction) -> BatchFunction:
    """The function itself."""
    if isinstance(function, str):
        return import_function(function)
    if not callable(function):
        raise TypeError(f"{function!r} is not callable.")
    return function


class _OpenFunction:
    def __init__(self, function: BatchFunction) -> None:
        self._function = function

    def __call__(self, records: Records) -> Output:
        bad = BadRows(records)
        batch = {name: _as_batch(column) for name, column in records.columns.items()}
        made = self._try(batch, records.num_rows)
        if isinstance(made, Exception):
            made = self._run_without_bad(batch, records, bad, made)
        columns, sources = made
        return Output(columns, bad.good_places()[sources], bad.errors())

    def _run_without_bad(self, batch: dict[str, Any], records: Records, bad: BadRows, failure: Exception) -> _Made:
        name = name_function(self._function)
        for place in range(records.num_rows):
            alone = self._try(_take_rows(batch, np.array([place])), 1)
            if isinstance(alone, Exception):
                bad.add(place, type(alone).__name__, f"{name} failed on this row:\n{_own_traceback(alone)}")
        places = bad.good_places()
        if not len(places):
            return {}, places
        made = self._try(_take_rows(batch, places), len(places)) if len(bad) else failure
        if isinstance(made, Exception):
            raise TransformFailed(
                f"{name} failed on a batch of {len(places)} rows (from row {records.first_row:,} of the split), "
                f"but on no single row of it. Its own traceback:\n{_own_traceback(made)}"
            ) from made
        return made

    def _try(self, batch: dict[str, Any], num_rows: int) -> _Made | Exception:
        """What the function returned for a batch, or what it raised; a malformed result stops the run."""
        try:
            return self._run(batch, num_rows)
        except (SchemaError, MemoryError):  # too little memory says nothing about a row
            raise
        except Exception as error:  # noqa: BLE001 (a user's function may raise anything)
            return error

    def _run(self, batch: dict[str, Any], num_rows: int) -> _Made:
        returned: object = self._function(dict(batch))
        if not isinstance(returned, Mapping):
            raise SchemaError(
                f"{name_function(self._function)} returned {type(returned).__name__}, not a dict of columns."
            )
        columns = {name: _encode_text(column) for name, column in returned.items() if name != SOURCE_KEY}
        counts = {name: _count(name, column) for name, column in columns.items()}
        if not counts or len(set(counts.values())) != 1:
            raise SchemaError(
                f"{name_function(self._function)} must return columns of one length; these have {counts}."
            )
        num_samples = next(iter(counts.values()))
        return columns, _check_sources(returned.get(SOURCE_KEY), num_samples, num_rows, name_function(self._function))


def _check_sources(given: Any, num_samples: int, num_rows: int, name: str) -> NDArray[np.int64]:
    if given is None:
        if num_samples != num_rows:
            raise SchemaError(
                f"{name} made {num_samples} samples from {num_rows} rows without saying which came from which. "
                f"Also return the place of each sample's row: {{'{SOURCE_KEY}': [0, 0, 1, …], …}}."
            )
        return np.arange(num_rows, dtype=np.int64)
    sources = np.asarray(given)
    is_valid = sources.shape == (num_samples,) and (sources.dtype.kind in "iu" or not num_samples)
    if not is_valid or (num_samples and (sources.min() < 0 or sources.max() >= num_rows)):
        raise SchemaError(
            f"{name} returned {SOURCE_KEY!r} with {sources.dtype} {list(sources.shape)}; "
            f"it must be {num_samples} integers from 0 to {num_rows - 1}."
        )
    if (np.diff(sources) < 0).any():
        raise SchemaError(f"{name}: {SOURCE_KEY!r} must be non-decreasing; keep samples in the order of their rows.")
    return sources.astype(np.int64)


def _count(name: str, column: Any) -> int:
    if isinstance(column, (str, bytes)) or not hasattr(column, "__len__"):
        raise SchemaError(
            f"Column {name!r} is one {type(column).__name__}; it must be an array or list with one value per sample."
        )
    return len(column)


def _encode_text(column: Any) -> Any:
    """Text as byte strings, which is how a dataset stores it; anything else unchanged."""
    values = column.tolist() if isinstance(column, np.ndarray) and column.dtype.kind == "U" else column
    if isinstance(values, (list, tuple)) and values and all(isinstance(value, str) for value in values):
        return [value.encode() for value in values]
    return column


def _as_batch(column: Any) -> Any:
    """Numbers without nulls as a numpy array, everything else as a list."""
    if not is_arrow(column):
        return column
    return numbers_of(column) if is_number(column.type) and not column.null_count else column.to_pylist()


def _take_rows(batch: dict[str, Any], places: NDArray[np.int64]) -> dict[str, Any]:
    return {
        name: column[places] if isinstance(column, np.ndarray) else [column[place] for place in places]
        for name, column in batch.items()
    }


def _own_traceback(error: BaseException) -> str:
    """The traceback from the user's function on, without our frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()

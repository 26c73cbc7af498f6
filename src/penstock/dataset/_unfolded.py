"""Windows of time series as samples: every `stride` steps, `length` consecutive ones. Nothing is copied.

    samples are steps     columns of numbers: sample i is steps i * stride to i * stride + length of the dataset
    samples are series    ragged columns: the windows of one series after those of another, none over a border; columns
                          that are not ragged are those of the series

A batch of scalars is one gather; of vectors, a slice for each window. A window has no key of its own: neighbours
overlap, so a split that went window by window would put the same steps into training and validation.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset._joined import count_elements
from penstock.dataset._samples import By, SampleKeys, Samples
from penstock.errors import SchemaError
from penstock.identity import digest
from penstock.schema import Column, Ragged, Schema, offsets_of
from penstock.shards import Spans, from_front

Int64 = NDArray[np.int64]


class UnfoldedStorage:
    """Windows of the samples, or inside the samples, of a dataset."""

    def __init__(self, steps: Samples, length: int, stride: int) -> None:
        self.steps, self.length, self.stride = steps, length, stride
        ragged = [column for column in steps.schema.columns if column.kind == "ragged"]
        self.is_of_series = bool(ragged)
        self._cut = {column.name: column for column in ragged or steps.schema.columns}
        self._starts = self._count(ragged)
        self.num_samples = int(self._starts[-1])
        self.schema = Schema(tuple(self._unfold(column) for column in steps.schema.columns))

    def _count(self, ragged: list[Column]) -> Int64:
        """Number of the first window of each series, and of all windows."""
        if not ragged:
            if any(column.is_ragged for column in self.steps.schema.columns):
                raise SchemaError("unfold(): byte strings have no steps. Leave them out with select_columns().")
            return offsets_of([self._windows_in(np.array(len(self.steps)))])
        lengths = self.steps.lengths(ragged[0])
        for column in ragged[1:]:
            if not np.array_equal(self.steps.lengths(column), lengths):
                raise SchemaError(
                    f"unfold(): {ragged[0].name!r} and {column.name!r} differ in length in some samples; choose "
                    "columns whose steps belong together with select_columns()."
                )
        return offsets_of(self._windows_in(lengths))

    def _windows_in(self, num_steps: Any) -> Any:
        return np.maximum(0, (num_steps - self.length) // self.stride + 1)

    def _unfold(self, column: Column) -> Column:
        if column.name not in self._cut:
            return column
        return Column.parse(column.name, Column(column.name, column.dtype, (self.length, *column.shape)).spec)

    @property
    def fingerprint(self) -> str:
        return digest(f"unfold {self.length} {self.stride} {self.steps.digest(repr(self.steps.schema.to_json()))}")

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Classes, if the series have any."""
        known = self.steps.storage.attributes
        return {"classes": known["classes"]} if "classes" in known else {}

    def provenance(self) -> Mapping[str, Any]:
        """Empty: `sample_keys` refers to the steps'."""
        return {}

    def sample_keys(self) -> SampleKeys:
        """Those of the series."""
        return _SeriesKeys(self)

    @property
    def num_bytes(self) -> int:
        """Bytes of all steps, each counted once."""
        columns = self.steps.schema.columns
        return sum(count_elements(self.steps, column) * column.item_bytes for column in columns)

    def series(self, windows: Int64) -> Int64:
        """The series that each window belongs to."""
        return np.searchsorted(self._starts, windows, side="right") - 1

    def windows_touching(self, begins: Int64, ends: Int64) -> tuple[Int64, Int64]:
        """(first window, last window + 1) that reads samples `begins[k]` to `ends[k]` of what is cut."""
        if self.is_of_series:
            return self._starts[begins], self._starts[ends]
        first = np.maximum((begins - self.length) // self.stride + 1, 0)
        return first, np.minimum(-(-ends // self.stride), self.num_samples)

    def read_fixed(self, column: Column, indices: Int64, out: NDArray[Any]) -> None:
        windows, steps = from_front(indices, self.num_samples), self.steps
        if column.name not in self._cut:
            steps.storage.read_fixed(column, steps.locate(self.series(windows)), out)
            return
        stored = self._cut[column.name]
        if not self.is_of_series:
            places = (windows[:, None] * self.stride + np.arange(self.length)).reshape(-1)
            flat = out.reshape(-1, *stored.shape)
            steps.storage.read_fixed(stored, steps.locate(places), flat)
            out[...] = flat.reshape(out.shape)
        else:
            self._read_series(stored, windows, out)

    def _read_series(self, stored: Column, windows: Int64, out: NDArray[Any]) -> None:
        series = self.series(windows)
        firsts = (windows - self._starts[series]) * self.stride
        located, storage = self.steps.locate(series), self.steps.storage
        if stored.shape:
            for place, (sample, first) in enumerate(zip(located.tolist(), firsts.tolist(), strict=True)):
                out[place] = storage.value(stored, sample)[first : first + self.length]
            return
        sizes = np.full(len(windows), self.length, np.int64)
        flat = np.empty(out.size, out.dtype)
        storage.read_spans(stored, Spans(located, firsts, sizes, np.arange(len(windows)) * self.length), flat)
        out[...] = flat.reshape(out.shape)

    def read_ragged(self, column: Column, indices: Int64) -> Ragged:
        return self.steps.storage.read_ragged(
            column, self.steps.locate(self.series(from_front(indices, self.num_samples)))
        )

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        located = self.steps.locate(self.series(spans.indices))
        self.steps.storage.read_spans(column, Spans(located, spans.firsts, spans.sizes, spans.targets), out)

    def lengths_of(self, column: Column, indices: Int64) -> Int64:
        return self.steps.storage.lengths_of(column, self.steps.locate(self.series(indices)))

    def lengths(self, column: Column, begin: int, end: int) -> Int64:
        return self.lengths_of(column, np.arange(begin, end))

    def read_stream(self, column: Column, firsts: Int64, out: NDArray[Any]) -> None:
        """Refused: windows overlap, so they are not a stream."""
        raise SchemaError("window() cannot follow unfold(), whose samples are windows already.")

    def num_elements(self, column: Column) -> int:
        if not column.is_ragged:
            return self.num_samples
        return int(self.lengths(column.stored[0], 0, self.num_samples).sum())

    def value(self, column: Column, index: int) -> Any:
        (window,) = from_front(np.array([index]), self.num_samples)
        if column.name not in self._cut:
            return self.steps.storage.value(column, self.steps.locate_one(int(self.series(window))))
        out = np.empty((1, *column.shape), column.dtype)
        self.read_fixed(column, np.array([window]), out)
        out.flags.writeable = False
        return np.asarray(out[0])

    def will_need(self, column: Column, begin: int, end: int) -> None:
        """Left to the kernel's own read-ahead."""

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        """Left to the kernel as well."""

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Steps are checked when they are read."""


class _SeriesKeys(SampleKeys):
    """Keys of series, so that all windows of one stay together."""

    def __init__(self, storage: UnfoldedStorage) -> None:
        super().__init__(storage)
        self._unfolded = storage

    def of(self, by: By, indices: Int64) -> NDArray[np.uint64]:
        steps = self._unfolded.steps
        return steps.keys.of(by, steps.locate(self._unfolded.series(indices)))

    def check(self, by: By) -> None:
        """Refuse to split the windows of one series: they overlap."""
        if not self._unfolded.is_of_series:
            raise ValueError(
                "split() after unfold() would put overlapping windows into different parts. Cut the steps first: "
                "ds.take(range(...)).unfold(...) for each part."
            )
        self._unfolded.steps.keys.check(by)

    def origin(self, index: int) -> str | None:
        """File and row that a series was prepared from, or the first step of a window."""
        unfolded = self._unfolded
        steps = unfolded.series(np.array(index)) if unfolded.is_of_series else index * unfolded.stride
        return unfolded.steps.origin(int(steps))

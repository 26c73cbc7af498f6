"""Row sources: what row i of an endless run holds.

The run is one endless sequence of epochs of `num_rows` rows each; row numbers are absolute. A row
source answers any set of them, in any order, from nothing but the numbers. Which row of the data
stands at which position of an epoch is the order's business; what the row holds is the source's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.errors import SchemaError
from penstock.order import FullOrder, Order, SequentialOrder, WindowedOrder
from penstock.plan._compiled import kernels
from penstock.plan._dataset import Dataset
from penstock.plan._stages import Cast, Shuffle, Window
from penstock.schema import Ragged, dtype_from_name, dtype_name
from penstock.shards import Storage

Batch = dict[str, Any]
Rows = NDArray[np.int64]

# What is permuted as one piece and read as one piece: large enough to stream from a disk.
STORAGE_WINDOW_BYTES = 4 << 20
_KEPT_EPOCHS = 4


class RowSource(Protocol):
    """Rows by absolute number."""

    num_rows: int
    """Rows in an epoch."""
    makes_labels: bool
    """Whether its `labels` are targets that it made, and no column that happens to have the name."""
    is_rectangular: bool
    """Whether a batch is nothing but its rows, side by side in the arrays that `output_arrays` names."""

    @property
    def order_identity(self) -> Any:
        """JSON of everything that decides which data is row i."""
        ...

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """These rows, side by side; `out` offers arrays to fill."""
        ...

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of the arrays that `out` may offer."""
        ...

    def announce(self, row: int) -> None:
        """Tell the kernel which data an absolute row and those after it need."""
        ...

    def release(self, row: int) -> None:
        """Tell the kernel which data is done with, once rows are read in order up to an absolute row."""
        ...


class Epochs:
    """The orders of the epochs of a row source, made when first needed."""

    def __init__(self, window_rows: NDArray[np.int64], shuffle: Shuffle | None) -> None:
        self.num_rows = int(window_rows.sum())
        self.window_rows = window_rows
        self.window_starts = np.cumsum(window_rows) - window_rows
        self.shuffle = shuffle
        self._announced: set[tuple[int, int]] = set()
        self._announced_rows = range(0)
        self._released: tuple[int, int] | None = None
        """(epoch, group) up to which groups were released."""
        self.order = functools.lru_cache(_KEPT_EPOCHS)(self._order)

    def _order(self, epoch: int) -> Order:
        if self.shuffle is None:
            return SequentialOrder(self.num_rows)
        if self.shuffle.mode == "full":
            return FullOrder(self.num_rows, self.shuffle.seed, epoch)
        return WindowedOrder(self.window_rows, self.shuffle.seed, epoch, self.shuffle.group)

    def locate(self, rows: Rows) -> list[tuple[int, Rows, NDArray[np.int64]]]:
        """(epoch, places in `rows`, rows of the data) for each epoch that `rows` touch; nearly always one."""
        epoch = self._only_epoch(rows)
        if epoch is not None:
            return [(epoch, np.arange(len(rows)), self.order(epoch).rows(rows - epoch * self.num_rows))]
        epochs = rows // self.num_rows
        found: list[tuple[int, Rows, NDArray[np.int64]]] = []
        for epoch in np.unique(epochs).tolist():
            places = np.flatnonzero(epochs == epoch)
            found.append((epoch, places, self.order(epoch).rows(rows[places] - epoch * self.num_rows)))
        return found

    def _only_epoch(self, rows: Rows) -> int | None:
        """The epoch that all rows are in; None when there are several, or no rows."""
        if not len(rows):
            return None
        least, greatest = kernels().extent(rows)
        epoch = least // self.num_rows
        return int(epoch) if greatest // self.num_rows == epoch else None

    def announce(self, row: int, announce_window: Callable[[int], None]) -> None:
        """Call `announce_window` once for each storage window of the row's group and of the next.

        Only where groups are read in turn: without a shuffle the kernel sees the pattern by itself, and a
        full shuffle has none.
        """
        if self.shuffle is None or self.shuffle.mode != "windows" or not self.num_rows:
            return
        if row in self._announced_rows:
            return
        epoch, position = divmod(row, self.num_rows)
        order = self.order(epoch)
        assert isinstance(order, WindowedOrder)
        group = order.group_of(position)
        positions = order.positions_of_group(group)
        self._announced_rows = range(epoch * self.num_rows + positions.start, epoch * self.num_rows + positions.stop)
        for number in range(group, min(group + 2, order.num_groups)):
            if (epoch, number) not in self._announced:
                self._announced = (
                    {*self._announced, (epoch, number)} if len(self._announced) < 64 else {(epoch, number)}
                )
                for window in order.windows_of_group(number).tolist():
                    announce_window(window)

    def release(self, row: int, release_window: Callable[[int], None]) -> None:
        """Call `release_window` for each storage window of the groups between the last row's and this row's."""
        if self.shuffle is None or self.shuffle.mode != "windows" or not self.num_rows:
            return
        epoch, position = divmod(row, self.num_rows)
        order = self.order(epoch)
        assert isinstance(order, WindowedOrder)
        group = order.group_of(position)
        before, here = self._released, (epoch, group)
        if before == (epoch, group + 1):  # another thread is ahead
            return
        self._released = here
        if before is None or before > here:  # the run begins, or begins again
            return
        for number in range(before[1] if before[0] == epoch else 0, group):
            for window in order.windows_of_group(number).tolist():
                release_window(window)

    def find(self, rows: Rows) -> NDArray[np.int64]:
        """The row of the data behind each row of the run."""
        epoch = self._only_epoch(rows)
        if epoch is not None:
            return self.order(epoch).rows(rows - epoch * self.num_rows)
        found = np.empty(len(rows), np.int64)
        for _, places, data_rows in self.locate(rows):
            found[places] = data_rows
        return found

    @property
    def identity(self) -> Any:
        """JSON of what decides the order."""
        shuffle = self.shuffle
        return None if shuffle is None else [shuffle.seed, shuffle.mode, shuffle.group]

    def __reduce__(self) -> tuple[Callable[..., Epochs], tuple[Any, ...]]:
        return Epochs, (self.window_rows, self.shuffle)


def even_windows(num_rows: int, rows_per_window: int) -> NDArray[np.int64]:
    """Rows of each storage window, when all but the last are alike."""
    sizes = np.full(-(-num_rows // rows_per_window), rows_per_window, np.int64)
    if len(sizes):
        sizes[-1] = num_rows - rows_per_window * (len(sizes) - 1)
    return sizes


class SampleRows:
    """Each sample is a row; keys and dtypes are the columns'."""

    makes_labels = False

    def __init__(self, dataset: Dataset, casts: tuple[Cast, ...], shuffle: Shuffle | None) -> None:
        self.dataset = dataset
        dtypes = _cast_dtypes(dataset, casts)
        self._columns = [(column, dtypes.get(column.name, column.dtype)) for column in dataset.schema.columns]
        rows_per_window = max(1, STORAGE_WINDOW_BYTES // _sample_bytes(dataset.storage))
        self.epochs = Epochs(even_windows(len(dataset), rows_per_window), shuffle)
        self.num_rows = self.epochs.num_rows
        self.is_rectangular = not any(column.is_ragged for column in dataset.schema.columns)

    @property
    def order_identity(self) -> Any:
        """Samples of this dataset in this order."""
        return ["samples", self.dataset.rows_fingerprint, self.epochs.identity]

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """Samples by one gather per column."""
        stored = self.dataset.storage_indices(self.epochs.find(rows))
        storage = self.dataset.storage
        batch: Batch = {}
        for column, dtype in self._columns:
            if column.is_ragged:
                if out is not None and column.name in out:
                    raise SchemaError(f"out[{column.name!r}]: the column is ragged; what it takes is not known before.")
                batch[column.name] = storage.read_ragged(column, stored)
            else:
                batch[column.name] = offered(out, column.name, (len(rows), *column.shape), dtype)
                storage.read_fixed(column, stored, batch[column.name])
        return batch

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """The fixed columns."""
        fixed = [(column, dtype) for column, dtype in self._columns if not column.is_ragged]
        return {column.name: ((num_rows, *column.shape), dtype_name(dtype)) for column, dtype in fixed}

    def announce(self, row: int) -> None:
        """The storage windows of the row's group, and of the next."""
        self.epochs.announce(row, self._announce_window)

    def release(self, row: int) -> None:
        """The storage windows of the group before the row's."""
        self.epochs.release(row, lambda number: self.dataset.release(*self._samples_of(number)))

    def _announce_window(self, number: int) -> None:
        self.dataset.announce(*self._samples_of(number))

    def _samples_of(self, number: int) -> tuple[int, int, tuple[str, ...]]:
        """(first sample, end, columns) of a storage window."""
        begin = int(self.epochs.window_starts[number])
        return begin, begin + int(self.epochs.window_rows[number]), tuple(self.dataset.schema)

    def sample_indices(self, rows: Rows) -> NDArray[np.int64]:
        """The sample behind each row."""
        return self.epochs.find(rows)


def _sample_bytes(storage: Storage) -> int:
    """Mean size of a sample, from the data alone: files hold padding that depends on how it was cut into shards."""
    columns = storage.schema.columns
    fixed = sum(column.item_bytes for column in columns if not column.is_ragged)
    ragged = sum(storage.num_elements(column) * column.item_bytes for column in columns if column.is_ragged)
    return max(1, fixed + ragged // max(1, storage.num_samples))


def _cast_dtypes(dataset: Dataset, casts: tuple[Cast, ...]) -> dict[str, np.dtype[Any]]:
    dtypes: dict[str, np.dtype[Any]] = {}
    for name, text in [item for cast in casts for item in cast.dtypes]:
        column, dtype = dataset.schema[name], dtype_from_name(text)
        if column.is_ragged:
            raise SchemaError(f"cast({name}={text!r}): {name!r} is ragged; only fixed columns are cast in the gather.")
        if not np.can_cast(column.dtype, dtype, "safe"):
            raise SchemaError(f"cast({name}={text!r}): {column.dtype} does not fit; cast to a wider dtype.")
        dtypes[name] = dtype
    return dtypes


class WindowRows:
    """Rows are `length` tokens of the concatenated documents; the label after the last is read from the next row."""

    makes_labels = True
    is_rectangular = True

    def __init__(self, dataset: Dataset, stage: Window, shuffle: Shuffle | None) -> None:
        self.dataset, self.stage = dataset, stage
        self._column = dataset.schema[stage.column]
        if self._column.kind == "bytes" or self._column.shape or self._column.dtype.kind not in "iu":
            raise SchemaError(
                f"window() cuts a stream of integers; column {stage.column!r} is {self._column.spec}. "
                "Name the token column with column=."
            )
        self._stream = dataset.stream(self._column)
        self.num_tokens = self._stream.num_elements
        row_bytes = stage.length * self._column.dtype.itemsize
        windows = even_windows(self.num_tokens // stage.length, max(1, STORAGE_WINDOW_BYTES // row_bytes))
        self.epochs = Epochs(windows, shuffle)
        self.num_rows = self.epochs.num_rows

    @property
    def order_identity(self) -> Any:
        """Windows of this stream in this order."""
        stage = self.stage
        return ["window", self.dataset.rows_fingerprint, stage.column, stage.length, self.epochs.identity]

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Tokens and labels."""
        return dict.fromkeys(("input_ids", "labels"), ((num_rows, self.stage.length), "int64"))

    def announce(self, row: int) -> None:
        """Left to the kernel's own read-ahead: windows of a stream are read in long runs."""

    def release(self, row: int) -> None:
        """Left to the kernel as well."""

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """`input_ids` and `labels`, int64 [rows, length]; the stream's very last label is -100."""
        length = self.stage.length
        firsts = self.epochs.find(rows) * length
        input_ids, labels = (offered(out, key, (len(rows), length), np.int64) for key in ("input_ids", "labels"))
        self._stream.read(firsts, input_ids)
        labels[:, :-1] = input_ids[:, 1:]
        has_next = firsts + length < self.num_tokens
        last = np.empty((int(has_next.sum()), 1), np.int64)
        self._stream.read(firsts[has_next] + length, last)
        labels[:, -1] = -100
        labels[has_next, -1] = last[:, 0]
        return {"input_ids": input_ids, "labels": labels}


def offered(out: Mapping[str, NDArray[Any]] | None, key: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """The array offered for `key`, or a new one.

    Raises:
        ValueError: the array offered has another shape or dtype, or cannot be written in one piece.
    """
    array = (out or {}).get(key)
    if array is None:
        return np.empty(shape, dtype)
    if array.shape != shape or array.dtype != dtype or not (array.flags.c_contiguous and array.flags.writeable):
        kind = "" if array.flags.writeable else "read-only "
        kind += "" if array.flags.c_contiguous else "strided "
        raise ValueError(
            f"out[{key!r}] is {kind}{array.dtype} {list(array.shape)}; "
            f"writeable, contiguous {np.dtype(dtype)} {list(shape)} is needed."
        )
    return array


def interleave(
    parts: list[tuple[NDArray[np.int64], Any]], num_rows: int, key: str, out: Mapping[str, NDArray[Any]] | None
) -> Any:
    """One column from the same column of several sources, each with the places its rows go to."""
    first = parts[0][1]
    if isinstance(first, Ragged):
        samples: list[Any] = [None] * num_rows
        for places, part in parts:
            for place, sample in zip(places.tolist(), part, strict=True):
                samples[place] = np.frombuffer(sample, np.uint8) if part.is_bytes else sample
        offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
        return Ragged(np.concatenate(samples), offsets, first.is_bytes)
    whole = offered(out, key, (num_rows, *first.shape[1:]), first.dtype)
    for places, part in parts:
        whole[places] = part
    return whole

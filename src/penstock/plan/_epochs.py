"""Which row of the data stands where in each epoch, and so which data comes next.

The data of a row source is cut into storage windows, runs of consecutive rows. An epoch is an order over
them (`penstock.order`), made when it is first asked for: 4 ms for 100,000 windows. Where groups of windows are
read in turn (`mode="windows"`) the kernel is told which come next: without a shuffle it sees the pattern by itself,
and a full shuffle has none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples, ShardLayer, shard_edges
from penstock.order import FullOrder, LaneOrder, Order, SequentialOrder, WindowedOrder
from penstock.plan import _kernels
from penstock.plan._accounts import Mixing, measure_mixing
from penstock.plan._stages import Shuffle
from penstock.plan._uses import RowRange, Rows, Spans, join_spans, scattered
from penstock.schema import Column, offsets_of

# What is permuted as one piece and read as one piece: large enough to stream from a disk.
STORAGE_WINDOW_BYTES = 4 << 20
_KEPT_EPOCHS = 4
_KEPT_GROUPS = 64


class Epochs:
    """The orders of the epochs of a row source, made when first needed."""

    def __init__(self, rows_per_window: NDArray[np.int64], shuffle: Shuffle | None) -> None:
        self.num_rows = int(rows_per_window.sum())
        self.rows_per_window = rows_per_window
        self.row_starts = offsets_of(rows_per_window)
        """First row of each storage window; the last entry is the number of rows."""
        assert shuffle is None or shuffle.group is not None, "with_groups writes the default out"
        self.shuffle = shuffle
        self.order = functools.lru_cache(_KEPT_EPOCHS)(self._order)
        self._last_positions = functools.lru_cache(_KEPT_EPOCHS)(self._last_of)

    def _order(self, epoch: int) -> Order:
        if self.shuffle is None:
            return SequentialOrder(self.num_rows)
        if self.shuffle.mode == "full":
            return FullOrder(self.num_rows, self.shuffle.seed, epoch)
        if self.shuffle.lanes > 1:
            return LaneOrder(self.rows_per_window, self.shuffle.seed, epoch, self.group, self.shuffle.lanes)
        return WindowedOrder(self.rows_per_window, self.shuffle.seed, epoch, self.group)

    @property
    def group(self) -> int:
        """Storage windows that are mixed with each other; 1 where none are."""
        if self.shuffle is None or self.shuffle.mode == "full":
            return 1
        return self.shuffle.group or 1

    @property
    def lanes(self) -> int:
        """Lanes that take turns; 1 where there are none."""
        return 1 if self.shuffle is None else self.shuffle.lanes

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
        least, greatest = _kernels.extent(rows)
        epoch = least // self.num_rows
        return int(epoch) if greatest // self.num_rows == epoch else None

    def find(self, rows: Rows) -> NDArray[np.int64]:
        """The row of the data behind each row of the run."""
        epoch = self._only_epoch(rows)
        if epoch is not None:
            return self.order(epoch).rows(rows - epoch * self.num_rows)
        found = np.empty(len(rows), np.int64)
        for _, places, data_rows in self.locate(rows):
            found[places] = data_rows
        return found

    def spans(self, rows: RowRange) -> Spans:
        """Between which rows of the run each storage window is read; places are numbers of windows."""
        return join_spans(self._spans_of_epoch(epoch, part) for epoch, part in rows.epochs(self.num_rows))

    def _spans_of_epoch(self, epoch: int, rows: RowRange) -> Spans:
        order, start = self.order(epoch), epoch * self.num_rows
        if isinstance(order, LaneOrder):
            places = rows.shifted(-start)
            first, last, windows = order.uses(places.begin, places.end, places.world_size, places.remainders)
        elif isinstance(order, WindowedOrder):
            first, last, windows = order.uses(rows.begin - start, rows.end - start)
        elif isinstance(order, SequentialOrder):
            low, high = (self._window_of(np.array([row - start])) for row in (rows.begin, rows.end - 1))
            windows = np.arange(low[0], high[0] + 1)
            first, last = self.row_starts[windows], self.row_starts[windows + 1] - 1
        else:
            return scattered(rows, lambda some: self._window_of(self.find(some)), len(self.rows_per_window))
        first, last = np.maximum(first + start, rows.begin), np.minimum(last + start, rows.end - 1)
        kept = (first <= last) & (self.rows_per_window[windows] > 0)
        return Spans(first[kept], last[kept], windows[kept], windows[kept] + 1)

    def _window_of(self, data_rows: Rows) -> NDArray[np.int64]:
        return np.searchsorted(self.row_starts, data_rows, side="right") - 1

    def mixing(self, samples: Samples, window_starts: NDArray[np.int64]) -> list[Mixing]:
        """How batches are mixed; nothing where a shuffle reaches all windows at once, or there is none."""
        order = self.order(0) if len(self.rows_per_window) > self.group else None
        return measure_mixing(samples, order, window_starts) if isinstance(order, WindowedOrder | LaneOrder) else []

    def is_past(self, epoch: int, window: int, row: int) -> bool:
        """Whether a window of lanes is not read again in an epoch from a row of the run on."""
        return epoch * self.num_rows + int(self._last_positions(epoch)[window]) < row

    def _last_of(self, epoch: int) -> NDArray[np.int64]:
        order = self.order(epoch)
        assert isinstance(order, LaneOrder)
        return order.last_positions()

    @property
    def identity(self) -> Any:
        """JSON of what decides the order."""
        shuffle = self.shuffle
        lanes = [] if shuffle is None or shuffle.lanes == 1 else [shuffle.lanes]
        return None if shuffle is None else [shuffle.seed, shuffle.mode, shuffle.group, *lanes]


def even_windows(num_rows: int, row_bytes: int) -> NDArray[np.int64]:
    """Rows of each storage window, when rows are alike: as many as 4 MiB hold, and what is left in the last."""
    rows_per_window = max(1, STORAGE_WINDOW_BYTES // row_bytes)
    sizes = np.full(-(-num_rows // rows_per_window), rows_per_window, np.int64)
    if len(sizes):
        sizes[-1] = num_rows - rows_per_window * (len(sizes) - 1)
    return sizes


def lane_edges(shuffle: Shuffle | None, layers: Sequence[ShardLayer], num_places: int) -> NDArray[np.int64] | None:
    """Where the storage windows of lanes begin, which are whole shards: each is then needed in one lane alone.

    None without lanes, or where the data is not in shards.
    """
    return None if shuffle is None or shuffle.lanes == 1 else shard_edges(layers, num_places)


class PageHints:
    """Tells the kernel which storage windows a run needs next and which it has left.

    Threads may call at once; at worst a window is announced twice.
    """

    def __init__(
        self, epochs: Epochs, samples: Samples, columns: tuple[Column, ...], window_starts: NDArray[np.int64]
    ) -> None:
        self._epochs, self._samples, self._columns = epochs, samples, columns
        self._window_starts = window_starts
        """First sample of each storage window; the last entry is the number of samples."""
        self._hinted: frozenset[tuple[int, int]] = frozenset()
        """(epoch, group) of the groups announced recently."""
        self._hinted_rows = range(0)
        """Rows of the group announced last: most calls end here."""
        self._left: tuple[int, int] | None = None
        """(epoch, group) up to which groups were released."""

    def will_need(self, row: int) -> None:
        """Announce, once, the windows of the row's group and of the next."""
        if row in self._hinted_rows or not self._reads_groups:
            return
        epoch, group, order = self._locate(row)
        first, positions = epoch * self._epochs.num_rows, order.positions_of_group(group)
        self._hinted_rows = range(first + positions.start, first + positions.stop)
        for number in range(group, min(group + 2, order.num_groups)):
            if (epoch, number) not in self._hinted:
                kept = self._hinted if len(self._hinted) < _KEPT_GROUPS else frozenset()
                self._hinted = kept | {(epoch, number)}
                for window in order.windows_of_group(number).tolist():
                    self._samples.will_need(self._columns, *self._samples_of(window))

    def dont_need(self, row: int) -> None:
        """Release the windows of the groups between the last row's and this row's."""
        if not self._reads_groups:
            return
        epoch, group, order = self._locate(row)
        before, here = self._left, (epoch, group)
        if before == (epoch, group + 1):  # another thread is ahead
            return
        self._left = here
        if before is None or before > here:  # the run starts, or starts over
            return
        for number in range(before[1] if before[0] == epoch else 0, group):
            for window in order.windows_of_group(number).tolist():
                self._samples.dont_need(self._columns, *self._samples_of(window))

    @property
    def _reads_groups(self) -> bool:
        shuffle = self._epochs.shuffle
        # With lanes, what is next depends on the rank, and its shards come into the cache just before.
        is_grouped = shuffle is not None and shuffle.mode == "windows" and shuffle.lanes == 1
        return is_grouped and self._epochs.num_rows > 0

    def _locate(self, row: int) -> tuple[int, int, WindowedOrder]:
        """(epoch, group, the epoch's order) of an absolute row."""
        epoch, position = divmod(row, self._epochs.num_rows)
        order = self._epochs.order(epoch)
        assert isinstance(order, WindowedOrder)
        return epoch, order.group_of(position), order

    def _samples_of(self, window: int) -> tuple[int, int]:
        begin, end = self._window_starts[window : window + 2].tolist()
        return begin, end

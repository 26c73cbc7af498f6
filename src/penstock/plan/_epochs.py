"""Which row of the data stands where in each epoch.

The data of a row source is cut into storage windows, runs of consecutive rows. An epoch is an order over
them (`penstock.order`), made when it is first asked for: 4 ms for 100,000 windows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.order import FullOrder, Order, SequentialOrder, WindowedOrder
from penstock.plan._compiled import kernels
from penstock.plan._rows import Rows
from penstock.plan._stages import Shuffle
from penstock.schema import offsets_of

# What is permuted as one piece and read as one piece: large enough to stream from a disk.
STORAGE_WINDOW_BYTES = 4 << 20
_KEPT_EPOCHS = 4


class Epochs:
    """The orders of the epochs of a row source, made when first needed."""

    def __init__(self, rows_per_window: NDArray[np.int64], shuffle: Shuffle | None) -> None:
        self.num_rows = int(rows_per_window.sum())
        self.rows_per_window = rows_per_window
        self.row_starts = offsets_of(rows_per_window)
        """First row of each storage window, and behind them the number of rows."""
        self.shuffle = shuffle
        self.order = functools.lru_cache(_KEPT_EPOCHS)(self._order)

    def _order(self, epoch: int) -> Order:
        if self.shuffle is None:
            return SequentialOrder(self.num_rows)
        if self.shuffle.mode == "full":
            return FullOrder(self.num_rows, self.shuffle.seed, epoch)
        return WindowedOrder(self.rows_per_window, self.shuffle.seed, epoch, self.shuffle.group)

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


def even_windows(num_rows: int, row_bytes: int) -> NDArray[np.int64]:
    """Rows of each storage window, when rows are alike: as many as 4 MiB hold, and what is left in the last."""
    rows_per_window = max(1, STORAGE_WINDOW_BYTES // row_bytes)
    sizes = np.full(-(-num_rows // rows_per_window), rows_per_window, np.int64)
    if len(sizes):
        sizes[-1] = num_rows - rows_per_window * (len(sizes) - 1)
    return sizes

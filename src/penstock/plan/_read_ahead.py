"""Telling the kernel which data comes next and which is done with.

Only where groups of storage windows are read in turn (`mode="windows"`): without a shuffle the kernel sees the
pattern by itself, and a full shuffle has none. Threads may call at once; at worst a window is named twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.order import WindowedOrder
from penstock.plan._epochs import Epochs
from penstock.plan._stored import StoredSamples
from penstock.schema import Column

_REMEMBERED = 64


class ReadAhead:
    """The storage windows that a run passes through."""

    def __init__(
        self, epochs: Epochs, stored: StoredSamples, columns: tuple[Column, ...], window_starts: NDArray[np.int64]
    ) -> None:
        self._epochs, self._stored, self._columns = epochs, stored, columns
        self._window_starts = window_starts
        """First sample of each storage window, and behind them the number of samples."""
        self._announced: frozenset[tuple[int, int]] = frozenset()
        """(epoch, group) of the groups announced lately."""
        self._announced_rows = range(0)
        """Rows of the group announced last: most calls end here."""
        self._released: tuple[int, int] | None = None
        """(epoch, group) up to which groups were released."""

    def announce(self, row: int) -> None:
        """Announce, once, the windows of the row's group and of the next."""
        if row in self._announced_rows or not self._reads_groups:
            return
        epoch, group, order = self._locate(row)
        first, positions = epoch * self._epochs.num_rows, order.positions_of_group(group)
        self._announced_rows = range(first + positions.start, first + positions.stop)
        for number in range(group, min(group + 2, order.num_groups)):
            if (epoch, number) not in self._announced:
                kept = self._announced if len(self._announced) < _REMEMBERED else frozenset()
                self._announced = kept | {(epoch, number)}
                for window in order.windows_of_group(number).tolist():
                    self._stored.announce(self._columns, *self._samples_of(window))

    def release(self, row: int) -> None:
        """Release the windows of the groups between the last row's and this row's."""
        if not self._reads_groups:
            return
        epoch, group, order = self._locate(row)
        before, here = self._released, (epoch, group)
        if before == (epoch, group + 1):  # another thread is ahead
            return
        self._released = here
        if before is None or before > here:  # the run begins, or begins again
            return
        for number in range(before[1] if before[0] == epoch else 0, group):
            for window in order.windows_of_group(number).tolist():
                self._stored.release(self._columns, *self._samples_of(window))

    @property
    def _reads_groups(self) -> bool:
        shuffle = self._epochs.shuffle
        return shuffle is not None and shuffle.mode == "windows" and self._epochs.num_rows > 0

    def _locate(self, row: int) -> tuple[int, int, WindowedOrder]:
        """(epoch, group, the epoch's order) of an absolute row."""
        epoch, position = divmod(row, self._epochs.num_rows)
        order = self._epochs.order(epoch)
        assert isinstance(order, WindowedOrder)
        return epoch, order.group_of(position), order

    def _samples_of(self, window: int) -> tuple[int, int]:
        begin, end = self._window_starts[window : window + 2].tolist()
        return begin, end

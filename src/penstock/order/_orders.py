"""The order of an epoch: which row stands at which position.

All orders answer `rows(positions)` for any positions in any sequence, so that a batch can be computed
by itself. There are three kinds:

    SequentialOrder    as stored
    FullOrder          everything permuted; reads land anywhere
    WindowedOrder      windows permuted, rows permuted within groups of windows

Epochs differ because the epoch is part of the key; nothing is kept from one to the next.

**A permutation that is computed, not stored.** A stored one costs 8 bytes per number, takes minutes at 1e9 numbers, and
cannot give its entry 700,000,000 without building the rest. A keyed bijection gives any entry by itself, in 8 to 24 ns
and without memory. `_kernels.py` has the arithmetic, and why it is strong enough: a chi-square test over keys finds no
bias, though it finds one in two well-known weak methods.

**A shuffle that still reads storage almost in sequence.** Permuting all rows makes every read a random one.
`WindowedOrder` permutes the storage windows (runs of consecutive rows) first; every `group` consecutive windows of that
sequence form a group; and the rows of a group are permuted among themselves. While the epoch passes through a group,
reads touch only its windows, and which windows come next is known: a loader can have them read in advance.

    windows as stored       0    1    2    3    4
    slots (permuted)        3    0 |  4    2 |  1        group=2: three groups
    positions               rows of 3 and 0, mixed | rows of 4 and 2, mixed | rows of 1, mixed

Names: a *slot* is a place in the permuted sequence of windows; a *place* numbers the rows slot by
slot, before they are mixed; adding `shifts[slot]` to a place gives its row. A position and its place are in
the same group, so a position becomes a row in three steps: find the group, permute inside it, find the window.

Price: O(windows) to build (100,000 windows: 4 ms, 5 MB); two binary searches and one permutation per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from penstock.order import _kernels
from penstock.order._border import (
    MAX_ROWS,
    Int64,
    checked_counts,
    checked_number,
    checked_positions,
    derive_key,
    map_indices,
    out_of_range,
)
from penstock.schema import offsets_of


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of [0, size) chosen by a 64-bit key; related keys give unrelated bijections.

    >>> shuffle = Permutation(size=10, key=7)
    >>> shuffle([0, 1, 2]).tolist()
    [5, 4, 8]

    Raises:
        ValueError: `size` is not in [0, 2**62], or `key` is not in [0, 2**64).
    """

    size: int
    """How many numbers are permuted; the price per number does not depend on it."""
    key: int
    """Which permutation; `derive_key` makes keys from a seed and labels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", checked_number("size", self.size, at_most=MAX_ROWS))
        object.__setattr__(self, "key", checked_number("key", self.key, at_most=2**64 - 1))

    def __call__(self, positions: ArrayLike) -> Int64:
        """The number at each position.

        Raises:
            IndexError: a position is not in [0, size).
        """
        return map_indices(_kernels.permute, "position", positions, self.size, self.key)


class Order(Protocol):
    """One epoch's bijection between positions [0, num_rows) and rows [0, num_rows).

    Positions come in an array of any shape, and rows are returned in the same shape; a position outside
    [0, num_rows) raises IndexError.
    """

    @property
    def num_rows(self) -> int:
        """How many rows, and positions, the epoch has."""

    def rows(self, positions: ArrayLike) -> Int64:
        """The row at each position."""


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """Rows as they are stored, the same in every epoch.

    >>> SequentialOrder(3).rows([2, 0]).tolist()
    [2, 0]
    """

    num_rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_rows", checked_number("num_rows", self.num_rows, at_most=MAX_ROWS))

    def rows(self, positions: ArrayLike) -> Int64:
        return checked_positions(positions, self.num_rows).copy()


@dataclass(frozen=True, slots=True)
class FullOrder:
    """All rows of an epoch permuted: the best shuffle, for storage that likes random reads.

    >>> order = FullOrder(num_rows=1_000_000_000, seed=7, epoch=0)
    >>> order.rows([0, 999_999_999]).tolist()
    [895861355, 634298014]

    Raises:
        ValueError: `num_rows` is not in [0, 2**62], or `epoch` is negative.
    """

    num_rows: int
    seed: int
    epoch: int
    _permutation: Permutation = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        epoch = checked_number("epoch", self.epoch)
        permutation = Permutation(
            checked_number("num_rows", self.num_rows, at_most=MAX_ROWS),
            derive_key(self.seed, "full", epoch),
        )
        object.__setattr__(self, "_permutation", permutation)

    def rows(self, positions: ArrayLike) -> Int64:
        return self._permutation(positions)


@dataclass(frozen=True, slots=True, eq=False)
class WindowedOrder:
    """One epoch in which groups of storage windows are read one after the other.

    >>> order = WindowedOrder(np.array([3, 0, 2, 4]), seed=7, epoch=0, group=2)
    >>> order.num_rows, order.num_groups, sorted(order.rows(range(9)).tolist())
    (9, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8])

    Raises:
        ValueError: a window has a negative number of rows, together they have more than 2**62,
            `group` is less than 1, or `epoch` is negative.
    """

    rows_per_window: Int64
    """How many rows each window holds; rows are numbered window by window."""
    seed: int
    epoch: int
    group: int
    """Windows read together. More of them mix better, but keep more of the storage in use at a time."""

    _rows_key: int = field(init=False, repr=False)
    _sequence: Int64 = field(init=False, repr=False)  # slot -> window
    _slot_starts: Int64 = field(init=False, repr=False)  # slot -> its first place; then num_rows
    _shifts: Int64 = field(init=False, repr=False)  # slot -> row minus place
    _group_starts: Int64 = field(init=False, repr=False)  # group -> its first position; then num_rows

    def __post_init__(self) -> None:
        rows_per_window = checked_counts(self.rows_per_window)
        epoch = checked_number("epoch", self.epoch)
        group = checked_number("group", self.group, at_least=1, at_most=MAX_ROWS)
        sequence = Permutation(rows_per_window.size, derive_key(self.seed, "windows", epoch))(
            np.arange(rows_per_window.size)
        )
        row_starts, slot_starts = offsets_of(rows_per_window), offsets_of(rows_per_window[sequence])
        self._set(
            rows_per_window=rows_per_window,
            _sequence=sequence,
            _slot_starts=slot_starts,
            _shifts=row_starts[sequence] - slot_starts[:-1],
            _group_starts=np.append(slot_starts[:-1:group], slot_starts[-1]),
        )
        object.__setattr__(self, "_rows_key", derive_key(self.seed, "rows", epoch))

    def _set(self, **arrays: Int64) -> None:
        for name, array in arrays.items():
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __reduce__(self) -> tuple[type[WindowedOrder], tuple[Int64, int, int, int]]:
        return WindowedOrder, (self.rows_per_window, self.seed, self.epoch, self.group)

    @property
    def num_rows(self) -> int:
        return int(self._slot_starts[-1])

    @property
    def num_groups(self) -> int:
        """How many groups the epoch passes through, one after the other."""
        return self._group_starts.size - 1

    def rows(self, positions: ArrayLike) -> Int64:
        return map_indices(
            _kernels.windowed_rows,
            "position",
            positions,
            self.num_rows,
            self._rows_key,
            self.group,
            self._group_starts,
            self._slot_starts,
            self._shifts,
        )

    def group_of(self, position: int) -> int:
        """The group that the epoch is in at this position."""
        if not 0 <= position < self.num_rows:
            raise out_of_range("position", position, self.num_rows)
        return int(np.searchsorted(self._group_starts, position, side="right")) - 1

    def positions_of_group(self, group: int) -> range:
        """The positions at which rows of this group are read; none if its windows are empty."""
        first, last = self._group_starts[self._checked_group(group) :][:2].tolist()
        return range(first, last)

    def windows_of_group(self, group: int) -> Int64:
        """The windows whose rows are at `positions_of_group(group)`, in no particular order."""
        first = self._checked_group(group) * self.group
        return self._sequence[first : first + self.group]

    def uses(self, begin: int, end: int) -> tuple[Int64, Int64, Int64]:
        """(first position, last position, window) of the windows that positions `begin` to `end` may be in."""
        first, last = self.group_of(begin), self.group_of(end - 1)
        windows = self._sequence[first * self.group : (last + 1) * self.group]
        groups = first + np.arange(len(windows)) // self.group
        return self._group_starts[groups], self._group_starts[groups + 1] - 1, windows

    def _checked_group(self, group: int) -> int:
        if not 0 <= group < self.num_groups:
            raise out_of_range("group", group, self.num_groups)
        return group

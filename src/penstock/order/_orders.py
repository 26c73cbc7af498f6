"""The order of an epoch: which row stands at which position.

All orders answer `rows(positions)` for any positions in any sequence, so that a batch can be computed
by itself. There are three kinds:

    SequentialOrder    as stored
    FullOrder          everything permuted; reads land anywhere
    WindowedOrder      windows permuted, rows permuted within groups of windows (`_windowed.py`)

Epochs differ because the epoch is part of the key; nothing is kept from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from numpy.typing import ArrayLike

from penstock.order._border import MAX_ROWS, Int64, checked_indices, checked_number
from penstock.order._keys import derive_key
from penstock.order._permutation import Permutation


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
        """The positions themselves, in a new array."""
        return checked_indices("position", positions, self.num_rows).copy()


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
        """The row at each position."""
        return self._permutation(positions)

"""Classes dealt in turn: every C rows hold each of C classes once, and each class cycles through its own members.

    rows       | 0  1  2 | 3  4  5 | ...      C = 3 rows are a round; inside it the classes are permuted
    class      | 2  0  1 | 0  2  1 | ...
    turn       | 0  0  0 | 1  1  1 | ...      a class's turn k is its k-th row of the whole run

A class's turns go through the class in cycles, each a permutation of its members: no member is repeated before all have
had their turn, however small the class is. So members of a small class come often and those of a large one seldom, by
arithmetic alone; nothing is drawn, and only the sizes are stored.

If no member may come twice in `rounds` rounds (an epoch without repetition), a cycle uses only a multiple of `rounds`
of its places; which members that leaves out differs from cycle to cycle. Dealt in their own order, members simply go
round: no `rounds` turns in a row repeat one, and none is left out.

Price: 16 bytes per class; two keyed permutations per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from penstock.order._border import MAX_ROWS, Int64, as_int64, kernels, map_indices
from penstock.order._keys import derive_key


@dataclass(frozen=True, slots=True, eq=False)
class ClassDeal:
    """Rows of an endless run over classes of these sizes; members are numbered class after class.

    >>> deal = ClassDeal(np.array([1, 4]), seed=7)
    >>> deal.members(range(8)).tolist()
    [0, 2, 0, 4, 0, 1, 3, 0]

    Raises:
        ValueError: there are no classes, or one has no members.
    """

    sizes: Int64
    seed: int | None
    """None deals classes and members in their own order."""
    rounds: int = 1
    """Rounds in which no member comes twice; 1 requires nothing."""

    _starts: Int64 = field(init=False, repr=False)
    _used: Int64 = field(init=False, repr=False)  # class -> places of a cycle that are used

    def __post_init__(self) -> None:
        sizes = as_int64("size", self.sizes)
        if sizes.ndim != 1 or not sizes.size or sizes.min() < 1:
            raise ValueError("there must be at least one class, and at least one member in each")
        if not 1 <= self.rounds <= sizes.min():
            raise ValueError(f"no member twice in {self.rounds:,} rounds: the smallest class has {sizes.min():,}")
        object.__setattr__(self, "_starts", np.cumsum(sizes) - sizes)
        object.__setattr__(self, "_used", sizes if self.seed is None else sizes // self.rounds * self.rounds)

    def members(self, rows: ArrayLike) -> Int64:
        """The member at each row of the run."""
        key = np.uint64(0 if self.seed is None else derive_key(self.seed, "deal"))
        arguments = (key, self.seed is not None, as_int64("size", self.sizes), self._starts, self._used)
        return map_indices(kernels().deal_classes, "row", rows, MAX_ROWS, *arguments)

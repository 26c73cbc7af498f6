"""Which rank gets which rows of a batch, so that none waits for the one with the longest documents.

Without this, rank r of w takes rows r, r + w, ... of a batch, whatever they cost. With `batch(balance=...)` the same
batch has the same rows, in bins of the same sizes, but the dearest rows are dealt first, each to the rank that has
least so far, and then rows are exchanged while that makes the dearest rank cheaper. A rank's rows are dealt to its
micro-batches likewise, the dearest micro-batch first, so that ranks that wait for each other at every one meet alike
ones.

    batch at row 96          rows  96 97 98 99 ...   the same for any balance and any number of ranks
      costs                        from the index: tokens, attention, a column; never from the tokens
      | deal
    rank 0: 97 102 | rank 1: 96 111 | ...            equal numbers, nearly equal costs, rows in order
      | deal
    micro-batches

It depends on the plan, the row and the number of ranks alone, so every rank finds its share by itself. All of it is
done in integers, so that two kinds of processor cannot disagree. Price at 64 ranks of 8 rows: 80 to 100 µs a
batch (`benchmarks/bench_balance.py`), once for all micro-batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.plan import _kernels
from penstock.plan._rows import RowSource
from penstock.plan._stages import Costs
from penstock.plan._steps import Steps
from penstock.plan._uses import Rows
from penstock.schema import offsets_of

_KEPT_BATCHES = 16
_COST_BITS = 40


class _Shares(NamedTuple):
    """The places of a batch, rank by rank: those of rank r are `places[starts[r]]` to `places[starts[r + 1]]`."""

    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    costs: NDArray[np.int64]
    """Of each place."""
    sums: NDArray[np.int64]
    """Of each rank."""

    def of(self, number: int) -> NDArray[np.int64]:
        """The places of one rank, in order."""
        return np.sort(self.places[self.starts[number] : self.starts[number + 1]])


class Dealer:
    """The rows of each rank and micro-batch, of equal cost."""

    def __init__(self, rows: RowSource, steps: Steps, costs: Costs) -> None:
        self._rows, self._steps, self._costs = rows, steps, costs
        self._shares = functools.lru_cache(_KEPT_BATCHES)(self._deal)

    def rows_at(
        self, row: int, rank: int, world_size: int, part: int, num_parts: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """As `Steps.rows_at`: as many rows, but others of the same batch."""
        steps = self._steps
        own = steps.places(row, rank, world_size)
        if world_size == num_parts == 1:
            return steps.rows_at(row)
        shares = self._shares(row, world_size)
        places = shares.of(rank)
        if num_parts > 1:
            sizes = [len(steps.places(row, rank, world_size, each, num_parts)) for each in range(num_parts)]
            parts = _deal(shares.costs[places], sizes)
            is_even = len(own) % num_parts == 0
            by_cost = np.argsort(-parts.sums, kind="stable") if is_even else range(num_parts)
            places = places[parts.of(int(by_cost[part]))]
        return steps.rows_of(row, places)

    def imbalance(self, batches: Iterable[int], world_size: int) -> Imbalance:
        """What ranks would wait for each other in the batches at these rows, without dealing and with it."""
        found = []
        for row in batches:
            shares = self._shares(row, world_size)
            in_turn = np.bincount(np.arange(len(shares.costs)) % world_size, weights=shares.costs)
            if mean := float(shares.sums.mean()):
                found.append((float(in_turn.max()) / mean, float(shares.sums.max()) / mean))
        before, after = np.mean(found or [(1.0, 1.0)], axis=0).tolist()
        return Imbalance(world_size=world_size, num_steps=len(found), costs=self._costs, before=before, after=after)

    def _deal(self, row: int, world_size: int) -> _Shares:
        steps = self._steps
        rows, _ = steps.rows_of(row, np.arange(steps.num_filled(row, world_size)))
        costs = _as_whole_numbers(find_costs(self._rows, rows, self._costs))
        sizes = (len(rows) + np.arange(world_size - 1, -1, -1)) // world_size  # as when they are dealt in turn
        return _deal(costs, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """What the dearest rank of a step costs, as a multiple of the mean over ranks: all others wait for it."""

    world_size: int
    num_steps: int
    """Batches that were looked at."""
    costs: Costs
    before: float
    """Rows dealt in turn."""
    after: float
    """Rows dealt by batch(balance=...)."""

    @property
    def gain(self) -> float:
        """How much faster steps would be, if they took as long as their dearest rank costs."""
        return self.before / self.after - 1

    def __str__(self) -> str:
        what = " + ".join(name if weight == 1 else f"{weight:g} x {name}" for name, weight in self.costs)
        return (
            f"{what}, {self.world_size} ranks, {self.num_steps} steps: the dearest rank costs {self.before:.3f} times "
            f"the mean as rows come, {self.after:.3f} times with batch(balance=...). Steps that take as long as their "
            f"dearest rank would be {100 * self.gain:.0f} % faster."
        )


def find_costs(source: RowSource, rows: Rows, costs: Costs) -> NDArray[np.float64]:
    """What each row costs: the weighted sum of some measures.

    Raises:
        ValueError: a cost is negative, or not a number.
    """
    found = sum(source.costs(rows, measure) * weight for measure, weight in costs)
    assert isinstance(found, np.ndarray)
    if len(found) and not 0 <= found.min() <= found.max() < math.inf:
        worst = int(np.flatnonzero(~((found >= 0) & (found < math.inf)))[0])
        raise ValueError(
            f"batch(balance=...): {source.describe(int(rows[worst]))} costs {found[worst]}; a cost is at least 0."
        )
    return found


def _as_whole_numbers(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """The same proportions in integers up to 2**40; scaling by a power of two rounds nothing."""
    exponent = math.frexp(float(costs.max(initial=0)))[1]
    found: NDArray[np.int64] = np.rint(np.ldexp(costs, _COST_BITS - exponent)).astype(np.int64)
    return found


def _deal(costs: NDArray[np.int64], sizes: NDArray[np.int64] | list[int]) -> _Shares:
    starts = offsets_of(sizes)
    places, sums = _kernels.deal(costs, starts)
    return _Shares(places, starts, costs, sums)

"""Samples drawn by weight, and classes dealt in turn; any row by itself.

**By weight, with exact quotas in each epoch.** Drawing every row at random misses the weights by chance and cannot be
continued without its state. Here an epoch of n rows is a line of n equal slots. The samples divide the line in
proportion to their weights, and slot k belongs to the sample whose part contains its mark, k + u:

    samples    |  0  |    1     | 2 |       3       |      lengths: expected rows in the epoch
    slots      '....:....'....:....'....:....'           marks (:) at u = 0.5
                     1         1         3

A sample expected m times holds floor(m) or ceil(m) marks, never any other number: **the quota is exact**. From epoch to
epoch u moves by the golden ratio, so that what was rounded down soon makes up for it: after E epochs a sample came E m
times, give or take 2 for E up to 10, 3 up to 100, 4 up to 1,000 and 3 + 3.6 ln E in general (the discrepancy of the
golden ratio: Kuipers and Niederreiter 1974, theorem 3.4). If no length exceeds 1, no sample comes twice in an epoch:
drawing without replacement is the same line with the lengths capped at 1 and the others raised in proportion. Lengths
are multiples of 2**-30 slots, so places are exact.

Slots are in the order of samples, so shuffling slots by storage windows reads those windows.

Price: 8 bytes per sample and a few passes to build; a binary search per row.

**Dealt in turn.** Every C rows hold each of C classes once, and each class cycles through its own members:

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

import copy
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.order import _kernels
from penstock.order._border import MAX_ROWS, Int64, as_int64, checked_number, derive_key, map_indices

_UNIT_BITS = 30
_UNIT = 1 << _UNIT_BITS
_MAX_DRAWN = 1 << 32
_GOLDEN = 0x9E3779B97F4A7C15
_SUMMED, _MOST_PARTS = 1 << 16, 4


@dataclass(frozen=True, slots=True, eq=False)
class WeightedDraw:
    """Epochs of `num_rows` slots over weighted samples.

    >>> draw = WeightedDraw(np.array([1.0, 2.0, 0.0, 1.0]), num_rows=4, seed=7)
    >>> draw.samples(0, range(4)).tolist()
    [0, 1, 1, 3]

    Raises:
        ValueError: the weights are not finite numbers of at least 0 with one above 0; or, without replacement,
            there are fewer samples to draw than rows.
    """

    weights: NDArray[np.floating] | NDArray[np.integer]
    num_rows: int
    seed: int
    replacement: bool = True
    """Whether a sample may come more than once in an epoch."""

    _ends: Int64 = field(init=False, repr=False)  # sample -> where its part of the line ends, in units

    def __post_init__(self) -> None:
        weights = _checked_weights(self.weights)
        num_rows = checked_number("num_rows", self.num_rows, at_least=1, at_most=_MAX_DRAWN)
        if not self.replacement and num_rows > (available := int(np.count_nonzero(weights))):
            raise ValueError(f"{num_rows:,} rows without replacement, but {available:,} samples have a weight above 0")
        most = _MAX_DRAWN if self.replacement else 1
        expected = _expected(weights, num_rows, most)
        expected *= _UNIT
        units = _rounded_down(expected)
        _spread(units, weights, num_rows * _UNIT - int(units.sum()), most * _UNIT)
        object.__setattr__(self, "_ends", np.cumsum(units, out=units))

    def with_seed(self, seed: int) -> WeightedDraw:
        """The same draw with other marks, without building the line again."""
        other = copy.copy(self)
        object.__setattr__(other, "seed", seed)
        return other

    def samples(self, epoch: int, slots: ArrayLike) -> Int64:
        """The sample of each slot; slots are trusted to be in [0, num_rows)."""
        marks = np.asarray(slots, np.int64) * _UNIT + self._offset(epoch)
        return np.searchsorted(self._ends, marks, side="right").astype(np.int64, copy=False)

    def _offset(self, epoch: int) -> int:
        return ((derive_key(self.seed, "draw") + epoch * _GOLDEN) % 2**64) >> (64 - _UNIT_BITS)


def _rounded_down(numbers: NDArray[np.float64]) -> Int64:
    """Whole numbers in the memory of these: new memory costs as much as the rest of the arithmetic."""
    whole = numbers.view(np.int64)
    for begin in range(0, len(whole), _SUMMED):
        whole[begin : begin + _SUMMED] = numbers[begin : begin + _SUMMED].astype(np.int64)
    return whole


def _spread(units: Int64, weights: NDArray[np.float64], missing: int, most: int) -> None:
    """Make up for rounding: `missing` units more or fewer in all, hardly more than one per sample."""
    step = 1 if missing > 0 else -1
    while missing:
        before = missing
        for begin in range(0, len(units), _SUMMED):
            chunk, weighted = units[begin : begin + _SUMMED], weights[begin : begin + _SUMMED] > 0
            changed = chunk + step
            chosen = np.flatnonzero(weighted & (changed > 0) & (changed <= most))[: abs(missing)]
            chunk[chosen] += step
            missing -= step * len(chosen)
            if not missing:
                break
        assert missing != before, "shares that add up to 1 leave room for what rounding took"


def _checked_weights(weights: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(weights)
    if given.ndim != 1 or given.dtype.kind not in "buif":
        raise ValueError(f"weights must be one number per sample, not {given.dtype} of shape {list(given.shape)}")
    found = given.astype(np.float64, copy=False)
    wrong = ~np.isfinite(found) | (found < 0)
    if wrong.any():
        sample = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"the weight of sample {sample:,} is {found[sample]}: weights must be finite and at least 0")
    if not found.any():
        raise ValueError("all weights are 0: there is nothing to draw")
    return found


def _expected(weights: NDArray[np.float64], num_rows: int, most: int) -> NDArray[np.float64]:
    """How often each sample is expected: in proportion to its weight, but at most `most` times."""
    expected = _shares(weights)
    expected *= num_rows
    is_full = np.zeros(len(weights), np.bool_)
    while (expected > most).any():  # the excess of full samples goes to the others, which may fill them too
        is_full |= expected >= most
        left = num_rows - most * np.count_nonzero(is_full)
        expected = np.where(is_full, most, left * _shares(np.where(is_full, 0.0, weights)))
    return expected


def _shares(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each weight's share of their sum, identical to the last bit on every machine; zeros if the sum is 0.

    Dividing by the largest first keeps the sum from overflowing, and small weights from vanishing.
    """
    largest = weights.max(initial=0.0)
    if not largest:
        return weights
    scaled: NDArray[np.float64] = weights / largest
    scaled /= exact_sum(scaled)
    return scaled


def exact_sum(numbers: NDArray[np.float64]) -> float:
    """What `math.fsum` gives for numbers from 0 to 1, at ten times its speed.

    numpy's sum depends on the width of the processor's vectors, because it rounds. It does not round sums of numbers
    that are multiples of one power of two and small enough. So each chunk is split into two or three such parts: adding
    2**17 to a number and subtracting it again leaves its multiple of 2**-35, the rest is at most half as much, and so
    on (Rump, Ogita and Oishi 2008).
    """
    parts: list[float] = []
    for begin in range(0, len(numbers), _SUMMED):
        rest, step = numbers[begin : begin + _SUMMED].copy(), 2.0 * _SUMMED
        for _ in range(_MOST_PARTS):
            multiples = (rest + step) - step
            parts.append(float(multiples.sum()))
            rest -= multiples
            if not rest.any():
                break
            step *= 2.0**-35
        else:  # some are 2**100 times as large as others
            parts.append(math.fsum(rest[rest != 0]))
    return math.fsum(parts)


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
        key = 0 if self.seed is None else derive_key(self.seed, "deal")
        arguments = (key, self.seed is not None, as_int64("size", self.sizes), self._starts, self._used)
        return map_indices(_kernels.deal_classes, "row", rows, MAX_ROWS, *arguments)

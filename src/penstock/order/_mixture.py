"""Which source gives row i of an endless mixture, exactly in proportion and at random in detail.

Drawing each row's source at random drifts: 0.7 becomes 0.7 +- sqrt(0.21 n)/n, and "how many rows did
source k give so far" can only be counted. A fixed pattern is exact, but resonates with the number of
ranks and the batch size. This mixture deals in two steps, both in O(1) for any row.

1. *Evenly.* Weights become quotas that add up to BLOCK = 65,536. One table of 65,536 places says which
   source has which place; every block of rows uses it. With w = quota / BLOCK, item j of a source
   must have a place in [floor(j / w), ceil((j + 1) / w)). Giving each source the fraction w of every place
   would respect all these windows, so by Hall's theorem whole places can too, and for items of one
   place each, "earliest deadline first" finds them. Item j's window ends by m if j + 1 <= m w and
   begins before m if j < m w, so the first m places hold at least floor(m w) and at most ceil(m w)
   items: **any first m places are off by less than 1** (cf. Tijdeman 1980; Baruah et al. 1996).
2. *Dealt.* A keyed permutation mixes each stratum of s = STRATUM = 32 places, differently in every block.

**The bound.** Let D(m) = rows of a source among the first m rows, minus m w. At a stratum's ends |D| < 1.
o rows into a stratum, at most o of them are of this source, so D < 1 + o (1 - w); and at worst none
are from there to the stratum's end, so D < 1 + (s - o) w. The smaller of these is largest at o = s w, where
it is 1 + s w (1 - w); the bound from below is the same with w and 1 - w exchanged. Therefore
**|D(m)| < 1 + s w (1 - w)**, less than 9, and any n consecutive rows, the difference of two such, hold
**n w +- 2 (1 + s w (1 - w)) rows** of the source: fewer than 18 off, for n of any size.

**Positions.** A source's item j of the table is, in block b, position b * quota + j of the source's own
sequence. So a block holds exactly its quota of consecutive positions, in order from stratum to stratum,
and mixed within one. `counts(n)` is how many rows of each source come before row n, which in the middle
of a stratum is not the same as the highest position plus 1.

Price: 65,536 x sources comparisons to build (2 ms for 5), 1.5 MB; 25 to 110 ns per row.

**Schedules.** Weights may change at given rows: curricula, annealing, a change of mind at a checkpoint. A schedule is a
sequence of phases, each its own mixture from some row on. A phase continues in every source where the phases before it
stopped, so no row of a source is left out or comes twice:

    rows      0 .................. start 1 ............. start 2 ...
    source k  0 .. counts(start 1) | + positions of phase 1 | + positions of phase 2

Phases begin at whole strata, because only there have the phases before them used exactly the first n positions of each
source. Before its first change, a schedule gives the same rows as the mixture without it: a saved state stays valid
when a phase is added after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from penstock.order import _kernels
from penstock.order._border import (
    MAX_ROWS,
    Int64,
    as_int64,
    checked_number,
    derive_key,
    map_indices,
    out_of_range,
)

BLOCK = 65_536
STRATUM = 32


@dataclass(frozen=True, slots=True)
class Mixture:
    """A bijection between rows 0, 1, 2, ... and (source, position in that source's sequence).

    >>> mixture = Mixture([0.7, 0.3], seed=7)
    >>> mixture.quotas
    (45875, 19661)
    >>> mixture.sources(range(10)).tolist(), mixture.positions(range(10)).tolist()
    ([0, 1, 0, 0, 0, 0, 1, 0, 1, 0], [2, 4, 5, 16, 0, 9, 8, 11, 5, 13])

    Raises:
        ValueError: no weights, or one that is not a positive finite number or rounds to a quota of 0.
    """

    weights: Sequence[float]
    """One per source, in the order of their numbers; only their proportions matter."""
    seed: int
    quotas: tuple[int, ...] = field(init=False, compare=False)
    """Rows of each source in every 65,536: the weights after rounding."""

    _key: int = field(init=False, repr=False, compare=False)
    _strides: Int64 = field(init=False, repr=False, compare=False)  # the quotas, as an array
    _source_at: Int64 = field(init=False, repr=False, compare=False)  # place in a block -> source
    _item_at: Int64 = field(init=False, repr=False, compare=False)  # place in a block -> its item number

    def __post_init__(self) -> None:
        quotas = _rounded(_checked_weights(self.weights))
        strides, source_at = np.array(quotas), np.empty(BLOCK, np.int64)
        _kernels.deal_evenly(strides, source_at)
        places = np.argsort(source_at, kind="stable")
        item_at = np.empty(BLOCK, np.int64)
        item_at[places] = np.concatenate([np.arange(quota) for quota in quotas])
        derived = {
            "weights": tuple(self.weights),
            "quotas": quotas,
            "_key": derive_key(self.seed, "mixture"),
            "_strides": strides,
            "_source_at": source_at,
            "_item_at": item_at,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[Mixture], tuple[Sequence[float], int]]:
        return Mixture, (self.weights, self.seed)

    def sources(self, rows: ArrayLike) -> Int64:
        """Which source gives each row."""
        return self.locate(rows)[0]

    def positions(self, rows: ArrayLike) -> Int64:
        """The position of each row in its source's own endless sequence."""
        return self.locate(rows)[1]

    def locate(self, rows: ArrayLike) -> tuple[Int64, Int64]:
        """Source and position of each row, at the price of either.

        Raises:
            IndexError: a row is negative (or beyond 2**62).
        """
        places = map_indices(_kernels.shuffle_strata, "row", rows, MAX_ROWS, self._key, STRATUM)
        block, place = np.divmod(places, BLOCK)
        sources = self._source_at[place]
        return sources, block * self._strides[sources] + self._item_at[place]

    def rows_near(self, source: int, positions: Int64) -> tuple[Int64, Int64]:
        """Between which two rows each position of a source comes: its places in the table, out to whole strata."""
        quota = self.quotas[source]
        block, item = np.divmod(positions, quota)
        least = item * BLOCK // quota // STRATUM * STRATUM
        greatest = ((item + 1) * BLOCK - 1) // quota // STRATUM * STRATUM + STRATUM - 1
        return block * BLOCK + least, block * BLOCK + greatest

    def counts(self, num_rows: int) -> Int64:
        """How many of the first `num_rows` rows come from each source, in 0.1 ms at most."""
        num_rows = checked_number("num_rows", num_rows, at_most=MAX_ROWS)
        dealt = num_rows - num_rows % STRATUM  # whole strata up to here: mixing inside them changes no count
        sources = [self._source_at[: dealt % BLOCK], self.sources(np.arange(dealt, num_rows))]
        counts = np.bincount(np.concatenate(sources), minlength=len(self.quotas))
        return counts + (dealt // BLOCK) * self._strides


def _checked_weights(weights: Sequence[float]) -> list[Fraction]:
    if not len(weights):
        raise ValueError("a mixture needs at least one weight, got none")
    for source, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weights[{source}] is {weight}: weights must be positive finite numbers")
    return [Fraction(weight) for weight in weights]


def _rounded(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Quotas that add up to BLOCK by the largest-remainder method, exact on any machine."""
    total = sum(weights)
    shares = [BLOCK * weight / total for weight in weights]
    quotas = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda source: quotas[source] - shares[source])
    for source in by_remainder[: BLOCK - sum(quotas)]:
        quotas[source] += 1
    for source, quota in enumerate(quotas):
        if quota == 0:
            raise ValueError(
                f"weights[{source}] is {float(weights[source] / total):.3g} of the total, which rounds to "
                f"0 rows of {BLOCK:,}; the smallest share is 1/{BLOCK} (1.53e-05). "
                f"Raise the weight, leave the source out, or merge it with another one."
            )
    return tuple(quotas)


@dataclass(frozen=True, slots=True, eq=False)
class _Phase:
    """A mixture from some row on."""

    start: int
    mixture: Mixture
    active: Int64
    """The sources with a weight in this phase."""
    bases: Int64
    """Rows of each source before it."""

    def counts(self, row: int) -> Int64:
        """Rows of each source before a row of this phase."""
        counts = self.bases.copy()
        counts[self.active] += self.mixture.counts(row - self.start)
        return counts

    @property
    def quotas(self) -> tuple[int, ...]:
        """Quotas of all sources, including those with weight 0."""
        quotas = np.zeros(len(self.bases), np.int64)
        quotas[self.active] = self.mixture.quotas
        return tuple(quotas.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledMixture:
    """A mixture whose weights change.

    >>> mixture = ScheduledMixture([1, 1], seed=7, changes={64: [0, 1]})
    >>> mixture.counts(64).tolist(), mixture.counts(100).tolist()
    ([32, 32], [32, 68])

    Raises:
        ValueError: weights are negative or all 0, their number is not that of the sources, or a change is at row 0.
    """

    weights: Sequence[float]
    """Weights of the first phase."""
    seed: int
    changes: Mapping[int, Sequence[float]]
    """New weights, by the row from which they apply, rounded up to a multiple of 32; 0 leaves a source out."""

    _phases: tuple[_Phase, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_sources = len(self.weights)
        first = Mixture(self.weights, self.seed)
        phases = [_Phase(0, first, np.arange(num_sources), np.zeros(num_sources, np.int64))]
        for row in sorted(self.changes):
            start = -(-checked_number("row of a change", row, at_least=1, at_most=MAX_ROWS // 2) // STRATUM) * STRATUM
            if start <= phases[-1].start:
                raise ValueError(f"changes at row {row:,} and before it are less than {STRATUM} rows apart")
            if len(self.changes[row]) != len(self.weights):
                raise ValueError(f"{len(self.changes[row])} weights at row {row:,} for {len(self.weights)} sources")
            phases.append(
                _next_phase(phases[-1], start, self.changes[row], derive_key(self.seed, "phase", len(phases)))
            )
        object.__setattr__(self, "_phases", tuple(phases))

    @property
    def quotas(self) -> tuple[int, ...]:
        """Rows of each source in every 65,536 of the first phase."""
        return self._phases[0].quotas

    @property
    def schedule(self) -> dict[int, tuple[int, ...]]:
        """Quotas, by the row from which they apply."""
        return {phase.start: phase.quotas for phase in self._phases}

    def locate(self, rows: ArrayLike) -> tuple[Int64, Int64]:
        """Source of each row, and its position in that source's own sequence."""
        given = as_int64("row", rows)
        if given.size and given.min() < 0:
            raise out_of_range("row", int(given.min()), MAX_ROWS)
        sources, positions = np.empty_like(given), np.empty_like(given)
        numbers = np.searchsorted([phase.start for phase in self._phases], given, side="right") - 1
        for number in np.unique(numbers).tolist():
            phase, places = self._phases[number], numbers == number
            found, own = phase.mixture.locate(given[places] - phase.start)
            sources[places] = phase.active[found]
            positions[places] = phase.bases[phase.active[found]] + own
        return sources, positions

    def rows_near(self, source: int, positions: Int64) -> tuple[Int64, Int64]:
        """Between which two rows each position of a source comes."""
        least, greatest = np.empty_like(positions), np.empty_like(positions)
        bases = [phase.bases[source] for phase in self._phases]
        numbers = np.searchsorted(bases, positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            phase, places = self._phases[number], numbers == number
            own = int(np.searchsorted(phase.active, source))
            low, high = phase.mixture.rows_near(own, positions[places] - phase.bases[source])
            least[places], greatest[places] = phase.start + low, phase.start + high
        return least, greatest

    def counts(self, num_rows: int) -> Int64:
        """How many of the first `num_rows` rows come from each source."""
        phase = next(phase for phase in reversed(self._phases) if phase.start <= num_rows)
        return phase.counts(num_rows)


def _next_phase(before: _Phase, start: int, weights: Sequence[float], seed: int) -> _Phase:
    active = np.flatnonzero(np.asarray(weights, np.float64))
    return _Phase(start, Mixture([weights[source] for source in active.tolist()], seed), active, before.counts(start))

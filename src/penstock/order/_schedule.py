"""Mixtures whose weights change at given rows: curricula, annealing, a change of mind at a checkpoint.

A schedule is a sequence of phases, each its own mixture from some row on. A phase continues in every source where the
phases before it stopped, so no row of a source is left out or comes twice:

    rows      0 .................. start 1 ............. start 2 ...
    source k  0 .. counts(start 1) | + positions of phase 1 | + positions of phase 2

Phases begin at whole strata (multiples of 32 rows), because only there have the phases before them used exactly the
first n positions of each source. Before its first change, a schedule gives the same rows as the mixture without it: a
saved state stays valid when a phase is added after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from penstock.order._border import MAX_ROWS, Int64, as_int64, checked_number, out_of_range
from penstock.order._keys import derive_key
from penstock.order._mixture import STRATUM, Mixture


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
        phases = [_Phase(0, Mixture(self.weights, self.seed), np.arange(len(self.weights)), _zeros(self.weights))]
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

    def counts(self, num_rows: int) -> Int64:
        """How many of the first `num_rows` rows come from each source."""
        phase = next(phase for phase in reversed(self._phases) if phase.start <= num_rows)
        return phase.counts(num_rows)


def _next_phase(before: _Phase, start: int, weights: Sequence[float], seed: int) -> _Phase:
    active = np.flatnonzero(np.asarray(weights, np.float64))
    return _Phase(start, Mixture([weights[source] for source in active.tolist()], seed), active, before.counts(start))


def _zeros(weights: Sequence[float]) -> Int64:
    return np.zeros(len(weights), np.int64)

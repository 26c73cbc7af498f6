"""How fast the script is during a turn: time from one batch handed over to the next, and samples trained on.

Between turns workers fill their queue. A loader that is slower than training then lives on the queue for a while, and
seems to keep up: as long as the queue runs down, steps count as settling, not as measured. So do those before the
slowest batches can have come: at the beginning no worker is held up by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.diagnosis._experiment import TurnResult

_ENOUGH_STEPS, _FEWEST_STEPS = 8, 3
_LONG = 4
"""A turn that takes this many times as long as it should ends after the fewest steps."""
_RUNS_DOWN = 0.12
"""Batches by which a queue falls for each one handed over, from which on that is no chance."""
_MOST_REPEATS = 3
_EMPTY_STEPS = 3
"""So many steps in a row with an empty queue, and nothing is left of the pause."""


class TurnClock:
    """Measures one turn. Times are in nanoseconds, without what the doctor itself used."""

    def __init__(self, trial: int, *, settle: int, turn_seconds: float, settle_seconds: float = 0.0) -> None:
        self.trial = trial
        self._settle, self._settled = settle, 0
        self._settle_seconds = settle_seconds
        self._began_at: int | None = None
        self._turn_seconds = turn_seconds
        self._left_at: int | None = None
        self._rows_in_hand = 0
        self._num_repeats = self._num_empty = 0
        self._ready_at_first = math.nan
        self._clear()

    def restart(self) -> None:
        """Begin again: what was measured cannot be compared."""
        self.__init__(  # type: ignore[misc]
            self.trial, settle=self._settle, turn_seconds=self._turn_seconds, settle_seconds=self._settle_seconds
        )

    def handed_over(
        self, asked_at: int, now: int, rows: int, *, is_disturbed: bool, num_ready: Callable[[], float]
    ) -> None:
        """A batch of so many samples was handed over, and so many more batches are ready; NaN if nobody knows.

        A disturbed step, with a validation in it, does not count.
        """
        self._began_at = now if self._began_at is None else self._began_at
        is_early = now - self._began_at < 1e9 * self._settle_seconds
        if self._left_at is not None and self._settled >= self._settle and not is_disturbed and not is_early:
            self._count(self._rows_in_hand, 1, now - self._left_at, now - asked_at)
        if self._settled <= self._settle or is_early:
            self._settle_down(num_ready())
        self._settled += 1
        self._left_at, self._rows_in_hand = now, rows
        if self.is_over and self._num_repeats < _MOST_REPEATS:
            ready = num_ready()
            if self._ready_at_first - ready > max(1, _RUNS_DOWN * self._num_steps):
                self._num_repeats += 1
                self._ready_at_first = ready
                self._clear()

    def epoch(self, rows: int, steps: int, nanoseconds: int, waited: int) -> None:
        """A whole epoch went by."""
        if self._settled >= self._settle:
            self._count(rows, steps, nanoseconds, waited)
        self._settled += 1

    @property
    def is_over(self) -> bool:
        """Whether enough was measured: time for many steps, or a few long ones."""
        fewest = _FEWEST_STEPS if self._seconds > _LONG * self._turn_seconds else _ENOUGH_STEPS
        return self._seconds >= self._turn_seconds and self._num_steps >= fewest

    @property
    def result(self) -> TurnResult:
        """What was measured so far."""
        return TurnResult(self.trial, self._rows, self._num_steps, self._seconds, self._wait)

    def _settle_down(self, ready: float) -> None:
        """Steps do not count until what was ready before the turn is used up."""
        self._ready_at_first = ready
        self._num_empty = self._num_empty + 1 if ready <= 1 else 0
        if self._num_empty >= _EMPTY_STEPS:
            self._settled = self._settle

    def _clear(self) -> None:
        self._rows, self._num_steps, self._seconds, self._wait = 0.0, 0, 0.0, 0.0

    def _count(self, rows: float, steps: int, nanoseconds: int, waited: int) -> None:
        self._rows += rows
        self._num_steps += steps
        self._seconds += nanoseconds / 1e9
        self._wait += waited / 1e9

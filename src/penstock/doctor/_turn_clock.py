"""How fast the script is during a turn: time from one batch handed over to the next, and samples trained on.

How many steps a turn has, and how many before them are not counted, is fixed before it begins. A turn that ended when
its time is up would mostly end during a long step, such as the wait for a slow batch, and the next one would begin
behind it: jobs whose batches differ seemed a fifth slower than they are.

Between turns workers fill their queue. A loader that is slower than training then lives on the queue for a while, and
seems to keep up: as long as the queue runs down, steps count as settling, not as measured.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.doctor._experiment import TurnResult

_FEWEST_STEPS = 3
"""Of a turn that takes longer than it may."""
_RUNS_DOWN = 0.12
"""A queue that loses more batches than this for each one handed over is running down, not fluctuating."""
_MOST_LOOKS = 40
"""At the queue, in a turn: each takes 15 µs if caches are cold."""
_MOST_REPEATS = 3
_EMPTY_STEPS = 3
"""After this many steps in a row with an empty queue, nothing is left of what was prefetched in the pause."""


class TurnClock:
    """Measures one turn. Times are in nanoseconds, without what the doctor itself used."""

    def __init__(self, trial: int, *, settle: int, steps: int, longest_seconds: float) -> None:
        self.trial = trial
        self._settle, self._steps, self._longest_seconds = settle, steps, longest_seconds
        self._look_every = max(1, steps // _MOST_LOOKS)
        self.restart()

    def restart(self) -> None:
        """Begin again: what was measured cannot be compared."""
        self._settled = self._num_repeats = self._num_empty = 0
        self._left_at: int | None = None
        self._rows_in_hand = 0
        self._clear()

    def handed_over(
        self, asked_at: int, now: int, rows: int, *, is_disturbed: bool, num_ready: Callable[[], float]
    ) -> None:
        """A batch of `rows` samples was handed over, and `num_ready()` more batches are ready; NaN if that is unknown.

        A disturbed step, with a validation in it, does not count.
        """
        if self._left_at is not None and self._settled >= self._settle and not is_disturbed:
            self._count(self._rows_in_hand, 1, now - self._left_at, now - asked_at)
            if self._num_steps % self._look_every == 0:
                self._ready.append(num_ready())
        elif self._settled < self._settle:
            self._settle_down(num_ready())
        self._settled += 1
        self._left_at, self._rows_in_hand = now, rows
        if self.is_over and self._num_repeats < _MOST_REPEATS and self._runs_down():
            self._num_repeats += 1
            self._clear()

    def epoch(self, rows: int, steps: int, nanoseconds: int, waited: int) -> None:
        """A whole epoch has passed."""
        if self._settled >= self._settle:
            self._count(rows, steps, nanoseconds, waited)
        self._settled += 1

    @property
    def is_over(self) -> bool:
        """Whether enough was measured: all steps, or a few long ones."""
        is_late = self._seconds > self._longest_seconds and self._num_steps >= _FEWEST_STEPS
        return is_late or self._num_steps >= self._steps

    @property
    def result(self) -> TurnResult:
        """What was measured so far."""
        return TurnResult(self.trial, self._rows, self._num_steps, self._seconds, self._wait)

    def _settle_down(self, ready: float) -> None:
        """Steps do not count until what was ready before the turn is used up."""
        self._num_empty = self._num_empty + 1 if ready <= 1 else 0
        if self._num_empty >= _EMPTY_STEPS:
            self._settled = self._settle

    def _runs_down(self) -> bool:
        """Whether the queue was much fuller in the first third than in the last, at its fullest.

        Behind a slow batch, and before the next one, the queue of a job whose batches differ is full again.
        """
        if not self._ready:
            return False
        third = max(1, len(self._ready) // 3)
        fell = max(self._ready[:third]) - max(self._ready[-third:])
        return fell > max(1, _RUNS_DOWN * (self._num_steps - self._num_steps // 3))

    def _clear(self) -> None:
        self._rows, self._num_steps, self._seconds, self._wait = 0.0, 0, 0.0, 0.0
        self._ready: list[float] = []

    def _count(self, rows: float, steps: int, nanoseconds: int, waited: int) -> None:
        self._rows += rows
        self._num_steps += steps
        self._seconds += nanoseconds / 1e9
        self._wait += waited / 1e9

"""Which rows of a plan's endless run one `for` loop hands out: whole epochs, or a number of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from penstock.loader import has_batches
from penstock.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """One `for` loop over a loader."""

    number: int
    """Which one it is: of epochs, the one that it begins in."""
    end: int | None
    """Its last batch starts before this row."""
    num_batches: int | None
    """Including those that an earlier run handed over."""
    num_parts: int
    """Micro-batches of a full batch."""


@dataclass(frozen=True, slots=True)
class Loops(ABC):
    """The run cut into loops, which are counted from 0; a state may stand anywhere in one."""

    plan: Plan

    def begin(self, row: int, num_parts: int) -> Loop:
        """The loop that begins, or goes on, at a row."""
        number, end = self.loop_at(row), self.end_after(row)
        if end is None:
            return Loop(number, None, None, num_parts)
        num_before = self.steps_before(row) * num_parts
        return Loop(number, end, num_before + self.plan.steps.num_parts_between(row, end, num_parts), num_parts)

    @abstractmethod
    def loop_at(self, row: int) -> int:
        """The loop that a row belongs to."""

    @abstractmethod
    def row_of(self, step: int, loop: int) -> int:
        """First row of a step, counted from the beginning of a loop on into those after it."""

    @abstractmethod
    def steps_before(self, row: int) -> int:
        """Steps of the row's loop that come before it."""

    @abstractmethod
    def end_after(self, row: int) -> int | None:
        """Where a loop ends that begins, or goes on, at a row; None if it never does."""

    @abstractmethod
    def next_loop(self, row: int) -> int:
        """First row of what follows when a loop is left at a row."""


@dataclass(frozen=True, slots=True)
class EpochLoops(Loops):
    """A loop is an epoch, or goes on through several; frameworks count these epochs."""

    epochs: int | None
    """Epochs in one loop; None never stops."""

    def loop_at(self, row: int) -> int:
        """The epoch."""
        return row // self.plan.num_rows if self.plan.num_rows else 0

    def row_of(self, step: int, loop: int) -> int:
        """With tail="carry" epochs can differ by one batch, so they are gone through."""
        if not has_batches(self.plan):
            return loop * self.plan.num_rows
        while step >= (num_batches := self.plan.num_batches(loop)):
            step, loop = step - num_batches, loop + 1
        return self.plan.row_of(step, loop)

    def steps_before(self, row: int) -> int:
        """Of the epoch."""
        return (row - self.loop_at(row) * self.plan.num_rows) // self.plan.global_size

    def end_after(self, row: int) -> int | None:
        """The end of the last of its epochs."""
        return None if self.epochs is None else (self.loop_at(row) + self.epochs) * self.plan.num_rows

    def next_loop(self, row: int) -> int:
        """The next epoch."""
        return (self.loop_at(row) + 1) * self.plan.num_rows


@dataclass(frozen=True, slots=True)
class StepLoops(Loops):
    """Every loop has as many steps; where an epoch ends inside one, the next begins.

    For frameworks that ask for the length once: with tail="carry", epochs differ by one batch.
    """

    steps: int

    def loop_at(self, row: int) -> int:
        """Steps before the row, in loops."""
        return self._number_at(row) // self.steps

    def row_of(self, step: int, loop: int) -> int:
        """Arithmetic: loops are of one length."""
        return self._row_at(loop * self.steps + step)

    def steps_before(self, row: int) -> int:
        """Of the loop."""
        return self._number_at(row) % self.steps

    def end_after(self, row: int) -> int:
        """Where the next loop begins."""
        return self._row_at((self.loop_at(row) + 1) * self.steps)

    def next_loop(self, row: int) -> int:
        """The same: one loop at a time."""
        return self.end_after(row)

    def _number_at(self, row: int) -> int:
        """Batches of the whole run before a row."""
        if self.plan.steps.tail == "carry":
            return row // self.plan.global_size
        epoch, row = divmod(row, self.plan.num_rows)
        return epoch * self.plan.num_batches(0) + row // self.plan.global_size

    def _row_at(self, number: int) -> int:
        if self.plan.steps.tail == "carry":
            return number * self.plan.global_size
        epoch, step = divmod(number, self.plan.num_batches(0))
        return self.plan.row_of(step, epoch)


def make_loops(plan: Plan, *, epochs: int | None, steps: int | None) -> Loops:
    """The loops of a plan's run.

    Raises:
        ValueError: it has no batches to count steps of.
    """
    if steps is None:
        return EpochLoops(plan, epochs)
    if not has_batches(plan):
        raise ValueError(
            f"The plan has no batches ({plan.num_rows:,} rows), so a loop cannot have steps={steps} of them."
        )
    return StepLoops(plan, steps)

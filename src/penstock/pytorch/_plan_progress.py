"""Where a run of a plan stands: the next row, the loop that is running, and which one follows.

A plan's run never ends. One `for` loop hands out some of its rows: whole epochs, or a number of steps.

    row ── a step's last part is handed over ──► row ── … ──► the loop's end; or left early: skipped to the next loop
     ▲
     └── a state is loaded, or an epoch set: the running loop is over

Arithmetic alone: whatever computes batches is told where to begin.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.loader import Cursor, Item, has_batches
from penstock.plan import Plan
from penstock.pytorch._arguments import LoaderSettings


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """One `for` loop over a loader."""

    number: int
    """Counted from 0; if loops are epochs, the epoch that it begins in."""
    end: int | None
    """Its last batch starts before this row."""
    num_parts: int
    """Micro-batches of a full batch."""
    count: Callable[[], int] | None = None
    """How many batches it has; none if it never ends. Where they differ in rows, counting takes all their lengths."""

    @property
    def num_batches(self) -> int | None:
        """Including those that an earlier run handed over."""
        return None if self.count is None else self.count()


@dataclass(frozen=True, slots=True)
class EpochLoops:
    """The run cut into loops, which are counted from 0: each is an epoch, or goes on through several.

    Frameworks count these epochs. A state may stand anywhere in one.
    """

    plan: Plan
    epochs: int | None
    """Epochs in one loop; None never stops."""

    def loop_at(self, row: int) -> int:
        """The loop that a row belongs to."""
        return row // self.plan.num_rows if self.plan.num_rows else 0

    def row_of(self, step: int, loop: int) -> int:
        """First row of a step, counted from the beginning of a loop on into those after it.

        With tail="carry" epochs can differ by one batch, so this walks through them.
        """
        if not has_batches(self.plan):
            return loop * self.plan.num_rows
        while step >= (num_batches := self.plan.num_batches(loop)):
            step, loop = step - num_batches, loop + 1
        return self.plan.row_of(step, loop)

    def steps_before(self, row: int) -> int:
        """Steps of the row's loop that come before it."""
        return self.plan.steps.num_before(row)

    def end_after(self, row: int) -> int | None:
        """Where a loop ends that begins, or goes on, at a row; None if it never does."""
        return None if self.epochs is None else (self.loop_at(row) + self.epochs) * self.plan.num_rows

    def next_loop(self, row: int) -> int:
        """First row of what follows when a loop is left at a row."""
        return (self.loop_at(row) + 1) * self.plan.num_rows


@dataclass(frozen=True, slots=True)
class StepLoops:
    """Every loop has the same number of steps; where an epoch ends inside one, the next begins.

    For frameworks that ask for the length once: with tail="carry", epochs differ by one batch.
    """

    plan: Plan
    steps: int

    def loop_at(self, row: int) -> int:
        return self.plan.steps.number_at(row) // self.steps

    def row_of(self, step: int, loop: int) -> int:
        return self.plan.steps.row_at(loop * self.steps + step)

    def steps_before(self, row: int) -> int:
        return self.plan.steps.number_at(row) % self.steps

    def end_after(self, row: int) -> int:
        return self.plan.steps.row_at((self.loop_at(row) + 1) * self.steps)

    def next_loop(self, row: int) -> int:
        return self.end_after(row)


class PlanProgress:
    """Counts what the training loop was handed."""

    def __init__(self, plan: Plan, settings: LoaderSettings) -> None:
        self.plan = plan
        self._settings = settings
        self.row = 0
        """Absolute number of the next row to hand out."""
        self.running: Loop | None = None
        self._taken_from: Loop | None = None
        """The last loop of which a batch was handed over."""
        self._moved: Loop | None = None
        """A loop that an epoch was set for after it was started, and before its first batch."""
        self._is_unfinished = False

    @property
    def cursor(self) -> Cursor:
        """Where it stands, as a state stores it."""
        return Cursor(self.plan, self.row)

    @property
    def loop_number(self) -> int:
        """The loop that the next row belongs to."""
        return self._loops.loop_at(self.row)

    def next_loop(self, world_size: int) -> Loop:
        """What a `for` loop would run through if it began now."""
        loops, steps, num_parts = self._loops, self.plan.steps, self._num_parts(world_size)
        row = loops.next_loop(self.row) if self._is_unfinished else self.row
        number, end = loops.loop_at(row), loops.end_after(row)
        if end is None:
            return Loop(number, None, num_parts)

        def count() -> int:
            return loops.steps_before(row) * num_parts + steps.num_parts_between(row, end, num_parts)

        return Loop(number, end, num_parts, count)

    def hand_over(self, item: Item, loop: Loop) -> None:
        """Count a step's rows when its last part goes to the user."""
        self._taken_from, self._moved = loop, None
        if item.part == item.num_parts - 1 and item.next_row > self.row:
            self.row = item.next_row
        self._is_unfinished = loop.end is None or self.row < loop.end

    def complete(self, loop: Loop) -> None:
        """All batches of a loop were handed over."""
        if loop.end is not None:
            self.row = max(self.row, loop.end)
        self._is_unfinished = False

    def leave(self, loop: Loop) -> None:
        """A loop is over, complete or not."""
        if self.running is loop:
            self.running = None

    def skip_unfinished(self) -> None:
        """After a `break`, the next loop is the next epoch; a warning says how many rows it skips."""
        if not self._is_unfinished:
            return
        self._is_unfinished = False
        end = self._loops.next_loop(self.row)
        left, follows = f"epoch {self.cursor.epoch} early: its", "epoch"
        if self._settings.steps is not None:
            left, follows = "early: its", "loop"
        warnings.warn(
            f"The last loop left {left} last {end - self.row:,} rows are skipped and the next {follows} starts. To "
            "continue where it left off instead, call loader.load_state_dict(loader.state_dict()) before the loop.",
            stacklevel=4,
        )
        self.row = end

    def move_to(self, row: int) -> None:
        """Go to a row; a running loop is over, and rows that fill no batch are skipped."""
        self.row = self.plan.steps.skip_tail(row) if self.plan.num_rows else row
        self.running = None
        self._is_unfinished = False

    def change_plan(self, plan: Plan) -> None:
        """Stand at the same row of a plan with other batches."""
        self.plan = plan
        self.move_to(self.row)

    def load(self, state: dict[str, Any]) -> None:
        """Go to where a state stands; `StateError` if it belongs to another order of the data."""
        self.move_to(self.cursor.restore(state).row)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the running epoch is not rewound."""
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"set_epoch({epoch!r}): epochs count from 0.")
        loop = self.running  # its last batch may reach into the next epoch, and one that never ends goes through all
        is_running = loop is not None and (loop.end is None or loop.number == epoch)
        if epoch != self.loop_number and not is_running:
            if loop is not None and loop is not self._taken_from:
                self._moved = loop
                self._warn_of_rows_left(epoch)
            self.move_to(self._loops.row_of(0, epoch))

    def is_moved(self, loop: Loop) -> bool:
        """Whether a loop starts over with its first batch: Lightning starts it, and then says which epoch it is."""
        return loop is self._moved and self.running is None

    def _warn_of_rows_left(self, epoch: int) -> None:
        """Warn that the rest of an epoch, in which a loaded state stands, is skipped."""
        if self._loops.steps_before(self.row):
            warnings.warn(
                f"The state that was loaded stands in epoch {self.loop_number}, and epoch {epoch} is asked for: the "
                f"last {self._loops.next_loop(self.row) - self.row:,} rows before it are skipped. Frameworks do so if "
                "they saved the state after training had ended, in the middle of an epoch; save it while they train.",
                stacklevel=4,
            )

    def go_to(self, number: int, epoch: int, world_size: int) -> int:
        """Go to the step of a batch of a loop that begins in the epoch; returns which part of the step it is."""
        step, part = divmod(number, self._num_parts(world_size))
        if epoch != self.loop_number or step != self._loops.steps_before(self.row):
            self.move_to(self._loops.row_of(step, epoch))
        return part

    def item(self, number: int, epoch: int, rank: int, world_size: int) -> Item:
        """What a batch of a loop that begins in the epoch is computed from."""
        num_parts = self._num_parts(world_size)
        step, part = divmod(number, num_parts)
        row = self._loops.row_of(step, epoch)
        return Item(row, rank, world_size, part, self.plan.steps.num_parts(row, num_parts))

    @property
    def _loops(self) -> EpochLoops | StepLoops:
        plan, steps = self.plan, self._settings.steps
        if steps is None:
            return EpochLoops(plan, self._settings.epochs)
        if not has_batches(plan):
            raise ValueError(
                f"The plan has no batches ({plan.num_rows:,} rows), so a loop cannot have steps={steps} of them."
            )
        return StepLoops(plan, steps)

    def _num_parts(self, world_size: int) -> int:
        size = self._settings.micro_batch
        if size is None:
            return 1
        share = self.plan.global_size // world_size
        if share % size:
            raise ValueError(f"micro_batch={size} does not divide the {share} rows that each rank has per step.")
        return share // size

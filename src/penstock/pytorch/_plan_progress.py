"""Where a run of a plan stands: the next row, the loop that is running, and which one follows.

    row ── a step's last part is handed over ──► row ── … ──► the loop's end; or left early: skipped to the next loop
     ▲
     └── a state is loaded, or an epoch set: the running loop is over

Arithmetic alone: whatever computes batches is told where to begin.
"""

from __future__ import annotations

import warnings
from typing import Any

from penstock.loader import Cursor, Item
from penstock.plan import Plan
from penstock.pytorch._arguments import LoaderSettings
from penstock.pytorch._loops import Loop, Loops, make_loops


class PlanProgress:
    """Counts what the training loop was handed."""

    def __init__(self, plan: Plan, settings: LoaderSettings) -> None:
        self.plan = plan
        self._settings = settings
        self.row = 0
        """Absolute number of the next row to hand out."""
        self.running: Loop | None = None
        self._is_unfinished = False

    @property
    def cursor(self) -> Cursor:
        """Where it stands, as a state says it."""
        return Cursor(self.plan, self.row)

    @property
    def loop_number(self) -> int:
        """The loop that the next row belongs to."""
        return self._loops.loop_at(self.row)

    def next_loop(self, world_size: int) -> Loop:
        """What a `for` loop would run through if it began now."""
        row = self._loops.next_loop(self.row) if self._is_unfinished else self.row
        return self._loops.begin(row, self._num_parts(world_size))

    def hand_over(self, item: Item, loop: Loop) -> None:
        """Count a step's rows when its last part goes to the user."""
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
        self.row = self.plan.steps.settle(row) if self.plan.num_rows else row
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
            self.move_to(self._loops.row_of(0, epoch))

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
    def _loops(self) -> Loops:
        return make_loops(self.plan, epochs=self._settings.epochs, steps=self._settings.steps)

    def _num_parts(self, world_size: int) -> int:
        size = self._settings.micro_batch
        if size is None:
            return 1
        share = self.plan.global_size // world_size
        if share % size:
            raise ValueError(f"micro_batch={size} does not divide the {share} rows that each rank has per step.")
        return share // size

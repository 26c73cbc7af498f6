"""Where a run is: one absolute row, shown as epoch and row, and a fingerprint of the order.

The end of epoch e and the start of epoch e + 1 are the same row, and so the same state. If take() ended
the epoch, the state says after how many rows, so that a plan that takes more continues there.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import StateError
from penstock.plan import Plan
from penstock.shapes import misfit

STATE_VERSION = 1
_MAX_ROW = 1 << 60


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the run of a plan."""

    plan: Plan
    row: int = 0
    """Absolute number of the next row to hand out."""

    @property
    def epoch(self) -> int:
        """The epoch that the next row belongs to."""
        return self.row // self.plan.num_rows if self.plan.num_rows else 0

    def state(self) -> dict[str, Any]:
        """The place as plain data, under 1 KB."""
        row = self.row - self.epoch * self.plan.num_rows
        state = {"version": STATE_VERSION, "order": self.plan.order_fingerprint, "epoch": self.epoch, "row": row}
        if self.plan.has_own_epochs:
            state["epoch_rows"] = self.plan.num_rows
        return state | {"facts": dict(self.plan.order_facts)}

    def restore(self, state: dict[str, Any]) -> Cursor:
        """The place that a state describes.

        Raises:
            StateError: the state has another version or belongs to another order; the message says which.
        """
        if not isinstance(state, dict) or not {"version", "order", "epoch", "row"} <= state.keys():
            raise StateError(f"Not the state of a loader: {reprlib.repr(state)} has no version, order, epoch and row.")
        if _whole_number(state["version"]) != STATE_VERSION:
            raise StateError(
                f"The state has version {reprlib.repr(state['version'])}; this Penstock reads version {STATE_VERSION}."
            )
        epoch, row, rows_then = (_whole_number(state.get(name)) for name in ("epoch", "row", "epoch_rows"))
        epoch, row = self._unended(epoch, row, rows_then)
        order, place = state["order"], epoch * self.plan.num_rows + row
        if not isinstance(order, str) or not self.plan.goes_on_from(order, place, max(0, rows_then)):
            difference = _difference(state.get("facts"), self.plan.order_facts)
            raise StateError(
                f"The state belongs to another order of the data. {difference} "
                "Batch size, ranks, workers, casts, labels and maps may differ; this may not."
            )
        if not 0 <= epoch * self.plan.num_rows <= _MAX_ROW or epoch < 0 or not 0 <= row <= self.plan.num_rows:
            found = f"Epoch {reprlib.repr(state['epoch'])}, row {reprlib.repr(state['row'])}"
            raise StateError(f"{found}: an epoch has rows 0 to {self.plan.num_rows:,}, and a run fewer than 2**60.")
        return Cursor(self.plan, epoch * self.plan.num_rows + row)

    def _unended(self, epoch: int, row: int, rows_then: int) -> tuple[int, int]:
        """(epoch, row) of a state whose epochs had `rows_then` rows: if they are longer now, the last has not ended."""
        is_longer = row == 0 < epoch and 0 < rows_then < self.plan.num_rows
        return (epoch - 1, rows_then) if is_longer else (epoch, row)


def _whole_number(value: Any) -> int:
    """An int, even if a checkpoint returned it as numpy's or torch's; -1 for anything else."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def _difference(theirs: Any, ours: Mapping[str, str]) -> str:
    if isinstance(theirs, dict) and not misfit(theirs, {str: str}):
        names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        if names:
            changes = "; ".join(f"{name} was {theirs.get(name, 'none')}, is {ours.get(name, 'none')}" for name in names)
            grown = " If samples were appended since, penstock.open(path, as_of=state) opens those there were then."
            return f"Different: {changes}.{grown if names == ['data'] else ''}"
    return "The dataset, shuffle, window, packing, mixture, or the version of Penstock's order differs."

"""Where steps lie among rows: what a loader asks of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock.plan._steps import Steps


class Stepped(ABC):
    """Anything whose rows are cut into batches; `Steps` does the arithmetic."""

    @property
    @abstractmethod
    def _steps(self) -> Steps:
        """How rows are cut."""

    @property
    def global_size(self) -> int:
        """Rows in a batch, over all ranks."""
        return self._steps.global_size

    def num_batches(self, epoch: int = 0) -> int:
        """Batches that start in an epoch; with tail="carry" epochs can differ by one."""
        return self._steps.num_batches(epoch)

    def row_of(self, step: int, epoch: int = 0) -> int:
        """Absolute number of the first row of a step."""
        return self._steps.row_of(step, epoch)

    def next_row(self, row: int) -> int:
        """Absolute row at which the batch after the one at `row` starts."""
        return self._steps.next_row(row)

    def settle(self, row: int) -> int:
        """Where the next batch starts when `row` is the next row: with tail="drop", past rows that fill none."""
        return self._steps.settle(row)

    def are_regular(self, row: int, num_steps: int) -> bool:
        """Whether so many batches from `row` on follow each other with no row cut, repeated or left out."""
        return self._steps.are_regular(row, num_steps)

    def num_batches_between(self, row: int, end: int) -> int:
        """Batches that start from `row` on and before `end`, both absolute, when the first starts at `row`."""
        return self._steps.num_batches_between(row, end)

    def num_parts(self, row: int, num_parts: int) -> int:
        """Parts of the batch at `row` on each rank, when a full batch has `num_parts`."""
        return self._steps.num_parts(row, num_parts)

    def num_parts_between(self, row: int, end: int, num_parts: int) -> int:
        """Parts of all batches from `row` on to `end`, where an epoch ends, when a full batch has `num_parts`."""
        return self._steps.num_parts_between(row, end, num_parts)

"""Which rows are batch k: integer arithmetic on rows, epochs and tails.

Rows are numbered through all epochs of a run, and a batch is `global_size` consecutive ones. Where an epoch does not
end with a batch, `tail` says what becomes of its last rows:

    carry    the batch goes on into the next epoch
    drop     they are in no batch: `skip_tail` skips them
    short    they are a smaller batch
    pad      the first rows of the epoch fill the batch up, and are marked as repeated
    even     they are a smaller batch, in which rows are repeated until every rank has the same number
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import whole_number
from penstock.plan._stages import Tail

MAX_ROW = 2**62


@dataclass(frozen=True)
class Steps:
    """Batches of `global_size` rows over epochs of `num_rows` rows."""

    num_rows: int
    global_size: int
    tail: Tail

    @property
    def hides_repeated(self) -> bool:
        """Whether rows that fill up a batch are not to be learned from."""
        return self.tail == "pad"

    def num_batches(self, epoch: int) -> int:
        """Batches that start in an epoch."""
        first, end = self._batches_of(checked_epoch(epoch))
        return end - first

    def row_of(self, step: int, epoch: int) -> int:
        """Absolute number of the first row of a step."""
        step, epoch = whole_number("read", "step", step), checked_epoch(epoch)
        row = self._find(step, epoch) if step >= 0 else None
        if row is None:
            count = self.num_batches(epoch)
            steps = f"steps 0 to {count - 1:,}" if count else "no steps"
            raise IndexError(
                f"Epoch {epoch} has {steps} ({self.num_rows:,} rows, batches of {self.size}, "
                f"tail={self.tail!r}); step {step} is asked for."
            )
        return row

    @property
    def size(self) -> str:
        """How large batches are, in words."""
        return f"{self.global_size:,}"

    def num_before(self, row: int) -> int:
        """Batches of the row's epoch that come before it."""
        return row % self.num_rows // self.global_size if self.num_rows else 0

    def number_at(self, row: int) -> int:
        """Batches of the whole run before a row."""
        if self.tail == "carry":
            return row // self.global_size
        epoch, row = divmod(row, self.num_rows)
        return epoch * self.num_batches(0) + row // self.global_size

    def row_at(self, number: int) -> int:
        """First row of the batch with this number, counted over the whole run."""
        if self.tail == "carry":
            return number * self.global_size
        epoch, step = divmod(number, self.num_batches(0))
        return self.row_of(step, epoch)

    def _find(self, step: int, epoch: int) -> int | None:
        """First row of a step; None if the epoch has fewer."""
        first, end = self._batches_of(epoch)
        if step >= end - first:
            return None
        start = first * self.global_size if self.tail == "carry" else epoch * self.num_rows
        return start + step * self.global_size

    def _batches_of(self, epoch: int) -> tuple[int, int]:
        """Numbers of an epoch's first batch and of the next epoch's, over the whole run; without "carry", from 0."""
        if self.tail == "carry":
            size = self.global_size
            return -(-epoch * self.num_rows // size), -(-(epoch + 1) * self.num_rows // size)
        return 0, self.num_rows // self.global_size if self.tail == "drop" else -(-self.num_rows // self.global_size)

    def rows_at(
        self, row: int, rank: int = 0, world_size: int = 1, part: int = 0, num_parts: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """(absolute rows that a rank reads of the batch at `row`, which of them only fill it up; None if none can).

        Ranks take every `world_size`-th row. `part` of `num_parts` are consecutive ones of the rank's, whose numbers
        differ by one at most. The price is that of these rows, however many the batch has.
        """
        own = self.places(row, rank, world_size, part, num_parts)
        return self.rows_of(row, np.arange(own.start, own.stop, own.step))

    def places(self, row: int, rank: int, world_size: int, part: int = 0, num_parts: int = 1) -> range:
        """The places in the batch at `row` that a rank's part has, as `rows_at` says."""
        num_filled = self.num_filled(row, world_size)
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: ranks go from 0 to world_size - 1.")
        if self.global_size % world_size:
            raise ValueError(self._refuse(world_size))
        own = range(rank, num_filled, world_size)
        return own[-(-part * len(own) // num_parts) : -(-(part + 1) * len(own) // num_parts)]

    def _refuse(self, world_size: int) -> str:
        return (
            f"A batch of {self.global_size} rows cannot be shared evenly by {world_size} ranks; "
            f"batch({self.global_size + -self.global_size % world_size}) could."
        )

    def rows_of(self, row: int, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """(absolute rows at these places of the batch at `row`, which of them only fill it up; None if none can)."""
        if self.tail not in ("pad", "even"):
            return row + places, None
        num_real = self.num_real(row)
        is_repeated = places >= num_real
        if self.tail == "even":
            return row + places % num_real, is_repeated
        first = row // self.num_rows * self.num_rows
        return first + (row - first + places) % self.num_rows, is_repeated

    def num_real(self, row: int) -> int:
        """Rows of the batch at `row`, without those that only fill it up."""
        if not 0 <= row <= MAX_ROW or self.num_rows == 0:
            raise IndexError(f"Row {row} is asked for; an epoch has {self.num_rows:,} rows, and a run 2**62.")
        return self.next_row(row) - row

    def num_filled(self, row: int, world_size: int) -> int:
        """Rows of the batch at `row`, over all ranks; how many they are matters to tail="even" alone."""
        num_real = self.num_real(row)
        if self.tail == "pad":
            return num_real + -num_real % self.global_size
        return num_real + -num_real % max(world_size, 1) if self.tail == "even" else num_real

    def next_row(self, row: int) -> int:
        """Absolute row after the batch that starts at `row`."""
        if self.tail == "carry":
            return row + self.global_size
        return min(row + self.global_size, self._end_of_epoch(row))

    def skip_tail(self, row: int) -> int:
        """Where the next batch starts when `row` is the next row: with tail="drop", past rows that fill none."""
        if self.tail == "drop" and row + self.global_size > self._end_of_epoch(row) and row % self.num_rows:
            return self._end_of_epoch(row)
        return row

    def are_regular(self, row: int, num_steps: int) -> bool:
        """Whether `num_steps` batches from `row` on follow each other with no row cut, repeated or left out."""
        return self.tail == "carry" or row + num_steps * self.global_size <= self._end_of_epoch(row)

    def num_batches_between(self, row: int, end: int) -> int:
        """Batches that start from `row` on and before `end`, when the first starts at `row`."""
        if self.tail == "carry":
            return max(0, -(-(end - row) // self.global_size))
        num_batches = 0
        while row < end:
            stop = self._end_of_epoch(row)
            starting = -(-(min(stop, end) - row) // self.global_size)
            num_batches += min(starting, (stop - row) // self.global_size) if self.tail == "drop" else starting
            row = stop
        return num_batches

    def _end_of_epoch(self, row: int) -> int:
        return (row // self.num_rows + 1) * self.num_rows

    def num_parts(self, row: int, num_parts: int) -> int:
        """Parts of the batch at `row`, when a full one has `num_parts`: a shorter one has fewer, none of them larger.

        It is the same for all ranks, so that they stay in step.
        """
        if self.tail not in ("short", "even"):
            return num_parts
        return min(num_parts, -(-(self.next_row(row) - row) * num_parts // self.global_size))

    def num_parts_between(self, row: int, end: int, num_parts: int) -> int:
        """Parts of all batches from `row` on to `end`, where an epoch ends, when a full batch has `num_parts`."""
        if self.tail not in ("short", "even"):
            return self.num_batches_between(row, end) * num_parts
        return dataclasses.replace(self, global_size=self.global_size // num_parts).num_batches_between(row, end)

    def num_dropped(self) -> int:
        """Rows of an epoch that are in no batch."""
        return self.num_rows % self.global_size if self.tail == "drop" else 0


def checked_epoch(epoch: int, *, verb: str = "read") -> int:
    """The epoch that a caller asks for, if it is valid."""
    number = whole_number(verb, "epoch", epoch)
    if number < 0:
        raise IndexError(f"Epoch {number} is asked for; epochs count from 0.")
    return number

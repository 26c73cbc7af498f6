"""What an engine computes: any function of a small item that writes a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from penstock.loader._memory import Arena, Batch
from penstock.plan import Plan
from penstock.schema import dtype_from_name


class Item(NamedTuple):
    """One batch of a plan: its first row, whose share of it, and which part of the share."""

    row: int
    rank: int = 0
    world_size: int = 1
    part: int = 0
    num_parts: int = 1

    def __str__(self) -> str:
        part = f", part {self.part + 1} of {self.num_parts}" if self.num_parts > 1 else ""
        return f"the batch at row {self.row:,} (rank {self.rank} of {self.world_size}{part})"


class Work(Protocol):
    """Computes items, in any worker, in any order; small enough to be sent there."""

    def compute(self, item: Any, arena: Arena) -> Batch:
        """The batch of one item; arrays asked of `arena` are handed over without a copy."""
        ...

    def announce(self, item: Any) -> None:
        """Tell the kernel what an item will read."""
        ...


@dataclass(frozen=True, slots=True)
class PlanWork:
    """Batches of a plan."""

    plan: Plan

    def compute(self, item: Item, arena: Arena) -> Batch:
        """Read the batch straight into the arena."""
        out = None
        if self.plan.next_row(item.row) - item.row == self.plan.global_size:  # not the last, shorter one of an epoch
            share = self.plan.global_size // item.world_size // item.num_parts
            shapes = self.plan.output_arrays(share)
            out = {key: arena.array(shape, dtype_from_name(dtype)) for key, (shape, dtype) in shapes.items()}
        return self.plan.read_at(
            item.row, item.rank, item.world_size, part=item.part, num_parts=item.num_parts, out=out
        )

    def announce(self, item: Item) -> None:
        """Tell the kernel which stretches of the shards come next."""
        self.plan.announce(item.row)


def plan_items(plan: Plan, row: int, end: int | None, *, rank: int, world_size: int, num_parts: int) -> Iterator[Item]:
    """The items of all batches that start from `row` on and before `end`; without an end, for ever."""
    if not has_batches(plan):
        return
    while end is None or row < end:
        for part in range(num_parts):
            yield Item(row, rank, world_size, part, num_parts)
        row = plan.settle(plan.next_row(row))


def has_batches(plan: Plan) -> bool:
    """Whether an epoch has any: not without rows, nor with fewer than a batch when the tail is dropped."""
    return plan.num_rows > 0 and plan.num_batches_between(0, plan.num_rows) > 0

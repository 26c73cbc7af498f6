"""A plan as work for an engine: where its run stands, which items there are, and how one is computed.

Where a run stands is one absolute row, shown as epoch and row, and a fingerprint of the order. The end of epoch e and
the start of epoch e + 1 are the same row, and so the same state. If take() ended the epoch, the state says after how
many rows, so that a plan that takes more continues there.
"""

from __future__ import annotations

import functools
import itertools
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import StateError
from penstock.loader._layout import Batch, place_arrays
from penstock.loader._memory import Arena
from penstock.plan import Plan, from_arrays
from penstock.schema import Ragged
from penstock.shapes import find_mismatch
from penstock.workers import WarmUp, needs_torch

STATE_VERSION = 1
_MAX_ROW = 1 << 60
_KEPT_LAYOUTS = 8
_BUNDLE_BYTES = 8 << 20
_MAX_STEPS = 16


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
        """The place as plain data, under 1 KB; with many sources, 100 bytes for each."""
        row = self.row - self.epoch * self.plan.num_rows
        state = {"version": STATE_VERSION, "order": self.plan.order_fingerprint, "epoch": self.epoch, "row": row}
        if self.plan.has_own_epochs:
            state["epoch_rows"] = self.plan.num_rows
        if self.plan.folders:
            state["folders"] = list(self.plan.folders)
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
        order = state["order"]
        place = self.plan.find_row(order, epoch, row, max(0, rows_then)) if isinstance(order, str) else None
        if place is None:
            difference = _difference(state.get("facts"), self.plan.order_facts, has_folders="folders" in state)
            raise StateError(
                f"The state belongs to another order of the data. {difference} "
                "Batch size, ranks, workers, casts, labels and maps may differ; this may not."
            )
        is_current = order == self.plan.order_fingerprint  # others know how long their epochs were
        if not 0 <= place <= _MAX_ROW or epoch < 0 or row < 0 or (is_current and row > self.plan.num_rows):
            found = f"Epoch {reprlib.repr(state['epoch'])}, row {reprlib.repr(state['row'])}"
            raise StateError(f"{found}: an epoch has rows 0 to {self.plan.num_rows:,}, and a run fewer than 2**60.")
        return Cursor(self.plan, place)

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


def _difference(theirs: Any, ours: Mapping[str, str], *, has_folders: bool) -> str:
    if isinstance(theirs, dict) and not find_mismatch(theirs, {str: str}):
        names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        if names:
            changes = "; ".join(f"{name} was {theirs.get(name, 'none')}, is {ours.get(name, 'none')}" for name in names)
            grown = " If samples were appended since, penstock.open(path, as_of=state) opens those there were then."
            is_data = all(name == "data" or (has_folders and name.startswith("source ")) for name in names)
            return f"Different: {changes}.{grown if is_data else ''}"
    return "The dataset, shuffle, window, packing, mixture, or the version of Penstock's order differs."


class Item(NamedTuple):
    """One batch of a plan: its first row, which rank's share, and which part of the share."""

    row: int
    rank: int = 0
    world_size: int = 1
    part: int = 0
    num_parts: int = 1
    next_row: int = -1
    """Where the next batch begins: rows up to there count as handed over once this batch's last part is."""

    def __str__(self) -> str:
        part = f", part {self.part + 1} of {self.num_parts}" if self.num_parts > 1 else ""
        return f"the batch at row {self.row:,} (rank {self.rank} of {self.world_size}{part})"


_new_item: Callable[[tuple[int, ...]], Item] = functools.partial(tuple.__new__, Item)
"""`Item`, from all its fields: half a microsecond faster, which counts for tiny batches."""


class Bundle(NamedTuple):
    """Batches of several consecutive steps, computed as one; see NOTE [bundles]."""

    row: int
    rank: int
    world_size: int
    num_parts: int
    num_steps: int
    step_rows: int
    """Rows of a step, over all ranks."""
    next_row: int
    """Where the batch after the last one begins."""

    def items(self) -> list[Item]:
        """Its batches, one by one."""
        edges = [self.row + step * self.step_rows for step in range(self.num_steps)] + [self.next_row]
        return [
            _new_item((row, self.rank, self.world_size, part, self.num_parts, next_row))
            for row, next_row in itertools.pairwise(edges)
            for part in range(self.num_parts)
        ]

    def __str__(self) -> str:
        return f"the {self.num_steps} batches from row {self.row:,} on (rank {self.rank} of {self.world_size})"


# NOTE [bundles]
#   A small batch takes less to compute than everything around it: finding out what is next, taking a buffer,
#   handing over, counting, switching threads or processes; and all that code is cold, because the batch has just
#   gone through the caches. So if several batches side by side are one batch with more rows
#   (`plan.is_rectangular`), they are computed as one, up to 8 MiB, and handed over one by one. They share a
#   buffer, which is free again when the last of them is. Nothing else differs: neither the batches, nor their
#   order, nor the state.
#   At the start of a loop, bundles grow from a single step: its first batch would otherwise wait for the rest of its
#   bundle, and while workers start, for those of all workers.
#   Without workers it is the training loop that computes them: batches of 32 x 2,048 int64 then cost what `plan.read`
#   costs, and 1.4 to 1.9 times that one by one. The price: one step in sixteen waits for all of a bundle.
#   Without bundles, batches of 8 x 128 tokens take five times as long in a thread, and six times in two processes
#   (`benchmarks/bench_loader.py --only small`).


class PlanWork:
    """Batches of a plan."""

    def __init__(self, plan: Plan, *, drops_consumed: bool = False) -> None:
        self.plan = plan
        self._drops_consumed = drops_consumed
        self._has_maps = bool(plan.functions)
        self._layout = functools.lru_cache(_KEPT_LAYOUTS)(
            lambda num_rows, num_pieces: place_arrays(plan.output_arrays(num_rows), num_pieces)
        )
        self._widened = functools.lru_cache(_KEPT_LAYOUTS)(plan.join_steps)

    @property
    def warm_up(self) -> WarmUp:
        """What workers that read the plan have in common."""
        return warm_up_for(self.plan)

    def compute(self, item: Item | Bundle, arena: Arena) -> Batch:
        """Read the batch straight into the arena."""
        batch = self._read(item, arena)
        if self._drops_consumed:
            self.plan.dont_need(item.row)
        return batch

    def _read(self, item: Item | Bundle, arena: Arena) -> Batch:
        if isinstance(item, Bundle):
            plan = self._widened(item.num_steps)
            share = plan.global_size // item.world_size
            out = arena.arrays(self._layout(share, item.num_steps * item.num_parts))
            return plan.read_at(item.row, item.rank, item.world_size, out=out)
        row, rank, world_size, part, num_parts, _ = item
        plan, offer = self.plan, None
        arena.is_seen = self._has_maps
        if plan.steps.next_row(row) - row == plan.global_size:  # not the last, shorter one of an epoch
            offer = arena.arrays(self._layout(plan.global_size // world_size // num_parts, 1))
        return plan.read_at(row, rank, world_size, part=part, num_parts=num_parts, out=offer)

    def announce(self, item: Item | Bundle) -> None:
        """Tell the kernel which parts of the shards are needed next."""
        self.plan.will_need(item.row)

    def __reduce__(self) -> tuple[Callable[..., PlanWork], tuple[Plan]]:
        return functools.partial(PlanWork, drops_consumed=self._drops_consumed), (self.plan,)


def warm_up_for(plan: Plan) -> WarmUp:
    """What a fork server does once for all workers that read a plan."""
    return WarmUp(_load_kernels, imports_torch=needs_torch(plan.functions))


def _load_kernels() -> None:
    """Load the kernels and the modules around them by using them, which each worker would otherwise do for itself."""
    ragged = Ragged(np.arange(8, dtype=np.uint8), np.array([0, 3, 8]))
    from_arrays({"fixed": np.arange(2), "ragged": ragged}).shuffle(seed=0).batch(1).read(0)


def steps_per_bundle(plan: Plan, world_size: int) -> int:
    """How many steps of a plan make a bundle of a sensible size; 1 if they cannot be computed as one."""
    if not plan.is_rectangular or plan.global_size % world_size:
        return 1
    num_bytes = place_arrays(plan.output_arrays(plan.global_size // world_size)).num_bytes
    return max(1, min(_MAX_STEPS, _BUNDLE_BYTES // max(1, num_bytes)))


def plan_items(
    plan: Plan,
    row: int,
    end: int | None,
    *,
    rank: int,
    world_size: int,
    num_parts: int,
    num_steps: int = 1,
    num_growing: int = 0,
) -> Iterator[Item | Bundle]:
    """The items of all batches that start at or after `row` and before `end`, in bundles of up to `num_steps` steps.

    Without an end, for ever. A full batch has `num_parts` parts, a shorter one may have fewer. The first `num_growing`
    items are single steps, as many after them have two each, then four, up to `num_steps`.
    """
    if not has_batches(plan):
        return
    size = plan.global_size
    most_steps, num_items = 1 if num_growing else num_steps, 0
    while end is None or row < end:
        steps = most_steps if end is None else min(most_steps, -(-(end - row) // size))
        num_items += 1
        if most_steps < num_steps and num_items % num_growing == 0:
            most_steps = min(2 * most_steps, num_steps)
        if steps > 1 and plan.steps.are_regular(row, steps):
            next_row = plan.steps.skip_tail(row + steps * size)
            yield Bundle(row, rank, world_size, num_parts, steps, size, next_row)
            row = next_row
            continue
        next_row = plan.steps.skip_tail(plan.steps.next_row(row))
        parts = plan.steps.num_parts(row, num_parts)
        for part in range(parts):
            yield Item(row, rank, world_size, part, parts, next_row)
        row = next_row


def has_batches(plan: Plan) -> bool:
    """Whether an epoch has any: it may have no rows, or fewer than a batch and drop them."""
    return plan.num_rows > 0 and (plan.steps.tail != "drop" or plan.num_rows >= plan.global_size)

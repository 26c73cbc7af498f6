"""One run of a plan: batches from where it stands, computed ahead, to the training loop, which counts them.

PlanProgress ── row, loop ──► PlanWorkers ── batches ──► feed: pinned memory, a device ──► the `for` loop
     ▲                                                                                          │
     └──────────────────────────────────────── handed over ─────────────────────────────────────┘
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import StateError
from penstock.loader import Item, LoaderStatistics, Pipeline, has_batches
from penstock.plan import Dataset, Plan
from penstock.pytorch._arguments import LoaderSettings
from penstock.pytorch._feed import OnDevice, make_feed, take
from penstock.pytorch._plan_progress import Loop, PlanProgress
from penstock.pytorch._plan_workers import PlanWorkers
from penstock.pytorch._ranks import check_rank, find_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """What a loader's plan is made from: a plan, or a Penstock dataset with torch's arguments.

    A dataset gives each rank `batch_size` samples, so its plan depends on the number of ranks, which is often
    not known yet when the loader is made: the plan is made again when a loop begins.
    """

    dataset: Plan | Dataset
    batch_size: int = 1
    seed: int | None = None
    drop_last: bool = False
    world_size: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the plan is the same for any number of ranks."""
        return isinstance(self.dataset, Plan) or self.world_size is not None

    def make(self) -> Plan:
        """The plan, for as many ranks as there are now."""
        if isinstance(self.dataset, Plan):
            return self.dataset
        plan = self.dataset.as_plan() if self.seed is None else self._shuffled(self.dataset, self.seed)
        world_size = find_rank()[1] if self.world_size is None else self.world_size
        return plan.batch(self.batch_size * world_size, tail="drop" if self.drop_last else "short")

    def _shuffled(self, dataset: Dataset, seed: int) -> Plan:
        """Everything permuted, as torch does it, unless small samples would have to be read one by one from a disk."""
        return dataset.shuffle(seed=seed, mode="full" if dataset.is_cheap_at_random else "windows")


class PlanRun:
    """Runs a plan ahead of the training loop; what `DataLoader` does when it is given one."""

    def __init__(
        self,
        source: PlanSource,
        settings: LoaderSettings,
        given_rank: tuple[int, int] | None,
        *,
        device: torch.device | None = None,
        pin_memory: bool = False,
        on_device: OnDevice | None = None,
    ) -> None:
        self.source, self.settings = source, settings
        plan = source.make()
        self._workers = PlanWorkers(plan, settings)
        self._progress = PlanProgress(plan, settings)
        self._given_rank = None if given_rank is None else check_rank(*given_rank)
        self._feeding: dict[str, Any] = {"device": device, "pin_memory": pin_memory, "on_device": on_device}

    @property
    def plan(self) -> Plan:
        """What runs."""
        return self._progress.plan

    @property
    def kind(self) -> str:
        return self._workers.kind

    @property
    def num_workers(self) -> int:
        return self._workers.num_workers

    def start_early(self) -> None:
        """Start now, while the program does other things, what the first batch would wait for longest."""
        self._workers.start_early()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches from where the state stands to the end of the epoch."""
        self._update_plan()
        self._progress.skip_unfinished()
        rank, world_size = self._rank
        loop = self._progress.next_loop(world_size)
        if loop.end is None and not has_batches(self.plan):
            raise ValueError(
                f"The plan has no batches ({self.plan.num_rows:,} rows), so epochs=None would wait for one for ever."
            )
        pipeline = self._workers.start(world_size)
        self._progress.running = loop  # before workers begin: a loop in another thread sees that it is over
        self._workers.begin(pipeline, self._progress.row, loop, rank=rank, world_size=world_size)
        return self._iterate(pipeline, loop)

    def __len__(self) -> int:
        """All batches of the running epoch, or of the next: as in torch, also after a resume."""
        num_batches = self.num_batches
        if num_batches is None:
            raise TypeError("This loader never stops: epochs=None.")
        return num_batches

    @property
    def num_batches(self) -> int | None:
        """Its length; None when it never stops."""
        self._update_plan()
        loop = self._progress.running
        return (self._progress.next_loop(self._rank[1]) if loop is None else loop).num_batches

    @property
    def rows_per_rank(self) -> int:
        """Rows that a rank has of a batch, as far as is known now."""
        return max(1, self.plan.global_size // self._rank[1])

    def begin_epoch(self) -> int:
        """The number of the next loop, which frameworks call epoch; the rest of one that was left early is skipped."""
        self._update_plan()
        self._progress.skip_unfinished()
        return self._progress.loop_number

    def iterate_from(self, number: int, epoch: int) -> Iterator[dict[str, Any]]:
        """Batches of the loop that begins in the epoch, from this number on; none before it is computed."""
        part = self._progress.go_to(number, epoch, self._rank[1])
        loop = iter(self)
        for _ in range(part):  # a state is between steps, never between the parts of one
            next(loop)
        return loop

    def item(self, number: int, epoch: int) -> Item:
        """What a batch of a loop that begins in the epoch is computed from."""
        return self._progress.item(number, epoch, *self._rank)

    def state_dict(self) -> dict[str, Any]:
        if not self.settings.in_order:
            raise StateError(
                "With in_order=False no single row says which batches were handed over, so there is no state. "
                "Use in_order=True."
            )
        return self._progress.cursor.state()

    def load_state_dict(self, state: Any) -> None:
        self._progress.load(state)

    def set_epoch(self, epoch: int) -> None:
        self._progress.set_epoch(epoch)

    def set_workers(self, num_workers: int) -> None:
        self._workers.set_workers(num_workers)

    def set_prefetch(self, prefetch: int) -> None:
        self._workers.set_prefetch(prefetch)

    def stats(self) -> LoaderStatistics:
        return self._workers.measure()

    def close(self) -> None:
        self._workers.close()

    def __reduce__(self) -> tuple[Callable[..., PlanRun], tuple[Any, ...]]:
        """A copy, in this process or another, has not begun."""
        make = functools.partial(PlanRun, **self._feeding)
        return make, (self.source, self.settings, self._given_rank)

    def _iterate(self, pipeline: Pipeline, loop: Loop) -> Iterator[dict[str, Any]]:
        if self._progress.is_moved(loop):
            yield from self
            return
        feed = make_feed(pipeline, **self._feeding)
        source = feed or pipeline
        progress, workers = self._progress, self._workers
        replaces_rows = self.plan.replaces_rows
        try:
            while True:
                if progress.running is not loop:
                    raise RuntimeError(
                        "This loop is over: another one was started on the loader, or a state was loaded."
                    )
                found = take(source, "penstock.wait")
                if found is None:
                    break
                progress.hand_over(found[0], loop)
                workers.step(progress.row)
                batch = found[1]
                del found
                if replaces_rows:
                    workers.statistics.num_replaced += batch["num_replaced"]
                yield batch
                del batch
            progress.complete(loop)
        finally:
            if feed is not None:
                feed.close()
            progress.leave(loop)

    @property
    def _rank(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return self._given_rank or find_rank()

    def _update_plan(self) -> None:
        """Make a dataset's plan for the ranks there are now: loaders are often made before ranks know each other."""
        if self.source.is_fixed or self._progress.running is not None:
            return
        plan = self.source.make()
        if plan.global_size != self.plan.global_size:
            self._workers.change_plan(plan)
            self._progress.change_plan(plan)

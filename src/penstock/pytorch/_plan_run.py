"""One run of a plan: where it stands, the loop that is running, and the pipeline behind it."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import StateError
from penstock.loader import (
    Cursor,
    Engine,
    Item,
    LoaderStatistics,
    Pipeline,
    PlanWork,
    has_batches,
    make_engine,
    plan_items,
    start_early,
    steps_per_bundle,
)
from penstock.pytorch._arguments import LoaderSettings
from penstock.pytorch._batches import as_tensors
from penstock.pytorch._device_feed import make_feed
from penstock.pytorch._feed import take
from penstock.pytorch._live_tuning import LiveTuning
from penstock.pytorch._loops import Loops, make_loops
from penstock.pytorch._plan_source import PlanSource
from penstock.pytorch._ranks import check_rank, find_rank
from penstock.service import RemoteEngine, requests_in_flight
from penstock.tuning import OnlineTuner, Setting
from penstock.workers import ServerLease, usable_cpus

_DEPTH = 2
"""Items ahead for each worker: one that it computes, and one that waits for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Loop:
    """One `for` loop over a loader."""

    number: int
    """Which one it is: of epochs, the one that it begins in."""
    end: int | None
    """Its last batch starts before this row."""
    num_batches: int | None
    """Including those that an earlier run handed over."""
    num_parts: int
    """Micro-batches of a full batch."""


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
    ) -> None:
        self.source = source
        self.plan = source.make()
        self.settings = settings
        self.kind, self.num_workers = settings.resolve(self.plan)
        self._prefetch = None if settings.prefetch == "auto" else settings.prefetch
        self._depth = _DEPTH
        self._given_rank = None if given_rank is None else check_rank(*given_rank)
        self._device, self._pin_memory = device, pin_memory
        self._row = 0
        """Absolute number of the next row to hand out."""
        self._statistics = LoaderStatistics()
        self._tuning = self._make_tuning()
        self._pipeline: Pipeline | None = None
        self._engine: Engine | None = None
        self._fork_server: ServerLease | None = None
        """The one that workers will come from, until they do."""
        self._loop: _Loop | None = None
        self._is_unfinished = False
        self._num_steps = 1

    def start_early(self) -> None:
        """Have what takes longest before the first batch begin now, beside what the program does until then."""
        if self.kind == "process" and self.settings.start_method == "forkserver":
            self._fork_server = start_early()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches from where the state stands to the end of the epoch."""
        self._meet_ranks()
        self._leave_unfinished_epoch()
        rank, world_size = self._given_rank or find_rank()
        loop = self._next_loop(world_size)
        if loop.end is None and not has_batches(self.plan):
            raise ValueError(
                f"The plan has no batches ({self.plan.num_rows:,} rows), so epochs=None would wait for one for ever."
            )
        pipeline = self._start()
        self._num_steps = self._steps_per_item(world_size)
        items = plan_items(
            self.plan,
            self._row,
            loop.end,
            rank=rank,
            world_size=world_size,
            num_parts=loop.num_parts,
            num_steps=self._num_steps,
        )
        pipeline.prefetch = self._num_ahead
        self._loop = loop  # first, so that a loop in another thread sees that it is over before it takes a batch
        pipeline.start(items, self._num_steps * loop.num_parts)
        if self._tuning is not None:
            self._tuning.begin(self._num_ahead)
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
        self._meet_ranks()
        if self._loop is not None:
            return self._loop.num_batches
        _, world_size = self._given_rank or find_rank()
        return self._next_loop(world_size).num_batches

    @property
    def rows_per_rank(self) -> int:
        """Rows that a rank has of a batch, as far as can be told now."""
        _, world_size = self._given_rank or find_rank()
        return max(1, self.plan.global_size // world_size)

    def begin_epoch(self) -> int:
        """The number of the next loop, as of an epoch; what is left of one that was left early is skipped."""
        self._meet_ranks()
        self._leave_unfinished_epoch()
        return self._loops.loop_at(self._row)

    def iterate_from(self, number: int, epoch: int) -> Iterator[dict[str, Any]]:
        """Batches from this one of a loop on, which begins in the epoch; none before it is computed."""
        step, part = divmod(number, self._num_parts((self._given_rank or find_rank())[1]))
        if epoch != self._loops.loop_at(self._row) or step != self._loops.steps_before(self._row):
            self._move_to(self._loops.row_of(step, epoch))
        loop = iter(self)
        for _ in range(part):  # a state is between steps, never between the parts of one
            next(loop)
        return loop

    def item(self, number: int, epoch: int) -> Item:
        """What a batch of a loop that begins in the epoch is computed from."""
        rank, world_size = self._given_rank or find_rank()
        num_parts = self._num_parts(world_size)
        step, part = divmod(number, num_parts)
        row = self._loops.row_of(step, epoch)
        return Item(row, rank, world_size, part, self.plan.steps.num_parts(row, num_parts))

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: rows handed over, not rows computed ahead. Under 1 KB.

        Raises:
            StateError: batches do not come in order, so no row says what was handed over.
        """
        if not self.settings.in_order:
            raise StateError(
                "With in_order=False no single row says which batches were handed over, so there is no state. "
                "Use in_order=True."
            )
        return self._cursor.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state stands; batch size, ranks, workers and maps may differ from when it was saved.

        Raises:
            StateError: the state belongs to another order of the data.
        """
        self._move_to(self._cursor.restore(state).row)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the running epoch is not rewound."""
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"set_epoch({epoch!r}): epochs count from 0.")
        loop = self._loop  # its last batch may reach into the next epoch, and one that never ends goes through all
        is_running = loop is not None and (loop.end is None or loop.number == epoch)
        if epoch != self._loops.loop_at(self._row) and not is_running:
            self._move_to(self._loops.row_of(0, epoch))

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on; no batch changes."""
        if type(num_workers) is not int or num_workers < 1:
            raise ValueError(f"num_workers={num_workers!r}; expected an integer of at least 1.")
        if self.kind == "inline":
            raise ValueError(
                "This loader has no workers to change: it was made with num_workers=0 or workers='inline'."
            )
        self._stop_tuning()
        self._change_workers(num_workers)

    def set_prefetch(self, prefetch: int) -> None:
        """Compute more or fewer batches ahead from now on; no batch changes."""
        if type(prefetch) is not int or prefetch < 1:
            raise ValueError(f"prefetch={prefetch!r}; expected an integer of at least 1.")
        self._stop_tuning()
        self._prefetch = prefetch
        if self._pipeline is not None:
            self._change_prefetch(self._pipeline)

    def stats(self) -> LoaderStatistics:
        """What was measured so far."""
        if self._pipeline is not None:
            self._pipeline.look()
        return dataclasses.replace(self._statistics)

    def close(self) -> None:
        """Stop the workers. The next `for` loop starts them again."""
        if self._tuning is not None:
            self._tuning.close()
        pipeline, self._pipeline, self._engine = self._pipeline, None, None
        if pipeline is not None:
            pipeline.close()
            statistics = self._statistics
            statistics.num_workers = statistics.num_buffers = statistics.num_buffers_in_use = 0
        self._give_back_server()

    def __reduce__(self) -> tuple[Callable[..., PlanRun], tuple[Any, ...]]:
        """A copy, in this process or another, has not begun."""
        return _make_run, (self.source, self.settings, self._given_rank, self._device, self._pin_memory)

    def _iterate(self, pipeline: Pipeline, loop: _Loop) -> Iterator[dict[str, Any]]:
        feed = make_feed(pipeline, device=self._device, pin_memory=self._pin_memory)
        source = feed or pipeline
        try:
            while True:
                if self._loop is not loop:
                    raise RuntimeError(
                        "This loop is over: another one was started on the loader, or a state was loaded."
                    )
                found = take(source, "penstock.wait")
                if found is None:
                    break
                self._hand_over(found[0], loop)
                if self._tuning is not None:
                    self._tuning.step()
                batch = found[1]
                del found
                if self.plan.replaces_rows:
                    self._statistics.num_replaced += batch["num_replaced"]
                yield batch
                del batch
            if loop.end is not None:
                self._row = max(self._row, loop.end)
            self._is_unfinished = False
        finally:
            if feed is not None:
                feed.close()
            if self._loop is loop:
                self._loop = None

    def _hand_over(self, item: Item, loop: _Loop) -> None:
        """Count a step's rows when its last part goes to the user."""
        if item.part == item.num_parts - 1 and item.next_row > self._row:
            self._row = item.next_row
        self._is_unfinished = loop.end is None or self._row < loop.end

    def _next_loop(self, world_size: int) -> _Loop:
        row = self._loops.next_loop(self._row) if self._is_unfinished else self._row
        num_parts = self._num_parts(world_size)
        number, end = self._loops.loop_at(row), self._loops.end_after(row)
        if end is None:
            return _Loop(number, None, None, num_parts)
        num_before = self._loops.steps_before(row) * num_parts
        return _Loop(number, end, num_before + self.plan.steps.num_parts_between(row, end, num_parts), num_parts)

    @property
    def _cursor(self) -> Cursor:
        return Cursor(self.plan, self._row)

    @property
    def _loops(self) -> Loops:
        return make_loops(self.plan, epochs=self.settings.epochs, steps=self.settings.steps)

    @property
    def _num_ahead(self) -> int:
        if self._prefetch:
            return self._prefetch
        is_remote = isinstance(self._engine, RemoteEngine)
        num_items = requests_in_flight(self.num_workers) if is_remote else self._depth * self.num_workers
        return max(1, num_items * self._num_steps)

    def _make_tuning(self) -> LiveTuning | None:
        """What finds the settings while it runs, if any is to be found."""
        settings, kind = self.settings, self.kind
        if kind in ("inline", "remote") or not (settings.tunes_workers or settings.tunes_prefetch):
            return None
        tuner = OnlineTuner(
            Setting(self.num_workers, self._depth),
            usable_cpus(),
            tunes_workers=settings.tunes_workers,
            tunes_depth=settings.tunes_prefetch,
        )
        find_run = weakref.ref(self)  # not itself: a loader that is forgotten must end at once, not with a collection

        def apply(setting: Setting) -> int:
            run = find_run()
            return 0 if run is None else run.apply(setting)

        def has_started() -> bool:
            run = find_run()
            engine = None if run is None else run._engine
            return engine is None or engine.num_started() >= engine.num_workers

        return LiveTuning(tuner, self._statistics, kind, apply=apply, has_started=has_started)

    def apply(self, setting: Setting) -> int:
        """Go on with another setting; returns how many batches are ahead then."""
        self._depth = setting.depth
        self._change_workers(setting.num_workers)
        return self._num_ahead

    def _stop_tuning(self) -> None:
        """Somebody says what to use: that is what is used."""
        tuning, self._tuning = self._tuning, None
        if tuning is not None:
            tuning.close()

    def _change_workers(self, num_workers: int) -> None:
        self.num_workers = num_workers
        if self._pipeline is not None and self._engine is not None:
            self._engine.set_workers(num_workers)
            self._change_prefetch(self._pipeline)

    def _change_prefetch(self, pipeline: Pipeline) -> None:
        pipeline.prefetch = self._num_ahead
        if pipeline.is_ours:
            pipeline.refill()

    def _steps_per_item(self, world_size: int) -> int:
        """Steps that a worker computes as one item, so that two items per worker fit into the prefetch."""
        if self.kind == "inline" or not self.settings.in_order:
            return 1
        if isinstance(self._engine, RemoteEngine):
            num_steps = self._engine.steps_per_request(world_size)
        else:
            num_steps = steps_per_bundle(self.plan, world_size)
        if self._prefetch is None:
            return num_steps
        return max(1, min(num_steps, self._prefetch // max(1, 2 * self.num_workers)))

    def _start(self) -> Pipeline:
        if self._pipeline is None or not self._pipeline.is_ours:
            work = PlanWork(self.plan, drops_consumed=self.settings.drop_consumed)
            self._engine = self._make_engine(work)
            self._pipeline = Pipeline(
                self._engine,
                work,
                self._statistics,
                convert=as_tensors,
                prefetch=self._num_ahead,
                in_order=self.settings.in_order,
                timeout=self.settings.timeout,
            )
            self._give_back_server()
        return self._pipeline

    def _give_back_server(self) -> None:
        lease, self._fork_server = self._fork_server, None
        if lease is not None:
            lease.close()

    def _make_engine(self, work: PlanWork) -> Engine:
        settings = self.settings
        if settings.remote is None:
            assert self.kind != "remote"
            return make_engine(work, kind=self.kind, num_workers=self.num_workers, start_method=settings.start_method)
        local = None
        if settings.local_workers:
            kind, _ = dataclasses.replace(settings, remote=None, local_workers=0).resolve_here(self.plan)
            local = make_engine(work, kind=kind, num_workers=settings.local_workers, start_method=settings.start_method)
        engine = RemoteEngine(self.plan, settings.remote, local=local)
        self.num_workers = engine.num_workers
        return engine

    def _num_parts(self, world_size: int) -> int:
        size = self.settings.micro_batch
        if size is None:
            return 1
        share = self.plan.global_size // world_size
        if share % size:
            raise ValueError(f"micro_batch={size} does not divide the {share} rows that each rank has per step.")
        return share // size

    def _meet_ranks(self) -> None:
        """A dataset's plan depends on the number of ranks, and loaders are often made before ranks know each other."""
        if self.source.is_fixed or self._loop is not None:
            return
        plan = self.source.make()
        if plan.global_size != self.plan.global_size:
            cursor = self._cursor
            self.close()
            self.plan = plan
            self._move_to(cursor.row)

    def _leave_unfinished_epoch(self) -> None:
        """After a `break`, the next loop is the next epoch; a warning says how many rows it skips."""
        if not self._is_unfinished:
            return
        self._is_unfinished = False
        end = self._loops.next_loop(self._row)
        left, follows = f"epoch {self._cursor.epoch} early: its", "epoch"
        if self.settings.steps is not None:
            left, follows = "early: its", "loop"
        warnings.warn(
            f"The last loop left {left} last {end - self._row:,} rows are skipped and the next {follows} starts. To "
            "continue where it left off instead, call loader.load_state_dict(loader.state_dict()) before the loop.",
            stacklevel=4,
        )
        self._row = end

    def _move_to(self, row: int) -> None:
        """Go to a row; a running loop is over, and rows that fill no batch are skipped."""
        self._row = self.plan.steps.settle(row) if self.plan.num_rows else row
        self._loop = None
        self._is_unfinished = False


def _make_run(
    source: PlanSource,
    settings: LoaderSettings,
    given_rank: tuple[int, int] | None,
    device: torch.device | None,
    pin_memory: bool,
) -> PlanRun:
    return PlanRun(source, settings, given_rank, device=device, pin_memory=pin_memory)

"""What computes a plan's batches ahead of the training loop: workers of this machine or of servers, and how far ahead.

settings ──► Engine ──► Pipeline ──► the loop             made when a loop first needs them, kept until `close`
               ▲           ▲
               └─ workers ─┴─ prefetch ── set by the user, or by live tuning, while it runs
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from penstock.loader import (
    Engine,
    FetchAhead,
    LoaderStatistics,
    Pipeline,
    PlanWork,
    make_engine,
    plan_items,
    start_early,
    steps_per_bundle,
)
from penstock.plan import Plan
from penstock.pytorch._arguments import LoaderSettings
from penstock.pytorch._batches import as_tensors
from penstock.pytorch._plan_progress import Loop
from penstock.workers import ServerLease

if TYPE_CHECKING:
    from penstock.pytorch._live_tuning import LiveTuning
    from penstock.pytorch._online import Setting
    from penstock.service import RemoteEngine

_DEPTH = 2
"""Items ahead for each worker: one that it computes, and one that waits for it."""


class PlanWorkers:
    """The engine of a plan's run and the pipeline in front of it."""

    def __init__(self, plan: Plan, settings: LoaderSettings) -> None:
        self._plan, self._settings = plan, settings
        self.kind, self.num_workers = settings.resolve(plan)
        self.statistics = LoaderStatistics()
        self._prefetch = None if settings.prefetch == "auto" else settings.prefetch
        self._depth = _DEPTH
        self._num_steps = 1
        """In one item, as a worker computes it."""
        self._tuning = self._make_tuning()
        self._pipeline: Pipeline | None = None
        self._ahead: FetchAhead | None = None
        """What has remote data fetched for the running loop."""
        self._engine: Engine | None = None
        self._remote: RemoteEngine | None = None
        """The engine, if it is that of servers."""
        self._fork_server: ServerLease | None = None
        """The server that workers will come from, leased until they do."""

    def start_early(self) -> None:
        if self.kind == "process" and self._settings.start_method == "forkserver":
            self._fork_server = start_early(self._plan)

    def start(self, world_size: int) -> Pipeline:
        """The pipeline, with its workers; made if there is none, or only that of a parent process."""
        if self._pipeline is None or not self._pipeline.is_ours:
            work = PlanWork(self._plan, drops_consumed=self._settings.drop_consumed)
            self._engine = self._make_engine(work)
            self._pipeline = Pipeline(
                self._engine,
                work,
                self.statistics,
                convert=as_tensors,
                prefetch=self._num_ahead,
                in_order=self._settings.in_order,
                timeout=self._settings.timeout,
            )
            self._give_back_server()
        self._num_steps = self._steps_per_item(world_size)
        return self._pipeline

    def begin(self, pipeline: Pipeline, row: int, loop: Loop, *, rank: int, world_size: int) -> None:
        """Have the batches of a loop computed, from a row on."""
        self._fetch_ahead(row, loop.end, rank, world_size)
        items = plan_items(
            self._plan,
            row,
            loop.end,
            rank=rank,
            world_size=world_size,
            num_parts=loop.num_parts,
            num_steps=self._num_steps,
            num_growing=max(1, self.num_workers),
        )
        pipeline.prefetch = self._num_ahead
        pipeline.start(items, self._num_steps * loop.num_parts)
        if self._tuning is not None:
            self._tuning.begin(self._num_ahead)

    def step(self, row: int) -> None:
        """A batch is about to be handed over, and `row` is the first after it."""
        if self._ahead is not None:
            self._ahead.row = row
        if self._tuning is not None:
            self._tuning.step()

    def _fetch_ahead(self, row: int, end: int | None, rank: int, world_size: int) -> None:
        """Have remote data fetched for a loop, in place of the one before."""
        if self._ahead is not None:
            self._ahead.count(self.statistics)
            self._ahead.close()
            self._ahead = None
        if self.kind != "remote":  # servers fetch for themselves
            self._ahead = FetchAhead.of(
                self._plan, row=row, end=end, rank=rank, world_size=world_size, num_ahead=self._num_ahead
            )

    def set_workers(self, num_workers: int) -> None:
        if type(num_workers) is not int or num_workers < 1:
            raise ValueError(f"num_workers={num_workers!r}; expected an integer of at least 1.")
        if self.kind == "inline":
            raise ValueError(
                "This loader has no workers to change: it was made with num_workers=0 or workers='inline'."
            )
        self._stop_tuning()
        self._change_workers(num_workers)

    def set_prefetch(self, prefetch: int) -> None:
        if type(prefetch) is not int or prefetch < 1:
            raise ValueError(f"prefetch={prefetch!r}; expected an integer of at least 1.")
        self._stop_tuning()
        self._prefetch = prefetch
        self._change_prefetch()

    def apply(self, setting: Setting) -> int:
        self._depth = setting.depth
        self._change_workers(setting.num_workers)
        return self._num_ahead

    def has_started(self) -> bool:
        return self._engine is None or self._engine.num_started() >= self._engine.num_workers

    def measure(self) -> LoaderStatistics:
        """What was measured so far."""
        if self._pipeline is not None:
            self._pipeline.update_statistics()
        if self._ahead is not None:
            self._ahead.count(self.statistics)
        return self.statistics.copy()

    def change_plan(self, plan: Plan) -> None:
        """Stop; the next loop runs a plan with the same functions and other batches."""
        self.close()
        self._plan = plan

    def close(self) -> None:
        """Stop the workers; the next loop starts them again."""
        if self._tuning is not None:
            self._tuning.close()
        if self._ahead is not None:
            self._ahead.count(self.statistics)
            self._ahead.close()
            self._ahead = None
        pipeline, self._pipeline, self._engine, self._remote = self._pipeline, None, None, None
        if pipeline is not None:
            pipeline.close()
            statistics = self.statistics
            statistics.num_workers = statistics.num_buffers = statistics.num_buffers_in_use = 0
        self._give_back_server()

    @property
    def _num_ahead(self) -> int:
        if self._prefetch:
            return self._prefetch
        num_items = self._depth * self.num_workers
        if self._remote is not None:
            from penstock.service import requests_in_flight

            num_items = requests_in_flight(self.num_workers)
        return max(1, num_items * self._num_steps)

    def _steps_per_item(self, world_size: int) -> int:
        """Steps that a worker computes as one item, so that two items per worker fit into the prefetch."""
        if not self._settings.in_order:
            return 1
        if self._remote is not None:
            num_steps = self._remote.steps_per_request(world_size)
        else:
            num_steps = steps_per_bundle(self._plan, world_size)
        if self._prefetch is None:
            return num_steps
        return max(1, min(num_steps, self._prefetch // max(1, 2 * self.num_workers)))

    def _make_tuning(self) -> LiveTuning | None:
        """What tunes the settings while they are used; None if all are given."""
        settings, kind = self._settings, self.kind
        if kind in ("inline", "remote") or not (settings.tunes_workers or settings.tunes_prefetch):
            return None
        from penstock.pytorch._live_tuning import LiveTuning
        from penstock.pytorch._online import Setting

        allowed = {"tunes_workers": settings.tunes_workers, "tunes_depth": settings.tunes_prefetch}
        return LiveTuning(self, self.statistics, kind, Setting(self.num_workers, self._depth), **allowed)

    def _stop_tuning(self) -> None:
        """From now on, what the user sets is used."""
        tuning, self._tuning = self._tuning, None
        if tuning is not None:
            tuning.close()

    def _change_workers(self, num_workers: int) -> None:
        self.num_workers = num_workers
        if self._engine is not None:
            self._engine.set_workers(num_workers)
            self._change_prefetch()

    def _change_prefetch(self) -> None:
        if self._pipeline is not None:
            self._pipeline.prefetch = self._num_ahead
            if self._pipeline.is_ours:
                self._pipeline.refill()

    def _make_engine(self, work: PlanWork) -> Engine:
        settings = self._settings
        if settings.remote is None:
            assert self.kind != "remote"
            return make_engine(work, kind=self.kind, num_workers=self.num_workers, start_method=settings.start_method)
        local = None
        if settings.local_workers:
            kind, _ = dataclasses.replace(settings, remote=None, local_workers=0).resolve_here(self._plan)
            local = make_engine(work, kind=kind, num_workers=settings.local_workers, start_method=settings.start_method)
        from penstock.service import RemoteEngine

        self._remote = RemoteEngine(self._plan, settings.remote, self.statistics, local=local)
        self.num_workers = self._remote.num_workers
        return self._remote

    def _give_back_server(self) -> None:
        lease, self._fork_server = self._fork_server, None
        if lease is not None:
            lease.close()

"""What findings are made from: a recording, its figures, and what was tried. A change that helped becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.doctor._experiment import AS_IS, FEWEST_ROUNDS, HEALTHY_BELOW, LEAST_GAIN, REPLAY, Estimate, Trial
from penstock.doctor._recording import Recording
from penstock.doctor._stages import Stages, measure_stages
from penstock.machine import EventKind
from penstock.report import Finding, format_bytes
from penstock.tuning import name_of as written_options

_WIDE = 1.5
"""An interval that reaches above this does not show that a job is healthy."""
_MANY_OTHERS = 0.25
"""Other programs that use this share of the cores are in the way."""
_DELAYED = 0.2
"""Share of a time that was spent without a core."""
_HARDLY_WAITS = 0.05
"""Share of the time spent waiting, below which that hardly matters."""
_PLENTY = 0.25
"""Share of a step's time: a loader that makes a batch in less has plenty of them."""
_SETTLED_SECONDS = 1.8
_FEWEST_GROWTHS = 4
_LEAST_GROWTH = 0.5e6
"""Bytes per second."""


class Tried(NamedTuple):
    """A change and what it gave."""

    trial: Trial
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script under examination."""

    recording: Recording
    cores: int

    @cached_property
    def stages(self) -> Stages:
        """Where the time goes in the baseline."""
        return measure_stages(self.recording)

    @cached_property
    def loader(self) -> Mapping[str, Any]:
        """The loader that was experimented on."""
        assert self.recording.loader is not None
        return self.recording.loader

    @property
    def options(self) -> Mapping[str, Any]:
        """Its options."""
        options: Mapping[str, Any] = self.loader["options"]
        return options

    @cached_property
    def was_enough_tried(self) -> bool:
        """Whether the experiment ended by itself, or every promising change had enough turns to be evidence."""
        if self.recording.has("done") and not self.recording.has("out-of-time"):
            return True
        most_rounds = max((each.estimate.num_rounds for each in self.tried), default=0)
        return most_rounds >= FEWEST_ROUNDS and self.promising is None

    @cached_property
    def promising(self) -> Tried | None:
        """The change that looked best of those that had too few turns to tell."""
        few = [each for each in self.tried if each.estimate.num_rounds < FEWEST_ROUNDS]
        good = [each for each in few if each.estimate.ratio >= LEAST_GAIN]
        return max(good, key=lambda each: each.estimate.ratio, default=None)

    @cached_property
    def waits_for_data(self) -> bool:
        """Whether a loader that costs nothing would be clearly faster."""
        ceiling = self.recording.ceiling
        is_faster = ceiling is not None and ceiling.ratio >= HEALTHY_BELOW and ceiling.is_above(1.05)
        return is_faster and not self.others_hold_cores and not self.only_shares_processor

    @cached_property
    def only_shares_processor(self) -> bool:
        """Whether it hardly waits, and nothing that was tried helps much.

        Replayed batches are faster even so: caches and memory are then the step's alone, and so is a core that two
        threads share. If the loader could make many times as many batches, the rest of the wait is taking them over.
        """
        stages, workers = self.stages, self.options["num_workers"]
        has_plenty = bool(workers) and stages.making / workers < _PLENTY * stages.training
        hardly_waits = stages.wait_share < (2 * _HARDLY_WAITS if has_plenty else _HARDLY_WAITS)
        return hardly_waits and all(each.estimate.ratio < HEALTHY_BELOW for each in self.helped)

    @property
    def other_cores(self) -> float:
        """How many cores other programs used meanwhile, on average."""
        return float(self.recording.machine.get("other_cores", 0.0))

    @property
    def has_neighbours(self) -> bool:
        """Whether other programs used enough cores to be in the way."""
        return self.other_cores >= _MANY_OTHERS * self.cores

    @cached_property
    def others_hold_cores(self) -> bool:
        """Whether it waits because other programs hold cores, and would keep up with a core whenever it is ready.

        A loader that costs nothing needs no core, so on such a machine it is faster whatever the job does.
        """
        workers, stages = self.options["num_workers"], self.stages
        if not workers or self.recording.whole_epochs or not self.has_neighbours:
            return False
        if stages.wait_share < _HARDLY_WAITS:
            return True
        is_delayed = stages.fetch_delay > _DELAYED * stages.fetch or stages.delay > _DELAYED * stages.step
        fits = workers * (1 - stages.waits_share) <= self.cores
        keeps_up = stages.making / workers < HEALTHY_BELOW * stages.training
        return is_delayed and fits and keeps_up and not stages.is_uneven

    @cached_property
    def is_unclear(self) -> bool:
        """Whether the interval is too wide to say if it waits for data."""
        ceiling = self.recording.ceiling
        if ceiling is None:
            return True
        if self.waits_for_data or self.others_hold_cores or self.only_shares_processor:
            return False
        return ceiling.ratio >= HEALTHY_BELOW or ceiling.ratio + ceiling.gain.error > _WIDE

    @cached_property
    def tried(self) -> list[Tried]:
        """Every change that had a turn."""
        changes = (trial for trial in self.recording.trials if trial not in (AS_IS, REPLAY))
        estimates = ((trial, self.recording.estimate(trial.number)) for trial in changes)
        return [Tried(trial, found) for trial, found in estimates if found is not None]

    @cached_property
    def helped(self) -> list[Tried]:
        """Changes that make it faster beyond their error, the best first."""
        good = [each for each in self.tried if each.estimate.ratio >= LEAST_GAIN and each.estimate.is_above(1.0)]
        return sorted(good, key=lambda each: -each.estimate.ratio)

    def best(self, is_wanted: Callable[[Trial], bool]) -> Tried | None:
        """The best of the changes that helped and are wanted; None if there is none."""
        return next((each for each in self.helped if is_wanted(each.trial)), None)

    def advise(
        self,
        found: Tried,
        *,
        id: str,
        title: str,
        evidence: tuple[str, ...],
        price: str,
        change: str = "",
        link: str = "",
    ) -> Finding:
        """A finding whose change was tried; unless `change` says otherwise, it is the call with the changed options."""
        return Finding(
            id=id,
            title=title,
            evidence=evidence,
            change=change or f"DataLoader(..., {written_options(found.trial.changes)})",
            where=self.loader["where"],
            price=price,
            gain=found.estimate.gain,
            link=link,
        )

    def price_of_prefetch(self, trial: Trial) -> str:
        """What having more batches ready costs."""
        workers = trial.changes.get("num_workers", self.options["num_workers"])
        depth = trial.changes.get("prefetch_factor", self.options["prefetch_factor"] or 2)
        more = max(0, workers * depth - self.loader["prefetched"]) * self.stages.bytes
        return f"up to {format_bytes(more)} of memory for batches" if more else "batches come in another order"

    def price_of_workers(self, trial: Trial) -> str:
        """What more workers cost."""
        more = trial.changes["num_workers"] - self.options["num_workers"]
        return f"memory of {more} more process{'es' if more != 1 else ''}"

    @cached_property
    def worker_growth(self) -> float:
        """Bytes per second by which a worker's own memory keeps growing; 0 when it does not.

        In their first seconds all forked workers copy pages of the interpreter. That ends; copying a dataset goes on.
        """
        events = self.recording.events_as_is(EventKind.MEMORY)
        growths = []
        for worker in np.unique(events["worker"]):
            mine = events[events["worker"] == worker]
            mine = mine[mine["start"] >= mine["start"][0] + 1e9 * _SETTLED_SECONDS]
            seconds, grown = np.diff(mine["start"]) / 1e9, np.diff(mine["value"].astype(np.float64))
            if len(grown) >= _FEWEST_GROWTHS and (grown > _LEAST_GROWTH * seconds).mean() > 0.6:
                growths.append(grown.sum() / seconds.sum())
        return float(np.mean(growths)) if growths else 0.0

    @cached_property
    def worker_memory(self) -> tuple[float, float]:
        """(First, largest) size in bytes of a worker's own memory, averaged over workers."""
        events = self.recording.events_as_is(EventKind.MEMORY)
        if not len(events):
            return 0.0, 0.0
        per_worker = [events[events["worker"] == worker]["value"] for worker in np.unique(events["worker"])]
        return float(np.mean([each[0] for each in per_worker])), float(np.mean([each.max() for each in per_worker]))


def is_smoothing(trial: Trial) -> bool:
    """Whether a trial evens out batches of uneven cost."""
    return any(name in trial.changes for name in ("prefetch_factor", "prefetch", "in_order", "num_workers"))


def is_about_workers(trial: Trial) -> bool:
    """Whether a trial has another number of workers."""
    return "num_workers" in trial.changes and trial.kind == "options"


def percent(share: float) -> str:
    """A share as people write it."""
    return f"{100 * share:.0f} %"

"""What findings are made from: a recording, its figures, and what was tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.diagnosis._experiment import FEWEST_ROUNDS, HEALTHY_BELOW, LEAST_GAIN, Estimate, Trial
from penstock.diagnosis._recording import Recording
from penstock.diagnosis._stages import Stages, measure_stages
from penstock.metrics import EventKind

_WIDE = 1.5
"""An interval that ends above this is no sign of health."""
_MANY_OTHERS = 0.25
"""Share of the cores."""
_DELAYED = 0.2
"""Share of a time that was spent without a core."""
_HARDLY_WAITS = 0.05
"""Share of the time."""
_PLENTY = 0.25
"""Of the time of a step, to make a batch."""
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
        """Where the time goes, as it is."""
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
        """Whether the experiment came to its end, or so far that a change had the turns that are evidence."""
        found = [self.recording.estimate(trial.number) for trial in self.recording.trials[2:]]
        most_rounds = max((each.num_rounds for each in found if each is not None), default=0)
        was_cut_short = any(True for _ in self.recording.of("out-of-time"))
        return not was_cut_short or most_rounds >= FEWEST_ROUNDS

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
        """Processors' worth of time that other programs used meanwhile."""
        return float(self.recording.machine.get("other_cores", 0.0))

    @property
    def has_neighbours(self) -> bool:
        """Whether other programs used so many that they were in the way."""
        return self.other_cores >= _MANY_OTHERS * self.cores

    @cached_property
    def others_hold_cores(self) -> bool:
        """Whether it waits because other programs hold cores, and would keep up with a core whenever it is ready.

        A loader that costs nothing needs none, so that it is faster on such a machine whatever is wrong with the job.
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
        """Whether it cannot be told if it waits for data: the interval is too wide."""
        ceiling = self.recording.ceiling
        if ceiling is None or self.waits_for_data or self.others_hold_cores or self.only_shares_processor:
            return ceiling is None
        return ceiling.ratio >= HEALTHY_BELOW or ceiling.ratio + ceiling.gain.error > _WIDE

    @cached_property
    def helped(self) -> list[Tried]:
        """Changes that make it faster beyond their error, the best first."""
        tried = [
            Tried(trial, found)
            for trial in self.recording.trials[2:]
            if (found := self.recording.estimate(trial.number)) is not None
        ]
        good = [each for each in tried if each.estimate.ratio >= LEAST_GAIN and each.estimate.is_above(1.0)]
        return sorted(good, key=lambda each: -each.estimate.ratio)

    def best(self, is_meant: Callable[[Trial], bool]) -> Tried | None:
        """The best of the changes that are meant."""
        return next((each for each in self.helped if is_meant(each.trial)), None)

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
        """(Bytes of a worker's own at first, and at last)."""
        events = self.recording.events_as_is(EventKind.MEMORY)
        if not len(events):
            return 0.0, 0.0
        per_worker = [events[events["worker"] == worker]["value"] for worker in np.unique(events["worker"])]
        return float(np.mean([each[0] for each in per_worker])), float(np.mean([each.max() for each in per_worker]))

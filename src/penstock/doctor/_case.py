"""What findings are made from: a recording, its figures, and what was tried. A change that helped becomes a finding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.doctor._experiment import AS_IS, FEWEST_ROUNDS, HEALTHY_BELOW, LEAST_GAIN, REPLAY, Trial
from penstock.doctor._recording import Recording
from penstock.doctor._remedies import STARVING, BatchCosts, choose_trials, measure_batch_costs
from penstock.machine import EventKind
from penstock.report import Gain
from penstock.tuning import Comparison

_FEWEST_STEPS = 8
"""Fewer say little about a share of the time."""
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
    comparison: Comparison


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script under examination."""

    recording: Recording
    cores: int
    is_observed: bool = False
    """Whether nothing was to be tried."""

    @cached_property
    def costs(self) -> BatchCosts:
        """Where the time goes in the baseline."""
        return measure_batch_costs(self.recording)

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

    @property
    def num_workers(self) -> int:
        """Its own workers."""
        return int(self.options["num_workers"])

    @cached_property
    def is_finished(self) -> bool:
        """Whether the experiment ended by itself."""
        return self.recording.has("done") and not self.recording.has("out-of-time")

    @cached_property
    def was_enough_tried(self) -> bool:
        """Whether it is known what does not help."""
        most_rounds = max((each.comparison.num_rounds for each in self.tried), default=0)
        return self.promising is None and (self.is_finished or most_rounds >= FEWEST_ROUNDS)

    @cached_property
    def promising(self) -> Tried | None:
        """The change that looked best of those that had too few turns to tell, or turns that differ too much."""
        few = [each for each in self.tried if each.comparison.num_rounds < FEWEST_ROUNDS and not self.is_finished]
        noisy = [each for each in self.tried if each.comparison.num_rounds >= FEWEST_ROUNDS and each not in self.helped]
        good = [each for each in few if each.comparison.ratio >= LEAST_GAIN]
        good += [each for each in noisy if each.comparison.ratio >= HEALTHY_BELOW]
        return max(good, key=lambda each: each.comparison.ratio, default=None)

    @cached_property
    def waits_for_data(self) -> bool:
        """Whether a loader that costs nothing would be clearly faster, or else seems to be, and the clock agrees."""
        ceiling = self.recording.ceiling
        seems_faster = ceiling is None or ceiling.ratio >= HEALTHY_BELOW
        was_measured = ceiling is not None and ceiling.num_rounds >= FEWEST_ROUNDS
        waits_much = self.waits_by_clock and (not was_measured or self.costs.wait_share >= STARVING)
        is_clear = waits_much or (ceiling is not None and ceiling.is_above(1.05))
        return seems_faster and is_clear and not self.others_hold_cores and not self.only_shares_processor

    @property
    def waits_by_clock(self) -> bool:
        """Whether training would be as much faster as no healthy job would, if it did not wait at all."""
        return self.costs.num_steps >= _FEWEST_STEPS and self.costs.wait_share > 1 - 1 / HEALTHY_BELOW

    @property
    def limit(self) -> Gain:
        """The most that a better loader can give: as the replay shows, or without one the clock."""
        ceiling = self.recording.ceiling
        if ceiling is not None and ceiling.gain.error < ceiling.ratio:
            return ceiling.gain
        return Gain(ratio=1 / max(1e-3, 1 - self.costs.wait_share))

    @cached_property
    def only_shares_processor(self) -> bool:
        """Whether it hardly waits, and nothing that was tried helps much.

        Replayed batches are faster even so: caches and memory are then the step's alone, and so is a core that two
        threads share. If the loader could make many times as many batches, the rest of the wait is taking them over.
        """
        costs, workers = self.costs, self.num_workers
        has_plenty = bool(workers) and costs.making / workers < _PLENTY * costs.training
        hardly_waits = costs.wait_share < (2 * _HARDLY_WAITS if has_plenty else _HARDLY_WAITS)
        return hardly_waits and all(each.comparison.ratio < HEALTHY_BELOW for each in self.helped)

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
        workers, costs = self.num_workers, self.costs
        if not workers or self.recording.whole_epochs or not self.has_neighbours:
            return False
        if costs.wait_share < _HARDLY_WAITS:
            return True
        is_delayed = costs.fetch_delay > _DELAYED * costs.fetch or costs.delay > _DELAYED * costs.step
        fits = workers * (1 - costs.waits_share) <= self.cores
        keeps_up = costs.making / workers < HEALTHY_BELOW * costs.training
        return is_delayed and fits and keeps_up and not costs.is_uneven

    @cached_property
    def is_unclear(self) -> bool:
        """Whether it cannot be said if it waits for data.

        A job is healthy if the whole interval of the ceiling is below the border; or if the ceiling is, its interval is
        not very wide, and the clock agrees.
        """
        ceiling = self.recording.ceiling
        if self.waits_for_data or self.others_hold_cores or self.only_shares_processor:
            return False
        if ceiling is None or ceiling.ratio >= HEALTHY_BELOW:
            return True
        upper = ceiling.ratio + ceiling.gain.error
        return upper > HEALTHY_BELOW and (upper > _WIDE or self.waits_by_clock)

    @cached_property
    def untried(self) -> list[Trial]:
        """Changes that may help and had too few turns to tell, or none; the most promising first."""
        trials = choose_trials(
            self.recording, self.recording.turns, whole_epochs=self.recording.whole_epochs, cores=self.cores
        )
        known = {each.trial.name for each in self.tried}
        promising = [] if self.promising is None else [self.promising.trial]
        return promising + [trial for trial in trials if trial.name not in known]

    @cached_property
    def tried(self) -> list[Tried]:
        """Every change that had a turn."""
        changes = (trial for trial in self.recording.trials if trial not in (AS_IS, REPLAY))
        estimates = ((trial, self.recording.gain_of(trial.number)) for trial in changes)
        return [Tried(trial, found) for trial, found in estimates if found is not None]

    @cached_property
    def helped(self) -> list[Tried]:
        """Changes that make it faster beyond their error, the best first."""
        good = [each for each in self.tried if each.comparison.ratio >= LEAST_GAIN and each.comparison.is_above(1.0)]
        return sorted(good, key=lambda each: -each.comparison.ratio)

    def best(self, is_wanted: Callable[[Trial], bool]) -> Tried | None:
        """The best of the changes that helped and are wanted; None if there is none."""
        return next((each for each in self.helped if is_wanted(each.trial)), None)

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


def percent(share: float) -> str:
    """A share as people write it."""
    return f"{100 * share:.0f} %"

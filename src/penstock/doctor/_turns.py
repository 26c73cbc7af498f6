"""Turns: which comes next, how long it lasts, how fast the script is in it.

    Leader       on rank 0: sends each result to `experiment`, announces the next trial on the board
    TurnClocks   make the clock of a turn, from what earlier turns took
    TurnClock    measures one turn: time from one batch handed over to the next, and samples trained on

How many steps a turn has, and how many before them are not counted, is fixed before it begins. A turn that ended when
its time is up would mostly end during a long step, such as the wait for a slow batch, and the next one would begin
behind it: jobs whose batches differ seemed a fifth slower than they are.

Between turns workers fill their queue. A loader that is slower than training then lives on the queue for a while, and
seems to keep up: as long as the queue runs down, steps are warm-up, not measured.
"""

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from penstock.doctor._experiment import AS_IS, REPLAY, Trial, TurnResult, affordable_trials, experiment
from penstock.doctor._loaders import ScriptLoader
from penstock.doctor._recording import Recorder, RunSettings, read_recording
from penstock.doctor._remedies import FIRST_NUMBER, choose_likeliest, choose_trials
from penstock.doctor._stopping import Board, Notice, Ranks
from penstock.machine import usable_cpus

_ENOUGH_STEPS, _MOST_STEPS, _MOST_WARM_UP = 8, 4096, 64
_FEWEST_STEPS = 3
"""Of a turn that takes longer than it may."""
_LONG = 4
"""A turn that takes this many times as long as it should ends after a few steps."""
_FEWEST_TURNS = 10
"""A turn takes no more of the time than that this many fit in, unless its first few steps do."""
_LONGEST_TURN = 4.0
"""Seconds that a turn may take so that several of the slowest batches are in it."""
_RUNS_DOWN = 0.12
"""A queue that loses more batches than this for each one handed over is running down, not fluctuating."""
_MOST_LOOKS = 40
"""At the queue, in a turn: each takes 15 µs if caches are cold."""
_MOST_REPEATS = 3
_EMPTY_STEPS = 3
"""After this many steps in a row with an empty queue, nothing is left of what was prefetched in the pause."""


class TurnClock:
    """Measures one turn. Times are in nanoseconds, without what the doctor itself used."""

    def __init__(self, trial: int, *, warm_up: int, steps: int, longest_seconds: float) -> None:
        self.trial = trial
        self._warm_up, self._steps, self._longest_seconds = warm_up, steps, longest_seconds
        self._look_every = max(1, steps // _MOST_LOOKS)
        self.restart()

    def restart(self) -> None:
        """Begin again: what was measured cannot be compared."""
        self._num_warm = self._num_repeats = self._num_empty = 0
        self._left_at: int | None = None
        self._rows_in_hand = 0
        self._clear()

    def handed_over(
        self, asked_at: int, now: int, rows: int, *, is_disturbed: bool, num_ready: Callable[[], float]
    ) -> None:
        """A batch of `rows` samples was handed over, and `num_ready()` more batches are ready; NaN if that is unknown.

        A disturbed step, with a validation in it, does not count.
        """
        if self._left_at is not None and self._num_warm >= self._warm_up and not is_disturbed:
            self._count(self._rows_in_hand, 1, now - self._left_at, now - asked_at)
            if self._num_steps % self._look_every == 0:
                self._ready.append(num_ready())
        elif self._num_warm < self._warm_up:
            self._end_warm_up_if_empty(num_ready())
        self._num_warm += 1
        self._left_at, self._rows_in_hand = now, rows
        if self.is_over and self._num_repeats < _MOST_REPEATS and self._runs_down():
            self._num_repeats += 1
            self._clear()

    def epoch(self, rows: int, steps: int, nanoseconds: int, waited: int) -> None:
        """A whole epoch has passed."""
        if self._num_warm >= self._warm_up:
            self._count(rows, steps, nanoseconds, waited)
        self._num_warm += 1

    @property
    def is_over(self) -> bool:
        """Whether enough was measured: all steps, or a few long ones."""
        is_late = self._seconds > self._longest_seconds and self._num_steps >= _FEWEST_STEPS
        return is_late or self._num_steps >= self._steps

    @property
    def result(self) -> TurnResult:
        """What was measured so far."""
        return TurnResult(self.trial, self._rows, self._num_steps, self._seconds, self._wait)

    def _end_warm_up_if_empty(self, ready: float) -> None:
        self._num_empty = self._num_empty + 1 if ready <= 1 else 0
        if self._num_empty >= _EMPTY_STEPS:
            self._num_warm = self._warm_up

    def _runs_down(self) -> bool:
        """Whether the queue was much fuller in the first third than in the last, at its fullest.

        Behind a slow batch, and before the next one, the queue of a job whose batches differ is full again.
        """
        if not self._ready:
            return False
        third = max(1, len(self._ready) // 3)
        fell = max(self._ready[:third]) - max(self._ready[-third:])
        return fell > max(1, _RUNS_DOWN * (self._num_steps - self._num_steps // 3))

    def _clear(self) -> None:
        self._rows, self._num_steps, self._seconds, self._wait = 0.0, 0, 0.0, 0.0
        self._ready: list[float] = []

    def _count(self, rows: float, steps: int, nanoseconds: int, waited: int) -> None:
        self._rows += rows
        self._num_steps += steps
        self._seconds += nanoseconds / 1e9
        self._wait += waited / 1e9


class TurnClocks:
    """Makes the clock of each turn.

    Args:
        step_seconds: Of the baseline.
        turn_seconds: How long a turn should take.
        slowest: Seconds to make one of the slowest batches.
        seconds: How long the experiment may take.
    """

    def __init__(self, *, step_seconds: float, turn_seconds: float, slowest: float, seconds: float = math.inf) -> None:
        self._seconds = max(turn_seconds, min(_LONGEST_TURN, 3 * slowest))
        self._longest_seconds = min(_LONG * self._seconds, max(turn_seconds, seconds / _FEWEST_TURNS))
        self._slowest = slowest
        self._paces = {AS_IS.number: step_seconds}
        """Seconds of a step, of each trial that had a turn."""

    def make(self, trial: Trial, *, warm_up: int, multiple_of: int = 1) -> TurnClock:
        """The clock of a turn whose first `warm_up` steps, or epochs, do not count."""
        steps = steps_within(self._seconds, self._pace_of(trial), multiple_of=multiple_of)
        return TurnClock(trial.number, warm_up=warm_up, steps=steps, longest_seconds=self._longest_seconds)

    def add(self, result: TurnResult) -> None:
        """A turn was measured."""
        self._paces[result.trial] = result.seconds / result.steps

    def warm_up_steps(self, trial: Trial, prefetched: int) -> int:
        """Steps that do not count, of a loader that may have `prefetched` batches ready."""
        if trial is REPLAY:
            return 2
        steps = warm_up_steps(prefetched, slowest=self._slowest, pace=min(self._paces.values()))
        return steps if trial.number in self._paces else 2 * steps  # memory of a new loader was never used before

    def fits_twice(self, epoch_steps: int | None, prefetched: int) -> bool:
        """Whether an epoch has room for two turns. Shorter ones are taken whole, so that starting workers counts."""
        pace = self._paces[AS_IS.number]
        warm_up = warm_up_steps(prefetched, slowest=self._slowest, pace=pace)
        return epoch_steps is None or epoch_steps >= 2 * (steps_within(self._seconds, pace) + warm_up)

    def _pace_of(self, trial: Trial) -> float:
        """Seconds of a step when it last had a turn; before its first, between the baseline's and the quickest."""
        as_is = self._paces[AS_IS.number]
        return self._paces.get(trial.number, math.sqrt(as_is * min(self._paces.values())))


def steps_within(seconds: float, pace: float, *, multiple_of: int = 1) -> int:
    """How many steps of `pace` seconds to count, to measure for `seconds`; at least a few, and not too many.

    What the doctor does for each step is not in its pace: a turn of a million steps that do nothing would take minutes.
    """
    steps = min(_MOST_STEPS, max(_ENOUGH_STEPS, math.ceil(seconds / max(pace, 1e-6))))
    return -(-steps // multiple_of) * multiple_of


def warm_up_steps(prefetched: int, *, slowest: float, pace: float) -> int:
    """Steps that are not counted: until batches prefetched before are used up, and some worker may be at a slow one.

    Where nothing is prefetched, each step is like the next.
    """
    if not prefetched:
        return 2
    return min(_MOST_WARM_UP, max(2, prefetched + 1, math.ceil(slowest / max(pace, 1e-6))))


class Leader:
    """Decides for all ranks which trial is next, and when they stop. Only rank 0 has one."""

    def __init__(
        self,
        examined: ScriptLoader,
        log: Recorder,
        board: Board,
        ranks: Ranks,
        settings: RunSettings,
        whole_epochs: bool,
    ) -> None:
        self._examined, self._log, self._board, self._ranks, self._settings = examined, log, board, ranks, settings
        self._whole_epochs, self._was_restarted = whole_epochs, False
        self._cores = max(1, usable_cpus() // ranks.world_size)
        self._num_notices = 0
        self._began_at = time.monotonic()
        self._num_known = 0
        """Turns of earlier runs of the script."""
        self._plan: Generator[Trial, TurnResult | None, None] | None = self._new_plan()
        self._continue(self._plan)

    @property
    def is_done(self) -> bool:
        """Whether no turn follows."""
        return self._plan is None

    def _continue(self, plan: Generator[Trial, TurnResult | None, None]) -> None:
        """Announce the first turn that no earlier run of the script has measured."""
        recording = read_recording(self._log.folder)
        failed = {each["trial"] for each in recording.of("failed")}
        left = deque(recording.turns)
        try:
            trial = next(plan)
            while trial.number in failed or (left and left[0].trial == trial.number):
                result = None if trial.number in failed else left.popleft()
                self._num_known += result is not None
                trial = plan.send(result)
            self._announce(trial)
        except StopIteration:
            self.finish()

    def next_turn(self, result: TurnResult | None) -> None:
        """Announce the turn after one that gave `result`, or could not be taken."""
        if self._plan is None:
            return
        if self._is_out_of_time():
            self._log.note("out-of-time")
            self.finish()
            return
        try:
            self._announce(self._plan.send(result))
        except StopIteration:
            self.finish()

    def take_whole_epochs(self) -> bool:
        """Begin the experiment again, with turns of whole epochs; only once."""
        if self._was_restarted or self._plan is None:
            return False
        self._was_restarted = True
        if self._examined.steps_of_last_epoch is None:
            return False
        self._whole_epochs = True
        self._log.note("restart", whole_epochs=True)
        self._plan = self._new_plan()
        self._announce(next(self._plan))
        return True

    def finish_if_late(self, seconds: float) -> None:
        """Finish if the time for turns ended this long ago."""
        if time.monotonic() - self._began_at > self._settings["seconds"] + seconds:
            self._log.note("out-of-time")
            self.finish(now=True)

    def finish(self, *, now: bool = False) -> None:
        """Let the script run on as it is, or stop it on all ranks at the same step."""
        steps, is_full = self._examined.num_steps, self._settings["full"]
        self._plan = None
        self._log.note("done", step=steps, full=is_full)
        stops_at = 0 if is_full else steps + (self._ranks.margin or (0 if now else 1))
        self._num_notices += 1
        self._board.write(Notice(AS_IS.number, steps, False, stops_at, self._num_notices))

    def _new_plan(self) -> Generator[Trial, TurnResult | None, None]:
        if self._settings["observe"]:
            return _observe()
        recording = read_recording(self._log.folder)
        likeliest = recording.likeliest
        if likeliest is None and not recording.turns:
            likeliest = choose_likeliest(recording, whole_epochs=self._whole_epochs, cores=self._cores)
            self._tell([] if likeliest is None else [likeliest], is_likeliest=True)
        return experiment(functools.partial(self._choose, likeliest), likeliest)

    def _choose(self, likeliest: Trial | None, turns: Sequence[TurnResult]) -> list[Trial]:
        """The trials that fit into the remaining time."""
        recording = read_recording(self._log.folder)
        if known := [trial for trial in recording.chosen if trial != likeliest]:
            return known
        trials = choose_trials(recording, turns, whole_epochs=self._whole_epochs, cores=self._cores)
        if likeliest is not None:
            others = (trial for trial in trials if trial.name != likeliest.name)
            trials = [replace(trial, number=number) for number, trial in enumerate(others, FIRST_NUMBER + 1)]
        used = time.monotonic() - self._began_at
        time_left = self._settings["seconds"] - used
        trials = trials[: affordable_trials(time_left / (used / max(1, len(turns) - self._num_known)))]
        self._tell(trials)
        return trials

    def _tell(self, trials: list[Trial], *, is_likeliest: bool = False) -> None:
        for trial in trials:
            fields = {"name": trial.name, "kind": trial.kind, "changes": dict(trial.changes)}
            self._log.note("trial", trial=trial.number, **fields, likeliest=is_likeliest)

    def _is_out_of_time(self) -> bool:
        most_steps = self._settings["steps"]
        out_of_steps = most_steps is not None and self._examined.num_steps >= most_steps
        return out_of_steps or time.monotonic() - self._began_at > self._settings["seconds"]

    def _announce(self, trial: Trial) -> None:
        self._num_notices += 1
        begins_at = self._examined.num_steps + self._ranks.margin
        self._board.write(Notice(trial.number, begins_at, self._whole_epochs, 0, self._num_notices))


def _observe() -> Generator[Trial, TurnResult | None, None]:
    """Every turn is the baseline."""
    while True:
        yield AS_IS

"""The turns of an experiment inside one training process: whose it is, how long it lasts, what it showed.

Rank 0 asks `experiment` whose turn is next and puts it on the board; every rank follows at the same step. A turn is
some steps in the middle of an epoch, or whole epochs where these are short.

    count, end_epoch            the clock of a turn is over ── result ──► experiment ── next trial ──► the board
                                                                                                         │ some steps
    before_step, begin_epoch    pause the trial that had its turn, enter the next, start a clock ◄───────┘ later
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Generator, Sequence

from penstock.doctor._board import NEVER, Board, Notice, Ranks
from penstock.doctor._experiment import (
    AS_IS,
    Trial,
    TurnLength,
    TurnResult,
    affordable_trials,
    experiment,
    steps_to_settle,
    steps_within,
    turn_length,
)
from penstock.doctor._recorder import Recorder, RunSettings
from penstock.doctor._recording import read_recording
from penstock.doctor._remedies import choose_trials
from penstock.doctor._stages import measure_stages
from penstock.doctor._training_loop import TrainingLoop
from penstock.doctor._trials import Trials, group_size, prefetched_by
from penstock.doctor._turn_clock import TurnClock
from penstock.doctor._watched import Watched
from penstock.machine import usable_cpus

_MOST_INTERRUPTIONS = 2
_LONGEST_TURN = 4.0
"""Seconds that a turn may take so that several of the slowest batches are in it."""
_LONG = 4
"""A turn that takes this many times as long as it should ends after a few steps."""
_GONE_SECONDS = 10


class Turns:
    """Turns of the loop over one loader, the primary one, starting at the step at which this is made."""

    def __init__(self, primary: Watched, *, log: Recorder, board: Board, ranks: Ranks, settings: RunSettings) -> None:
        self.primary = primary
        self.trials = Trials(log)
        self.is_done = False
        self._log, self._board, self._ranks, self._settings = log, board, ranks, settings
        self._slowest = measure_stages(read_recording(log.folder)).slowest_tenth
        self._length = self._measure_length()
        self._paces = {AS_IS.number: primary.step_seconds}
        """Seconds of a step, of each trial that had a turn."""
        self._plan: Generator[Trial, TurnResult | None, None] | None = None
        self._loop: weakref.ref[TrainingLoop] | None = None
        self._clock: TurnClock | None = None
        self._num_turns = self._turn_seen = self._num_interruptions = self._off_clock = 0
        self._was_restarted = False
        """Whether the experiment began again with whole epochs, which happens once."""
        self._is_between_turns = False
        """Whether a turn is over, and the next one is announced for a later step."""
        self._epoch_began_at = time.perf_counter_ns()
        self._began_at = time.monotonic()

    def begin(self) -> None:
        """Announce the first turn, on the rank that decides."""
        if self._ranks.is_first:
            self._plan = self._new_plan()
            self._announce(next(self._plan))

    # Called by the conductor.

    @property
    def whole_epochs(self) -> bool:
        """Whether turns are whole epochs."""
        return self._length.whole_epochs

    @property
    def current_trial(self) -> Trial:
        """The trial that has its turn."""
        return AS_IS if self._clock is None else self.trials.find(self._clock.trial)

    def exclude(self, nanoseconds: int) -> None:
        """Leave out time that the doctor itself used: it does not count towards any turn."""
        self._off_clock += nanoseconds

    def before_step(self, loop: TrainingLoop) -> None:
        """The primary loop asks for a batch."""
        if not self.is_done and self._board.read().turn != self._turn_seen:
            begin = time.perf_counter_ns()
            self._follow_board(loop, is_new_epoch=False)
            self.exclude(time.perf_counter_ns() - begin)

    def count(self, loop: TrainingLoop, rows: int, begin: int, end: int, *, is_disturbed: bool) -> None:
        """The primary loop got its batch."""
        self.primary.num_steps += 1
        clock = self._clock
        if self.is_done or clock is None or self.whole_epochs or self._is_between_turns:
            return
        off = self._off_clock
        asked = end - off if loop.trial.kind == "replay" else begin - off
        clock.handed_over(asked, end - off, rows, is_disturbed=is_disturbed, num_ready=loop.num_ready)
        if clock.is_over and self._plan is not None:
            self._finish_turn()

    def begin_epoch(self, loop: TrainingLoop) -> None:
        """The script begins to iterate over the primary loader."""
        previous = None if self._loop is None else self._loop()
        if previous is not None and previous.num_handed_over:
            self.end_epoch(previous)  # the script left the loop before its end
        self._loop = weakref.ref(loop)
        self._follow_board(loop, is_new_epoch=True)

    def end_epoch(self, loop: TrainingLoop) -> None:
        """The primary loop came to its end."""
        now, clock = time.perf_counter_ns(), self._clock
        self._loop = None
        if clock is not None and not self.is_done and not self._is_between_turns:
            if self.whole_epochs:
                off, self._off_clock = self._off_clock, 0
                clock.epoch(loop.rows, loop.num_handed_over, now - self._epoch_began_at - off, loop.waited)
                if clock.is_over and self._plan is not None:
                    self._finish_turn()
            else:
                self._interrupt()
        self._epoch_began_at = now

    def ran_out(self, loop: TrainingLoop) -> None:
        """A trial's source has no more batches in this epoch; the rest come from the script's own loader."""
        if self._clock is not None and not self.whole_epochs:
            self._clock.restart()
        length = loop.watched.length
        if self.whole_epochs and (length is None or loop.num_handed_over >= length):
            raise StopIteration
        loop.trial = AS_IS

    def failed(self, loop: TrainingLoop, error: Exception) -> None:
        """A trial does not work here; the script goes on with its own loader."""
        trial = loop.trial
        self._log.note("failed", trial=trial.number, reason=f"{type(error).__name__}: {error}"[:500])
        self.trials.drop(loop, trial)
        if self._plan is not None:
            self._next_turn(None)

    def finish_if_gone(self, watched: Watched) -> None:
        """Time is up, and the script no longer uses the loader that was looked at."""
        is_late = time.monotonic() - self._began_at > self._settings["seconds"] + _GONE_SECONDS
        if is_late and self._plan is not None and self.primary is not watched:
            self._finish(now=True)

    def is_time_to_stop(self) -> bool:
        """Whether the step is reached at which all ranks stop."""
        return self.primary.num_steps >= self._board.read().stops_at

    # Lengths and choices.

    def _measure_length(self) -> TurnLength:
        primary = self.primary
        return turn_length(
            step_seconds=primary.step_seconds,
            turn_seconds=max(self._settings["turn_seconds"], min(_LONGEST_TURN, 3 * self._slowest)),
            settle=steps_to_settle(primary.prefetched, slowest=self._slowest, pace=primary.step_seconds),
            epoch_steps=primary.steps_of_last_epoch if primary.num_epochs else primary.length,
        )

    def _new_plan(self) -> Generator[Trial, TurnResult | None, None]:
        return _observe() if self._settings["observe"] else experiment(self._choose)

    def _choose(self, turns: Sequence[TurnResult]) -> list[Trial]:
        """What to try, no more of it than there is time for."""
        cores = max(1, usable_cpus() // self._ranks.world_size)
        recording = read_recording(self._log.folder)
        trials = choose_trials(recording, turns, whole_epochs=self.whole_epochs, cores=cores)
        used = time.monotonic() - self._began_at
        time_left = self._settings["seconds"] - used
        trials = trials[: affordable_trials(time_left / (used / max(1, len(turns))))]
        self.trials.add(trials)
        return trials

    # One turn after the other.

    def _interrupt(self) -> None:
        """An epoch ended in the middle of a turn: epochs are shorter than they seemed, or this is the odd one."""
        assert self._clock is not None
        self._clock.restart()
        self._num_interruptions += 1
        if self._num_interruptions > _MOST_INTERRUPTIONS and not self._was_restarted and self._plan is not None:
            self._was_restarted = True
            if self.primary.steps_of_last_epoch is not None:
                self._length = self._length._replace(whole_epochs=True)
                self._log.note("restart", whole_epochs=True)
                self._plan = self._new_plan()
                self._announce(next(self._plan))

    def _finish_turn(self) -> None:
        assert self._clock is not None
        result = self._clock.result
        self._num_interruptions = 0
        self._paces[result.trial] = result.seconds / result.steps
        self._log.note("turn", **result._asdict(), step=self.primary.num_steps)
        self._next_turn(result)

    def _next_turn(self, result: TurnResult | None) -> None:
        assert self._plan is not None
        begin = time.perf_counter_ns()
        try:
            if self._is_out_of_time():
                self._log.note("out-of-time")
                raise StopIteration
            self._announce(self._plan.send(result))
        except StopIteration:
            self._finish()
        self.exclude(time.perf_counter_ns() - begin)

    def _is_out_of_time(self) -> bool:
        most_steps = self._settings["steps"]
        out_of_steps = most_steps is not None and self.primary.num_steps >= most_steps
        return out_of_steps or time.monotonic() - self._began_at > self._settings["seconds"]

    def _announce(self, trial: Trial) -> None:
        self._num_turns += 1
        self._is_between_turns = True
        begins_at = self.primary.num_steps + self._ranks.margin
        self._board.write(Notice(trial.number, begins_at, self.whole_epochs, 0, self._num_turns))

    def _finish(self, *, now: bool = False) -> None:
        """All was tried."""
        steps, is_full = self.primary.num_steps, self._settings["full"]
        self._plan = None
        self._log.note("done", step=steps, full=is_full)
        stops_at = 0 if is_full else steps + (self._ranks.margin or (0 if now else 1))
        self._num_turns += 1
        self._board.write(Notice(AS_IS.number, steps, False, stops_at, self._num_turns))

    def _follow_board(self, loop: TrainingLoop, *, is_new_epoch: bool) -> None:
        notice = self._board.read()
        is_early = self.primary.num_steps < notice.begins_at or (notice.whole_epochs and not is_new_epoch)
        if notice.turn == self._turn_seen or is_early:
            if is_new_epoch and self._clock is not None:
                self._enter(loop, self.current_trial)
            return
        self._turn_seen, self._is_between_turns = notice.turn, False
        if notice.stops_at != NEVER or (self._plan is None and self._ranks.is_first):
            self._end(loop)
        else:
            self._begin_turn(loop, notice)

    def _begin_turn(self, loop: TrainingLoop, notice: Notice) -> None:
        trial, before = self.trials.find(notice.trial), self.current_trial if self._clock is not None else None
        self._length = self._length._replace(whole_epochs=notice.whole_epochs)
        goes_on = trial is before  # as when it is only observed: no pause in which queues would fill
        if before is not None and not goes_on:
            self.trials.pause(loop, before, whole_epochs=self.whole_epochs)
        self._clock = TurnClock(
            trial.number,
            settle=0 if goes_on else self._steps_to_settle(trial),
            steps=steps_within(self._length.seconds, self._pace_of(trial), multiple_of=group_size(trial)),
            longest_seconds=_LONG * self._length.seconds,
        )
        self._enter(loop, trial)

    def _end(self, loop: TrainingLoop) -> None:
        self._enter(loop, AS_IS)
        self.is_done, self._clock = True, None
        self.trials.close()

    def _enter(self, loop: TrainingLoop, trial: Trial) -> None:
        try:
            self.trials.enter(loop, trial, whole_epochs=self.whole_epochs)
        except Exception as error:  # noqa: BLE001 - what cannot be built cannot be tried; the script goes on
            loop.trial = trial
            self.failed(loop, error)

    def _steps_to_settle(self, trial: Trial) -> int:
        """Steps, or epochs, of a turn that do not count."""
        if self.whole_epochs:
            keeps = trial.changes.get("persistent_workers", getattr(self.primary.loader, "persistent_workers", False))
            return int(bool(keeps) and trial.kind != "replay" and not self.trials.keeps_loader_of(trial))
        if trial.kind == "replay":
            return 2
        prefetched = prefetched_by(trial, self.primary) if trial.changes else self.primary.prefetched
        settle = steps_to_settle(prefetched, slowest=self._slowest, pace=min(self._paces.values()))
        return settle if trial.number in self._paces else 2 * settle  # memory of a new loader was never used before

    def _pace_of(self, trial: Trial) -> float:
        """Seconds of a step when it last had a turn; before its first, between the baseline's and the quickest."""
        as_is = self._paces[AS_IS.number]
        return self._paces.get(trial.number, math.sqrt(as_is * min(self._paces.values())))


def _observe() -> Generator[Trial, TurnResult | None, None]:
    """Every turn is the baseline."""
    while True:
        yield AS_IS

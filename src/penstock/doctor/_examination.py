"""The examination of a training process: which turn runs, what it takes, when it ends.

    look      some steps of the baseline, of whichever loop trains
    turns     of the loop that is waited for most: each begins at a step, or an epoch, that the board announces
    stop      an exception from `next()`, on all ranks at the same step; or, with `--full`, the script runs on

A loop of the script asks `Examination.next_batch` for each batch. From there, in this order: leave if it is time;
begin the turn that the board announces; take a batch from the supply of the trial that runs; record the step; let the
clock of the turn count it. When the clock is over, the leader, on rank 0, announces the next turn.
"""

import contextlib
import functools
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from penstock.doctor._experiment import AS_IS, REPLAY, Trial
from penstock.doctor._loaders import Look, ScriptLoader, ScriptLoop, go_together
from penstock.doctor._recording import (
    SETTINGS,
    Recorder,
    RunSettings,
    StepRecorder,
    name_process,
    read_recording,
    read_trials,
)
from penstock.doctor._remedies import measure_batch_costs
from penstock.doctor._stopping import NEVER, Board, Exit, Notice, TrainingWithoutLoader, find_ranks
from penstock.doctor._supplies import GroupedSupply, rows_of
from penstock.doctor._trial_loaders import TrialLoaders, group_size, prefetched_by
from penstock.doctor._turns import Leader, TurnClock, TurnClocks
from penstock.machine import EventKind

_CHECK_EVERY_SECONDS = 1.0
_LATE_SECONDS = 10
_MOST_INTERRUPTIONS = 2


class Examination:
    """Examines one training process."""

    def __init__(self, log: Recorder) -> None:
        self._log, self._steps = log, StepRecorder(log)
        self._settings: RunSettings = json.loads((log.folder / SETTINGS).read_text())
        self._ranks = find_ranks()
        name = "board" if self._ranks.world_size > 1 else f"board-{os.getpid()}"
        self._board, self._board_without_loader = Board(log.folder / name), Board(log.folder / f"{name}-unfed")
        self._look = Look(log, self._ranks.rank)
        self._num_batches = 0
        """Batches to train on, from any loop."""
        self._without_loader: TrainingWithoutLoader | None = None
        # Of the loop that is examined, once it is known:
        self._examined: ScriptLoader | None = None
        self._loop: weakref.ref[ScriptLoop] | None = None
        """Over the examined loader, in this epoch."""
        self._leader: Leader | None = None
        self._num_foreign = 0
        """Batches of other loops since the last one of the examined one."""
        # Of the turn that runs:
        self._trial: Trial | None = None
        self._turn_clocks: TurnClocks
        self._clock: TurnClock | None = None
        """None while nothing is measured: before the first turn, and until the next one begins."""
        self._whole_epochs = False
        self._notice_seen = self._num_interruptions = 0
        self._epoch_began_at = self._off_clock = 0
        """Nanoseconds; what the doctor itself used does not count towards any turn."""
        self._known_trials = {AS_IS.number: AS_IS, REPLAY.number: REPLAY}
        self._trial_loaders = TrialLoaders()
        # Of the end:
        self._is_over = False
        self._exit: Exit | None = None
        self._doctor = self._find_doctor()
        self._check_due_at = time.monotonic() + _CHECK_EVERY_SECONDS

    # What the script does: called by the hooks and by loops.

    def start_loop(self, loader: ScriptLoader, make_own: Callable[[], Iterator[Any]]) -> ScriptLoop:
        """A script begins to iterate over a loader."""
        self._check_stop(loader)
        self._look.begin_epoch(loader)
        loop = ScriptLoop(self.next_batch, loader, functools.partial(self._start_own, loader, make_own))
        if loader is self._examined:
            previous = None if self._loop is None else self._loop()
            if previous is not None and previous.num_steps:
                self._end_examined_epoch(previous)  # the script left the loop before its end
            self._loop = weakref.ref(loop)
            self._follow_board(loop, is_new_epoch=True)
        if loop.trial is AS_IS:
            loop.own()
        return loop

    def _start_own(self, loader: ScriptLoader, make_own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        begin, length = time.perf_counter_ns(), -1 if loader.length is None else loader.length
        iterator = make_own()
        self._log.events.add(EventKind.START, begin, time.perf_counter_ns(), loader=loader.number, value=length)
        return iterator

    def next_batch(self, loop: ScriptLoop) -> Any:
        """The batch that a loop of the script gets.

        Raises:
            StopIteration: its epoch is over.
            SystemExit: it is time to stop.
        """
        loader = loop.loader
        self._check_stop(loader)
        if loader is self._examined:
            self._follow_board(loop)
        elif self._examined is not None and go_together(loader, self._examined):
            loop.use(REPLAY if self._trial is REPLAY and loader.replay.is_full and not self._is_over else AS_IS)
        self._log.loader, self._log.trial, self._log.sequence = loader.number, loop.trial.number, loader.num_steps
        begin = time.perf_counter_ns()
        try:
            batch = self._take(loop)
        except StopIteration:
            self._end_epoch(loop)
            raise
        self._count(loop, batch, begin, time.perf_counter_ns())
        return batch

    def optimizer_stepped(self) -> None:
        """An optimizer made a step."""
        if self._without_loader is None:
            self._without_loader = TrainingWithoutLoader(
                log=self._log, board=self._board_without_loader, ranks=self._ranks, settings=self._settings
            )
        self._without_loader.count(self._num_batches)
        self._check_stop(None)

    # One step.

    def _take(self, loop: ScriptLoop) -> Any:
        if loop.is_over:
            raise StopIteration
        if loop.trial.uses_own_loader:
            return loop.take_own()
        try:
            supply = loop.supply()
            if isinstance(supply, GroupedSupply) and not supply.is_ready:
                with self._off_the_clock():
                    supply.deal()
            return supply.take()
        except StopIteration:
            self._run_out(loop)
        except Exception as error:  # noqa: BLE001 - a remedy that does not work is not the script's error
            self._fail(loop, loop.trial, error)
        return loop.take_own()

    def _run_out(self, loop: ScriptLoop) -> None:
        """A trial has no more batches in this epoch; the script's own loader may have."""
        if self._whole_epochs and (loop.loader.length is None or loop.num_steps >= loop.loader.length):
            raise StopIteration
        if self._clock is not None and not self._whole_epochs:
            self._clock.restart()
        loop.use(AS_IS)

    def _fail(self, loop: ScriptLoop, trial: Trial, error: Exception) -> None:
        """A trial does not work here; the script goes on with its own loader."""
        self._log.note("failed", trial=trial.number, reason=f"{type(error).__name__}: {error}"[:500])
        self._trial_loaders.drop(loop, trial)
        self._trial_loaders.leave(loop, trial, whole_epochs=True)
        loop.use(AS_IS)
        if self._leader is not None:
            self._clock = None
            with self._off_the_clock():
                self._leader.next_turn(None)

    def _count(self, loop: ScriptLoop, batch: Any, begin: int, end: int) -> None:
        """A batch is about to be handed over."""
        loader, rows, is_replay = loop.loader, rows_of(batch), loop.trial is REPLAY
        waited = 0 if is_replay else end - begin  # making the copy is the doctor's own time
        self._steps.add(
            loader=loader.number,
            trial=loop.trial.number,
            sequence=loader.num_steps,
            rows=rows,
            begin=begin,
            waited=waited,
        )
        loop.num_steps += 1
        loop.rows += rows
        loop.waited += waited
        if loader is self._examined:
            self._off_clock += end - begin if is_replay else 0
            self._count_turn(loop, rows, end - waited, end)
        else:
            self._count_look(loader, batch, begin, end)
        self._num_batches += loader is self._examined or loader.trains

    def _count_turn(self, loop: ScriptLoop, rows: int, asked: int, end: int) -> None:
        loop.loader.num_steps += 1
        is_disturbed, self._num_foreign = self._num_foreign > 0, 0
        if self._clock is None or self._whole_epochs:
            return
        off, num_ready = self._off_clock, loop.supply().num_ready
        self._clock.handed_over(asked - off, end - off, rows, is_disturbed=is_disturbed, num_ready=num_ready)
        self._end_turn_if_over()

    # Looking: which loop trains, and how fast it is.

    def _count_look(self, loader: ScriptLoader, batch: Any, begin: int, end: int) -> None:
        loader.count_step(begin, end)
        if self._examined is not None:
            self._num_foreign += not go_together(loader, self._examined)
        elif (examined := self._look.add(loader, batch, end)) is not None:
            self._begin_turns(examined)

    def _begin_turns(self, examined: ScriptLoader) -> None:
        self._examined, recording = examined, read_recording(self._log.folder)
        self._turn_clocks = TurnClocks(
            step_seconds=examined.step_seconds,
            turn_seconds=self._settings["turn_seconds"],
            slowest=measure_batch_costs(recording).slowest_tenth,
            seconds=self._settings["seconds"],
        )
        steps = examined.steps_of_last_epoch if examined.num_epochs else examined.length
        whole_epochs = recording.has("restart") or not self._turn_clocks.fits_twice(steps, examined.prefetched)
        self._look.describe_examined(examined, whole_epochs=whole_epochs)
        self._epoch_began_at = time.perf_counter_ns()
        if self._ranks.is_first:
            self._leader = Leader(examined, self._log, self._board, self._ranks, self._settings, whole_epochs)

    # Turns.

    def _follow_board(self, loop: ScriptLoop, *, is_new_epoch: bool = False) -> None:
        """Begin the turn, or the end, that the board announces, if its step is reached."""
        notice = self._board.read()
        if self._is_over or (notice.number == self._notice_seen and not is_new_epoch):
            return
        is_early = loop.loader.num_steps < notice.begins_at or (notice.whole_epochs and not is_new_epoch)
        if notice.number == self._notice_seen or is_early:
            if is_new_epoch and self._trial is not None:
                self._serve(loop, self._trial)
            return
        self._notice_seen = notice.number
        with contextlib.nullcontext() if is_new_epoch else self._off_the_clock():  # to start an epoch takes its time
            if notice.stops_at != NEVER or (self._leader is not None and self._leader.is_done):
                self._end_turns(loop)
            else:
                self._begin_turn(loop, notice)

    def _end_turns(self, loop: ScriptLoop) -> None:
        """Let the script run on as it is."""
        self._is_over, self._clock = True, None
        if self._trial is not None:
            self._trial_loaders.leave(loop, self._trial, whole_epochs=True)
        self._trial_loaders.close()
        loop.use(AS_IS)

    def _begin_turn(self, loop: ScriptLoop, notice: Notice) -> None:
        trial, before = self._find_trial(notice.trial), self._trial
        self._trial, self._whole_epochs = trial, notice.whole_epochs
        goes_on = trial is before  # as when it is only observed: no pause in which queues would fill
        if before is not None and not goes_on:
            self._trial_loaders.leave(loop, before, whole_epochs=notice.whole_epochs)
        warm_up = 0 if goes_on else self._warm_up(trial)
        self._clock = self._turn_clocks.make(trial, warm_up=warm_up, multiple_of=group_size(trial))
        self._serve(loop, trial)

    def _serve(self, loop: ScriptLoop, trial: Trial) -> None:
        """Have a loop take its batches from a trial's loader."""
        try:
            self._trial_loaders.enter(loop, trial, whole_epochs=self._whole_epochs)
        except Exception as error:  # noqa: BLE001 - what cannot be built cannot be tried; the script goes on
            self._fail(loop, trial, error)
        else:
            loop.use(trial)

    def _find_trial(self, number: int) -> Trial:
        """The trial with this number, which the leader chose, perhaps in another process."""
        if number not in self._known_trials:
            self._known_trials |= {trial.number: trial for trial in read_trials(self._log.folder)}
        return self._known_trials[number]

    def _warm_up(self, trial: Trial) -> int:
        """Steps, or epochs, of a turn that do not count."""
        assert self._examined is not None
        loader = self._examined.instance
        if self._whole_epochs:
            keeps = trial.changes.get("persistent_workers", getattr(loader, "persistent_workers", False))
            return int(bool(keeps) and trial is not REPLAY and not self._trial_loaders.keeps_loader_of(trial))
        prefetched = prefetched_by(trial, loader) if trial.changes else self._examined.prefetched
        return self._turn_clocks.warm_up_steps(trial, prefetched)

    def _end_turn_if_over(self) -> None:
        if self._clock is None or not self._clock.is_over or self._leader is None:
            return
        assert self._examined is not None
        result, self._clock = self._clock.result, None
        self._num_interruptions = 0
        self._turn_clocks.add(result)
        self._log.note("turn", **result._asdict(), step=self._examined.num_steps)
        with self._off_the_clock():
            self._leader.next_turn(result)

    # Epochs.

    def _end_epoch(self, loop: ScriptLoop) -> None:
        """A loop came to the end of its epoch."""
        loop.loader.num_epochs += 1
        loop.loader.steps_of_last_epoch = loop.num_steps
        if loop.loader is self._examined:
            self._end_examined_epoch(loop)
        loop.close()

    def _end_examined_epoch(self, loop: ScriptLoop) -> None:
        now, began_at = time.perf_counter_ns(), self._epoch_began_at
        self._loop, self._epoch_began_at = None, now
        if self._clock is None:
            return
        if self._whole_epochs:
            off, self._off_clock = self._off_clock, 0
            self._clock.epoch(loop.rows, loop.num_steps, now - began_at - off, loop.waited)
            self._end_turn_if_over()
            return
        self._clock.restart()  # in the middle of a turn: epochs are shorter than they seemed, or this is the odd one
        self._num_interruptions += 1
        is_often = self._num_interruptions > _MOST_INTERRUPTIONS
        if is_often and self._leader is not None and self._leader.take_whole_epochs():
            self._clock = None

    # The end.

    def _check_stop(self, loader: ScriptLoader | None) -> None:
        """Leave the script when it is time, from whichever loop it is in, or after an optimizer's step."""
        if self._exit is None:
            if not self._is_time_to_stop(loader) and not self._has_lost_its_purpose(loader):
                return
            steps = self._examined.num_steps if self._examined is not None else 0
            self._log.note("stopped", step=steps, rank=self._ranks.rank)
            self._exit = Exit()
            self._trial_loaders.close()
        self._exit.leave(None if self._without_loader is None else self._without_loader.thread)

    def _is_time_to_stop(self, loader: ScriptLoader | None) -> bool:
        if self._without_loader is not None and self._without_loader.is_time_to_stop():
            return True
        return (
            self._examined is not None
            and loader is not None
            and (self._examined.num_steps >= self._board.read().stops_at)
        )

    def _has_lost_its_purpose(self, loader: ScriptLoader | None) -> bool:
        """Check once a second whether the doctor is still running, and whether turns end.

        They do not in a script that no longer uses the examined loader, and late in an epoch that is taken whole.
        """
        if time.monotonic() <= self._check_due_at:
            return False
        self._check_due_at = time.monotonic() + _CHECK_EVERY_SECONDS
        leader = self._leader
        may_be_late = self._whole_epochs or loader not in (None, self._examined)
        if leader is not None and not leader.is_done and may_be_late:
            leader.finish_if_late(_LATE_SECONDS)
        return self._doctor is not None and self._find_doctor() is None

    def _find_doctor(self) -> list[int] | None:
        """The doctor's process, if it can be seen from here."""
        doctor = self._settings["doctor"]
        return doctor if doctor is not None and name_process(doctor[0]) == doctor else None

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self._off_clock += time.perf_counter_ns() - begin

"""Runs the experiment inside the script: looks at its loops, then swaps what is behind one of them, turn by turn.

    look      some steps as it is, of whichever loop trains
    turns     `experiment` says which trial is next; rank 0 announces it on the board, all ranks follow at the same step
    stop      an exception from `next()`, on all ranks at the same step; or, with `--full`, the script runs on

All effects are here and in the sources; what to try, and what it means, is decided by pure functions.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from penstock.diagnosis._batches import bytes_of, can_regroup, padding_share, rows_of
from penstock.diagnosis._board import Board, Notice
from penstock.diagnosis._experiment import AS_IS, REPLAY, Trial, TurnLength, TurnResult, experiment, turn_length
from penstock.diagnosis._recorder import SETTINGS, Recorder
from penstock.diagnosis._recording import read_recording
from penstock.diagnosis._remedies import choose_trials
from penstock.diagnosis._sources import Grouped, IteratorSource, Source, num_workers_of, rebuild, wait_until_idle
from penstock.diagnosis._stages import measure_stages
from penstock.diagnosis._stopping import Stop, protect_checkpoints
from penstock.diagnosis._training_loop import TrainingLoop
from penstock.diagnosis._turn_clock import TurnClock
from penstock.diagnosis._watched import Watched
from penstock.metrics import EventKind, ThreadMeter
from penstock.workers import usable_cpus

_LOOK_STEPS, _LOOK_SECONDS = 12, 1.0
_FEWEST_LOOK_STEPS, _LONGEST_LOOK_SECONDS = 5, 10.0
_IDLE_SECONDS = 3.0
_MARGIN = 4
"""Steps between an announcement and what it announces, when several ranks must hear it."""
_MOST_INTERRUPTIONS = 2
_LONGEST_TURN = 4.0
"""Seconds that a turn may take so that several of the slowest batches are in it."""
_GONE_SECONDS = 10
_GROUPED = 32
"""Batches whose rows are dealt anew by length."""


class Conductor:
    """One for each training process."""

    def __init__(self, log: Recorder) -> None:
        self._log = log
        self._settings = json.loads((log.folder / SETTINGS).read_text())
        self._rank, self._world = rank_and_world()
        name = "board" if self._world > 1 else f"board-{os.getpid()}"
        self._board = Board(log.folder / name)
        self._meter: ThreadMeter | None = None
        self._last_delay = 0.0
        self._watched: dict[int, Watched] = {}
        self._primary: Watched | None = None
        self._loop: weakref.ref[TrainingLoop] | None = None
        self._plan: Generator[Trial, TurnResult | None, None] | None = None
        self._trials = {AS_IS.number: AS_IS, REPLAY.number: REPLAY}
        self._kept_loaders: dict[int, Any] = {}
        """Rebuilt loaders of trials that take whole epochs; their workers may live on between epochs."""
        self._turn_seen = 0
        self._clock: TurnClock | None = None
        self._length: TurnLength | None = None
        self._num_turns = self._interruptions = self._foreign = 0
        self._off_clock = 0
        self._epoch_began_at = 0
        self._began_at = time.monotonic()
        self._is_done = self._is_stopped = False
        self._is_between_turns = False
        """Whether a turn is over, and the next one is announced for a step to come."""
        self._clocks = time.perf_counter(), time.process_time()
        self._threads: int | None = None

    # Loops: called by TrainingLoop and the hooks.

    def start_loop(self, watched: Watched, make_own: Callable[[], Iterator[Any]]) -> TrainingLoop:
        """A script begins to iterate over a loader."""
        self._check_stop(watched)
        self._watched[watched.number] = watched
        watched.begin_epoch()
        if not watched.was_described:
            self._log.note("loader", **watched.describe(), rank=self._rank)
            watched.was_described = True
        loop = TrainingLoop(self, watched, make_own)
        if watched is self._primary:
            self._begin_epoch(loop)
        if loop.trial.number == AS_IS.number:
            loop.own()
        return loop

    def started(self, watched: Watched, begin: int, end: int) -> None:
        """A loader's own iterator was made."""
        length = -1 if watched.length is None else watched.length
        self._log.add(EventKind.START, begin, end, loader=watched.number, trial=0, value=length)

    def before(self, loop: TrainingLoop) -> None:
        """A script asks for a batch."""
        self._check_stop(loop.watched)
        if loop.watched is self._primary and not self._is_done:
            begin = time.perf_counter_ns()
            self._follow_board(loop, is_new_epoch=False)
            self._off_clock += time.perf_counter_ns() - begin
        elif self._primary is not None and self._is_companion(loop.watched):
            loop.trial = REPLAY if self._current_trial() is REPLAY and loop.watched.replay.is_full else AS_IS
        self._log.loader, self._log.trial = loop.watched.number, loop.trial.number
        self._log.sequence = loop.watched.num_steps

    def after(self, loop: TrainingLoop, batch: Any, begin: int, end: int) -> None:
        """A batch is about to be handed over."""
        watched, rows = loop.watched, rows_of(batch)
        if self._meter is None:
            self._meter = ThreadMeter()
        delay = self._meter.read().delay_seconds or 0.0
        waited = 0 if loop.trial is REPLAY else end - begin
        self._log.events.add(
            EventKind.NEXT,
            begin,
            begin + waited,
            loader=watched.number,
            trial=loop.trial.number,
            sequence=watched.num_steps,
            value=rows,
            extra=int(1e9 * (delay - self._last_delay)),
        )
        self._last_delay = delay
        if loop.trial is REPLAY:  # making the copy is the doctor's own time
            self._off_clock += end - begin
        loop.num_handed_over += 1
        loop.rows += rows
        loop.waited += waited
        if watched is self._primary:
            self._count(loop, rows, begin, end)
        else:
            self._look(watched, batch, begin, end)
        self._last_delay = self._meter.read().delay_seconds or 0.0

    def ended(self, loop: TrainingLoop) -> None:
        """A loop came to the end of its epoch."""
        watched = loop.watched
        watched.num_epochs += 1
        watched.steps_of_last_epoch = loop.num_handed_over
        if watched is self._primary:
            self._end_epoch(loop)
        loop.close()

    def take(self, loop: TrainingLoop) -> Any:
        """A batch of the trial that has its turn."""
        if loop.trial is REPLAY:
            return loop.watched.replay.take()
        source = loop.sources[loop.trial.number]
        if isinstance(source, Grouped) and not source.is_ready:
            begin = time.perf_counter_ns()
            source.gather()
            self._off_clock += time.perf_counter_ns() - begin
        return source.take()

    def ran_out(self, loop: TrainingLoop) -> None:
        """A trial's source has no more batches in this epoch; the rest is as it is."""
        if self._clock is not None and not self._is_whole():
            self._clock.restart()
        length = loop.watched.length
        if self._is_whole() and (length is None or loop.num_handed_over >= length):
            raise StopIteration
        loop.trial = AS_IS

    def failed(self, loop: TrainingLoop, error: Exception) -> None:
        """A trial does not work here; the script goes on as it is."""
        trial = loop.trial
        self._log.note("failed", trial=trial.number, reason=f"{type(error).__name__}: {error}"[:500])
        source = loop.sources.pop(trial.number, None)
        if source is not None:
            source.close()
        self._kept_loaders.pop(trial.number, None)
        self._leave(trial)
        loop.trial = AS_IS
        if self._plan is not None:
            self._next_turn(loop.watched, None)

    # Looking: which loop trains, and how fast it is.

    def _look(self, watched: Watched, batch: Any, begin: int, end: int) -> None:
        torch = sys.modules.get("torch")
        watched.trains = watched.trains or (torch is not None and torch.is_grad_enabled())
        watched.seen(begin, end)
        if self._primary is not None:
            self._foreign += not self._is_companion(watched)
            return
        if not watched.replay.is_full:
            watched.replay.keep(batch)
            self._log.note(
                "batch",
                loader=watched.number,
                rows=rows_of(batch),
                bytes=bytes_of(batch),
                padding=padding_share(batch),
                can_regroup=can_regroup(batch),
            )
        if self._has_seen_enough(watched, end):
            self._begin_experiment(watched)

    def _has_seen_enough(self, watched: Watched, now: int) -> bool:
        assert watched.first_at is not None
        seconds, steps = (now - watched.first_at) / 1e9, watched.num_steps
        patience = 1 if watched.trains else 8
        enough = steps >= patience * _LOOK_STEPS and seconds >= patience * _LOOK_SECONDS
        return enough or (steps >= patience * _FEWEST_LOOK_STEPS and seconds >= patience * _LONGEST_LOOK_SECONDS)

    def _is_companion(self, watched: Watched) -> bool:
        """Whether a loop advances with the primary one, as in `zip(a, b)`."""
        primary = self._primary
        return primary is not None and abs(watched.num_steps - primary.num_steps) <= 1

    def _begin_experiment(self, seen: Watched) -> None:
        together = [each for each in self._watched.values() if abs(each.num_steps - seen.num_steps) <= 1]
        primary = max(together, key=lambda each: each.waited)
        self._primary = primary
        self._began_at = time.monotonic()
        self._length = self._turn_length(primary, whole=False)
        self._log.note(
            "primary",
            loader=primary.number,
            rank=self._rank,
            step_seconds=primary.step_seconds,
            whole_epochs=self._length.whole_epochs,
            **self._describe_trainer(),
        )
        self._epoch_began_at = time.perf_counter_ns()
        if self._rank == 0:
            self._plan = self._new_plan()
            self._announce(primary, next(self._plan))

    def _new_plan(self) -> Generator[Trial, TurnResult | None, None]:
        return _observe() if self._settings["observe"] else experiment(self._choose)

    def _describe_trainer(self) -> dict[str, Any]:
        """How the training process computes."""
        torch = sys.modules["torch"]
        wall, cpu = time.perf_counter() - self._clocks[0], time.process_time() - self._clocks[1]
        accelerator = getattr(torch, "accelerator", None)
        return {
            "num_threads": torch.get_num_threads(),
            "cpu_share": cpu / max(wall, 1e-9),
            "accelerator": bool(accelerator is not None and accelerator.is_available()),
        }

    def _turn_length(self, primary: Watched, *, whole: bool) -> TurnLength:
        epoch_steps = primary.steps_of_last_epoch if primary.num_epochs else primary.length
        slowest = measure_stages(read_recording(self._log.folder)).slowest_tenth
        length = turn_length(
            step_seconds=primary.step_seconds,
            turn_seconds=max(self._settings["turn_seconds"], min(_LONGEST_TURN, 3 * slowest)),
            prefetched=primary.prefetched,
            epoch_steps=epoch_steps,
        )
        return length._replace(whole_epochs=True) if whole else length

    def _choose(self, turns: Any) -> list[Trial]:
        recording = read_recording(self._log.folder)
        cores = max(1, usable_cpus() // self._world)
        trials = choose_trials(recording, turns, whole_epochs=self._is_whole(), cores=cores)
        for trial in trials:
            self._trials[trial.number] = trial
            self._log.note("trial", trial=trial.number, name=trial.name, kind=trial.kind, changes=dict(trial.changes))
        return trials

    # Turns.

    def _is_whole(self) -> bool:
        return self._length is not None and self._length.whole_epochs

    def _current_trial(self) -> Trial:
        return AS_IS if self._clock is None else self._trials[self._clock.trial]

    def _count(self, loop: TrainingLoop, rows: int, begin: int, end: int) -> None:
        watched = loop.watched
        disturbed, self._foreign = self._foreign > 0, 0
        watched.num_steps += 1
        clock = self._clock
        if self._is_done or clock is None or self._is_whole() or self._is_between_turns:
            return
        off = self._off_clock
        asked = end - off if loop.trial.kind in ("replay", "grouped") else begin - off
        clock.handed_over(asked, end - off, rows, is_disturbed=disturbed)
        if clock.is_over and self._plan is not None:
            self._finish_turn(watched)

    def _begin_epoch(self, loop: TrainingLoop) -> None:
        previous = None if self._loop is None else self._loop()
        if previous is not None and previous.num_handed_over:
            self._end_epoch(previous)  # the script left the loop before its end
        self._loop = weakref.ref(loop)
        self._follow_board(loop, is_new_epoch=True)

    def _end_epoch(self, loop: TrainingLoop) -> None:
        now, clock = time.perf_counter_ns(), self._clock
        self._loop = None
        if clock is not None and not self._is_done and not self._is_between_turns:
            if self._is_whole():
                off, self._off_clock = self._off_clock, 0
                clock.epoch(loop.rows, loop.num_handed_over, now - self._epoch_began_at - off, loop.waited)
                if clock.is_over and self._plan is not None:
                    self._finish_turn(loop.watched)
            else:
                self._interrupt(loop.watched)
        self._epoch_began_at = now

    def _interrupt(self, watched: Watched) -> None:
        """An epoch ended in the middle of a turn: epochs are shorter than they seemed, or this is the odd one."""
        assert self._clock is not None
        self._clock.restart()
        self._interruptions += 1
        if self._interruptions > _MOST_INTERRUPTIONS and self._plan is not None:
            self._interruptions = -1000
            if watched.steps_of_last_epoch is not None and self._length is not None:
                self._length = self._length._replace(whole_epochs=True)
                self._log.note("restart", whole_epochs=True)
                self._plan = self._new_plan()
                self._announce(watched, next(self._plan))

    def _finish_turn(self, watched: Watched) -> None:
        assert self._clock is not None
        result = self._clock.result
        self._interruptions = min(self._interruptions, 0)
        self._log.note("turn", **result._asdict(), step=watched.num_steps)
        self._next_turn(watched, result)

    def _next_turn(self, watched: Watched, result: TurnResult | None) -> None:
        assert self._plan is not None
        out_of_time = time.monotonic() - self._began_at > self._settings["seconds"]
        out_of_steps = self._settings["steps"] is not None and watched.num_steps >= self._settings["steps"]
        begin = time.perf_counter_ns()
        try:
            if out_of_time or out_of_steps:
                raise StopIteration
            self._announce(watched, self._plan.send(result))
        except StopIteration:
            self._finish(watched)
        self._off_clock += time.perf_counter_ns() - begin

    def _announce(self, watched: Watched, trial: Trial) -> None:
        self._num_turns += 1
        self._is_between_turns = True
        begins_at = watched.num_steps + (_MARGIN if self._world > 1 else 0)
        self._board.write(Notice(trial.number, begins_at, self._is_whole(), 0, self._num_turns))

    def _finish(self, watched: Watched, *, now: bool = False) -> None:
        """All was tried."""
        self._plan = None
        self._log.note("done", step=watched.num_steps, full=self._settings["full"])
        stops_at = 0 if self._settings["full"] else watched.num_steps + (_MARGIN if self._world > 1 else 1 - now)
        self._num_turns += 1
        self._board.write(Notice(AS_IS.number, watched.num_steps, False, stops_at, self._num_turns))

    def _follow_board(self, loop: TrainingLoop, *, is_new_epoch: bool) -> None:
        notice, watched = self._board.read(), loop.watched
        if notice.turn == self._turn_seen:
            if is_new_epoch and self._clock is not None:
                self._enter(loop, self._trials[self._clock.trial])
            return
        if watched.num_steps < notice.begins_at or (notice.whole_epochs and not is_new_epoch):
            if is_new_epoch and self._clock is not None:
                self._enter(loop, self._trials[self._clock.trial])
            return
        self._turn_seen, self._is_between_turns = notice.turn, False
        if notice.stops_at != 1 << 62 or (self._plan is None and self._rank == 0):
            self._enter(loop, AS_IS)
            self._is_done, self._clock = True, None
            self._kept_loaders.clear()
            return
        trial = self._find_trial(notice.trial)
        assert self._length is not None
        if notice.whole_epochs != self._length.whole_epochs:
            self._length = self._length._replace(whole_epochs=notice.whole_epochs)
        if self._clock is not None:
            self._pause(loop, self._trials[self._clock.trial])
        self._clock = self._new_clock(trial, watched)
        self._enter(loop, trial)

    def _new_clock(self, trial: Trial, watched: Watched) -> TurnClock:
        assert self._length is not None
        settle = self._length.settle
        if self._length.whole_epochs:
            keeps = trial.changes.get("persistent_workers", getattr(watched.loader, "persistent_workers", False))
            settle = int(bool(keeps) and trial.kind not in ("replay",) and trial.number not in self._kept_loaders)
        elif trial.kind in ("replay", "grouped"):
            settle = 2
        elif trial.changes:
            settle = min(64, _prefetched(trial, watched) + 1)
        return TurnClock(trial.number, settle=settle, turn_seconds=self._length.seconds)

    def _find_trial(self, number: int) -> Trial:
        """By its number; ranks that did not choose it read about it."""
        if number not in self._trials:
            for trial in read_recording(self._log.folder).trials:
                self._trials.setdefault(trial.number, trial)
        return self._trials[number]

    def _pause(self, loop: TrainingLoop, trial: Trial) -> None:
        """Wait until what had its turn has nothing more to do."""
        self._leave(trial)
        if not self._is_whole() and trial.kind != "replay":
            source = loop.own() if trial.kind in ("as-is", "threads") else loop.sources.get(trial.number)
            if source is not None:
                wait_until_idle(source.is_idle, seconds=_IDLE_SECONDS)

    def _enter(self, loop: TrainingLoop, trial: Trial) -> None:
        """Have a loop serve a trial's batches."""
        try:
            if trial.kind not in ("as-is", "replay", "threads"):
                if trial.number not in loop.sources:
                    loop.sources[trial.number] = self._open(loop, trial)
                source = loop.sources[trial.number]
                if isinstance(source, Grouped):
                    source.gather()
                elif not self._is_whole():
                    wait_until_idle(source.is_idle, seconds=_IDLE_SECONDS)
            if trial.kind == "threads":
                torch = sys.modules["torch"]
                self._threads = torch.get_num_threads() if self._threads is None else self._threads
                torch.set_num_threads(trial.changes["num_threads"])
            loop.use(trial)
        except Exception as error:  # noqa: BLE001 - what cannot be built cannot be tried; the script goes on
            loop.trial = trial
            self.failed(loop, error)

    def _open(self, loop: TrainingLoop, trial: Trial) -> Source:
        watched = loop.watched
        if trial.kind == "grouped":
            return Grouped(loop.own(), num_batches=_GROUPED)
        whole = self._is_whole()
        loader = self._kept_loaders.get(trial.number) if whole else None
        if loader is None:
            if not whole:
                loop.own()
            loader = rebuild(
                watched.loader, trial, remaining=None if whole else loop.tap, remembered=watched.remembered
            )
        if whole:
            self._kept_loaders[trial.number] = loader
        iterate = sys.modules["penstock.diagnosis._hooks"].iterate_plainly
        return IteratorSource(iterate(loader, watched.number, trial.number), prefetched=0)

    def _leave(self, trial: Trial) -> None:
        if trial.kind == "threads" and self._threads is not None:
            sys.modules["torch"].set_num_threads(self._threads)

    def _check_stop(self, watched: Watched) -> None:
        """Leave the script when it is time, from whichever loop it is in."""
        is_late = time.monotonic() - self._began_at > self._settings["seconds"] + _GONE_SECONDS
        if is_late and self._plan is not None and self._primary not in (None, watched):
            assert self._primary is not None
            self._finish(self._primary, now=True)  # the script no longer uses the loader that was looked at
        if not self._is_stopped and self._primary is not None:
            notice = self._board.read()
            self._is_stopped = self._primary.num_steps >= notice.stops_at
            if self._is_stopped:
                self._log.note("stopped", step=self._primary.num_steps, rank=self._rank)
                protect_checkpoints()
                self._kept_loaders.clear()
        if self._is_stopped:
            raise Stop


def _observe() -> Generator[Trial, TurnResult | None, None]:
    """Every turn as it is."""
    while True:
        yield AS_IS


def _prefetched(trial: Trial, watched: Watched) -> int:
    changes, loader = trial.changes, watched.loader
    workers = changes.get("num_workers", num_workers_of(loader))
    depth = changes.get("prefetch_factor", loader.prefetch_factor) or 2
    return int(changes.get("prefetch") or workers * depth)


def rank_and_world() -> tuple[int, int]:
    """This process among those that train together: from torch.distributed, or from what launchers set."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

"""Runs the experiment inside the script: looks at its loops, then swaps what is behind one of them, turn by turn.

    look      some steps of the baseline, of whichever loop trains
    turns     of the loop that trains: `_turns`, which all ranks take together
    stop      an exception from `next()`, on all ranks at the same step; or, with `--full`, the script runs on

All effects are here, in the turns and in the sources; what to try, and what it means, is decided by pure functions.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.doctor._batches import bytes_of, can_regroup, padding_share, rows_of
from penstock.doctor._board import Board, find_ranks
from penstock.doctor._experiment import AS_IS, REPLAY
from penstock.doctor._recorder import SETTINGS, Recorder, RunSettings, name_process
from penstock.doctor._sources import Grouped
from penstock.doctor._stopping import UnfedTraining, protect_checkpoints
from penstock.doctor._training_loop import TrainingLoop
from penstock.doctor._turns import Turns
from penstock.doctor._watched import Watched
from penstock.machine import EventKind, ThreadMeter

_LOOK_STEPS, _LOOK_SECONDS = 12, 1.0
_FEWEST_LOOK_STEPS, _LONGEST_LOOK_SECONDS = 5, 10.0
_CHECK_EVERY_SECONDS = 1.0
_TRAINER_SECONDS = 5.0
"""How long a thread that fetches batches goes on after the stop, for the thread that trains to make a step."""
_FETCHER_SECONDS = 2.0
_DELAY_EVERY_NS = 50_000_000
"""Reading it takes 40 µs if caches are cold, and lets go of the interpreter's lock, for which others may wait."""


class Conductor:
    """Conducts the experiment in one training process."""

    def __init__(self, log: Recorder) -> None:
        self._log = log
        self._settings: RunSettings = json.loads((log.folder / SETTINGS).read_text())
        self._ranks = find_ranks()
        name = "board" if self._ranks.world_size > 1 else f"board-{os.getpid()}"
        self._board, self._unfed_board = Board(log.folder / name), Board(log.folder / f"{name}-unfed")
        self._meter: ThreadMeter | None = None
        self._last_cpu, self._last_delay = 0, 0.0
        self._delay_due_at = 0
        self._watched: dict[int, Watched] = {}
        self._turns: Turns | None = None
        self._num_foreign = 0
        """Batches of other loops since the last one of the loop that trains."""
        self._num_batches = 0
        """Batches to train on, from any loop."""
        self._stopped_at: float | None = None
        self._is_left, self._fetcher_left = threading.Event(), threading.Event()
        self._fetches_in_thread = False
        self._unfed: UnfedTraining | None = None
        self._doctor = self._find_doctor()
        self._check_due_at = time.monotonic() + _CHECK_EVERY_SECONDS
        self._clocks = time.perf_counter(), time.process_time()

    def optimizer_stepped(self) -> None:
        """An optimizer made a step."""
        if self._unfed is None:
            board = self._unfed_board
            self._unfed = UnfedTraining(log=self._log, board=board, ranks=self._ranks, settings=self._settings)
        self._unfed.count(self._num_batches)
        self._check_stop(None)

    # Loops: called by TrainingLoop and the hooks.

    def start_loop(self, watched: Watched, make_own: Callable[[], Iterator[Any]]) -> TrainingLoop:
        """A script begins to iterate over a loader."""
        self._check_stop(watched)
        self._watched[watched.number] = watched
        watched.begin_epoch()
        if not watched.was_described:
            self._log.note("loader", **watched.describe(), rank=self._ranks.rank)
            watched.was_described = True
        loop = TrainingLoop(self, watched, make_own)
        turns = self._turns_of(watched)
        if turns is not None:
            turns.begin_epoch(loop)
        if loop.trial.number == AS_IS.number:
            loop.own()
        return loop

    def started(self, watched: Watched, begin: int, end: int) -> None:
        """A loader's own iterator was made."""
        length = -1 if watched.length is None else watched.length
        self._log.events.add(EventKind.START, begin, end, loader=watched.number, value=length)

    def before(self, loop: TrainingLoop) -> None:
        """A script asks for a batch."""
        self._check_stop(loop.watched)
        turns = self._turns
        if turns is not None and loop.watched is turns.primary:
            turns.before_step(loop)
        elif turns is not None and _go_together(loop.watched, turns.primary):
            loop.trial = REPLAY if turns.current_trial is REPLAY and loop.watched.replay.is_full else AS_IS
        self._log.loader, self._log.trial = loop.watched.number, loop.trial.number
        self._log.sequence = loop.watched.num_steps

    def after(self, loop: TrainingLoop, batch: Any, begin: int, end: int) -> None:
        """A batch is about to be handed over."""
        rows, turns = rows_of(batch), self._turns_of(loop.watched)
        is_replay = loop.trial is REPLAY
        waited = 0 if is_replay else end - begin  # making the copy is the doctor's own time
        self._record(loop, rows, begin, waited)
        loop.num_handed_over += 1
        loop.rows += rows
        loop.waited += waited
        if turns is not None:
            if is_replay:
                turns.exclude(end - begin)
            is_disturbed, self._num_foreign = self._num_foreign > 0, 0
            turns.count(loop, rows, begin, end, is_disturbed=is_disturbed)
        else:
            self._look(loop.watched, batch, begin, end)
        self._num_batches += turns is not None or loop.watched.trains

    def ended(self, loop: TrainingLoop) -> None:
        """A loop came to the end of its epoch."""
        watched, turns = loop.watched, self._turns_of(loop.watched)
        watched.num_epochs += 1
        watched.steps_of_last_epoch = loop.num_handed_over
        if turns is not None:
            turns.end_epoch(loop)
        loop.close()

    def take(self, loop: TrainingLoop) -> Any:
        """A batch of the trial that has its turn."""
        if loop.trial is REPLAY:
            return loop.watched.replay.take()
        source = loop.sources[loop.trial.number]
        if isinstance(source, Grouped) and not source.is_ready:
            begin = time.perf_counter_ns()
            source.deal()
            self._expected_turns.exclude(time.perf_counter_ns() - begin)
        return source.take()

    def ran_out(self, loop: TrainingLoop) -> None:
        """A trial's source has no more batches in this epoch."""
        self._expected_turns.ran_out(loop)

    def failed(self, loop: TrainingLoop, error: Exception) -> None:
        """A trial does not work here."""
        self._expected_turns.failed(loop, error)

    # Looking: which loop trains, and how fast it is.

    def _record(self, loop: TrainingLoop, rows: int, begin: int, waited: int) -> None:
        before, self._last_cpu = self._last_cpu, time.thread_time_ns()
        self._log.events.add(
            EventKind.NEXT,
            begin,
            begin + waited,
            loader=loop.watched.number,
            trial=loop.trial.number,
            sequence=loop.watched.num_steps,
            cpu_seconds=(self._last_cpu - before) / 1e9,
            value=rows,
            extra=self._new_delay(begin),
        )

    def _new_delay(self, now: int) -> int:
        """Nanoseconds that this thread was ready and had no core since that was last read; 0 if that was just now."""
        if now < self._delay_due_at:
            return 0
        self._delay_due_at = now + _DELAY_EVERY_NS
        if self._meter is None:
            self._meter = ThreadMeter()
            self._last_delay = self._meter.read_delay() or 0.0
        before, self._last_delay = self._last_delay, self._meter.read_delay() or 0.0
        return int(1e9 * (self._last_delay - before))

    def _look(self, watched: Watched, batch: Any, begin: int, end: int) -> None:
        torch = sys.modules.get("torch")
        watched.trains = watched.trains or (torch is not None and torch.is_grad_enabled())
        watched.count_step(begin, end)
        if self._turns is not None:
            if not _go_together(watched, self._turns.primary):
                self._num_foreign += 1
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
        if _has_seen_enough(watched, end):
            self._begin_experiment(watched)

    def _begin_experiment(self, seen: Watched) -> None:
        """Begin turns of the loop that is waited for most, among those that go together, as in `zip(a, b)`."""
        together = [each for each in self._watched.values() if _go_together(each, seen)]
        primary = max(together, key=lambda each: each.waited)
        turns = Turns(primary, log=self._log, board=self._board, ranks=self._ranks, settings=self._settings)
        self._log.note(
            "primary",
            loader=primary.number,
            rank=self._ranks.rank,
            step_seconds=primary.step_seconds,
            whole_epochs=turns.whole_epochs,
            told=primary.own_statistics(),
            **self._describe_trainer(),
        )
        self._turns = turns
        turns.begin()

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

    # The experiment, once it runs.

    def _turns_of(self, watched: Watched) -> Turns | None:
        """The experiment on a loader, if there is one."""
        return self._turns if self._turns is not None and self._turns.primary is watched else None

    @property
    def _expected_turns(self) -> Turns:
        assert self._turns is not None
        return self._turns

    def _check_stop(self, watched: Watched | None) -> None:
        """Leave the script when it is time, from whichever loop it is in, or after an optimizer's step."""
        if self._stopped_at is None:
            is_due = time.monotonic() > self._check_due_at
            if not self._is_time_to_stop(watched) and not (is_due and self._is_alone(watched)):
                return
            self._stopped_at = time.monotonic()
            steps = self._turns.primary.num_steps if self._turns is not None else 0
            self._log.note("stopped", step=steps, rank=self._ranks.rank)
            protect_checkpoints()
            if self._turns is not None:
                self._turns.trials.close()
        self._leave(self._stopped_at)

    def _leave(self, stopped_at: float) -> None:
        """Leave the script, unless this thread only fetches batches for the one that trains: that leaves first."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main or self._unfed is None or self._unfed.thread == threading.get_ident():
            self._is_left.set()
            if self._fetches_in_thread:
                self._fetcher_left.wait(_FETCHER_SECONDS)  # or it would be cut off somewhere in torch
        elif not self._is_left.is_set() and time.monotonic() < stopped_at + _TRAINER_SECONDS:
            self._fetches_in_thread = True
            return
        else:
            self._fetcher_left.set()
        raise SystemExit(0)

    def _is_time_to_stop(self, watched: Watched | None) -> bool:
        if self._unfed is not None and self._unfed.is_time_to_stop():
            return True
        return self._turns is not None and watched is not None and self._turns.is_time_to_stop()

    def _find_doctor(self) -> list[int] | None:
        """The doctor's process, if it can be seen from here."""
        doctor = self._settings["doctor"]
        return doctor if doctor is not None and name_process(doctor[0]) == doctor else None

    def _is_alone(self, watched: Watched | None) -> bool:
        """Look around, once in a while: whether the doctor has ended, so that nobody will read what is recorded.

        An experiment on a loader that the script no longer uses is finished.
        """
        self._check_due_at = time.monotonic() + _CHECK_EVERY_SECONDS
        if self._turns is not None and watched is not None:
            self._turns.finish_if_gone(watched)
        return self._doctor is not None and self._find_doctor() is None


def _go_together(one: Watched, other: Watched) -> bool:
    """Whether two loops advance in step, as in `zip(a, b)`."""
    return abs(one.num_steps - other.num_steps) <= 1


def _has_seen_enough(watched: Watched, now: int) -> bool:
    assert watched.first_at is not None
    seconds, steps = (now - watched.first_at) / 1e9, watched.num_steps
    patience = 1 if watched.trains else 8
    enough = steps >= patience * _LOOK_STEPS and seconds >= patience * _LOOK_SECONDS
    return enough or (steps >= patience * _FEWEST_LOOK_STEPS and seconds >= patience * _LONGEST_LOOK_SECONDS)

"""Has loops serve trials: builds what a trial needs, lets it have its turn, and takes it away again."""

from __future__ import annotations

import sys
from typing import Any

from penstock.diagnosis._experiment import AS_IS, REPLAY, Trial
from penstock.diagnosis._recorder import Recorder
from penstock.diagnosis._recording import read_recording
from penstock.diagnosis._sources import Grouped, IteratorSource, Source, num_workers_of, rebuild, wait_until_idle
from penstock.diagnosis._training_loop import TrainingLoop
from penstock.diagnosis._watched import Watched

_IDLE_SECONDS, _START_SECONDS = 3.0, 10.0
"""How long to wait until a queue is full, and until workers have started and filled it."""
_GROUPED = 32
"""Batches whose rows are dealt anew by length."""


class Trials:
    """What this process knows of trials, and the loaders that it rebuilt for them."""

    def __init__(self, log: Recorder) -> None:
        self._log = log
        self._known = {AS_IS.number: AS_IS, REPLAY.number: REPLAY}
        self._kept_loaders: dict[int, Any] = {}
        """Rebuilt loaders of trials that take whole epochs; their workers may live on between epochs."""
        self._threads: int | None = None

    def add(self, trials: list[Trial]) -> None:
        """These were chosen; other ranks read about it."""
        for trial in trials:
            self._known[trial.number] = trial
            self._log.note("trial", trial=trial.number, name=trial.name, kind=trial.kind, changes=dict(trial.changes))

    def find(self, number: int) -> Trial:
        """By its number."""
        if number not in self._known:
            for trial in read_recording(self._log.folder).trials:
                self._known.setdefault(trial.number, trial)
        return self._known[number]

    def keeps_loader_of(self, trial: Trial) -> bool:
        """Whether its workers started in an earlier epoch."""
        return trial.number in self._kept_loaders

    def enter(self, loop: TrainingLoop, trial: Trial, *, whole_epochs: bool) -> None:
        """Have a loop serve a trial's batches from now on.

        Raises:
            Exception: whatever a loader raises that cannot be built with the change.
        """
        if trial.kind not in ("as-is", "replay", "threads"):
            is_new = trial.number not in loop.sources
            if is_new:
                loop.sources[trial.number] = self._open(loop, trial, whole_epochs=whole_epochs)
            source = loop.sources[trial.number]
            if isinstance(source, Grouped) and not source.is_ready:
                source.deal()
            if not whole_epochs:
                wait_until_idle(source.is_idle, seconds=_START_SECONDS if is_new else _IDLE_SECONDS)
        if trial.kind == "threads":
            torch = sys.modules["torch"]
            self._threads = torch.get_num_threads() if self._threads is None else self._threads
            torch.set_num_threads(trial.changes["num_threads"])
        loop.use(trial)

    def pause(self, loop: TrainingLoop, trial: Trial, *, whole_epochs: bool) -> None:
        """Its turn is over: wait until it has nothing more to do."""
        self.leave(trial)
        if not whole_epochs and trial.kind != "replay":
            source = loop.own() if trial.kind in ("as-is", "threads") else loop.sources.get(trial.number)
            if source is not None:
                wait_until_idle(source.is_idle, seconds=_IDLE_SECONDS)

    def leave(self, trial: Trial) -> None:
        """Undo what a trial changed in this process."""
        if trial.kind == "threads" and self._threads is not None:
            sys.modules["torch"].set_num_threads(self._threads)

    def drop(self, loop: TrainingLoop, trial: Trial) -> None:
        """It does not work here; the loop goes on as it is."""
        source = loop.sources.pop(trial.number, None)
        if source is not None:
            source.close()
        self._kept_loaders.pop(trial.number, None)
        self.leave(trial)
        loop.trial = AS_IS

    def close(self) -> None:
        """Let go of the loaders' workers."""
        self._kept_loaders.clear()

    def _open(self, loop: TrainingLoop, trial: Trial, *, whole_epochs: bool) -> Source:
        watched = loop.watched
        if trial.kind == "grouped":
            return Grouped(loop.own(), num_batches=_GROUPED)
        loader = self._kept_loaders.get(trial.number) if whole_epochs else None
        if loader is None:
            if not whole_epochs:
                loop.own()
            remaining = None if whole_epochs else loop.tap
            loader = rebuild(watched.loader, trial, remaining=remaining, remembered=watched.remembered)
        if whole_epochs:
            self._kept_loaders[trial.number] = loader
        iterate = sys.modules["penstock.diagnosis._hooks"].iterate_plainly
        return IteratorSource(iterate(loader, watched.number, trial.number), loader)


def prefetched_by(trial: Trial, watched: Watched) -> int:
    """Batches that a loader with the trial's changes may have ready."""
    changes, loader = trial.changes, watched.loader
    workers = changes.get("num_workers", num_workers_of(loader))
    depth = changes.get("prefetch_factor", loader.prefetch_factor) or 2
    return int(changes.get("prefetch") or workers * depth)


def group_size(trial: Trial) -> int:
    """Of how many batches none stands for the others: those that are dealt by length together."""
    return _GROUPED if trial.kind == "grouped" else 1

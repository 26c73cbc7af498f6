"""Serves a trial's batches in a script's loop: builds what the trial needs, gives it its turn, and takes it away again.

A change of options is tried with a second loader, rebuilt from the script's own over the same dataset. During an epoch
it draws the indices that remain of it, where torch shows them, so that no sample comes twice. Where turns are whole
epochs, rebuilt loaders are kept from turn to turn: their workers may live on.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from penstock.doctor._experiment import AS_IS, REPLAY, Trial
from penstock.doctor._probes import iterate_plainly
from penstock.doctor._recorder import Recorder
from penstock.doctor._recording import read_recording
from penstock.doctor._sources import (
    Grouped,
    IndexTap,
    IteratorSource,
    Source,
    is_ours,
    is_plans,
    num_workers_of,
    wait_until_idle,
)
from penstock.doctor._training_loop import TrainingLoop
from penstock.doctor._watched import Watched

_IDLE_SECONDS, _START_SECONDS = 3.0, 10.0
"""How long to wait until a queue is full, and until workers have started and filled it."""
_GROUPED = 32
"""Batches whose rows are regrouped by length."""
_PATIENCE_SECONDS = 60
_OPTIONS_OF_PLANS = (
    *("workers", "prefetch", "mesh", "rank", "world_size", "micro_batch", "epochs", "steps", "in_order"),
    *("start_method", "drop_consumed", "remote", "local_workers", "device"),
)
"""What a plan's loader is rebuilt with. A loop that goes on over epochs would wait for new workers after each."""
_rebuilding: ContextVar[bool] = ContextVar("rebuilding", default=False)


class Trials:
    """What this process knows of trials, and the loaders that it rebuilt for them."""

    def __init__(self, log: Recorder) -> None:
        self._log = log
        self._known = {AS_IS.number: AS_IS, REPLAY.number: REPLAY}
        self._kept_loaders: dict[int, Any] = {}
        """Rebuilt loaders of trials that take whole epochs; their workers may live on between epochs."""
        self._threads: int | None = None

    def add(self, trials: list[Trial]) -> None:
        """Take the trials that were chosen, and note them for other ranks."""
        for trial in trials:
            self._known[trial.number] = trial
            self._log.note("trial", trial=trial.number, name=trial.name, kind=trial.kind, changes=dict(trial.changes))

    def find(self, number: int) -> Trial:
        """The trial with this number, which another rank may have chosen."""
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
        if not trial.uses_own_loader and trial.kind != "replay":
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
            source = loop.own() if trial.uses_own_loader else loop.sources.get(trial.number)
            if source is not None:
                wait_until_idle(source.is_idle, seconds=_IDLE_SECONDS)

    def leave(self, trial: Trial) -> None:
        """Undo what a trial changed in this process."""
        if trial.kind == "threads" and self._threads is not None:
            sys.modules["torch"].set_num_threads(self._threads)

    def drop(self, loop: TrainingLoop, trial: Trial) -> None:
        """It does not work here; the loop goes on with the script's own loader."""
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
        return IteratorSource(iterate_plainly(loader, watched.number, trial.number), loader)


def prefetched_by(trial: Trial, watched: Watched) -> int:
    """Batches that a loader with the trial's changes may have ready."""
    changes, loader = trial.changes, watched.loader
    workers = changes.get("num_workers", num_workers_of(loader))
    depth = changes.get("prefetch_factor", loader.prefetch_factor) or 2
    return int(changes.get("prefetch") or workers * depth)


def group_size(trial: Trial) -> int:
    """How many batches must be measured together: those whose rows were regrouped as one group."""
    return _GROUPED if trial.kind == "grouped" else 1


def rebuild(loader: Any, trial: Trial, *, remaining: IndexTap | None, remembered: deque[Any]) -> Any:
    """A loader like `loader`, with the trial's changes.

    It draws the indices that remain of this epoch, where torch shows them; otherwise it begins an epoch of its own.
    """
    if is_plans(loader):
        return _rebuild_plan_loader(loader, dict(trial.changes))
    changes = dict(trial.changes)
    indices = _RememberedIndices(remembered) if trial.kind == "warm" else remaining
    arguments = _arguments_of(loader) | _indices_of(loader, indices, changes.pop("batch_size", None)) | changes
    if not arguments["num_workers"]:
        arguments |= {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
    elif not arguments["timeout"]:
        arguments["timeout"] = _PATIENCE_SECONDS
    torch = sys.modules["torch"]
    arguments["generator"] = torch.Generator().manual_seed(0) if remaining is not None else loader.generator
    return _make(_class_for(loader, trial), loader.dataset, arguments)


def is_rebuilding() -> bool:
    """Whether a loader that is being made is the doctor's own, not the script's."""
    return _rebuilding.get()


def _make(loader_class: Any, dataset: Any, arguments: dict[str, Any]) -> Any:
    token = _rebuilding.set(True)
    try:
        with warnings.catch_warnings():  # of too many workers, of an odd batch size: asked for on purpose
            warnings.simplefilter("ignore")
            return loader_class(dataset, **arguments)
    finally:
        _rebuilding.reset(token)


def _class_for(loader: Any, trial: Trial) -> Any:
    """Penstock's for its own loaders and where that is the change; torch's for torch's and all that inherit from it."""
    if is_ours(loader) or trial.kind == "penstock":
        from penstock.pytorch import DataLoader

        return DataLoader
    return sys.modules["torch.utils.data"].DataLoader


def _arguments_of(loader: Any) -> dict[str, Any]:
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    more = ("prefetch_factor", "persistent_workers", "in_order")
    return {name: getattr(loader, name) for name in (*names, *more) if hasattr(loader, name)}


def _indices_of(loader: Any, indices: Any, batch_size: int | None) -> dict[str, Any]:
    """The arguments that say which samples are in which batch."""
    if loader._dataset_kind == 1:  # _DatasetKind.Iterable
        size = loader.batch_size if batch_size is None else batch_size
        return {"batch_size": size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"batch_size": None, "sampler": loader.sampler if indices is None else indices}
    batches = loader.batch_sampler if indices is None else indices
    return {"batch_sampler": batches if batch_size is None else _ResizedBatches(batches, batch_size)}


def _rebuild_plan_loader(loader: Any, changes: dict[str, Any]) -> Any:
    arguments = {name: getattr(loader, name) for name in _OPTIONS_OF_PLANS} | changes
    if loader.remote is None:  # servers have the workers that they were started with
        arguments = {"num_workers": num_workers_of(loader)} | arguments
    rebuilt = _make(type(loader), loader.dataset, arguments)
    with contextlib.suppress(Exception):  # batches out of order have no state; then it starts at the beginning
        rebuilt.load_state_dict(copy.deepcopy(loader.state_dict()))
    return rebuilt


class _RememberedIndices:
    """A sampler of indices that were read already, so that their pages are in memory."""

    def __init__(self, remembered: deque[Any]) -> None:
        self._indices = list(remembered)

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._indices)


class _ResizedBatches:
    """A batch sampler that cuts the samples of another into batches of another size."""

    def __init__(self, batches: Any, batch_size: int) -> None:
        self._batches, self._size = batches, batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        samples = itertools.chain.from_iterable(self._batches)
        while batch := list(itertools.islice(samples, self._size)):
            yield batch

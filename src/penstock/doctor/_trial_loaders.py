"""The loaders of trials: built when a trial first runs, idle while another runs, dropped if they fail.

A change of options is tried with a second loader, rebuilt from the script's own over the same dataset. During an epoch
it draws the indices that remain of it, where torch shows them, so that no sample comes twice. Where turns are whole
epochs, rebuilt loaders are kept from turn to turn: their workers may live on.
"""

import contextlib
import copy
import itertools
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from penstock.doctor._experiment import Trial
from penstock.doctor._loaders import ScriptLoop
from penstock.doctor._probes import iterate_plainly
from penstock.doctor._supplies import (
    BatchSupply,
    GroupedSupply,
    IndexTap,
    IteratorSupply,
    is_ours,
    loads_plan,
    num_workers_of,
    wait_until_idle,
)

_IDLE_SECONDS, _START_SECONDS = 3.0, 10.0
"""How long to wait until a queue is full, and until workers have started and filled it."""
_GROUPED = 32
"""Batches whose rows are regrouped by length."""
_PATIENCE_SECONDS = 60
_OPTIONS_OF_TORCH = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)
_OPTIONS_OF_PLANS = (
    *("workers", "prefetch", "mesh", "rank", "world_size", "micro_batch", "epochs", "steps", "in_order"),
    *("start_method", "drop_consumed", "remote", "local_workers", "device"),
)
"""What a plan's loader is rebuilt with. A loop that goes on over epochs would wait for new workers after each."""
_rebuilding: ContextVar[bool] = ContextVar("rebuilding", default=False)


class TrialLoaders:
    """The loaders that this process rebuilt for trials, and what trials changed in it."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        """Rebuilt loaders of trials that take whole epochs; their workers may live on between epochs."""
        self._threads: int | None = None

    def keeps_loader_of(self, trial: Trial) -> bool:
        """Whether its workers started in an earlier epoch."""
        return trial.number in self._kept

    def enter(self, loop: ScriptLoop, trial: Trial, *, whole_epochs: bool) -> None:
        """Have a trial's batches ready for a loop.

        Raises:
            Exception: whatever a loader raises that cannot be built with the change.
        """
        if not trial.uses_own_loader:
            is_new = trial.number not in loop.supplies
            if is_new:
                loop.supplies[trial.number] = self._open(loop, trial, whole_epochs=whole_epochs)
            supply = loop.supplies[trial.number]
            if isinstance(supply, GroupedSupply) and not supply.is_ready:
                supply.deal()
            if not whole_epochs:
                wait_until_idle(supply.is_idle, seconds=_START_SECONDS if is_new else _IDLE_SECONDS)
        if trial.kind == "threads":
            torch = sys.modules["torch"]
            self._threads = torch.get_num_threads() if self._threads is None else self._threads
            torch.set_num_threads(trial.changes["num_threads"])

    def leave(self, loop: ScriptLoop, trial: Trial, *, whole_epochs: bool) -> None:
        """Undo what a trial changed in this process, and wait until its loader has nothing more to do."""
        if trial.kind == "threads" and self._threads is not None:
            sys.modules["torch"].set_num_threads(self._threads)
        supply = loop.own() if trial.uses_own_loader and not whole_epochs else loop.supplies.get(trial.number)
        if supply is not None and not whole_epochs:
            wait_until_idle(supply.is_idle, seconds=_IDLE_SECONDS)

    def drop(self, loop: ScriptLoop, trial: Trial) -> None:
        """It does not work here."""
        supply = loop.supplies.pop(trial.number, None)
        if supply is not None:
            supply.close()
        self._kept.pop(trial.number, None)

    def close(self) -> None:
        """Let go of the loaders' workers."""
        self._kept.clear()

    def _open(self, loop: ScriptLoop, trial: Trial, *, whole_epochs: bool) -> BatchSupply:
        loader = loop.loader
        if trial.kind == "replay":
            return loader.replay
        if trial.kind == "grouped":
            return GroupedSupply(loop.own(), num_batches=_GROUPED)
        rebuilt = self._kept.get(trial.number) if whole_epochs else None
        if rebuilt is None:
            if not whole_epochs:
                loop.own()
            remaining = None if whole_epochs else loop.tap
            rebuilt = rebuild(loader.instance, trial, remaining=remaining, remembered=loader.remembered)
        if whole_epochs:
            self._kept[trial.number] = rebuilt
        return IteratorSupply(iterate_plainly(rebuilt, loader.number, trial.number), rebuilt)


def prefetched_by(trial: Trial, loader: Any) -> int:
    """Batches that a loader with the trial's changes may have ready."""
    changes = trial.changes
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
    if loads_plan(loader):
        return _rebuild_plan_loader(loader, dict(trial.changes))
    torch, changes = sys.modules["torch"], dict(trial.changes)
    if is_ours(loader) or trial.kind == "penstock":
        from penstock.pytorch import DataLoader

        loader_class: Any = DataLoader
    else:  # torch's own, for every class that inherits from it
        loader_class = torch.utils.data.DataLoader
    indices = _RememberedIndices(remembered) if trial.kind == "warm" else remaining
    arguments = {name: getattr(loader, name) for name in _OPTIONS_OF_TORCH if hasattr(loader, name)}
    arguments |= _indices_of(loader, indices, changes.pop("batch_size", None)) | changes
    if not arguments["num_workers"]:
        arguments |= {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
    elif not arguments["timeout"]:
        arguments["timeout"] = _PATIENCE_SECONDS
    arguments["generator"] = loader.generator if remaining is None else torch.Generator().manual_seed(0)
    return _make(loader_class, loader.dataset, arguments)


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

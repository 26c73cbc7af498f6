"""Loading a torch dataset: starts loops, and knows where the last one stands.

    loaded state ──► EpochStart ──► Indices ──► batches ──► TorchLoop ──► user
                     (_torch_epochs)               LoopProgress ◄── handed over
                                                       └──► state (_torch_loop)

Between two loops a run knows three things: a state that was loaded and not yet continued from, the progress of the last
loop, and its batches, as long as persistent workers or the user keep them.
"""

from __future__ import annotations

import copy
import multiprocessing
import time
import weakref
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import IterDataPipe

from penstock.loader import LoaderStatistics, make_engine
from penstock.pytorch._device import find_device
from penstock.pytorch._feed import make_feed, wants_pinning
from penstock.pytorch._torch_datasets import (
    Fetching,
    is_iterable,
    is_pipe,
    reseed_pipe,
    split_over_ranks,
    with_sharding,
)
from penstock.pytorch._torch_epochs import (
    EpochStart,
    Indices,
    epoch_of,
    innermost_sampler,
    restore_generators,
)
from penstock.pytorch._torch_loop import (
    InlineBatches,
    LoopProgress,
    TorchBatches,
    TorchLoop,
    check_state,
    share_anew,
    state_between,
    state_within,
    worker_states,
)
from penstock.pytorch._torch_work import TorchWork
from penstock.pytorch._torch_workers import WorkerBatches
from penstock.pytorch._warnings import warn_reading_again, warn_slow_pickling
from penstock.workers import StartMethod

if TYPE_CHECKING:
    from penstock.pytorch._live_tuning import LiveTuning
    from penstock.pytorch._online import Setting

_IF_CHEAP = "Handing it over may take longer: try num_workers=0."


class TorchRun:
    """What `DataLoader` does with a torch dataset. Settings are the loader's attributes, read when a loop starts."""

    def __init__(self, loader: Any) -> None:
        self._find_loader = weakref.ref(loader)
        self._statistics = LoaderStatistics()
        self._loaded: dict[str, Any] | None = None
        """A state from which the next loop continues."""
        self._progress: LoopProgress | None = None
        """Where the last loop stands; None if there was none since a state was loaded."""
        self._find_batches: weakref.ref[TorchBatches] | None = None
        """What the last loop takes its batches from."""
        self._tuning = self._make_tuning(loader) if loader.tunes_workers else None

    @property
    def kind(self) -> str:
        """What computes: "inline" or "process"."""
        return "process" if self._loader.num_workers else "inline"

    def __iter__(self) -> TorchLoop:
        """A loop over one epoch, or over the rest of one after `load_state_dict`."""
        loader, batches = self._loader, self._start_batches()
        pins = loader.device is None and wants_pinning(loader.pin_memory, loader.pin_memory_device)
        feed = make_feed(batches, device=find_device(loader.device), pin_memory=pins, on_device=loader.on_device)
        return TorchLoop(loader, batches, feed)

    def _start_batches(self) -> TorchBatches:
        loader = self._loader
        loaded, self._loaded = self._loaded, None
        running = self._living_batches()
        if loaded is not None and not loader.num_workers:
            self._leave_epoch(loaded)
        living_seed = None if running is None else running.progress.worker_seed
        indices = Indices(loader, EpochStart.find(loader, loaded, living_seed))
        fetching, self._progress = Fetching.of(loader), self._start_progress(indices, loaded or {})
        if running is not None:
            running.restart(fetching, indices, self._progress)
            return running
        batches = self._make_batches(fetching, indices, self._progress)
        if loader.persistent_workers:
            loader._iterator = batches
        self._find_batches = weakref.ref(batches)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Where the last loop stands, as plain data: batches handed over, not batches computed ahead."""
        loader, progress = self._loader, self._progress
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        if progress is None or progress.is_finished:
            return state_between(loader, progress)
        batches = self._batches
        if batches is not None and batches.progress is progress:
            batches.begin()
        return state_within(loader, progress)

    def load_state_dict(self, state: Any) -> None:
        """Let the next loop continue where a state stands.

        Raises:
            StateError: it belongs to other data, another sampler, or for iterable data to another number of workers;
                or it is not a state at all.
        """
        loader = self._loader
        state = share_anew(state, loader)
        check_state(state, loader)
        restore_generators(loader, state["draws"])
        if state["dataset_epoch"] is not None and callable(getattr(loader.dataset, "set_epoch", None)):
            loader.dataset.set_epoch(state["dataset_epoch"])
        is_in_epoch = state["position"] is not None
        num_again = sum(one for one in state.get("workers", ()) if isinstance(one, int)) if is_in_epoch else 0
        if num_again:
            warn_reading_again(type(loader.dataset).__name__, num_again)
        if not is_in_epoch and state["draws"]["seed"]:
            loader._iterator = None  # the next epoch had new workers
        self._progress, self._loaded = None, copy.deepcopy(state)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to whatever has a `set_epoch`: the sampler, the batch sampler, the dataset."""
        loader = self._loader
        for owner in {id(o): o for o in (innermost_sampler(loader), loader._index_sampler, loader.dataset)}.values():
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)

    def set_workers(self, num_workers: int) -> None:
        """Not for torch datasets: a batch's random numbers depend on which worker computes it, except with "auto"."""
        raise ValueError(f"set_workers({num_workers}): workers of a torch dataset have state and cannot change.")

    def set_prefetch(self, prefetch: int) -> None:
        """Not for torch datasets: set `loader.prefetch_factor`, which the next loop uses."""
        raise ValueError(f"set_prefetch({prefetch}): for a torch dataset set loader.prefetch_factor, per worker.")

    def stats(self) -> LoaderStatistics:
        statistics, loader = self._statistics, self._loader
        batches = self._batches
        statistics.num_workers = loader.num_workers
        statistics.prefetch = loader.num_workers * (loader.prefetch_factor or 0)
        if isinstance(batches, WorkerBatches):
            batches.update_statistics()
        return statistics.copy()

    def close(self) -> None:
        """Stop the workers of the last loop."""
        batches = self._batches
        self._find_batches = None
        self._loader._iterator = None
        if batches is not None:
            batches.close()
        if self._tuning is not None:
            self._tuning.close()

    def apply(self, setting: Setting) -> int:
        loader = self._loader
        loader.num_workers, loader.prefetch_factor = setting.num_workers, setting.depth  # also of the next epoch
        batches = self._batches
        return batches.change(setting) if isinstance(batches, WorkerBatches) else 0

    def has_started(self) -> bool:
        batches = self._batches
        return not isinstance(batches, WorkerBatches) or batches.has_started()

    def _make_tuning(self, loader: Any) -> LiveTuning:
        """What tunes the settings while they are used; refused for datasets that keep something from batch to batch."""
        fetching = Fetching.of(loader)
        if fetching.may_have_state or is_pipe(fetching.dataset):
            what = "an iterable dataset" if fetching.is_iterable else "a dataset that has a state"
            raise ValueError(f"num_workers='auto' with {what}: what comes next depends on its workers. Give a number.")
        from penstock.pytorch._live_tuning import LiveTuning
        from penstock.pytorch._online import Setting

        start = Setting(loader.num_workers, loader.prefetch_factor)
        return LiveTuning(self, self._statistics, "process", start, if_cheap=_IF_CHEAP)

    @property
    def _loader(self) -> Any:
        loader = self._find_loader()
        assert loader is not None
        return loader

    @property
    def _batches(self) -> TorchBatches | None:
        """Those of the last loop, as long as they exist."""
        return None if self._find_batches is None else self._find_batches()

    def _living_batches(self) -> WorkerBatches | None:
        """Those of persistent workers, which run another epoch; if any worker died, all are restarted."""
        batches = self._loader._iterator if self._loader.persistent_workers else None
        if not isinstance(batches, WorkerBatches):
            return None
        if not batches.can_restart:
            batches.close()
            return None
        return batches

    def _leave_epoch(self, saved: dict[str, Any]) -> None:
        """Without workers: bring the dataset to where an epoch that is over left it, before the next one draws."""
        if saved["position"] is None:
            fetching, (state,) = Fetching.of(self._loader), worker_states(saved, 1)
            fetching.make_fetcher(fetching.collate_fn, state, has_ended=True)
            saved.pop("workers", None)

    def _start_progress(self, indices: Indices, saved: dict[str, Any]) -> LoopProgress:
        loader, is_in_epoch = self._loader, indices.start.rest_of is not None
        assert indices.worker_seed is not None
        progress = LoopProgress(
            draws=indices.start.draws,
            base_seed=saved["base_seed"] if is_in_epoch else indices.worker_seed,
            worker_seed=indices.worker_seed,
            begins_after_states=not is_in_epoch,
            num_workers=loader.num_workers,
            is_iterable=is_iterable(loader),
            sampler_epoch=epoch_of(innermost_sampler(loader)),
            dataset_epoch=epoch_of(loader.dataset),
            worker_states=worker_states(saved, max(1, loader.num_workers)),
        )
        if is_in_epoch:
            progress.position, progress.sampler_state = saved["position"], saved["sampler_state"]
            progress.ahead = indices.handed_over
            progress.next_worker = saved.get("next_worker", 0) % max(1, loader.num_workers)
            progress.ended = frozenset(saved.get("ended", ()))
        return progress

    def _make_batches(self, fetching: Fetching, indices: Indices, progress: LoopProgress) -> TorchBatches:
        loader = self._loader
        if isinstance(fetching.dataset, IterDataPipe):
            assert indices.shared_seed is not None
            reseed_pipe(fetching.dataset, indices.shared_seed)
        if not loader.num_workers:
            if loader.timeout != 0:
                raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
            if is_pipe(fetching.dataset):
                split_over_ranks(fetching.dataset)
            return InlineBatches(fetching, indices, progress, self._statistics)
        if loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        loader.check_worker_number_rationality()
        init = with_sharding(loader.worker_init_fn) if is_pipe(fetching.dataset) else loader.worker_init_fn
        begin = time.perf_counter()
        work = TorchWork(fetching, progress.worker_seed, init, seeds_batches=loader.tunes_workers)
        engine = make_engine(
            work,
            kind="process",
            num_workers=loader.num_workers,
            start_method=_start_method(loader),
            is_assigned=not loader.tunes_workers,
        )
        if _start_method(loader) != "fork":
            warn_slow_pickling(time.perf_counter() - begin, type(fetching.dataset).__name__)
        return WorkerBatches(loader, fetching, indices, progress, self._statistics, work, engine, self._tuning)


def _start_method(loader: Any) -> StartMethod:
    """The loader's, or the interpreter's default: on Linux before 3.14 that is to fork."""
    context = loader.multiprocessing_context
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    return cast(StartMethod, method)

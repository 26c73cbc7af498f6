"""One `for` loop over a torch dataset: what the user iterates over, batches without workers, where it stands: a state.

    sampler -> Indices -> InlineBatches | WorkerBatches (-> feed: pinned memory, device) -> TorchLoop -> user
                                                                       LoopProgress <- receipt

Batches may be taken ahead of the user, by workers and by a feed. The state counts what the user has, so each batch
comes with a receipt, and the loop's progress moves only when the batch is handed over.

A state is written from that progress, and checked before a loop continues from it. It comes from a checkpoint, and a
checkpoint may come from a stranger: `torch.load(weights_only=True)` lets only plain data pass, so nothing in a state
may become more than that here. Every field has a shape, and nothing is unpickled. The two exceptions belong to the
user: what a sampler (`sampler_state`) or a dataset (`workers`) gave as its own state is handed back to its
`load_state_dict` as it is.
"""

import contextlib
import copy
import pickle
import reprlib
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from torch.utils.data import DistributedSampler

from penstock.errors import StateError
from penstock.loader import LoaderStatistics, count_handed_over
from penstock.pytorch._feed import BatchSource, Feed, take
from penstock.pytorch._torch_datasets import (
    Fetching,
    WorkerState,
    is_iterable,
    is_shared_anew,
    preserve_generators,
    skip_batch,
)
from penstock.pytorch._torch_epochs import Indices, check_draws, current_draws, epoch_of, innermost_sampler
from penstock.shapes import COUNT, Either, find_mismatch

STATE_VERSION = 2
"""States of version 1 are read as well: they have no states of map-style datasets, nor of workers between epochs."""
_READ_VERSIONS = (1, STATE_VERSION)
_SEED = range(1 << 63)
_EPOCH = Either(None, COUNT)
_AT_REST = {"position": None, "base_seed": Either(None, _SEED), "dataset_epoch": _EPOCH, "draws": {"seed": bool}}
_IN_EPOCH = {
    "position": COUNT,
    "base_seed": _SEED,
    "sampler_epoch": _EPOCH,
    "dataset_epoch": _EPOCH,
    "sampler_state": object,
    "draws": {"seed": bool},
}
_OF_WORKER = Either(None, COUNT, {"iterator": object}, {"dataset": object})
"""At the beginning; batches to read again; or what the dataset's own iterator, or the dataset, or both, said."""
_OF_MAP_STYLE = {"workers": [Either(None, {"dataset": object})], "next_worker": COUNT, "ahead": [COUNT]}


class Receipt(NamedTuple):
    """What handing over one batch changes in where the loop stands."""

    number: int
    worker: int
    sampler_state: Any
    worker_state: bytes | None
    ended: Mapping[int, bytes | None] = {}
    """Workers of an iterable dataset that have no more to give after this batch, and where they stood then."""


@dataclass(slots=True, kw_only=True)
class LoopProgress:
    """Where a loop stands: what was handed over, not what was computed ahead."""

    draws: dict[str, Any]
    base_seed: int
    """The seed that the epoch began with."""
    worker_seed: int
    """The seed that its workers were given: another one in the rest of an epoch."""
    begins_after_states: bool = False
    """Whether the workers' states are those that the epoch before this one left them in."""
    num_workers: int
    is_iterable: bool
    sampler_epoch: int | None = None
    dataset_epoch: int | None = None
    position: int = 0
    """Batches handed over; out of order, those that have no gap before them."""
    ahead: dict[int, Any] = field(default_factory=dict)
    """Batches handed over out of order, with the sampler's state after each."""
    sampler_state: Any = None
    worker_states: list[WorkerState] = field(default_factory=list)
    """One for each worker, or the only one; of an iterable dataset without a state, the number of batches it gave."""
    next_worker: int = 0
    ended: frozenset[int] = frozenset()
    is_finished: bool = False

    def advance(self, receipt: Receipt) -> None:
        """Count a batch as handed over."""
        number = self.position if self.is_iterable else receipt.number  # items of ended workers leave gaps
        self.ahead[number] = receipt.sampler_state
        while self.position in self.ahead:
            self.sampler_state = self.ahead.pop(self.position)
            self.position += 1
        worker = receipt.worker
        if receipt.worker_state is not None:
            self.worker_states[worker] = receipt.worker_state
        elif self.is_iterable:
            self.worker_states[worker] = _one_more(self.worker_states[worker])
        if receipt.ended:
            self._end(receipt.ended)
        self.next_worker = (worker + 1) % max(1, self.num_workers)

    def finish(self, ended: Mapping[int, bytes | None]) -> None:
        """The epoch is over: all of it was handed over."""
        self._end(ended)
        self.is_finished = True

    def _end(self, ended: Mapping[int, bytes | None]) -> None:
        for worker in ended.keys() - self.ended:
            self.worker_states[worker] = ended[worker] or self.worker_states[worker]
        self.ended = self.ended.union(ended)


class TorchBatches(BatchSource, Protocol):
    """Batches of one epoch of a torch dataset."""

    progress: LoopProgress
    ended: Mapping[int, bytes | None]
    """Workers of an iterable dataset that have no more to give, and where they stood then."""
    profiled_as: str
    """The name that torch's profiler knows such a loop by."""

    def turn(self) -> AbstractContextManager[Any]:
        """What the thread that takes a batch holds until it is handed over."""
        ...

    def begin(self) -> None:
        """Wait until the progress knows where all workers started."""
        ...

    def close(self) -> None:
        """Stop what runs."""
        ...


class TorchLoop:
    """What iterating over a loader of a torch dataset gives.

    It refers to the batches and they do not refer to it: workers end with the last reference, not with a
    garbage collection.
    """

    def __init__(self, loader: Any, batches: TorchBatches, feed: Feed | None) -> None:
        self.batches, self._feed = batches, feed
        self._source: BatchSource = batches if feed is None else feed
        self._profiled_as = f"enumerate(DataLoader)#{batches.profiled_as}.__next__"
        self._dataset, self._index_sampler = loader.dataset, loader._index_sampler
        self._promised_length = loader._IterableDataset_len_called if batches.progress.is_iterable else None
        self._num_handed_over = 0

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __next__(self) -> Any:
        with self.batches.turn():
            found = take(self._source, self._profiled_as)
            if found is None:
                if self._feed is not None:
                    self._feed.close()
                self.batches.progress.finish(self.batches.ended)
                raise StopIteration
            receipt, batch = found
            self.batches.progress.advance(receipt)
            self._num_handed_over += 1
            if self._promised_length is not None and self._num_handed_over > self._promised_length:
                self._warn_length()
            return batch

    def __getstate__(self) -> None:
        """As torch's iterators refuse it."""
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled")

    def _warn_length(self) -> None:
        message = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._promised_length}"
            f"(when accessing len(dataloader)), but {self._num_handed_over} samples have been fetched. "
        )
        if self.batches.progress.num_workers > 0:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(message, stacklevel=3)


class InlineBatches:
    """Computes a batch when it is asked for, in the trainer: nothing is copied, objects are the dataset's own."""

    profiled_as = "_SingleProcessDataLoaderIter"

    def __init__(
        self, fetching: Fetching, indices: Indices, progress: LoopProgress, statistics: LoaderStatistics
    ) -> None:
        self.progress = progress
        self._fetching, self._indices, self._statistics = fetching, indices, statistics
        self._left_at: float | None = None
        self.ended: Mapping[int, bytes | None] = {}
        start = progress.worker_states[0]
        self._fetcher = fetching.make_fetcher(
            fetching.collate_fn, start, is_over=progress.begins_after_states, has_ended=bool(progress.ended)
        )
        self._awaits_start = fetching.may_have_state
        if isinstance(start, int):
            with preserve_generators():
                for _ in range(start):
                    if not skip_batch(self._fetcher, indices.any_index):
                        break  # a state may say any number

    def next(self) -> tuple[Receipt, Any] | None:
        begin = time.perf_counter()
        self._awaits_start = False
        try:
            number, index, sampler_state = self._indices.next()
            batch = self._fetcher.fetch(index)
        except StopIteration:
            self.ended = {0: self._fetching.state_of(self._fetcher)}
            return None
        state = self._fetching.state_of(self._fetcher)
        self._statistics.produce_seconds += time.perf_counter() - begin
        self._left_at = count_handed_over(self._statistics, begin, 0.0, self._left_at)
        ended = {0: state} if self._fetching.is_iterable and self._fetcher.ended else {}
        return Receipt(number, 0, sampler_state, state, ended), batch

    def begin(self) -> None:
        """Ask the dataset where it starts, after what the sampler draws: it may draw from the same generator."""
        if self._awaits_start:
            self._indices.draw_early()
            self.progress.worker_states[0] = self._fetching.state_of(self._fetcher) or self.progress.worker_states[0]

    def is_ready(self) -> bool:
        """Never: nothing is computed ahead."""
        return False

    def turn(self) -> AbstractContextManager[Any]:
        """As in torch, nothing keeps threads apart here."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Nothing runs."""


def _one_more(state: WorkerState) -> WorkerState:
    """The state of a worker whose dataset has none, or gave none because it failed."""
    return state if isinstance(state, bytes) else (state or 0) + 1


def state_within(loader: Any, progress: LoopProgress) -> dict[str, Any]:
    """The state within an epoch: what it drew from, and what of it was handed over."""
    state = describe_loader(loader) | {
        "position": progress.position,
        "draws": copy.deepcopy(progress.draws),
        "base_seed": progress.base_seed,
        "sampler_epoch": progress.sampler_epoch,
        "dataset_epoch": progress.dataset_epoch,
        "sampler_state": copy.deepcopy(progress.sampler_state),
    }
    if Fetching.of(loader).may_have_state:
        workers = _joined(loader.dataset, _plain(progress.worker_states))
        state |= {"workers": workers, "next_worker": progress.next_worker}
    if is_iterable(loader):
        state["ended"] = sorted(progress.ended)
    elif progress.ahead:
        state["ahead"] = sorted(progress.ahead)
    return state


def state_between(loader: Any, progress: LoopProgress | None) -> dict[str, Any]:
    """The state between epochs: what the next one draws from, and how workers that it finds were left.

    `progress` is that of the epoch before, if there was one.
    """
    live_on = progress is not None and loader._iterator is not None
    state = describe_loader(loader) | {
        "position": None,
        "base_seed": None if progress is None else progress.worker_seed,
        "dataset_epoch": epoch_of(loader.dataset),
        "draws": current_draws(loader, at_rest=True) | {"seed": not live_on},
    }
    is_kept = live_on or not loader.num_workers or is_shared_anew(loader.dataset)
    if progress is not None and Fetching.of(loader).may_have_state and is_kept:
        workers = [one if isinstance(one, dict) else None for one in _plain(progress.worker_states)]
        state["workers"] = _joined(loader.dataset, workers)
    return state


def _joined(dataset: Any, workers: list[Any]) -> list[Any]:
    """States of workers, or the one that a stream makes of them."""
    states = [one["dataset"] for one in workers if isinstance(one, dict) and "dataset" in one]
    if not is_shared_anew(dataset):
        return workers
    return [{"dataset": dataset.join_states(states, len(workers))} if states else None]


def share_anew(state: Any, loader: Any) -> Any:
    """A state as this loader's ranks and workers go on with it: of a stream, those of all ranks may be given as a list.

    Raises:
        StateError: they are of different times, or do not hold the progress of all that is needed.
    """
    dataset, states = loader.dataset, list(state) if isinstance(state, list | tuple) else [state]
    if not is_shared_anew(dataset) or not states or not all(isinstance(each, dict) for each in states):
        return state
    first = next((each for each in states if each.get("position") is not None), states[0])
    workers = [each.get("workers", [None]) for each in states]
    if find_mismatch(workers, [[Either(None, {"dataset": object})]]):
        return first
    found = [one for each in workers for one in each]
    if None in found:
        if len(states) > 1 and any(found):
            raise StateError("Not all ranks had begun the epoch when these states were saved. Use later ones.")
        return first
    joined = dataset.read_states([one["dataset"] for one in found])
    if dataset.is_continued(joined, max(1, loader.num_workers)):
        return {**first, "workers": [{"dataset": joined}]}
    if first.get("position") is None:  # the epoch is over, so the next one is shared
        return {name: value for name, value in first.items() if name != "workers"}
    return {**first, "next_worker": 0, "ended": [], "workers": [{"dataset": joined}]}


def _plain(states: Sequence[WorkerState]) -> list[Any]:
    """States of workers as plain data, as far as their datasets' are."""
    return [pickle.loads(one) if isinstance(one, bytes) else one for one in states]  # noqa: S301 - of our workers


def check_state(state: Any, loader: Any) -> None:
    """Raise `StateError` unless a loop of this loader can continue from the state."""
    known = isinstance(state, dict) and any(_is_same(state.get("version"), each) for each in _READ_VERSIONS)
    if not known or "position" not in state:
        raise StateError(f"This is not a state of a torch dataset's loader, version 1 to {STATE_VERSION}.")
    for key, here in describe_loader(loader).items():
        if key != "version" and not _is_same(state.get(key), here):
            raise StateError(f"The state was saved with {key}={reprlib.repr(state.get(key))}; here it is {here!r}.")
    shape = (_AT_REST if state["position"] is None else _IN_EPOCH) | _parts_of(state, loader)
    wrong = find_mismatch(state, shape, "state")
    if not wrong and state["base_seed"] is None and not state["draws"]["seed"]:
        wrong = "no seed for workers is drawn, and none was"
    if wrong:
        raise StateError(f"The state is damaged: {wrong}. Go on from another one.")
    check_draws(loader, state["draws"])
    worker_states(state, max(1, loader.num_workers))


def worker_states(state: dict[str, Any], num_workers: int) -> list[WorkerState]:
    """Where each worker continues; a state that they all share does for any number of them.

    Raises:
        StateError: there are more workers now, or fewer, and each had a state of its own.
    """
    states = [pickle.dumps(one) if isinstance(one, dict) else one for one in state.get("workers", [None])]
    if len(states) != num_workers and len(set(states)) > 1:
        raise StateError(
            f"The state was saved with {len(states)} workers whose datasets each had a state of their own; here there "
            f"are {num_workers}. Use num_workers={len(states)}."
        )
    return states if len(states) == num_workers else states[:1] * num_workers


def _parts_of(state: dict[str, Any], loader: Any) -> dict[str, Any]:
    """The shapes of what only some states have."""
    num_workers = max(1, loader.num_workers)
    if not is_iterable(loader):
        return {name: shape for name, shape in _OF_MAP_STYLE.items() if name in state}
    if state["position"] is None and "workers" not in state:
        return {}
    each = (_OF_WORKER,) * num_workers
    workers = {"workers": Either(each, each[:1]) if is_shared_anew(loader.dataset) else each}
    number = range(num_workers)
    return workers if state["position"] is None else workers | {"next_worker": number, "ended": [number]}


def _is_same(found: Any, here: Any) -> bool:
    """Whether two facts are equal; what a store gives back as numpy's number still is one, an array is not."""
    return isinstance(found, str | int | float | np.number | None) and bool(found == here)


def describe_loader(loader: Any) -> dict[str, Any]:
    """What a state must agree with to be honoured."""
    if is_iterable(loader):
        return {
            "version": STATE_VERSION,
            "kind": "iterable",
            "dataset": type(loader.dataset).__qualname__,
            "batch_size": loader.batch_size,
        } | ({} if is_shared_anew(loader.dataset) else {"num_workers": loader.num_workers})
    sampler = innermost_sampler(loader)
    # What decides the order of a sampler that splits over ranks; all of them may load the state of one.
    of_ranks = ("num_replicas", "shuffle", "seed") if isinstance(sampler, DistributedSampler) else ()
    return {
        "version": STATE_VERSION,
        "kind": "map",
        "length": len(loader.dataset) if hasattr(loader.dataset, "__len__") else None,
        "batch_size": loader.batch_size,
        "sampler": type(sampler).__qualname__,
    } | {name: getattr(sampler, name, None) for name in of_ranks}

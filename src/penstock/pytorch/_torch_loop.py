"""One `for` loop over a torch dataset: what the user iterates over, where it stands, and batches without workers.

    sampler -> Indices -> InlineBatches | WorkerBatches (-> feed: pinned memory, device) -> TorchLoop -> user
                                                                       LoopProgress <- receipt

Batches may be taken ahead of the user, by workers and by a feed. The state counts what the user has, so each batch
comes with a receipt, and the loop's progress moves only when the batch is handed over.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

from penstock.loader import LoaderStatistics, count_handed_over
from penstock.pytorch._feed import BatchSource, Feed, take
from penstock.pytorch._torch_datasets import Fetching, WorkerState, preserve_generators, skip_batch
from penstock.pytorch._torch_epochs import Indices


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
                self.finish()
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

    def finish(self) -> None:
        """The epoch is over: all of it was handed over."""
        if self._feed is not None:
            self._feed.close()
        self.batches.progress.finish(self.batches.ended)

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
        """Fetch and collate now."""
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

"""One `for` loop over a torch dataset: what all have in common, and the one without workers."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from penstock.loader import LoaderStatistics, count_handed_over
from penstock.pytorch._indices import Indices, global_generators_kept
from penstock.pytorch._stateful import WorkerState, iteration_state
from penstock.pytorch._torch_work import TorchTask, passes


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a loop stands: what was handed over, not what was computed ahead."""

    draws: dict[str, Any]
    base_seed: int
    num_workers: int
    sampler_epoch: int | None = None
    dataset_epoch: int | None = None
    position: int = 0
    sampler_state: Any = None
    worker_states: list[WorkerState] = field(default_factory=list)
    """Of an iterable dataset: one for each worker, or the only one; if it has none, how many batches it gave."""
    next_worker: int = 0
    ended: frozenset[int] = frozenset()
    is_finished: bool = False


class Mark(NamedTuple):
    """What handing over one batch changes in where the loop stands."""

    worker: int
    sampler_state: Any
    worker_state: bytes | None
    ended: frozenset[int] = frozenset()
    """Workers of an iterable dataset that had no more to give before this batch came."""


class Loop(ABC):
    """Batches of one epoch. `next` and `hand_over` are the two halves of `__next__`, for who works a batch ahead.

    Only `hand_over` and `finish` change where the loop stands.
    """

    def __init__(self, loader: Any, task: TorchTask, progress: Progress, statistics: LoaderStatistics) -> None:
        self._task, self.progress, self._statistics = task, progress, statistics
        self._index_sampler = loader._index_sampler
        self._told_length = loader._IterableDataset_len_called
        self._num_yielded = 0
        self._left_at: float | None = None

    @abstractmethod
    def next(self) -> tuple[Mark, Any] | None:
        """The next batch, with what handing it over changes; None at the end."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `next` would not wait."""

    @abstractmethod
    def close(self) -> None:
        """Stop what runs."""

    def hand_over(self, mark: Mark) -> None:
        """Count a batch as the user's."""
        self._advance(mark)
        self._num_yielded += 1
        if self._task.is_iterable and self._told_length is not None and self._num_yielded > self._told_length:
            self._warn_length()

    def finish(self) -> None:
        """Count the epoch as over: all of it was handed over."""
        self.progress.is_finished = True

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __next__(self) -> Any:
        found = _next_in_profile(self) if torch._C._autograd._profiler_enabled() else self.next()
        if found is None:
            self.finish()
            raise StopIteration
        self.hand_over(found[0])
        return found[1]

    def __getstate__(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled")

    def _advance(self, mark: Mark) -> None:
        progress = self.progress
        progress.position += 1
        progress.sampler_state = mark.sampler_state
        if self._task.is_iterable:
            progress.worker_states[mark.worker] = mark.worker_state or _one_more(progress.worker_states[mark.worker])
            progress.ended = mark.ended
            progress.next_worker = (mark.worker + 1) % max(1, progress.num_workers)

    def _count(self, begin: float, waited: float) -> None:
        self._left_at = count_handed_over(self._statistics, begin, waited, self._left_at)

    def _warn_length(self) -> None:
        message = (
            f"Length of IterableDataset {self._task.dataset} was reported to be {self._told_length}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
        )
        if self.progress.num_workers > 0:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(message, stacklevel=4)


class InlineLoop(Loop):
    """Computes a batch when it is asked for, in the trainer: nothing is copied, objects are the dataset's own."""

    def __init__(
        self,
        loader: Any,
        task: TorchTask,
        indices: Indices,
        progress: Progress,
        statistics: LoaderStatistics,
    ) -> None:
        super().__init__(loader, task, progress, statistics)
        self._indices = indices
        start = progress.worker_states[0]
        self._fetcher = task.make_fetcher(task.collate_fn, start)
        if isinstance(start, int):
            with global_generators_kept():
                for _ in range(start):
                    passes(self._fetcher, indices.next()[0])

    def next(self) -> tuple[Mark, Any] | None:
        """Fetch and collate now."""
        begin = time.perf_counter()
        try:
            index, sampler_state = self._indices.next()
            batch = self._fetcher.fetch(index)
        except StopIteration:
            return None
        state = iteration_state(self._task.dataset, self._fetcher.dataset_iter) if self._task.is_iterable else None
        waited = time.perf_counter()
        self._statistics.produce_seconds += waited - begin
        self._count(begin, waited)
        return Mark(0, sampler_state, state), batch

    def is_ready(self) -> bool:
        """Never: nothing is computed ahead."""
        return False

    def close(self) -> None:
        """Nothing runs."""


def _one_more(state: WorkerState) -> WorkerState:
    """The state of a worker whose dataset has none, or gave none because it failed."""
    return state if isinstance(state, bytes) else (state or 0) + 1


def _next_in_profile(loop: Loop) -> tuple[Mark, Any] | None:
    """The next batch, as a range that torch's profiler shows under the name that torch gives it."""
    kind = "_SingleProcessDataLoaderIter" if isinstance(loop, InlineLoop) else "_MultiProcessingDataLoaderIter"
    with torch.autograd.profiler.record_function(f"enumerate(DataLoader)#{kind}.__next__"):
        return loop.next()

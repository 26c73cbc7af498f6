"""What runs in a worker for a torch dataset: fetch samples, collate, pack.

A worker of a torch loader has state: its generators, and the iterator of an iterable dataset. So items are
assigned to workers, and an item says which epoch it belongs to: the first of a new one starts a new iterator.
"""

from __future__ import annotations

import gc
import pickle
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils as torch_utils

from penstock.loader import Arena, Batch
from penstock.pytorch._collate import collate_into, keep_collate_out_of_shared_memory
from penstock.pytorch._datapipes import is_iterable_pipe, reseed_pipe
from penstock.pytorch._stateful import WorkerState, iteration_state, load_dataset_state, load_iterator_state
from penstock.pytorch._transport import SlotTensors, pack
from penstock.pytorch._warnings import warn_slow_pickling
from penstock.pytorch._worker_seeds import WatchedWorkerInfo, seed_worker, set_worker_info

_SHOWN_INDICES = 4
_LOOKED_AT = 2


class TorchItem(NamedTuple):
    """One batch of a torch dataset."""

    number: int
    worker: int
    epoch: int
    index: Any
    """What the sampler gave: indices of the samples, or as many Nones for an iterable dataset."""
    start: WorkerState = None
    """Where an iterable dataset goes on; comes with the first item of a worker after a resume."""
    shared_seed: int | None = None

    def __str__(self) -> str:
        indices = self.index if isinstance(self.index, (list, tuple)) else [self.index]
        if not indices or indices[0] is None:
            return f"batch {self.number}"
        shown = ", ".join(str(index) for index in indices[:_SHOWN_INDICES])
        return f"batch {self.number} (samples {shown}{', …' if len(indices) > _SHOWN_INDICES else ''})"


@dataclass(frozen=True, kw_only=True)
class TorchTask:
    """What a torch loader loads, and how."""

    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool

    def make_fetcher(self, collate_fn: Callable[[Any], Any], start: WorkerState = None) -> Any:
        """Torch's own fetcher; for an iterable dataset this starts an iterator, from a state if there is one."""
        fetch = torch_utils.fetch
        if not self.is_iterable:
            return fetch._MapDatasetFetcher(self.dataset, self.auto_collation, collate_fn, self.drop_last)
        state = pickle.loads(start) if isinstance(start, bytes) else {}  # noqa: S301 - the trainer's
        load_dataset_state(self.dataset, state)
        fetcher = fetch._IterableDatasetFetcher(self.dataset, self.auto_collation, collate_fn, self.drop_last)
        load_iterator_state(fetcher.dataset_iter, state)
        return fetcher


@dataclass
class TorchWork:
    """Batches of a torch dataset, in worker processes."""

    task: TorchTask
    base_seed: int
    worker_init_fn: Callable[[int], None] | None
    _worker: int = 0
    _epoch: int = -1
    _fetcher: Any = None
    _tensors: SlotTensors | None = None
    _error: ExceptionWrapper | None = None
    _has_ended: bool = False
    _digests: list[int] = field(default_factory=list)

    def begin(self, worker: int, num_workers: int) -> None:
        """Make the process what torch's workers are."""
        gc.freeze()  # else a full collection writes to, and so copies, every page of the dataset's objects
        torch.set_num_threads(1)
        self._worker = worker
        seed_worker(self.base_seed, worker)
        set_worker_info(worker, num_workers, self.base_seed + worker, self.task.dataset)
        keep_collate_out_of_shared_memory()
        try:
            if self.worker_init_fn is not None:
                self.worker_init_fn(worker)
        except Exception:  # noqa: BLE001 - it is raised in the trainer, by each batch of this worker
            self._error = self._wrapped()

    def compute(self, item: TorchItem, arena: Arena) -> Batch:
        """Fetch, collate, pack; errors travel as torch wraps them."""
        try:
            return self._compute(item, arena)
        except Exception:  # noqa: BLE001 - it is raised in the trainer's next()
            return _carry(self._wrapped())
        except BaseException as error:  # noqa: BLE001 - it would end the trainer
            return _carry(self._wrapped_end(error))

    def announce(self, item: TorchItem) -> None:
        """Nobody knows what a dataset will read."""

    def _compute(self, item: TorchItem, arena: Arena) -> Batch:
        if self._error is not None:  # at every batch: what the start function did not do, each of them would lack
            return _carry(self._error)
        if item.epoch != self._epoch:
            self._start_epoch(item, arena)
        if self._has_ended:
            return {"end": True}
        self._tensors = tensors = SlotTensors(arena)
        try:
            value = self._fetcher.fetch(item.index)
        except StopIteration:
            if not self.task.is_iterable:
                raise
            self._has_ended = True
            return {"end": True}
        batch = pack(value, tensors, arena)
        if self.task.is_iterable:
            batch["state"] = iteration_state(self.task.dataset, self._fetcher.dataset_iter)
            self._look(batch)
        return batch

    def _look(self, batch: Batch) -> None:
        """Say with the second batch what the first two were, and whether anything asked which worker this is."""
        if len(self._digests) < _LOOKED_AT:
            self._digests.append(_digest(batch))
            if len(self._digests) == _LOOKED_AT:
                batch["look"] = (tuple(self._digests), WatchedWorkerInfo.was_read)

    def _start_epoch(self, item: TorchItem, arena: Arena) -> None:
        if item.shared_seed is not None and is_iterable_pipe(self.task.dataset):
            reseed_pipe(self.task.dataset, item.shared_seed)
        self._fetcher = self.task.make_fetcher(self._collate, item.start)
        self._epoch, self._has_ended = item.epoch, False
        for _ in range(item.start if isinstance(item.start, int) else 0):
            self._tensors = SlotTensors(arena)
            self._has_ended = self._has_ended or not passes(self._fetcher, item.index)
            arena.begin()

    def _collate(self, samples: Any) -> Any:
        if self.task.collate_fn is torch_utils.collate.default_collate:
            assert self._tensors is not None
            return collate_into(samples, self._tensors)
        return self.task.collate_fn(samples)

    def _wrapped(self) -> ExceptionWrapper:
        where = f"in DataLoader worker process {self._worker}"
        return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]

    def _wrapped_end(self, error: BaseException) -> ExceptionWrapper:
        """What would end a process is an error of this batch, and the worker goes on."""
        ended = f"called sys.exit({error})" if isinstance(error, SystemExit) else f"raised {error!r}"
        try:
            raise RuntimeError(f"DataLoader worker {self._worker} exited unexpectedly: the dataset {ended}.") from error
        except RuntimeError:
            return self._wrapped()

    def __getstate__(self) -> dict[str, Any]:
        """Pickled here, once for all workers, to be able to say when it takes long."""
        begin = time.perf_counter()
        pickled = pickle.dumps((self.task, self.worker_init_fn))
        warn_slow_pickling(time.perf_counter() - begin, len(pickled), type(self.task.dataset).__name__)
        return {"pickled": pickled, "base_seed": self.base_seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        task, worker_init_fn = pickle.loads(state["pickled"])  # noqa: S301 - the trainer's
        self.__init__(task, state["base_seed"], worker_init_fn)  # type: ignore[misc]


def passes(fetcher: Any, index: Any) -> bool:
    """Have a batch fetched and throw it away; False when there are no more. One that failed may fail again."""
    try:
        fetcher.fetch(index)
    except StopIteration:
        return False
    except Exception:  # noqa: BLE001 - it was raised when the batch was to be handed over
        return True
    return True


def _carry(error: ExceptionWrapper) -> Batch:
    """An error as a batch; of a class that cannot be pickled, its message."""
    try:
        pickle.loads(pickle.dumps(error.exc_type))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - defined inside a function
        error.exc_type = RuntimeError
    return {"error": error}


def _digest(batch: Batch) -> int:
    """A number that is the same for the same data."""
    digest = zlib.crc32(batch.get("pickle", b""))
    for key, value in batch.items():
        if key.isdigit() or key == "rest":
            digest = zlib.crc32(value.tobytes(), digest)
    return digest

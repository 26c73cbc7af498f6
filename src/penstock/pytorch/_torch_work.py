"""What runs in a worker process for a torch dataset: fetch samples, collate them into the slot, answer.

A worker of a torch loader has state: its generators, and the iterator of an iterable dataset. So items are
assigned to workers, and an item says which epoch it belongs to: the first of a new epoch starts a new iterator.

`default_collate` stacks straight into the shared slot. Torch's own `collate` walks the structure with torch's
own table of types, so results equal torch's and types that users registered are honoured. Only torch's function
for tensors is replaced, because in a worker it makes a new file in `/dev/shm` for each tensor of each batch.
"""

from __future__ import annotations

import gc
import pickle
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from penstock.loader import Arena, Batch
from penstock.pytorch._torch_datasets import Fetching, WorkerState, reseed_pipe, skip_batch
from penstock.pytorch._torch_transport import (
    Array,
    Content,
    FirstBatches,
    PickledValue,
    SlotTensors,
    TorchAnswer,
    WorkerEnd,
    WorkerFailure,
    pack,
)

_SHOWN_INDICES = 4
_LARGEST_SEED = (1 << 62) - 1
_COMPARED_BATCHES = 2
_COMPRESSED = {torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc}


def _warm_up() -> None:
    """Importing this module, and torch with it, is all there is to do before workers are forked."""


class TorchItem(NamedTuple):
    """One batch of a torch dataset, to be computed."""

    number: int
    worker: int
    epoch: int
    index: Any
    """What the sampler gave: indices of the samples, or as many Nones for an iterable dataset."""

    def __str__(self) -> str:
        indices = self.index if isinstance(self.index, (list, tuple)) else [self.index]
        if not indices or indices[0] is None:
            return f"batch {self.number}"
        shown = ", ".join(str(index) for index in indices[:_SHOWN_INDICES])
        return f"batch {self.number} (samples {shown}{', …' if len(indices) > _SHOWN_INDICES else ''})"


class TorchStart(NamedTuple):
    """The beginning of an epoch in a worker whose dataset may say where it stands: it is asked before any batch."""

    worker: int
    epoch: int
    state: WorkerState
    """Where it continues, or what the epoch before left."""
    is_over: bool
    """Whether it is what the epoch before left."""
    has_ended: bool
    """Whether the worker had no more to give in what was read of this epoch."""
    index: Any
    """An index of an iterable dataset, for batches that are read again."""
    shared_seed: int | None

    def __str__(self) -> str:
        return "the beginning of an epoch"


@dataclass
class TorchWork:
    """Batches of a torch dataset, in worker processes."""

    warm_up: ClassVar[Callable[[], None]] = staticmethod(_warm_up)
    fetching: Fetching
    base_seed: int
    worker_init_fn: Callable[[int], None] | None
    seeds_batches: bool = False
    """Whether random numbers depend on the batch alone, and not on the worker and what it computed before."""
    _worker: int = 0
    _epoch: int = -1
    _fetcher: Any = None
    _tensors: SlotTensors | None = None
    _error: ExceptionWrapper | None = None
    _start_error: Exception | None = None
    _has_ended: bool = False
    _digests: list[int] = field(default_factory=list)

    def begin(self, worker: int, num_workers: int) -> None:
        """Set this process up as torch does its workers."""
        gc.freeze()  # else a full collection writes to, and so copies, every page of the dataset's objects
        torch.set_num_threads(1)
        self._worker = worker
        _seed_worker(self.base_seed, worker)
        _set_worker_info(worker, num_workers, self.base_seed + worker, self.fetching.dataset)
        _keep_collate_out_of_shared_memory()
        try:
            if self.worker_init_fn is not None:
                self.worker_init_fn(worker)
        except Exception:  # noqa: BLE001 - it is raised in the trainer, by each batch of this worker
            self._error = self._wrap_error()

    def compute(self, item: TorchItem | TorchStart, arena: Arena) -> Batch:
        """Fetch, collate, pack; errors travel as torch wraps them."""
        try:
            return self._start(item, arena) if isinstance(item, TorchStart) else self._compute(item, arena)
        except Exception:  # noqa: BLE001 - it is raised in the trainer's next()
            error = self._wrap_error()
        except BaseException as end:  # noqa: BLE001 - it would end the trainer
            error = self._wrap_exit(end)
        return _failure(error).as_batch()

    def announce(self, item: TorchItem | TorchStart) -> None:
        """Do nothing: what a dataset will read is unknown."""

    def _compute(self, item: TorchItem, arena: Arena) -> Batch:
        if self._error is not None:  # for every batch: each would lack what the start function did not do
            return _failure(self._error).as_batch()
        if item.epoch != self._epoch:
            self._start_epoch(TorchStart(item.worker, item.epoch, None, False, False, None, None), arena)
        if self._start_error is not None:
            raise self._start_error
        if self._has_ended:
            return self._end()
        self._tensors = tensors = SlotTensors(arena)
        if self.seeds_batches:
            _seed_batch((self.base_seed ^ (item.epoch << 40)) & _LARGEST_SEED, item.number)
        try:
            value = self._fetcher.fetch(item.index)
        except StopIteration:
            if not self.fetching.is_iterable:
                raise
            self._has_ended = True
            return self._end()
        content, arrays = pack(value, tensors, arena)
        state = self.fetching.state_of(self._fetcher)
        first_batches = self._first_batches(content, arrays) if self.fetching.is_iterable else None
        has_ended = self.fetching.is_iterable and self._fetcher.ended
        return TorchAnswer(content, state, first_batches, has_ended).as_batch(arrays)

    def _end(self) -> Batch:
        return TorchAnswer(WorkerEnd(), self.fetching.state_of(self._fetcher)).as_batch()

    def _first_batches(self, content: Content, arrays: list[Array]) -> FirstBatches | None:
        """With the second batch: what the first two were, and whether anything asked which worker this is."""
        if len(self._digests) == _COMPARED_BATCHES:
            return None
        self._digests.append(_digest(content, arrays))
        if len(self._digests) < _COMPARED_BATCHES:
            return None
        return FirstBatches(tuple(self._digests), _WatchedWorkerInfo.was_read)

    def _start(self, start: TorchStart, arena: Arena) -> Batch:
        """Start an epoch and say where; an error is one of the first batch, as in torch."""
        self._start_error = None
        try:
            if self._error is None:
                self._start_epoch(start, arena)
        except Exception as error:  # noqa: BLE001 - it is raised by each batch of this worker
            self._epoch, self._start_error = start.epoch, error
        is_started = self._error is None and self._start_error is None
        return TorchAnswer(WorkerEnd(), self.fetching.state_of(self._fetcher) if is_started else None).as_batch()

    def _start_epoch(self, start: TorchStart, arena: Arena) -> None:
        if start.shared_seed is not None and isinstance(self.fetching.dataset, IterDataPipe):
            reseed_pipe(self.fetching.dataset, start.shared_seed)
        self._fetcher = self.fetching.make_fetcher(
            self._collate, start.state, is_over=start.is_over, has_ended=start.has_ended
        )
        self._epoch, self._has_ended = start.epoch, start.has_ended
        for _ in range(start.state if isinstance(start.state, int) else 0):
            if self._has_ended:
                break
            self._tensors = SlotTensors(arena)
            self._has_ended = not skip_batch(self._fetcher, start.index)
            arena.begin()

    def _collate(self, samples: Any) -> Any:
        if self.fetching.collate_fn is torch_collate.default_collate:
            assert self._tensors is not None
            return _collate_into(samples, self._tensors)
        return self.fetching.collate_fn(samples)

    def _wrap_error(self) -> ExceptionWrapper:
        """The error being handled."""
        where = f"in DataLoader worker process {self._worker}"
        return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]

    def _wrap_exit(self, error: BaseException) -> ExceptionWrapper:
        """What would end a process is an error of this batch, and the worker goes on."""
        ended = f"called sys.exit({error})" if isinstance(error, SystemExit) else f"raised {error!r}"
        try:
            raise RuntimeError(f"DataLoader worker {self._worker} exited unexpectedly: the dataset {ended}.") from error
        except RuntimeError:
            return self._wrap_error()

    def __reduce__(self) -> tuple[type[TorchWork], tuple[Any, ...]]:
        """A copy has not begun."""
        return TorchWork, (self.fetching, self.base_seed, self.worker_init_fn, self.seeds_batches)


def _failure(error: ExceptionWrapper) -> TorchAnswer:
    """An error as an answer; a class that cannot be pickled becomes RuntimeError, with the same message."""
    try:
        pickle.loads(pickle.dumps(error.exc_type))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - defined inside a function
        error.exc_type = RuntimeError
    return TorchAnswer(WorkerFailure(error))


def _digest(content: Content, arrays: list[Array]) -> int:
    """A number that is the same for the same data."""
    digest = zlib.crc32(content.pickled) if isinstance(content, PickledValue) else 0
    for array in arrays:
        digest = zlib.crc32(array.tobytes(), digest)
    return digest


class _WatchedWorkerInfo(torch_worker.WorkerInfo):
    """`torch.utils.data.get_worker_info()`, which remembers whether anyone read anything from it."""

    __slots__ = ()
    was_read = False

    def __getattribute__(self, name: str) -> Any:
        _WatchedWorkerInfo.was_read = True
        return super().__getattribute__(name)


def _seed_worker(base_seed: int, worker: int) -> None:
    """Seed the global generators of Python, torch and numpy as torch does."""
    torch.manual_seed(base_seed + worker)
    _seed_batch(base_seed, worker)


def _seed_batch(base_seed: int, number: int) -> None:
    """The same for a batch, but for devices: of 0.3 ms, torch spends 0.2 on telling those that are not in use."""
    random.seed(base_seed + number)
    torch.default_generator.manual_seed(base_seed + number)
    np.random.seed(torch_worker._generate_state(base_seed, number))  # type: ignore[no-untyped-call]


def _set_worker_info(worker: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Let `get_worker_info()` answer in this process."""
    torch_worker._worker_info = _WatchedWorkerInfo(id=worker, num_workers=num_workers, seed=seed, dataset=dataset)
    _WatchedWorkerInfo.was_read = False


def _collate_into(batch: Any, tensors: SlotTensors) -> Any:
    """What `default_collate(batch)` gives, with stacked tensors in the slot."""

    def stack(samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        first = samples[0]
        if first.device.type != "cpu" or any(type(sample) is not torch.Tensor for sample in samples):
            return _stack_privately(samples)
        _check_can_stack(first)
        return torch.stack(list(samples), 0, out=tensors.empty((len(samples), *first.shape), first.dtype))

    return torch_collate.collate(batch, collate_fn_map=_with_stacking(stack))


def _stack_privately(samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    """Torch's function for tensors, in memory of this process alone: for users' own collate functions."""
    first = samples[0]
    _check_can_stack(first)
    if type(first) is not torch.Tensor:
        return torch.stack(list(samples), 0)
    return torch.stack(list(samples), 0, out=first.new_empty((len(samples), *first.shape)))


def _keep_collate_out_of_shared_memory() -> None:
    """Have `default_collate`, when users call it in a worker, stack in private memory; the slot is next anyway."""
    torch_collate.default_collate_fn_map.update(_with_stacking(_stack_privately))


def _with_stacking(stack: Callable[..., torch.Tensor]) -> dict[Any, Callable[..., Any]]:
    replaced = (torch_collate.collate_tensor_fn, _stack_privately)
    return {key: stack if value in replaced else value for key, value in torch_collate.default_collate_fn_map.items()}


def _check_can_stack(first: torch.Tensor) -> None:
    kind = "nested" if first.is_nested else "sparse" if first.layout in _COMPRESSED else None
    if kind is not None:
        raise RuntimeError(
            f"Batches of {kind} tensors are not currently supported by the default collate_fn; "
            "please provide a custom collate_fn to handle them appropriately."
        )

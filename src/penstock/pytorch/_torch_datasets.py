"""Torch's datasets: map-style, iterable, and data pipes; how one is fetched from, and where an iteration stands.

The state of a worker is what its dataset says, and for iterable datasets what their iterator says, whichever have a
`state_dict`. An iterable dataset where neither has is read again from its beginning, and the batches already handed
over are thrown away: exact for datasets that yield the same again with the same seeds, and as slow as reading is.

Data pipes are deprecated, and still datasets of torch's: each worker takes its share of them.
"""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings
from torch.utils.data import _utils as torch_utils
from torch.utils.data import dataloader as torch_dataloader

from penstock.errors import StateError

WorkerState = bytes | int | None
"""Where a worker stands: pickled, or the number of batches it has given, or at the beginning."""
_NOTHING = object()


@dataclass(frozen=True, kw_only=True)
class Fetching:
    """What a torch loader fetches samples from, and how it collates them."""

    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool

    @classmethod
    def of(cls, loader: Any) -> Fetching:
        """What this loader fetches."""
        return cls(
            dataset=loader.dataset,
            is_iterable=is_iterable(loader),
            auto_collation=loader._auto_collation,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
        )

    @property
    def may_have_state(self) -> bool:
        """Whether workers are asked where they stand; what an iterator can say is known once there is one."""
        return self.is_iterable or has_state(self.dataset)

    def make_fetcher(
        self,
        collate_fn: Callable[[Any], Any],
        start: WorkerState,
        *,
        is_over: bool = False,
        has_ended: bool = False,
    ) -> Any:
        """Torch's own fetcher; for an iterable dataset this starts an iterator, from a state if there is one.

        If the state is of an epoch that is over, it is the next one that starts. If the iterator had ended in what was
        read of this epoch, it gives no more, whatever its state says: many datasets go back to their beginning there.
        """
        fetcher = self._fetcher_at(collate_fn, start)
        if not isinstance(start, bytes):
            is_over = False
        elif self.is_iterable and (is_over or has_ended):
            with preserve_generators():  # a generator notices only now that nothing is left of its epoch
                is_back = next(fetcher.dataset_iter, _NOTHING) is not _NOTHING
            fetcher = self._fetcher_at(collate_fn, start) if is_back else fetcher
        if has_ended:
            fetcher.ended = True
        return self._new_fetcher(collate_fn) if is_over else fetcher

    def _fetcher_at(self, collate_fn: Callable[[Any], Any], start: WorkerState) -> Any:
        state = pickle.loads(start) if isinstance(start, bytes) else {}  # noqa: S301 - the trainer's
        if "dataset" in state:
            _check_has_state(self.dataset, "dataset")
            self.dataset.load_state_dict(state["dataset"])
        fetcher = self._new_fetcher(collate_fn)
        if "iterator" in state:
            _check_has_state(fetcher.dataset_iter, "iterator")
            fetcher.dataset_iter.load_state_dict(state["iterator"])
        return fetcher

    def state_of(self, fetcher: Any) -> bytes | None:
        """Where a worker stands, pickled because the dataset keeps changing the original; None when it cannot say."""
        dataset: Any = self.dataset
        iterator: Any = fetcher.dataset_iter if self.is_iterable else None
        state = {"iterator": iterator.state_dict()} if has_state(iterator) else {}
        if iterator is not dataset and has_state(dataset):
            state["dataset"] = dataset.state_dict()
        return pickle.dumps(state) if state else None

    def _new_fetcher(self, collate_fn: Callable[[Any], Any]) -> Any:
        fetch = torch_utils.fetch
        kind = fetch._IterableDatasetFetcher if self.is_iterable else fetch._MapDatasetFetcher
        return kind(self.dataset, self.auto_collation, collate_fn, self.drop_last)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Put the global generators back as they were, whatever is drawn in the block."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def skip_batch(fetcher: Any, index: Any) -> bool:
    """Fetch a batch and throw it away; False when there are no more. One that failed before may fail again."""
    try:
        fetcher.fetch(index)
    except StopIteration:
        return False
    except Exception:  # noqa: BLE001 - it was raised when the batch should have been handed over
        return True
    return True


def is_iterable(loader: Any) -> bool:
    """Whether the loader's dataset is an iterable one."""
    return bool(loader._dataset_kind == torch_dataloader._DatasetKind.Iterable)


def has_state(value: Any) -> bool:
    """Whether it can say where it stands, and continue from there."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_shared_anew(dataset: Any) -> bool:
    """Whether it makes one state of its workers', from which any number of workers and ranks go on: a stream."""
    return callable(getattr(dataset, "join_states", None))


def is_pipe(dataset: Any) -> bool:
    """Whether it is a data pipe of either kind."""
    return isinstance(dataset, (IterDataPipe, MapDataPipe))


def reseed_pipe(dataset: Any, shared_seed: int) -> None:
    """Seed every random step of a pipe."""
    graph_settings.apply_random_seed(dataset, torch.Generator().manual_seed(shared_seed))


def draw_shared_seed(generator: torch.Generator | None) -> int:
    """A seed, the same on all ranks."""
    is_one_of_several = distributed.is_available() and distributed.is_initialized()
    group = distributed.new_group(backend="gloo") if is_one_of_several else None
    return int(torch_dataloader._share_dist_seed(generator, group))  # type: ignore[no-untyped-call]


def split_over_ranks(dataset: Any) -> None:
    """Without workers: take this rank's share of a pipe."""
    graph_settings.apply_sharding(dataset, *torch_dataloader._get_distributed_settings())  # type: ignore[no-untyped-call]


def with_sharding(worker_init_fn: Callable[[int], None] | None) -> Callable[[int], None]:
    """A worker's start function that also takes the worker's share of a pipe."""
    ranks = torch_dataloader._get_distributed_settings()  # type: ignore[no-untyped-call]
    return functools.partial(torch_dataloader._sharding_worker_init_fn, worker_init_fn, *ranks)


def _check_has_state(value: Any, role: str) -> None:
    if not has_state(value):
        raise StateError(
            f"The state was saved with a dataset whose {role} has load_state_dict(); {type(value).__name__} has none."
        )

"""Torch's datasets: map-style, iterable, and data pipes; how one is fetched from, and where an iteration stands.

The state of an iterable dataset is its iterator's if that has one, else the dataset's own. A dataset with neither is
read again from its beginning, and the batches already handed over are thrown away: exact for datasets that
yield the same again with the same seeds, and as slow as reading is.

Data pipes are deprecated, and still datasets of torch's: each worker takes its share of them.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings
from torch.utils.data import _utils as torch_utils
from torch.utils.data import dataloader as torch_dataloader

from penstock.errors import StateError

WorkerState = bytes | int | None
"""Where a worker's iteration stands: pickled, or the number of batches it has given, or at the beginning."""


@dataclass(frozen=True, kw_only=True)
class Fetching:
    """What a torch loader fetches samples from, and how it collates them."""

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
        _load_dataset_state(self.dataset, state)
        fetcher = fetch._IterableDatasetFetcher(self.dataset, self.auto_collation, collate_fn, self.drop_last)
        _load_iterator_state(fetcher.dataset_iter, state)
        return fetcher


def skip_batch(fetcher: Any, index: Any) -> bool:
    """Fetch a batch and throw it away; False when there are no more. One that failed before may fail again."""
    try:
        fetcher.fetch(index)
    except StopIteration:
        return False
    except Exception:  # noqa: BLE001 - it was raised when the batch should have been handed over
        return True
    return True


def has_state(value: Any) -> bool:
    """Whether it can say where it stands, and continue from there."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def iteration_state(dataset: Any, iterator: Any) -> bytes | None:
    """Where an iteration stands, pickled because the dataset keeps changing the original; None when it cannot say."""
    if has_state(iterator):
        return pickle.dumps({"iterator": iterator.state_dict()})
    if has_state(dataset):
        return pickle.dumps({"dataset": dataset.state_dict()})
    return None


def is_pipe(dataset: Any) -> bool:
    """Whether it is a data pipe of either kind."""
    return isinstance(dataset, (IterDataPipe, MapDataPipe))


def is_iterable_pipe(dataset: Any) -> bool:
    """Whether it is an iterable data pipe, which takes a seed that all workers and ranks share."""
    return isinstance(dataset, IterDataPipe)


def reseed_pipe(dataset: Any, shared_seed: int) -> None:
    """Seed every random step of a pipe."""
    graph_settings.apply_random_seed(dataset, torch.Generator().manual_seed(shared_seed))


def draw_shared_seed(generator: torch.Generator | None) -> int:
    """A seed, the same on all ranks."""
    group = (
        distributed.new_group(backend="gloo") if distributed.is_available() and distributed.is_initialized() else None
    )
    return int(torch_dataloader._share_dist_seed(generator, group))  # type: ignore[no-untyped-call]


def split_over_ranks(dataset: Any) -> None:
    """Without workers: take this rank's share of a pipe."""
    graph_settings.apply_sharding(dataset, *_world())


def with_sharding(worker_init_fn: Callable[[int], None] | None) -> Callable[[int], None]:
    """A worker's start function that also takes the worker's share of a pipe."""
    return functools.partial(torch_dataloader._sharding_worker_init_fn, worker_init_fn, *_world())


def _world() -> tuple[int, int]:
    world_size, rank = torch_dataloader._get_distributed_settings()  # type: ignore[no-untyped-call]
    return world_size, rank


def _load_dataset_state(dataset: Any, state: dict[str, Any]) -> None:
    """What there is to restore before the dataset's iterator is made."""
    if "dataset" in state:
        _check_has_state(dataset, "dataset")
        dataset.load_state_dict(state["dataset"])


def _load_iterator_state(iterator: Any, state: dict[str, Any]) -> None:
    """What there is to restore after the dataset's iterator was made."""
    if "iterator" in state:
        _check_has_state(iterator, "iterator")
        iterator.load_state_dict(state["iterator"])


def _check_has_state(value: Any, role: str) -> None:
    if not has_state(value):
        raise StateError(
            f"The state was saved with a dataset whose {role} has load_state_dict(); {type(value).__name__} has none."
        )

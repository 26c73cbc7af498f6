"""Torch's data pipes: deprecated, and still datasets of torch; each worker takes its share of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings
from torch.utils.data import dataloader as torch_dataloader


def is_pipe(dataset: Any) -> bool:
    """Whether it is a data pipe of either sort."""
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
    """In a loader without workers: take this rank's share."""
    graph_settings.apply_sharding(dataset, *_world())


def with_sharding(worker_init_fn: Callable[[int], None] | None) -> Callable[[int], None]:
    """A start function of workers that also takes the worker's share."""
    return functools.partial(torch_dataloader._sharding_worker_init_fn, worker_init_fn, *_world())


def _world() -> tuple[int, int]:
    world_size, rank = torch_dataloader._get_distributed_settings()  # type: ignore[no-untyped-call]
    return world_size, rank

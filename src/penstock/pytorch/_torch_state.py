"""States of loaders of torch datasets: how one is written, and what it must be before a loop continues from it.

A state comes from a checkpoint, and a checkpoint may come from a stranger: `torch.load(weights_only=True)` lets only
plain data pass, so nothing in a state may become more than that here. Every field has a shape, and nothing is
unpickled. The two exceptions belong to the user: what a sampler (`sampler_state`) or a dataset (`workers`) gave as its
own state is handed back to its `load_state_dict` as it is.
"""

from __future__ import annotations

import copy
import pickle
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from penstock.errors import StateError
from penstock.pytorch._torch_datasets import Fetching, WorkerState, is_iterable
from penstock.pytorch._torch_epochs import check_draws, current_draws, dataset_epoch, innermost_sampler
from penstock.pytorch._torch_loop import LoopProgress
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
        state |= {"workers": _plain(progress.worker_states), "next_worker": progress.next_worker}
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
        "dataset_epoch": dataset_epoch(loader),
        "draws": current_draws(loader, at_rest=True) | {"seed": not live_on},
    }
    if progress is not None and Fetching.of(loader).may_have_state and (live_on or not loader.num_workers):
        state["workers"] = [one if isinstance(one, dict) else None for one in _plain(progress.worker_states)]
    return state


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
    workers = {"workers": (_OF_WORKER,) * num_workers}
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
            "num_workers": loader.num_workers,
        }
    sampler = innermost_sampler(loader)
    return {
        "version": STATE_VERSION,
        "kind": "map",
        "length": len(loader.dataset) if hasattr(loader.dataset, "__len__") else None,
        "batch_size": loader.batch_size,
        "sampler": type(sampler).__qualname__,
    } | _order_of_ranks(sampler)


def _order_of_ranks(sampler: Any) -> dict[str, Any]:
    """What decides the order of a sampler that splits over ranks; all of them may load the state of one."""
    names = ("num_replicas", "shuffle", "seed") if isinstance(sampler, DistributedSampler) else ()
    return {name: getattr(sampler, name, None) for name in names}

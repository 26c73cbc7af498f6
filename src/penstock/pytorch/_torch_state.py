"""What the state of a torch dataset's loader must be before a loop continues from it.

A state comes from a checkpoint, and a checkpoint may come from a stranger: `torch.load(weights_only=True)` lets only
plain data pass, so nothing in a state may become more than that here. Every field has a shape, and nothing is
unpickled. The two exceptions belong to the user: what a sampler (`sampler_state`) or a dataset (`workers`) gave as its
own state is handed back to its `load_state_dict` as it is.
"""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler
from torch.utils.data.dataloader import _DatasetKind

from penstock.errors import StateError
from penstock.pytorch._samplers import check_draws, innermost_sampler
from penstock.shapes import COUNT, Either, misfit

STATE_VERSION = 1
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
"""At the beginning; batches to read again; or what the dataset's own iterator, or the dataset, said."""


def check_state(state: Any, loader: Any) -> None:
    """Raise `StateError` unless a loop of this loader can continue from the state."""
    if not isinstance(state, dict) or not _is_same(state.get("version"), STATE_VERSION) or "position" not in state:
        raise StateError(f"This is not a state of a torch dataset's loader, version {STATE_VERSION}.")
    for key, here in describe_loader(loader).items():
        if not _is_same(state.get(key), here):
            raise StateError(f"The state was saved with {key}={reprlib.repr(state.get(key))}; here it is {here!r}.")
    wrong = misfit(state, _AT_REST if state["position"] is None else _IN_EPOCH, "state")
    if not wrong and is_iterable(loader) and state["position"] is not None:
        wrong = _misfit_of_workers(state, max(1, loader.num_workers))
    if wrong:
        raise StateError(f"The state is damaged: {wrong}. Go on from another one.")
    check_draws(loader, state["draws"])


def _misfit_of_workers(state: dict[str, Any], num_workers: int) -> str | None:
    number = range(num_workers)
    shape = {"workers": (_OF_WORKER,) * num_workers, "next_worker": number, "ended": [number]}
    return misfit(state, shape, "state")


def _is_same(found: Any, here: Any) -> bool:
    """Whether two facts are equal; what a store gives back as numpy's number still is one, an array is not."""
    return isinstance(found, str | int | float | np.number | None) and bool(found == here)


def is_iterable(loader: Any) -> bool:
    """Whether the loader's dataset is an iterable one."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


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

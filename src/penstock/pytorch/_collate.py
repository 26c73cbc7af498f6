"""Torch's `default_collate`, stacking straight into the shared slot.

The structure is walked by torch's own `collate` with torch's own table of types, so results equal torch's and
types that users registered are honoured. Only torch's function for tensors is replaced, because in a
worker it makes a new file in `/dev/shm` for each tensor of each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate

from penstock.pytorch._transport import SlotTensors

_COMPRESSED = {torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc}


def collate_into(batch: Any, tensors: SlotTensors) -> Any:
    """What `default_collate(batch)` gives, with stacked tensors in the slot."""

    def stack(samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        first = samples[0]
        if first.device.type != "cpu" or any(type(sample) is not torch.Tensor for sample in samples):
            return stack_samples(samples)
        _check_can_stack(first)
        return torch.stack(list(samples), 0, out=tensors.empty((len(samples), *first.shape), first.dtype))

    return torch_collate.collate(batch, collate_fn_map=_with_stacking(stack))


def stack_samples(samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    """Torch's function for tensors, in memory of this process alone: for collate functions of users."""
    first = samples[0]
    _check_can_stack(first)
    if type(first) is not torch.Tensor:
        return torch.stack(list(samples), 0)
    return torch.stack(list(samples), 0, out=first.new_empty((len(samples), *first.shape)))


def keep_collate_out_of_shared_memory() -> None:
    """In a worker: have `default_collate`, called by users, stack in private memory; the slot is next anyway."""
    torch_collate.default_collate_fn_map.update(_with_stacking(stack_samples))


def _with_stacking(stack: Callable[..., torch.Tensor]) -> dict[Any, Callable[..., Any]]:
    ours = (torch_collate.collate_tensor_fn, stack_samples)
    return {key: stack if value in ours else value for key, value in torch_collate.default_collate_fn_map.items()}


def _check_can_stack(first: torch.Tensor) -> None:
    kind = "nested" if first.is_nested else "sparse" if first.layout in _COMPRESSED else None
    if kind is not None:
        raise RuntimeError(
            f"Batches of {kind} tensors are not currently supported by the default collate_fn; "
            "please provide a custom collate_fn to handle them appropriately."
        )

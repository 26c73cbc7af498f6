"""Reading a packed batch: the border where a wrong one is refused.

A batch comes from a plan, a DataLoader, or a test, as torch tensors on any device or as numpy
arrays. `tensor` and `integer` hand out one entry each and refuse a wrong kind, dtype or shape by
its key's name. Only these facts are looked at, never the values: reading one value of a CUDA
tensor makes the training loop wait for the GPU. So a batch with wrong boundaries is not noticed
here; boundaries are the plan's promise (`document_ids` in runs, no run across two rows).

**Reach.** How far back each position may look is the one fact behind every mask of this room.
Documents lie in a row one after the other, and attention is causal inside each. So what position
q may see is an interval of the row: from the first token of its document up to q.
The upper end is q itself; the lower end is the *reach* of q, and an int32 [B, T] tensor of
reaches says all that a [B, T, T] mask says:

    document_ids    0  0  0  1  1 -1 -1
    reach           0  0  0  3  3  5  6        q sees k  <=>  reach[q] <= k <= q

Padding is its own reach: it sees itself and nothing else, so no softmax is taken over nothing
(which would be NaN). Along a row reaches never fall; `_block` rests on that.

The price is one comparison and one running maximum over B * T integers, on the batch's device,
with no value read back by the host.

**Context parallelism.** Ranks that share a row have the same batch, and each takes a part of every row. With causal
attention the last tokens see most, so a rank that had only those would work longest: in the zigzag layout, which ring
attention uses, a row is cut into twice as many chunks as there are ranks, and rank r has chunk r and the r-th from the
end:

    4 ranks    0 1 2 3 3 2 1 0
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from penstock.errors import check_choice

Batch: TypeAlias = Mapping[str, object]

# B rows of T tokens; S segments, each a piece of a document or a row's padding tail.
_ARRAYS: Mapping[str, tuple[torch.dtype, str]] = {
    "input_ids": (torch.int64, "[B, T]"),
    "labels": (torch.int64, "[B, T]"),
    "position_ids": (torch.int64, "[B, T]"),
    "document_ids": (torch.int32, "[B, T]"),
    "cu_seqlens": (torch.int32, "[S + 1]"),
}


def tensor(batch: Batch, key: str) -> Tensor:
    """One array of the batch as a tensor, sharing its memory.

    Raises:
        ValueError: the key is missing, or the array has another number of dimensions.
        TypeError: it is not an array, or has another dtype.
    """
    dtype, shape = _ARRAYS[key]
    expected = f"expected an {_name(dtype)} tensor or array of shape {shape}"
    value = as_tensor(_entry(batch, key), f"batch[{key!r}]", expected)
    if value.dtype != dtype:
        raise TypeError(f"batch[{key!r}] is {_name(value.dtype)}; {expected}.")
    if value.ndim != shape.count(",") + 1:
        raise ValueError(f"batch[{key!r}] has shape {list(value.shape)}; {expected}.")
    return value


def integer(batch: Batch, key: str) -> int:
    """One number of the batch.

    Raises:
        ValueError: the key is missing.
        TypeError: it is not a Python int; turning a tensor into one would wait for the GPU.
    """
    value = _entry(batch, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"batch[{key!r}] is {type(value).__name__}; expected a Python int.")
    return value


def as_tensor(value: object, name: str, expected: str) -> Tensor:
    """`value` as a tensor; a numpy array shares its memory unless it is read-only.

    Raises:
        TypeError: it is neither; the message is made of `name` and `expected`.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        # torch has no read-only tensors and warns about each; a copy keeps the promise instead.
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    raise TypeError(f"{name} is {type(value).__name__}; {expected}.")


def _entry(batch: Batch, key: str) -> object:
    if not isinstance(batch, Mapping):
        raise TypeError(f"a packed batch is a mapping with {key!r} in it, not {type(batch).__name__}.")
    if key not in batch:
        raise ValueError(
            f"the batch has no {key!r}, only: {', '.join(map(str, batch))}. "
            "Masks need a packed batch, as a plan with .pack(length) gives."
        )
    return batch[key]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_PADDING = -1


def reach_of_documents(document_ids: Tensor) -> Tensor:
    """The reach of each position, from ids that change where a document ends; -1 is padding."""
    ids, previous = document_ids[:, 1:], document_ids[:, :-1]
    return reach_of_starts((ids != previous) | (ids == _PADDING))


def reach_of_starts(is_start: Tensor) -> Tensor:
    """The reach of each position, from "a document starts here" for positions 1 to T - 1.

    Position 0 is left out because a row's first token always starts a document.
    """
    positions = torch.arange(1, is_start.shape[1] + 1, dtype=torch.int32, device=is_start.device)
    starts = torch.where(is_start, positions, 0)
    return torch.nn.functional.pad(starts, (1, 0)).cummax(dim=1).values


Layout = Literal["zigzag", "contiguous"]

_IGNORED = -100


def context_slice(batch: Mapping[str, Any], rank: int, size: int, *, layout: Layout = "zigzag") -> dict[str, Any]:
    """The batch with only this rank's places of every row; what is not place by place (`cu_seqlens`) stays whole.

    Labels must be shifted already (`pack(labels="next")`): a model that shifts would miss the label at each cut.
    `num_targets` counts the labels of the slice, `num_targets_global` still those of all.

    Args:
        batch: A batch of tensors that has `input_ids`.
        rank: This process in its context-parallel group: `mesh["cp"].get_local_rank()`.
        size: Processes in the group.
        layout: "zigzag" gives each rank an early and a late chunk of the row, "contiguous" one chunk.

    Raises:
        ValueError: there is no such rank, or rows cannot be cut into equal chunks.
    """
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
        raise ValueError(f"rank={rank!r}, size={size!r}: expected a rank from 0 to size - 1.")
    check_choice("layout", layout, get_args(Layout))
    shape = batch["input_ids"].shape
    num_chunks = 2 * size if layout == "zigzag" else size
    if shape[1] % num_chunks:
        raise ValueError(f"Rows of {shape[1]:,} tokens cannot be cut into {num_chunks} equal chunks.")
    chunks = [rank, num_chunks - 1 - rank] if layout == "zigzag" else [rank]
    is_whole = size == 1
    sliced = {key: value if is_whole else _slice(value, shape, num_chunks, chunks) for key, value in batch.items()}
    if "num_targets" in sliced and "labels" in sliced:
        sliced["num_targets"] = int((sliced["labels"] != _IGNORED).sum())
    return sliced


def _slice(value: Any, shape: torch.Size, num_chunks: int, chunks: list[int]) -> Any:
    if not isinstance(value, Tensor) or value.shape[:2] != shape:
        return value
    parts = value.chunk(num_chunks, dim=1)
    return torch.cat([parts[chunk] for chunk in chunks], dim=1)

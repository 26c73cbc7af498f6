"""The part of a packed batch that one rank of a context-parallel group computes.

Ranks that share a row have the same batch, and each takes some places of every row. With causal attention the last
places see most, so a rank that had only those would work longest: in the zigzag layout, which ring attention uses, the
row is cut into twice as many chunks as there are ranks, and rank r has chunk r and the r-th from the end:

    4 ranks    0 1 2 3 3 2 1 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from penstock.errors import check_choice

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

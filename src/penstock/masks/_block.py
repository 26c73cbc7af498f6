"""A FlexAttention block mask without the T x T work.

FlexAttention wants to know, for each block of queries, which blocks of keys it must visit, and
which of those are *full* (every pair allowed, so the kernel skips the mask function). torch's
`create_block_mask` evaluates the mask function for all T x T pairs and counts in each block:
67 million evaluations at T = 8,192, for a mask that changes with every batch.

The reaches of `_reach` give the same answer from two numbers per block of queries, because
reaches never fall along a row:

    a block of keys is visited  <=>  it lies in [reach of the block's first query, last query]
    a block of keys is full     <=>  it starts at or after the reach of the block's last query,
                                     and ends at or before the block's first query

What is left is a table of (T / block_size)^2 bools, 64 x 64 at T = 8,192. All eight tensors equal
those of `create_block_mask` entry for entry, unused ones included; `benchmarks/bench_masks.py`
measures both (about 1,000 times faster at T = 8,192 on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from penstock.masks._batch import Batch, tensor
from penstock.masks._reach import reach_of_documents

_MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask(batch: Batch, *, block_size: int = 128) -> BlockMask:
    """The mask of a packed batch for `flex_attention`, one for all heads, on the batch's device.

    The same rule as `dense`. Rows need not be a multiple of `block_size`, whose default is torch's.
    A mask belongs to its batch: make one per step, use it in every layer. A new mask of the same
    shape does not make `torch.compile` compile again.

    Raises:
        ValueError: the batch has no `document_ids`, they are not [B, T], or block_size is below 1.
        TypeError: they are not int32, or block_size is not an integer.
    """
    if not hasattr(block_size, "__index__"):
        raise TypeError(f"block_size is {block_size!r}; expected an int of at least 1.")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected at least 1.")
    reach = reach_of_documents(tensor(batch, "document_ids"))
    is_partial, is_full = _visited_blocks(reach, block_size)
    # The backward pass walks the same table by columns: the q_ tensors are those of its transpose.
    tables = torch.stack([is_partial, is_full, is_partial.mT, is_full.mT]).unsqueeze(2)
    counts, indices = _in_order(tables)
    return BlockMask(
        seq_lengths=(reach.shape[1], reach.shape[1]),
        kv_num_blocks=counts[0],
        kv_indices=indices[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=indices[1],
        q_num_blocks=counts[2],
        q_indices=indices[2],
        full_q_num_blocks=counts[3],
        full_q_indices=indices[3],
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=_mask_mod(reach),
    )


def _visited_blocks(reach: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries sees in part and in full, bool [B, N, N] each."""
    length = reach.shape[1]
    first_reach = reach[:, ::block_size].unsqueeze(-1)
    last_reach = reach[:, block_size - 1 :: block_size].unsqueeze(-1)
    if length % block_size:
        # torch counts the missing end of a short last block as hidden, so no block is full in it.
        last_reach = torch.nn.functional.pad(last_reach, (0, 0, 0, 1), value=length)
    keys = torch.arange(0, length, block_size, dtype=torch.int32, device=reach.device)
    queries = keys.unsqueeze(-1)
    is_visited = (first_reach < keys + block_size) & (keys <= queries)
    is_full = (last_reach <= keys) & (keys + (block_size - 1) <= queries)
    return is_visited & ~is_full, is_full


def _in_order(tables: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of the tables marks, and their numbers, marked ones first."""
    counts = tables.sum(dim=-1, dtype=torch.int32)
    indices = torch.argsort(tables.to(torch.uint8), dim=-1, descending=True, stable=True)
    return counts, indices.to(torch.int32)


def _mask_mod(reach: Tensor) -> _MaskMod:
    """The rule for one pair. One load per query; comparing document ids would take a second per key."""

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (reach[b, q_idx] <= kv_idx) & (kv_idx <= q_idx)

    return sees

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

Masks written out in full: one bool for each pair of positions.

The form that every attention function understands, and the reference for the other forms. The
price is memory, B * T * T bytes: 67 MB for one row of 8,192 tokens. It is the only tensor of that
size made here; the triangle is cut into it in place.

True means "may look", as in `scaled_dot_product_attention`. `nn.MultiheadAttention` reads True as
"may not look": hand it `~mask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from penstock.masks._batch import Batch, as_tensor, reach_of_documents, reach_of_starts, tensor

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


def dense(batch: Batch) -> Tensor:
    """The mask of a packed batch, bool [B, T, T]: row q is True where position q may look.

    A token sees itself and the earlier tokens of its own document; padding sees only itself.
    `mask.unsqueeze(1)` fits `scaled_dot_product_attention`, for all heads.

    Raises:
        ValueError: the batch has no `document_ids`, or they are not [B, T].
        TypeError: they are not int32.

    >>> import numpy as np
    >>> dense({"document_ids": np.array([[0, 0, 1, -1]], dtype=np.int32)})[0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    return _written_out(reach_of_documents(tensor(batch, "document_ids")))


def from_token(tokens: Tensor | np.ndarray, token_id: int, eos: bool = True) -> Tensor:
    """The mask of packed tokens whose boundaries are only marked by a token, bool [B, T, T].

    With `eos` the token closes a document and belongs to it; without, it opens one. A row's start
    and end are boundaries too. Prefer `dense`: a token id is a guess about boundaries (a chat
    template that ends each turn with EOS is cut into turns, a document without EOS melts into the
    next), and padding is not recognised, so it forms documents of its own.

    Raises:
        ValueError: tokens are not [B, T].
        TypeError: tokens are not integers in a tensor or array, or the id is no integer.
    """
    if not hasattr(token_id, "__index__"):
        raise TypeError(f"token_id is {token_id!r}; expected the id of the token that ends (or begins) documents.")
    expected = "expected an integer tensor or array of shape [B, T]"
    tokens = as_tensor(tokens, "tokens", expected)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens are {str(tokens.dtype).removeprefix('torch.')}; {expected}.")
    if tokens.ndim != 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; {expected}.")
    starts = tokens[:, :-1] == token_id if eos else tokens[:, 1:] == token_id
    return _written_out(reach_of_starts(starts))


def _written_out(reach: Tensor) -> Tensor:
    keys = torch.arange(reach.shape[1], dtype=torch.int32, device=reach.device)
    return (reach.unsqueeze(-1) <= keys).tril_()

"""The block mask equals torch's own, tensor for tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from penstock import masks

from .packs import PackedBatch, pack, packs

TENSORS = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]


def torch_block_mask(batch: PackedBatch, block_size: int) -> BlockMask:
    """The same mask as anyone would write it for `create_block_mask`."""
    ids = batch["document_ids"]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same_document = (ids[b, q] == ids[b, k]) & (ids[b, q] >= 0)
        return ((q >= k) & same_document) | (q == k)

    rows, length = ids.shape
    return create_block_mask(mask_mod, rows, None, length, length, device="cpu", BLOCK_SIZE=block_size)


def assert_equal(ours: BlockMask, theirs: BlockMask) -> None:
    for name in TENSORS:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert mine.dtype == other.dtype, name
        assert mine.is_contiguous() == other.is_contiguous(), name
        # Whole tensors: also the entries after num_blocks, which torch calls undefined.
        assert torch.equal(mine, other), name
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.shape == theirs.shape


@settings(max_examples=60, deadline=None)
@given(packs(), st.sampled_from([1, 2, 3, 8, 16, 32, 128]))
@example(([[64]], 64), 16)
@example(([[], [48, 16]], 64), 16)
@example(([[1] * 33], 33), 16)
def test_it_equals_create_block_mask_on_random_packs(drawn: tuple[list[list[int]], int], size: int) -> None:
    batch = pack(*drawn)
    assert_equal(masks.block_mask(batch, block_size=size), torch_block_mask(batch, size))


@pytest.mark.parametrize("row_length", [1024, 1000])
def test_it_equals_create_block_mask_at_the_default_block_size(row_length: int) -> None:
    batch = pack([[700, 200], [row_length], [1, 129, 400]], row_length)
    theirs = torch_block_mask(batch, 128)
    assert theirs.full_kv_num_blocks.sum() > 0
    assert_equal(masks.block_mask(batch), theirs)


@settings(max_examples=25, deadline=None)
@given(packs(max_row_length=40), st.sampled_from([8, 16]))
def test_its_rule_for_one_pair_is_the_dense_mask(drawn: tuple[list[list[int]], int], size: int) -> None:
    batch = pack(*drawn)
    rows, length = batch["document_ids"].shape
    rule = masks.block_mask(batch, block_size=size).mask_mod
    assert torch.equal(create_mask(rule, rows, None, length, length, device="cpu")[:, 0], masks.dense(batch))


@settings(max_examples=25, deadline=None)
@given(packs(), st.sampled_from([8, 16]))
def test_full_blocks_hold_no_hidden_pair_and_unvisited_ones_no_visible_pair(
    drawn: tuple[list[list[int]], int], size: int
) -> None:
    batch = pack(*drawn)
    mask, block_mask = masks.dense(batch), masks.block_mask(batch, block_size=size)
    visited = block_mask.to_dense()[:, 0].bool()
    for row, q, k in torch.cartesian_prod(*map(torch.arange, visited.shape)).tolist():
        pairs = mask[row, q * size : (q + 1) * size, k * size : (k + 1) * size]
        num_full = block_mask.full_kv_num_blocks[row, 0, q]
        is_full = k in block_mask.full_kv_indices[row, 0, q, :num_full]
        assert visited[row, q, k] == pairs.any()
        assert not is_full or pairs.all()


def test_it_moves_to_another_device_like_any_block_mask() -> None:
    assert masks.block_mask(pack([[3, 2]], 6)).to("cpu").shape == (1, 1, 6, 6)

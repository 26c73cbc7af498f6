"""The written-out mask, against the rule read aloud, and `from_token` against its model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock import masks

from .packs import pack, packs


def published_mask(x: Tensor, token_id: int, eos: bool = True) -> Tensor:
    """The function whose meaning `from_token` keeps, word for word.

    From https://huggingface.co/blog/sirluk/llm-sequence-packing, by sirluk
    (`get_attention_mask_for_packed_sequence`).
    """
    B, T = x.shape
    eos_idx = (x.view(-1) == token_id).nonzero(as_tuple=True)[0] + eos
    eos_idx_expanded = torch.cat([eos_idx, torch.arange(0, B * T + 1, T)]).unique().sort()[0]
    normalized_idx = eos_idx_expanded - (eos_idx_expanded // T) * T
    normalized_idx = torch.where(normalized_idx == 0, T, normalized_idx)
    reps = normalized_idx[1:] - normalized_idx[:-1]
    reps = torch.where(reps < 1, normalized_idx[1:], reps)
    repeated_idx = torch.repeat_interleave(normalized_idx[1:], reps).view(B, 1, T).expand(-1, T, -1)
    mask_indices = torch.arange(T).view(1, -1, 1).expand(B, -1, T)
    mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, -1, -1)
    mask = mask.masked_fill(mask_indices >= repeated_idx, False)
    return mask  # noqa: RET504  (kept word for word)


@settings(max_examples=30, deadline=None)
@given(packs(max_row_length=24))
def test_a_token_sees_the_earlier_tokens_of_its_document_and_padding_sees_itself(
    drawn: tuple[list[list[int]], int],
) -> None:
    batch = pack(*drawn)
    mask = masks.dense(batch)
    ids = batch["document_ids"].tolist()
    for row, row_ids in enumerate(ids):
        for q, document in enumerate(row_ids):
            for k, other in enumerate(row_ids):
                may_look = q == k if document == -1 else document == other and k <= q
                assert mask[row, q, k] == may_look


def test_a_row_of_padding_alone_sees_only_itself() -> None:
    assert torch.equal(masks.dense(pack([[], [4]], 4))[0], torch.eye(4, dtype=torch.bool))


def test_nothing_of_the_batch_is_changed() -> None:
    batch = pack([[3, 2], [4]], 6)
    before = batch["document_ids"].clone()
    masks.dense(batch)
    masks.block_mask(batch)
    assert torch.equal(batch["document_ids"], before)


EDGE_CASES = {
    "none": [[5, 6, 7, 8]],
    "all": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "one row ends with it": [[5, 6, 7, 0], [5, 0, 7, 8]],
    "rows start with it": [[0, 6, 7, 8], [0, 6, 0, 8]],
    "several in a row": [[5, 0, 0, 0, 6, 0, 0, 7], [0, 0, 5, 6, 7, 8, 0, 0]],
    "row end meets row start": [[5, 6, 0], [0, 5, 6], [0, 5, 0]],
    "one token per row": [[0], [5], [0]],
}


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("rows", EDGE_CASES.values(), ids=EDGE_CASES.keys())
def test_from_token_means_what_its_model_means_at_the_edges(rows: list[list[int]], eos: bool) -> None:
    tokens = torch.tensor(rows)
    assert torch.equal(masks.from_token(tokens, 0, eos), published_mask(tokens, 0, eos))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 40),
    vocabulary=st.integers(1, 12),
    seed=st.integers(0, 2**16),
    eos=st.booleans(),
)
def test_from_token_means_what_its_model_means(rows: int, length: int, vocabulary: int, seed: int, eos: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
    assert torch.equal(masks.from_token(tokens, 0, eos), published_mask(tokens, 0, eos))


def test_from_token_takes_the_small_integers_that_tokens_are_stored_in() -> None:
    tokens = np.array([[5, 0, 6, 7]], dtype=np.uint16)
    assert torch.equal(masks.from_token(tokens, 0), masks.from_token(torch.tensor([[5, 0, 6, 7]]), 0))


def test_from_token_takes_a_slice_of_a_larger_tensor() -> None:
    tokens = torch.tensor([[5, 0, 6, 7], [1, 2, 0, 3]])[:, 1:]
    assert torch.equal(masks.from_token(tokens, 0), published_mask(tokens.contiguous(), 0))


def test_from_token_agrees_with_dense_when_every_document_ends_with_the_token() -> None:
    batch = pack([[3, 5], [1, 1, 6]], 8)
    tokens = batch["input_ids"].clone()
    ends = torch.nn.functional.pad(batch["position_ids"], (0, 1))[:, 1:] == 0
    tokens[ends] = 0
    assert torch.equal(masks.from_token(tokens, 0), masks.dense(batch))


def test_from_token_refuses_a_single_row_without_its_batch() -> None:
    with pytest.raises(ValueError, match=r"tokens have shape \[4\]; expected .* \[B, T\]"):
        masks.from_token(torch.arange(4), 0)


@pytest.mark.parametrize("tokens", [torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool), [[1, 2]]])
def test_from_token_refuses_what_are_no_tokens(tokens: object) -> None:
    with pytest.raises(TypeError, match=r"tokens (are|is) .*; expected an integer tensor or array"):
        masks.from_token(tokens, 0)  # type: ignore[arg-type]


def test_from_token_refuses_the_id_that_a_tokenizer_without_eos_has() -> None:
    with pytest.raises(TypeError, match="token_id is None; expected the id of the token that ends"):
        masks.from_token(torch.ones(1, 4, dtype=torch.int64), None)  # type: ignore[arg-type]

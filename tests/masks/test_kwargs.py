"""The spellings of boundaries: names, values, and that each kernel's own signature takes them."""

from __future__ import annotations

import inspect

import torch
from hypothesis import given, settings
from torch.nn.attention.varlen import varlen_attn

from penstock import masks

from .packs import pack, packs

LENGTHS, ROW_LENGTH = [[3, 2], [4, 2]], 6
FLAT_STARTS = [0, 3, 5, 6, 10, 12]  # two documents and a tail of one, then two documents


def test_varlen_spells_flash_attn_and_says_causal() -> None:
    kwargs = masks.varlen(pack(LENGTHS, ROW_LENGTH))
    assert kwargs["cu_seqlens_q"].tolist() == kwargs["cu_seqlens_k"].tolist() == FLAT_STARTS
    assert kwargs["cu_seqlens_q"].dtype == torch.int32
    assert (kwargs["max_seqlen_q"], kwargs["max_seqlen_k"], kwargs["causal"]) == (4, 4, True)
    assert len(kwargs) == 5


def test_varlen_spells_torch_and_says_causal() -> None:
    kwargs = masks.varlen(pack(LENGTHS, ROW_LENGTH), kernel="torch")
    assert kwargs["cu_seq_q"].tolist() == kwargs["cu_seq_k"].tolist() == FLAT_STARTS
    assert (kwargs["max_q"], kwargs["max_k"], kwargs["window_size"]) == (4, 4, (-1, 0))
    assert len(kwargs) == 5


def test_torch_varlen_attention_takes_the_arguments() -> None:
    # The kernel itself needs a GPU; on the meta device torch checks the call and the shapes.
    kwargs = masks.varlen(pack(LENGTHS, ROW_LENGTH), kernel="torch")
    inspect.signature(varlen_attn).bind(None, None, None, **kwargs)
    query = torch.empty(12, 2, 8, device="meta", dtype=torch.bfloat16)
    on_meta = {**kwargs, "cu_seq_q": kwargs["cu_seq_q"].to("meta"), "cu_seq_k": kwargs["cu_seq_k"].to("meta")}
    assert varlen_attn(query, query, query, **on_meta).shape == query.shape


def test_repeated_last_values_of_cu_seqlens_are_kept() -> None:
    batch = pack(LENGTHS, ROW_LENGTH)
    batch["cu_seqlens"] = torch.nn.functional.pad(batch["cu_seqlens"], (0, 3), value=12)
    assert masks.varlen(batch)["cu_seqlens_q"].tolist() == [*FLAT_STARTS, 12, 12, 12]


def test_hugging_face_gets_one_row_and_all_four_boundary_arguments() -> None:
    batch = pack(LENGTHS, ROW_LENGTH)
    kwargs = masks.hugging_face_kwargs(batch)
    for key in ("input_ids", "labels", "position_ids"):
        assert kwargs[key].shape == (1, 12)
        assert torch.equal(kwargs[key].view(2, 6), batch[key])
    assert kwargs["cu_seq_lens_q"].tolist() == kwargs["cu_seq_lens_k"].tolist() == FLAT_STARTS
    assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (4, 4)


def test_hugging_face_never_gets_an_attention_mask() -> None:
    batch = {**pack(LENGTHS, ROW_LENGTH), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    assert set(masks.hugging_face_kwargs(batch)) == {
        "input_ids", "labels", "position_ids",
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache",
    }  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(packs(max_row_length=24))
def test_positions_of_the_flat_row_restart_exactly_at_its_boundaries(
    drawn: tuple[list[list[int]], int],
) -> None:
    kwargs = masks.hugging_face_kwargs(pack(*drawn))
    restarts = (kwargs["position_ids"][0] == 0).nonzero().flatten()
    assert restarts.tolist() == kwargs["cu_seq_lens_q"][:-1].tolist()

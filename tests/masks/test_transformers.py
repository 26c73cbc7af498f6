"""Real transformers models, built from their configurations: no document feels another, on each backend of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import masks

from .packs import PackedBatch, documents, pack

LENGTHS, ROW_LENGTH = [[40, 60, 28], [100, 20]], 128  # row 1 ends in padding
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "mistral": ("MistralConfig", {**SMALL, "sliding_window": 16}),
    "qwen3": ("Qwen3Config", SMALL),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **SMALL, "hidden_size": 256, "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "gpt_oss": ("GptOssConfig", {**SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": 97, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "word_embed_proj_dim": 32,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "full_attn_idxs": [],
        },
    ),
}  # fmt: skip
BACKENDS = [
    ("llama", "eager"), ("llama", "sdpa"), ("llama", "flex_attention"),
    ("mistral", "eager"), ("mistral", "sdpa"), ("qwen3", "sdpa"), ("gpt2", "eager"), ("gpt2", "sdpa"),
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own


def build(name: str, attention: str | None = None) -> Any:
    import transformers  # only here: it takes seconds, also where tests are only collected

    torch.manual_seed(0)
    kind, values = CONFIGURATIONS[name]
    configuration = getattr(transformers, kind)(**values)
    return transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation=attention)


def logits(model: Any, batch: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        return model(**masks.hugging_face_kwargs(batch)).logits.view(len(LENGTHS), ROW_LENGTH, -1)


@pytest.mark.parametrize(("name", "attention"), BACKENDS)
def test_a_changed_token_changes_no_other_document(name: str, attention: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # transformers compiles FlexAttention, which takes most of a minute
        assert_documents_are_apart(name, attention)


@pytest.mark.stress
def test_a_changed_token_changes_no_other_document_under_compiled_flex_attention() -> None:
    assert_documents_are_apart("llama", "flex_attention")


def assert_documents_are_apart(name: str, attention: str) -> None:
    model = build(name, attention).eval()
    batch = pack(LENGTHS, ROW_LENGTH)
    before = logits(model, batch)
    for document, (row, start, end) in enumerate(documents(LENGTHS)):
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][row, (start + end) // 2] = 96
        differs = (logits(model, changed) != before).any(dim=-1)
        assert differs[row, start:end].any()
        assert not differs[batch["document_ids"] != document].any()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_document_gets_the_logits_it_gets_alone(attention: str) -> None:
    model = build("llama", attention).eval()
    batch = pack(LENGTHS, ROW_LENGTH)
    packed = logits(model, batch)
    for row, start, end in documents(LENGTHS):
        with torch.no_grad():
            alone = model(batch["input_ids"][row : row + 1, start:end]).logits[0]
        torch.testing.assert_close(packed[row, start:end], alone, rtol=1e-4, atol=1e-5)


def test_the_check_passes_a_model_that_keeps_documents_apart_and_leaves_its_mode() -> None:
    model = build("llama", "sdpa").train()
    masks.check_isolation(model, pack(LENGTHS, ROW_LENGTH))
    assert model.training


def test_the_check_refuses_a_model_that_never_reads_positions() -> None:
    with pytest.raises(RuntimeError, match="changed the logits of 208 tokens of others, of 208: OPTForCausalLM"):
        masks.check_isolation(build("opt", "sdpa"), pack(LENGTHS, ROW_LENGTH))


def test_the_check_refuses_a_model_whose_convolutions_cross_borders() -> None:
    with pytest.raises(RuntimeError, match="changed the logits of 2 tokens of others"):
        masks.check_isolation(build("lfm2"), pack(LENGTHS, ROW_LENGTH))


def test_the_check_takes_rounding_among_experts_for_what_it_is() -> None:
    model = build("qwen3_moe", "sdpa").eval()
    batch = pack(LENGTHS, ROW_LENGTH)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, :40] = 1
    differs = logits(model, changed) != logits(model, batch)
    assert differs[batch["document_ids"] > 0].any()  # or this is no test of rounding
    masks.check_isolation(model, batch)


def test_the_check_refuses_experts_that_never_read_positions() -> None:
    with pytest.raises(RuntimeError, match="GptOssForCausalLM does not keep packed documents apart"):
        masks.check_isolation(build("gpt_oss", "eager"), pack(LENGTHS, ROW_LENGTH))


def test_the_check_needs_two_documents() -> None:
    with pytest.raises(ValueError, match="holds one document"):
        masks.check_isolation(build("llama", "sdpa"), pack([[128]], ROW_LENGTH))

"""A plan's packed batches through real attention: no document feels another.

The tokens are bytes of this repository's own text; boundaries come from the plan alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import penstock
from penstock import masks
from penstock.plan import Plan

from .examples import assert_same

EOS, LENGTH = 0, 128
Batch = dict[str, Any]
Model = Callable[[Batch], Tensor]

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def texts() -> list[np.ndarray]:
    """Paragraphs of this file, each ended by EOS; one is longer than a row."""
    paragraphs = Path(__file__).read_bytes().split(b"\n\n")[:24]
    return [np.frombuffer(paragraph[:300] + bytes([EOS]), np.uint8) for paragraph in paragraphs]


def plan(**options: Any) -> Plan:
    return penstock.from_arrays({"tokens": texts()}).shuffle(seed=3).pack(LENGTH, **options).batch(3)


def tensors(batch: Batch) -> Batch:
    return {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in batch.items()}


class Attention(nn.Module):
    """Two layers, so that a leak in one spreads in the next; positions are the batch's."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Batch], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.embedding, self.positions = nn.Embedding(256, 32), nn.Embedding(512, 32)
        self.projections = nn.ModuleList([nn.Linear(32, 96) for _ in range(2)])

    def forward(self, batch: Batch) -> Tensor:
        x = self.embedding(batch["input_ids"]) + self.positions(batch["position_ids"])
        for projection in self.projections:
            q, k, v = projection(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            x = x + self.attend(q, k, v, batch).transpose(1, 2).flatten(2)
        return x


def sdpa(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=masks.dense(batch).unsqueeze(1))


def flex(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    return flex_attention(q, k, v, block_mask=masks.block_mask(batch))


def example() -> nn.Module:
    path = Path(__file__).parents[2] / "examples" / "packed_attention.py"
    spec = importlib.util.spec_from_file_location("packed_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.PackedAttention(256, 32, num_heads=4, eos_token_id=EOS).eval()


def models() -> dict[str, Model]:
    module = example()
    return {
        "dense SDPA": Attention(sdpa),
        "FlexAttention": Attention(flex),
        "example, dense": lambda batch: module(batch["input_ids"], visible=masks.dense(batch)),
        "example, from EOS": lambda batch: module(batch["input_ids"]),
    }


@pytest.fixture(params=["dense SDPA", "FlexAttention", "example, dense", "example, from EOS"])
def model(request: pytest.FixtureRequest) -> Model:
    found = models()[request.param]

    def run(batch: Batch) -> Tensor:
        with torch.no_grad():
            return found(batch)

    return run


def spans(step: int = 0) -> list[tuple[int, int, int]]:
    return [(trace.row, trace.column, trace.column + trace.size) for trace in plan().documents(step)]


def test_changing_a_token_leaves_every_other_document_bit_identical(model: Model) -> None:
    batch = tensors(plan().read(0))
    before = model(batch)
    assert len(spans()) > 3
    for row, begin, end in spans():
        if end - begin == 1:
            continue
        tokens = batch["input_ids"].clone()
        tokens[row, begin] = tokens[row, begin] % 200 + 1
        differs = (before != model({**batch, "input_ids": tokens})).any(dim=-1)
        assert differs[row, begin:end].any()
        differs[row, begin:end] = False
        assert not differs.any()


def test_a_packed_pass_equals_running_each_document_alone(model: Model) -> None:
    batch = tensors(plan().read(0))
    together = model(batch)
    for row, begin, end in spans():
        alone = {
            "input_ids": batch["input_ids"][row : row + 1, begin:end],
            "position_ids": torch.arange(end - begin)[None],
            "document_ids": torch.zeros(1, end - begin, dtype=torch.int32),
        }
        torch.testing.assert_close(together[row, begin:end], model(alone)[0], rtol=1e-4, atol=1e-5)


def test_the_loss_over_labels_is_the_sum_of_the_documents_losses_over_num_targets() -> None:
    batch = tensors(plan().read(0))
    model, head = Attention(sdpa), nn.Linear(32, 256)
    with torch.no_grad():
        logits = head(model(batch))
        packed = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
        alone = torch.zeros(())
        for row, begin, end in spans():
            tokens = batch["input_ids"][row, begin:end]
            part = logits[row, begin : end - 1]
            alone += cross_entropy(part, tokens[1:], reduction="sum") if end - begin > 1 else 0
        torch.testing.assert_close(packed, alone)
        mean = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    torch.testing.assert_close(mean, packed / batch["num_targets"])


def test_labels_of_the_same_kind_give_the_same_loss_to_a_model_that_shifts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, LENGTH, 256)
    following, same = tensors(plan().read(0)), tensors(plan(labels="same").read(0))
    assert torch.equal(following["input_ids"], same["input_ids"])
    assert following["num_targets"] == same["num_targets"]
    direct = cross_entropy(logits.flatten(0, 1), following["labels"].flatten(), reduction="sum")
    shifted = cross_entropy(logits[:, :-1].flatten(0, 1), same["labels"][:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(direct, shifted)


def test_masks_take_numpy_batches_as_a_plan_gives_them() -> None:
    batch = plan().read(0)
    untouched = plan().read(0)
    assert torch.equal(masks.dense(batch), masks.dense(tensors(batch)))
    ids = batch["document_ids"]
    visible = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0) & np.tri(LENGTH, dtype=bool)
    visible |= np.eye(LENGTH, dtype=bool)  # padding sees itself
    np.testing.assert_array_equal(masks.dense(batch).numpy(), visible)
    assert masks.varlen(batch)["max_seqlen_q"] == batch["max_seqlen"]
    assert_same(batch, untouched)

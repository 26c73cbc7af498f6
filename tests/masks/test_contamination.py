"""No document feels another, on every attention backend that runs on a CPU.

For each backend: change a token of one document and every other output is bit-identical; a packed
pass equals running each document alone; and padding tokens change nothing but padding.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from penstock import masks

from .packs import PackedBatch, documents, pack

LENGTHS, ROW_LENGTH = [[70, 1, 129], [300], [140, 2, 30]], 300  # row 0 and row 2 end in padding
EOS = 0
Attend = Callable[[Tensor, Tensor, Tensor, PackedBatch], Tensor]
Model = Callable[[PackedBatch], Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's own, from inductor
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


@pytest.fixture(autouse=True, scope="module")
def _nothing_stays_compiled(one_torch_thread: None) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def sdpa(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=masks.dense(batch).unsqueeze(1))


def flex(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
    return flex_attention(q, k, v, block_mask=masks.block_mask(batch))


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, fullgraph=True)


def compiled_flex(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
    return _compiled()(q, k, v, block_mask=masks.block_mask(batch))


def by_segments(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
    """What a variable-length kernel computes: the flat batch, one segment at a time."""
    rows, heads, length, size = q.shape
    q, k, v = (x.transpose(1, 2).reshape(rows * length, heads, size) for x in (q, k, v))
    return flash_attn_varlen_func(q, k, v, **masks.varlen(batch)).view(rows, length, heads, size).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool = False,
) -> Tensor:  # fmt: skip
    """A stand-in for the function of flash-attn, which has no CPU version."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    sizes = cu_seqlens_q.diff().tolist()
    assert max(sizes) == max_seqlen_q == max_seqlen_k
    parts = zip(*(x.transpose(0, 1).split(sizes, dim=1) for x in (q, k, v)), strict=True)
    out = [scaled_dot_product_attention(*part, is_causal=causal) for part in parts]
    return torch.cat(out, dim=1).transpose(0, 1)


class TwoLayers(nn.Module):
    """Embedding, then twice attention and a projection: the second layer spreads any leak."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.embedding = nn.Embedding(50, 32)
        self.projections = nn.ModuleList([nn.Linear(32, 96) for _ in range(2)])

    def forward(self, batch: PackedBatch) -> Tensor:
        x = self.embedding(batch["input_ids"])
        for projection in self.projections:
            q, k, v = projection(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            x = x + self.attend(q, k, v, batch).transpose(1, 2).flatten(2)
        return x


def example_module() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "packed_attention.py"
    spec = importlib.util.spec_from_file_location("packed_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed_attention() -> nn.Module:
    torch.manual_seed(0)
    return example_module().PackedAttention(vocab_size=50, embedding_dim=32, num_heads=2, eos_token_id=EOS)


def example_with_batch() -> Model:
    module = packed_attention()
    return lambda batch: module(batch["input_ids"], visible=masks.dense(batch))


def example_in_eval_mode() -> Model:
    module = packed_attention().eval()  # nn.MultiheadAttention takes another path there
    return lambda batch: module(batch["input_ids"], visible=masks.dense(batch))


def example_with_eos() -> Model:
    module = packed_attention()
    return lambda batch: module(batch["input_ids"])


COMPILED = "FlexAttention compiled"  # for half a minute; every day transformers' own model compiles it
BACKENDS: dict[str, Callable[[], Model]] = {
    "dense SDPA": lambda: TwoLayers(sdpa),
    "FlexAttention": lambda: TwoLayers(flex),
    COMPILED: lambda: TwoLayers(compiled_flex),
    "varlen": lambda: TwoLayers(by_segments),
    "example with batch": example_with_batch,
    "example in eval mode": example_in_eval_mode,
    "example with EOS": example_with_eos,
}


@pytest.fixture(
    params=[
        pytest.param(make, id=name, marks=[pytest.mark.stress] if name == COMPILED else [])
        for name, make in BACKENDS.items()
    ]
)
def model(request: pytest.FixtureRequest) -> Model:
    return request.param()


def packed_batch() -> PackedBatch:
    """Documents that end with EOS (and nowhere hold another), so that every backend can be asked."""
    batch = pack(LENGTHS, ROW_LENGTH)
    for row, _, end in documents(LENGTHS):
        batch["input_ids"][row, end - 1] = EOS
    return batch


def run(model: Model, batch: PackedBatch) -> Tensor:
    with torch.no_grad():
        return model(batch)


def changed(batch: PackedBatch, where: Tensor | tuple[int, int]) -> PackedBatch:
    """The batch with other tokens at `where`, none of them EOS."""
    tokens = batch["input_ids"].clone()
    tokens[where] = tokens[where] % 48 + 1
    return {**batch, "input_ids": tokens}


@pytest.mark.timeout(300)
def test_changing_a_token_changes_its_document_and_not_one_bit_elsewhere(model: Model) -> None:
    batch = packed_batch()
    before = run(model, batch)
    for row, start, end in documents(LENGTHS):
        if end - start == 1:
            continue  # its only token is the EOS that some backends need
        after = run(model, changed(batch, (row, start)))
        differs = (before != after).any(dim=-1)
        assert differs[row, start:end].any()
        differs[row, start:end] = False
        assert not differs.any()


@pytest.mark.timeout(300)
def test_changing_the_last_token_leaves_the_earlier_ones_bit_identical(model: Model) -> None:
    batch = packed_batch()
    row, start, end = documents(LENGTHS)[0]
    differs = (run(model, batch) != run(model, changed(batch, (row, end - 2)))).any(dim=-1)
    assert not differs[row, start : end - 2].any()
    assert differs[row, end - 2]


@pytest.mark.timeout(300)
def test_a_packed_pass_equals_running_each_document_alone(model: Model) -> None:
    batch = packed_batch()
    together = run(model, batch)
    for row, start, end in documents(LENGTHS):
        alone = {
            **pack([[end - start]], end - start),
            "input_ids": batch["input_ids"][row : row + 1, start:end],
        }
        torch.testing.assert_close(together[row, start:end], run(model, alone)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(300)
def test_padding_never_reaches_a_document(model: Model) -> None:
    batch = packed_batch()
    is_padding = batch["document_ids"] == -1
    before, after = run(model, batch), run(model, changed(batch, is_padding))
    assert torch.equal(before[~is_padding], after[~is_padding])
    assert torch.isfinite(after).all()


def test_a_mask_handed_over_without_inverting_it_contaminates_every_other_document() -> None:
    """Why the example inverts: nn.MultiheadAttention reads True as hidden."""
    module, batch = packed_attention(), packed_batch()
    not_inverted = ~masks.dense(batch)  # the module's own inversion undoes this one
    with torch.no_grad():
        before = module(batch["input_ids"], visible=not_inverted)
        after = module(changed(batch, (0, 0))["input_ids"], visible=not_inverted)
    other_documents_of_row_0 = (before != after).any(dim=-1)[0, 70:200]
    assert other_documents_of_row_0.all()


def test_without_packed_the_example_treats_a_row_as_one_document() -> None:
    module, batch = packed_attention(), packed_batch()
    one_document = torch.zeros_like(batch["document_ids"])
    with torch.no_grad():
        plain = module(batch["input_ids"], packed=False)
        expected = module(batch["input_ids"], visible=masks.dense({"document_ids": one_document}))
    assert torch.equal(plain, expected)


def test_gradients_of_one_document_do_not_touch_another() -> None:
    """In the backward pass too: the loss of one document has no gradient at the tokens of others."""
    batch = packed_batch()
    q, k, v = (torch.randn(3, 2, ROW_LENGTH, 16, requires_grad=True) for _ in range(3))
    row, start, end = documents(LENGTHS)[2]
    sdpa(q, k, v, batch)[row, :, start:end].sum().backward()
    for tensor in (q, k, v):
        touched = tensor.grad.ne(0).any(dim=-1).any(dim=1)
        touched[row, start:end] = False
        assert not touched.any()


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_a_new_mask_of_the_same_shape_compiles_nothing_again() -> None:
    q = torch.randn(3, 2, ROW_LENGTH, 16)
    compiled_flex(q, q, q, packed_batch())
    with torch.compiler.set_stance("fail_on_recompile"):
        other = pack([[300], [10, 20], [5]], ROW_LENGTH, seed=1)
        out = compiled_flex(q, q, q, other)
    torch.testing.assert_close(out, sdpa(q, q, q, other), rtol=1e-4, atol=1e-5)

"""Whatever layout tensors have, they arrive from workers as they do through torch's own hand-over."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.loader import private_slot
from penstock.pytorch._torch_transport import SlotTensors, TorchAnswer, pack, read_answer, unpack
from pytorch.torch_examples import Numbers, Point

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:The PyTorch API of nested tensors", "ignore:TypedStorage", "ignore:torch.quantize"
)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Boxes(torch.Tensor):
    """A user's kind of tensor."""


@dataclass
class Target:
    """A user's own container."""

    boxes: Any
    labels: Any


def ours(value: Any) -> Any:
    """A value after our hand-over, without the processes."""
    slot = private_slot(0)
    slot.begin()
    content, arrays = pack(value, SlotTensors(slot), slot)
    layout = pickle.loads(pickle.dumps(slot.lay_out(TorchAnswer(content).as_batch(arrays))))
    answer, received = read_answer(layout.view(slot.memory(layout.end)))
    return unpack(answer.content, received)  # type: ignore[arg-type]


def torchs(value: Any) -> Any:
    """A value after torch's."""
    return pickle.loads(bytes(ForkingPickler.dumps(value)))


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The strided tensors of a value, those inside other tensors too."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            yield value.values() if value.layout is torch.strided else value.values().detach()
        elif value.layout is torch.sparse_coo:
            yield from (value._indices(), value._values())
        elif value.layout is torch.sparse_csr:
            yield from (value.crow_indices(), value.col_indices(), value.values())
        else:
            yield value
    elif isinstance(value, dict):
        yield from (leaf for one in value.values() for leaf in leaves(one))
    elif isinstance(value, (list, tuple)):
        yield from (leaf for one in value for leaf in leaves(one))
    elif isinstance(value, Target):
        yield from leaves([value.boxes, value.labels])


def structure(value: Any) -> Any:
    """Types all the way down, and what tensors say of themselves."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.layout, value.is_nested, value.requires_grad, value.is_leaf
    if isinstance(value, dict):
        return dict, {key: structure(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [structure(one) for one in value]
    return (Target, structure([value.boxes, value.labels])) if isinstance(value, Target) else value


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that matter: of a dimension of one element any stride is as good."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1] if tensor.numel() else []


def contents(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().as_subclass(torch.Tensor)
    return (
        plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()
        if plain.numel()
        else b""
    )


def first_byte(tensor: torch.Tensor) -> torch.Tensor:
    offset = tensor.storage_offset() * tensor.itemsize
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), offset, (1,), (1,))


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """Any strides that stay inside a flat tensor."""
    offset = draw(st.integers(0, len(base)))
    room, shape, steps = len(base) - offset, [], []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, 6))
        size = draw(st.integers(0, 4))
        if size > 1 and (size - 1) * step >= room:
            size = draw(st.integers(0, 1))
        shape.append(size)
        steps.append(step)
        room -= max(0, size - 1) * step
    if room <= 0:
        shape.append(0)
        steps.append(1)
    return base.as_strided(shape, steps, offset)


SENT_BY_TORCH = torch.storage._dtype_to_storage_type_map()
"""Dtypes of which torch's hand-over takes subclasses; in the trainer it stumbles over the others."""

KINDS: dict[str, Any] = {
    "plain": lambda tensor: tensor,
    "subclass": lambda tensor: tensor.as_subclass(Boxes) if tensor.dtype in SENT_BY_TORCH else tensor,
    "gradient": lambda tensor: tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
    "whole": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "coo": lambda tensor: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (3,), is_coalesced=True),
    "csr": lambda tensor: torch.eye(3).to_sparse_csr(),
    "nested": lambda tensor: torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]),
    "jagged": lambda tensor: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
}


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Views of a few storages, in containers of every kind."""
    bases = [
        torch.arange(draw(st.integers(0, 24))).to(torch.float32).to(draw(st.sampled_from(DTYPES))) for _ in range(2)
    ]
    leaf = st.sampled_from(bases).flatmap(views)
    kinds = st.sampled_from(["plain"] * 4 + list(KINDS))
    tensor = st.builds(lambda kind, one: KINDS[kind](one), kinds, leaf)
    return draw(
        st.recursive(
            tensor | st.text(max_size=2) | st.none(),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.tuples(inner, inner)
                | st.builds(Point, inner, inner)
                | st.builds(Target, inner, inner)
                | st.dictionaries(st.text(max_size=2), inner, max_size=3)
            ),
            max_leaves=8,
        )
    )


@settings(max_examples=100, deadline=None)
@given(trees())
def test_any_tensors_in_any_structure_arrive_as_through_torchs_hand_over(tree: Any) -> None:
    mine, reference = ours(tree), torchs(tree)
    assert structure(mine) == structure(reference)
    pairs = list(zip(leaves(mine), leaves(reference), strict=True))
    assert [one.shape for one, _ in pairs] == [other.shape for _, other in pairs]
    assert [contents(one) for one, _ in pairs] == [contents(other) for _, other in pairs]
    if all(strides(one) == strides(other) for one, other in pairs):
        for one, other in pairs:
            if one.numel():
                first_byte(one).bitwise_xor_(1)
                first_byte(other).bitwise_xor_(1)
        assert [contents(one) for one, _ in pairs] == [contents(other) for _, other in pairs]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 24).flatmap(lambda size: views(torch.arange(size) * (1 + 2j))))
def test_conjugates_and_negatives_arrive_with_their_values(view: torch.Tensor) -> None:
    conjugate = view.conj()
    for sent, arrived in zip([conjugate, conjugate.imag], ours(("", conjugate, conjugate.imag))[1:], strict=True):
        assert torch.equal(arrived, sent)


def test_a_quantised_tensor_arrives_with_its_scales() -> None:
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    sent = torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.qint8)
    assert torch.equal(ours([sent])[0], sent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_subclass_of_any_dtype_arrives(dtype: torch.dtype) -> None:
    sent = torch.arange(6).to(dtype).reshape(2, 3).t().as_subclass(Boxes)
    (arrived,) = ours((sent,))
    assert structure(arrived) == structure(sent)
    assert contents(arrived) == contents(sent)


def test_strides_are_kept_where_the_gaps_between_elements_are_few() -> None:
    table = torch.arange(20.0).reshape(4, 5)
    boxes, labels = ours((table[:, :4], table[:, 4]))
    assert boxes.stride() == (5, 1)
    assert labels.stride() == (5,)
    assert boxes.untyped_storage().data_ptr() == labels.untyped_storage().data_ptr()


def test_a_row_of_a_large_tensor_is_sent_without_the_rest() -> None:
    large = torch.zeros(1000, 1000)
    row, column = ours((large[5], large[:, 5]))
    assert row.untyped_storage().nbytes() + column.untyped_storage().nbytes() == 8000


class Scenes(Numbers):
    """Images with some objects each, some with none."""

    def __getitem__(self, index: int) -> Any:
        objects = torch.arange(10.0).reshape(2, 5)[: index % 3]
        return torch.ones(3, 2, 2), {"boxes": objects[:, :4], "labels": objects[:, 4].long(), "scores": objects[:, 4]}


def test_detection_batches_arrive_from_workers() -> None:
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 1,
        "collate_fn": lambda batch: tuple(zip(*batch, strict=True)),
    }
    for mine, reference in zip(
        penstock.DataLoader(Scenes(8), **options), TorchDataLoader(Scenes(8), **options), strict=True
    ):
        assert structure(mine) == structure(reference)
        for one, other in zip(leaves(mine), leaves(reference), strict=True):
            assert torch.equal(one, other)


def test_empty_arrays_arrive() -> None:
    empty, full = ours((np.empty((0, 4), np.float32), np.ones(2)))
    assert empty.shape == (0, 4)
    assert full.tolist() == [1, 1]

"""Batches of any type arrive from workers as they do from torch's."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import penstock
from pytorch.torch_examples import Numbers, Point, assert_same, both


class Samples(Dataset[Any]):
    """A list as a dataset."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def batches(samples: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """From workers of ours and of torch's."""
    return both(lambda loader: list(loader(Samples(samples), num_workers=1, **({"batch_size": 3} | options))))


class Tagged(dict[str, Any]):
    """A mapping with more to it."""

    tag = "x"


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.arange(6).reshape(2, 3) * i,
    "scalar tensor": lambda i: torch.tensor(float(i)),
    "empty tensor": lambda i: torch.empty(0, 4),
    "bfloat16": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
    "complex": lambda i: torch.full((2,), i + 1j),
    "bool": lambda i: torch.tensor([i % 2 == 0, True]),
    "uint16": lambda i: torch.tensor([i], dtype=torch.uint16),
    "float8": lambda i: torch.tensor([i], dtype=torch.float32).to(torch.float8_e4m3fn),
    "transposed": lambda i: torch.arange(6).reshape(2, 3).t() + i,
    "array": lambda i: np.arange(4, dtype=np.float32) + i,
    "int array": lambda i: np.array([[i]], dtype=np.int16),
    "numpy scalar": lambda i: np.float32(i),
    "numpy bool": lambda i: np.bool_(i % 2),
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool number": lambda i: i % 2 == 0,
    "string": lambda i: f"sample {i}",
    "bytes": lambda i: bytes([i]),
    "tuple": lambda i: (i, torch.tensor([i]), "name"),
    "list": lambda i: [i, [i, i + 1.5]],
    "dict": lambda i: {"x": torch.tensor(i), "y": {"z": np.ones(2) * i}},
    "ordered dict": lambda i: collections.OrderedDict(b=i, a=torch.ones(i * 0 + 2)),
    "mapping": lambda i: Tagged(x=i),
    "named tuple": lambda i: Point(i, Point(np.zeros(2), "s")),
    "range": lambda i: range(i, i + 3),
    "dict of tensors": lambda i: {"ids": torch.arange(5) + i, 3: torch.ones(2)},
    "one tensor twice": lambda i: [torch.ones(2)] * 2,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_default_collate_gives_what_torchs_gives(name: str) -> None:
    assert_same(*batches([SAMPLES[name](i) for i in range(7)]))


@pytest.mark.parametrize("name", SAMPLES)
def test_without_batches_each_sample_is_converted_as_torch_converts_it(name: str) -> None:
    assert_same(*batches([SAMPLES[name](i) for i in range(3)], batch_size=None))


tensors = st.builds(
    lambda shape, dtype: torch.ones(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]),
)
leaves = (
    tensors | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3) | st.builds(np.ones, st.just(2))
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=15, deadline=None)
@given(trees)
def test_any_structure_is_collated_as_torch_collates_it(tree: Any) -> None:
    assert_same(*batches([tree] * 4))


@dataclass
class Bag:
    """A user's batch."""

    tensor: torch.Tensor
    names: list[str]
    array: np.ndarray[Any, Any]


def to_bag(samples: list[Any]) -> Bag:
    return Bag(torch.stack(samples), ["a"], np.arange(3).reshape(3, 1))


def results(collate_fn: Callable[[list[Any]], Any]) -> Any:
    """The first batch of ours and of torch's."""
    return both(lambda loader: next(iter(loader(Numbers(), batch_size=4, num_workers=1, collate_fn=collate_fn))))


def test_a_custom_batch_type_keeps_its_type_and_its_tensors() -> None:
    ours, torchs = results(to_bag)
    assert isinstance(ours, Bag)
    assert_same([ours.tensor, ours.names, ours.array], [torchs.tensor, torchs.names, torchs.array])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "collate_fn",
    [
        lambda samples: torch.stack(samples).reshape(2, 2).t(),
        lambda samples: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda samples: torch.ones(3).to_sparse(),
        lambda samples: torch.eye(3).to_sparse_csr(),
        lambda samples: torch.ones(3, requires_grad=True),
        lambda samples: torch.nn.Parameter(torch.ones(3)),
        lambda samples: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        lambda samples: [torch.full((index,), index) for index in range(100)],
        lambda samples: {"nested": [default_collate(samples), {"deep": default_collate(samples)}]},
        lambda samples: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        lambda samples: np.array(["a", "b"]),
        lambda samples: np.array([None, {}]),
        lambda samples: None,
        lambda samples: slice(3),
        lambda samples: {1, 2},
        lambda samples: torch.float16,
    ],
)
def test_whatever_a_collate_function_returns_arrives(collate_fn: Callable[[list[Any]], Any]) -> None:
    ours, torchs = results(collate_fn)
    if isinstance(ours, torch.Tensor) and ours.layout is not torch.strided:
        assert ours.layout is torchs.layout
        ours, torchs = ours.to_dense(), torchs.to_dense()
    assert_same(ours, torchs)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_a_quantised_tensor_which_torch_loses_the_scale_of_arrives_whole() -> None:
    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.tensor([0.1, 0.2]), 0.1, 0, torch.quint8)

    batch = next(iter(penstock.DataLoader(Numbers(), num_workers=1, collate_fn=collate)))
    assert batch.int_repr().tolist() == [1, 2]
    assert batch.q_scale() == 0.1


def test_a_conjugate_which_torch_cannot_collate_in_a_worker_is_collated() -> None:
    (batch,) = penstock.DataLoader(Samples([torch.tensor([1j]).conj()] * 2), batch_size=2, num_workers=1)
    assert batch.tolist() == [[-1j], [-1j]]


def test_gradients_are_asked_for_where_they_were() -> None:
    ours, _ = results(lambda samples: torch.ones(3, requires_grad=True))
    assert ours.requires_grad


def test_tensors_and_arrays_from_workers_can_be_written_to() -> None:
    def collate(samples: list[Any]) -> Any:
        return np.zeros(3), torch.zeros(3), default_collate(samples), np.frombuffer(bytes(3), np.uint8)

    arrived = next(iter(penstock.DataLoader(Numbers(), num_workers=1, collate_fn=collate)))
    array, tensor, stacked, was_read_only = arrived
    array += 1
    tensor += 1
    stacked += 1
    was_read_only += 1
    assert (array.sum(), tensor.sum(), was_read_only.sum()) == (3, 3, 3)


def test_a_tensor_that_a_batch_has_twice_is_one_tensor_there() -> None:
    def collate(samples: list[Any]) -> Any:
        one = torch.zeros(2)
        return {"a": one, "b": [one]}

    batch = next(iter(penstock.DataLoader(Numbers(), num_workers=1, collate_fn=collate)))
    assert batch["a"] is batch["b"][0]


def test_types_that_users_register_with_torch_are_collated_their_way() -> None:
    class Custom:
        pass

    def collate_custom(samples: Any, *, collate_fn_map: Any = None) -> Any:
        return f"{len(samples)} of them"

    default_collate_fn_map[Custom] = collate_custom
    try:
        assert_same(*batches([{"custom": Custom(), "x": 1}] * 3))
    finally:
        del default_collate_fn_map[Custom]


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        ([torch.ones(2), torch.ones(3)], RuntimeError),
        ([[1, 2], [1]], RuntimeError),
        ([object(), object()], TypeError),
        ([np.array(["a"])] * 2, TypeError),
        ([torch.ones(2).to_sparse()] * 2, RuntimeError),
        ([{"a": 1}, {"b": 1}], KeyError),
    ],
)
def test_what_cannot_be_collated_raises_what_torch_raises(samples: list[Any], error: type[Exception]) -> None:
    for loader in (penstock.DataLoader, TorchDataLoader):
        with pytest.raises(error):
            list(loader(Samples(samples), batch_size=2, num_workers=1))


def test_a_batch_that_cannot_be_pickled_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(AttributeError, match="lambda"):
        list(penstock.DataLoader(Numbers(), num_workers=1, collate_fn=lambda samples: lambda: None))


def test_a_batch_that_is_held_is_never_overwritten() -> None:
    class Wide(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.full((1000,), index), index

    held = list(penstock.DataLoader(Wide(400), batch_size=2, num_workers=2))
    for number, (wide, index) in enumerate(held):
        assert index.tolist() == [2 * number, 2 * number + 1]
        assert (wide == index[:, None]).all()


def test_what_user_code_keeps_of_a_collated_batch_is_never_overwritten() -> None:
    kept: list[torch.Tensor] = []

    def collate(samples: list[Any]) -> Any:
        kept.append(default_collate(samples))
        return torch.stack(kept)

    *_, last = penstock.DataLoader(Numbers(20), batch_size=2, num_workers=1, collate_fn=collate)
    assert last.flatten().tolist() == list(range(20))

"""Batches of any shape: torch's containers, ours, and the user's own."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

import penstock
from penstock.pytorch._batches import can_keep, copy_batch, keepables, pin_batch


class Leaf:
    """Pins and moves itself, as torch asks of batch types of the user's."""

    def __init__(self, done: str = "") -> None:
        self.done = done

    def pin_memory(self) -> Leaf:
        return Leaf("pinned")

    def to(self, device: Any, non_blocking: bool = False) -> Leaf:
        return Leaf("moved")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaf) and self.done == other.done

    def __hash__(self) -> int:
        return hash(self.done)


class Pair(NamedTuple):
    one: Any
    two: Any


class Tagged(dict[str, Any]):
    """A dict that carries more than its items."""

    tag = "none"


class Frozen(Sequence[Any]):
    """A sequence that nothing can be put into."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


def _tagged(items: dict[str, Any]) -> Tagged:
    made = Tagged(items)
    made.tag = "kept"
    return made


KEYS = st.text(max_size=2)
LEAVES = st.one_of(st.builds(Leaf), st.integers(), st.text(max_size=3), st.binary(max_size=3), st.none(), st.floats())
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(_tagged),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(UserDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items)),
        st.dictionaries(KEYS, inner, max_size=3).map(types.MappingProxyType),
        st.lists(inner, max_size=3).map(deque),
        st.lists(inner, max_size=3).map(Frozen),
        st.integers(0, 3).map(range),
    ),
    max_leaves=8,
)


def described(value: Any) -> Any:
    """Types and contents, to compare by."""
    if isinstance(value, (str, bytes, Leaf)):
        return value
    extra = getattr(value, "tag", None)
    if hasattr(value, "items"):
        return type(value), extra, [(key, described(inner)) for key, inner in value.items()]
    if isinstance(value, (Sequence, deque)):
        return type(value), extra, [described(inner) for inner in value]
    return type(value), repr(value)


@given(BATCHES)
def test_any_batch_is_pinned_as_torch_pins_it(batch: Any) -> None:
    assert described(pin_batch(batch, lambda tensor: tensor)) == described(pin_memory(batch))


@given(BATCHES)
def test_any_batch_is_copied_the_same_way(batch: Any) -> None:
    assert described(copy_batch(batch, lambda leaf: leaf.pin_memory())) == described(pin_memory(batch))


def moved(batch: Any) -> Any:
    return copy_batch(batch, lambda value: value.to("meta", non_blocking=True))


def test_tensors_are_moved_and_everything_else_is_left_alone() -> None:
    name, number = "name", 3
    batch = moved({"x": torch.ones(2), "nested": [torch.ones(3), (name, number)], "none": None})
    assert batch["x"].device.type == batch["nested"][0].device.type == "meta"
    assert batch["nested"][1] == (name, number)
    assert batch["none"] is None


def test_the_host_batch_itself_is_not_changed() -> None:
    inner = [torch.ones(1)]
    batch = {"x": torch.ones(2), "list": inner}
    moved(batch)
    assert batch["x"].device.type == inner[0].device.type == "cpu"


def test_ragged_columns_are_moved() -> None:
    ragged = penstock.Ragged(torch.arange(5), torch.tensor([0, 2, 5]))  # type: ignore[arg-type]
    result = moved({"tokens": ragged})["tokens"]
    assert isinstance(result, penstock.Ragged)
    assert result.values.device.type == result.offsets.device.type == "meta"
    assert can_keep({"tokens": ragged})
    assert len(list(keepables({"tokens": ragged}))) == 2


@dataclass(frozen=True, slots=True)
class Sample:
    image: torch.Tensor
    label: str
    num_made: int = field(default=0, init=False)


def test_dataclasses_are_moved_without_being_constructed_anew() -> None:
    sample = Sample(torch.ones(2), "cat")
    object.__setattr__(sample, "num_made", 7)
    result = moved([sample])[0]
    assert (result.image.device.type, result.label, result.num_made) == ("meta", "cat", 7)
    assert sample.image.device.type == "cpu"
    assert moved(Sample) is Sample


def test_packed_sequences_move_themselves() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    result = moved(packed)
    assert isinstance(result, torch.nn.utils.rnn.PackedSequence)
    assert result.data.device.type == "meta"
    assert can_keep(packed)


class Recorded:
    def record_stream(self, stream: Any) -> None:
        pass


class Moves:
    def to(self, device: Any) -> Moves:
        return self


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"x": torch.ones(1), "text": ["a", "b"], "number": 3}, True),
        ([Recorded()], True),
        ((torch.ones(1), [Moves()]), False),
        (torch.ones(2).to_sparse(), False),
        (object(), True),
    ],
)
def test_it_is_known_whether_all_tensors_can_be_found(batch: Any, found: bool) -> None:
    assert can_keep(batch) is found

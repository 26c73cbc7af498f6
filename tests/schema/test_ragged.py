from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.schema import Ragged


def test_samples_are_views_between_offsets() -> None:
    ragged = Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3]))
    assert len(ragged) == 3
    assert [sample.tolist() for sample in ragged] == [[5, 6], [], [7]]
    assert ragged.lengths.tolist() == [2, 0, 1]
    assert np.shares_memory(ragged[0], ragged.values)


def test_a_negative_index_counts_from_the_end() -> None:
    ragged = Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3]))
    assert ragged[-1].tolist() == [7]
    assert ragged[-3].tolist() == [5, 6]


@pytest.mark.parametrize("index", [3, -4, 100])
def test_an_index_out_of_range_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"Index {index} is out of range for 3 samples"):
        Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3]))[index]


def test_an_empty_one_has_no_samples() -> None:
    ragged = Ragged(np.empty(0), np.zeros(1, np.int64))
    assert len(ragged) == 0
    assert list(ragged) == []
    with pytest.raises(IndexError):
        ragged[0]


def test_byte_strings_come_out_as_bytes() -> None:
    ragged = Ragged(np.frombuffer(b"onetwo", np.uint8), np.array([0, 3, 3, 6]), is_bytes=True)
    assert list(ragged) == [b"one", b"", b"two"]


def test_trailing_dimensions_stay() -> None:
    ragged = Ragged(np.arange(12).reshape(4, 3), np.array([0, 1, 4]))
    assert ragged[1].shape == (3, 3)


def test_it_prints_counts_not_contents() -> None:
    assert repr(Ragged(np.zeros(10**6, np.uint16), np.array([0, 10**6]))) == (
        "Ragged(1 samples, 1000000 values of uint16)"
    )
    assert "of bytes" in repr(Ragged(np.zeros(2, np.uint8), np.array([0, 2]), is_bytes=True))


def test_tensors_are_as_good_as_arrays() -> None:
    ragged = Ragged(torch.arange(5, dtype=torch.bfloat16), torch.tensor([0, 2, 5]))  # type: ignore[arg-type]
    assert repr(ragged) == "Ragged(2 samples, 5 values of bfloat16)"
    assert ragged.lengths.tolist() == [2, 3]
    assert [sample.tolist() for sample in ragged] == [[0, 1], [2, 3, 4]]


def as_lists(ragged: Ragged) -> list[list[int]]:
    return [np.asarray(sample).tolist() for sample in ragged]


samples = st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=8)


def of(lists: list[list[int]]) -> Ragged:
    return Ragged.from_lengths(np.array([*chain(*lists)], np.int64), [len(part) for part in lists])


@given(samples, st.data())
def test_take_gives_the_samples_asked_for_in_that_order(lists: list[list[int]], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=12) if lists else st.just([]))
    assert as_lists(of(lists).take(np.array(indices, np.int64))) == [lists[index] for index in indices]


def test_take_of_everything_copies_nothing() -> None:
    ragged = of([[1], [2, 3]])
    assert ragged.take(np.array([0, 1])) is ragged


@given(st.lists(samples, min_size=1, max_size=4))
def test_concatenated_parts_keep_their_samples(parts: list[list[list[int]]]) -> None:
    assert as_lists(Ragged.concatenate([of(part) for part in parts])) == [*chain(*parts)]


def test_parts_that_use_only_some_of_their_values_can_be_joined_and_taken_from() -> None:
    part = Ragged(np.arange(10), np.array([2, 4, 7]))
    assert as_lists(Ragged.concatenate([part, part])) == [[2, 3], [4, 5, 6]] * 2
    assert as_lists(part.take(np.array([1]))) == [[4, 5, 6]]

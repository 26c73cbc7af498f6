"""The permutation is a bijection, is the one written in `_kernels.py`, and refuses what it cannot permute."""

import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.order import Permutation

from .inverse import invert

keys = st.integers(0, 2**64 - 1)
sizes = st.one_of(
    st.integers(1, 300),
    st.integers(1, 2**62),
    st.builds(lambda power, near: max(1, min(2**62, 2**power + near)), st.integers(0, 62), st.integers(-2, 2)),
)


def reference(size: int, key: int, position: int) -> int:
    """The method in Python integers, written from the description and sharing no code with the kernel."""
    word = 2**64 - 1
    gamma, m1, m2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    bits = ((size - 1).bit_length() + 1) // 2
    radix = -(-size // 2**bits)
    z = (key + gamma) & word
    z = ((z ^ (z >> 30)) * m1) & word
    z = ((z ^ (z >> 27)) * m2) & word
    key = z ^ (z >> 31)

    def hashed(half: int, number: int) -> int:
        h = ((half + key + number * gamma) * m1) & word
        return (((h ^ (h >> 32)) * m2) & word) >> 32

    while True:
        left, right = divmod(position, 2**bits)
        for number in range(0, 24 if size < 64 else 12 if size < 65_536 else 8, 2):
            right = (right + hashed(left, number)) % 2**bits
            left = (left + hashed(right, number + 1) * radix // 2**32) % radix
        position = left * 2**bits + right
        if position < size:
            return position


@given(sizes, keys, st.data())
@example(size=2**62, key=2**64 - 1, data=None)
@example(size=2**60 + 1, key=0, data=None)
@settings(deadline=None)
def test_the_kernel_is_the_method_as_described(size, key, data):
    position = size - 1 if data is None else data.draw(st.integers(0, size - 1))
    assert Permutation(size, key)([position]).tolist() == [reference(size, key, position)]


@given(sizes, keys, st.integers(1, 40), st.data())
@settings(deadline=None)
def test_numbers_side_by_side_come_as_one_by_one(size, key, count, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count))
    permutation = Permutation(size, key)
    assert permutation(positions).tolist() == [permutation([each])[0] for each in positions]


@given(st.integers(0, 70_000), keys)
@settings(max_examples=40, deadline=None)
def test_every_number_comes_exactly_once(size, key):
    assert np.bincount(Permutation(size, key)(np.arange(size)), minlength=size).tolist() == [1] * size


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_every_number_comes_exactly_once_at_each_small_size(key):
    for size in range(300):
        assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [4**8 - 1, 4**8, 4**8 + 1, 2**17 - 1, 2**17, 2**17 + 1, 1_000_003])
def test_every_number_comes_exactly_once_around_powers_of_two(size):
    assert (np.bincount(Permutation(size, 7)(np.arange(size)), minlength=size) == 1).all()


@given(sizes, keys, st.data())
@settings(deadline=None)
def test_the_inverse_undoes_it_and_it_undoes_the_inverse(size, key, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    positions = np.array([*positions, 0, size - 1])
    permutation = Permutation(size, key)
    assert invert(permutation, permutation(positions)) == positions.tolist()
    assert permutation(invert(permutation, positions)).tolist() == positions.tolist()


@given(st.integers(1, 70_000), keys, st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_position_asked_alone_has_the_answer_it_has_in_a_crowd(size, key, number):
    permutation = Permutation(size, key)
    position = number % size
    assert permutation([position])[0] == permutation(np.arange(size))[position]


def test_golden_values_belong_to_version_1():
    assert Permutation(10, 7)(range(10)).tolist() == [5, 4, 8, 0, 9, 2, 6, 3, 7, 1]
    assert Permutation(1000, 3)(range(8)).tolist() == [313, 358, 165, 379, 984, 168, 481, 806]
    assert Permutation(1_000_000, 3)(range(4)).tolist() == [408709, 728470, 768326, 548117]
    assert Permutation(10**9, 2**64 - 1)([0, 1, 999_999_999]).tolist() == [411938280, 977183638, 12640314]
    assert Permutation(2**62, 1)([0, 2**62 - 1]).tolist() == [132107961823914852, 2212766931142021998]


def test_the_answer_has_the_shape_of_the_question():
    permutation = Permutation(100, 7)
    square = np.arange(100).reshape(10, 10)
    assert (permutation(square).reshape(-1) == permutation(np.arange(100))).all()
    assert (permutation(square.T) == permutation(square).T).all()
    assert permutation(5).shape == ()
    assert permutation(np.zeros((0, 3), np.int64)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
def test_any_integer_type_will_do(dtype):
    assert (Permutation(100, 7)(np.arange(100, dtype=dtype)) == Permutation(100, 7)(range(100))).all()


def test_a_read_only_question_is_neither_refused_nor_changed():
    positions = np.arange(100)
    positions.flags.writeable = False
    assert (Permutation(100, 7)(positions) == Permutation(100, 7)(range(100))).all()
    assert positions.tolist() == list(range(100))


@pytest.mark.parametrize("position", [-1, 10, 2**62, -(2**63)])
def test_a_position_outside_is_named_with_the_size(position):
    with pytest.raises(IndexError, match=f"position {position} is out of range: there are 10,"):
        Permutation(10, 7)([0, position, -5])


def test_nothing_can_be_asked_of_an_empty_permutation():
    assert Permutation(0, 7)(np.arange(0)).tolist() == []
    with pytest.raises(IndexError, match="position 0 is out of range: there are 0"):
        Permutation(0, 7)([0])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="size must be at least 0, got -1"):
        Permutation(-1, 0)
    with pytest.raises(ValueError, match="size must be at most 4,611,686,018,427,387,904"):
        Permutation(2**62 + 1, 0)
    with pytest.raises(ValueError, match="key must be at most 18,446,744,073,709,551,615"):
        Permutation(1, 2**64)
    with pytest.raises(TypeError, match=r"size must be an integer, got 1\.5"):
        Permutation(1.5, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="every position must be an integer, got an array of float64"):
        Permutation(1, 0)([0.0])


def test_permutations_are_values():
    assert Permutation(10, 7) == Permutation(np.int64(10), np.uint64(7))
    assert hash(Permutation(10, 7)) == hash(Permutation(10, 7))
    assert pickle.loads(pickle.dumps(Permutation(10, 7))) == Permutation(10, 7)

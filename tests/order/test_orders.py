"""Every order is a bijection of an epoch; a windowed one reads a group of windows at a time."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order import FullOrder, Order, Permutation, SequentialOrder, WindowedOrder, derive_key

from .inverse import positions_of

seeds = st.integers(-(2**80), 2**80)
epochs = st.integers(0, 2**40)
windows = st.lists(st.one_of(st.just(0), st.integers(0, 40)), max_size=40)


def one_of_each(num_rows: int, seed: int, epoch: int) -> list[Order]:
    halves = [num_rows // 2, 0, num_rows - num_rows // 2]
    return [
        SequentialOrder(num_rows),
        FullOrder(num_rows, seed, epoch),
        WindowedOrder(halves, seed, epoch, group=2),
    ]


def window_of_row(order: WindowedOrder) -> np.ndarray:
    return np.repeat(np.arange(order.rows_per_window.size), order.rows_per_window)


# All orders


@given(st.integers(0, 3000), seeds, epochs)
@settings(deadline=None)
def test_an_epoch_has_every_row_exactly_once(num_rows, seed, epoch):
    for order in one_of_each(num_rows, seed, epoch):
        assert order.num_rows == num_rows
        rows = order.rows(np.arange(num_rows))
        assert np.bincount(rows, minlength=num_rows).tolist() == [1] * num_rows


@given(st.integers(1, 2**61), seeds, epochs, st.lists(st.integers(0, 2**61), min_size=1, max_size=20))
@settings(deadline=None)
def test_positions_of_rows_of_positions_are_the_positions(num_rows, seed, epoch, numbers):
    positions = np.array(numbers) % num_rows
    for order in one_of_each(num_rows, seed, epoch):
        assert positions_of(order, order.rows(positions)) == positions.tolist()
        assert order.rows(positions_of(order, positions)).tolist() == positions.tolist()


def test_a_position_outside_the_epoch_is_named():
    for order in one_of_each(10, seed=7, epoch=0):
        for outside in (-1, 10):
            with pytest.raises(IndexError, match=f"position {outside} is out of range: there are 10"):
                order.rows([3, outside])


def test_epochs_and_seeds_differ():
    for kind in (1, 2):
        some = [one_of_each(1000, seed, epoch)[kind].rows(np.arange(1000)) for seed in (7, 8) for epoch in (0, 1)]
        shared = [int((a == b).sum()) for i, a in enumerate(some) for b in some[:i]]
        assert max(shared) < 10  # 1 is expected; 10 or more has a chance of 1e-7


def test_orders_survive_pickling():
    for order in one_of_each(1000, seed=7, epoch=3):
        again = pickle.loads(pickle.dumps(order))
        assert (again.rows(np.arange(1000)) == order.rows(np.arange(1000))).all()


def test_a_sequential_order_gives_an_array_of_its_own():
    positions = np.arange(3)
    rows = SequentialOrder(3).rows(positions)
    rows[0] = 2
    assert positions.tolist() == [0, 1, 2]


def test_golden_values_belong_to_version_1():
    counts = [3, 0, 2, 4, 1, 5]
    first = WindowedOrder(counts, seed=7, epoch=0, group=2)
    assert [first.windows_of_group(g).tolist() for g in range(3)] == [[2, 5], [3, 4], [0, 1]]
    assert first.rows(range(15)).tolist() == [12, 14, 11, 4, 10, 3, 13, 8, 7, 9, 6, 5, 2, 0, 1]
    second = WindowedOrder(counts, seed=7, epoch=1, group=2)
    assert second.rows(range(15)).tolist() == [9, 12, 11, 1, 2, 13, 10, 14, 0, 7, 6, 8, 3, 5, 4]
    large = WindowedOrder(np.full(1000, 10**6), seed=7, epoch=0, group=16)
    assert large.rows([0, 1, 2, 10**9 - 1]).tolist() == [973845697, 559312725, 246434356, 700675734]
    assert FullOrder(10**9, seed=7, epoch=0).rows(range(3)).tolist() == [895861355, 819652814, 178245310]
    assert FullOrder(10**9, seed=7, epoch=1).rows(range(3)).tolist() == [240170042, 399909374, 133248115]


# Windowed orders


@given(windows, seeds, epochs, st.integers(1, 50))
@settings(deadline=None)
def test_a_windowed_epoch_has_every_row_once_and_can_be_inverted(counts, seed, epoch, group):
    order = WindowedOrder(counts, seed, epoch, group)
    rows = order.rows(np.arange(sum(counts)))
    assert np.bincount(rows, minlength=sum(counts)).tolist() == [1] * sum(counts)
    assert positions_of(order, rows) == list(range(sum(counts)))


@given(windows, seeds, epochs, st.integers(1, 50))
@settings(deadline=None)
def test_a_group_reads_all_of_its_windows_and_no_other(counts, seed, epoch, group):
    order = WindowedOrder(counts, seed, epoch, group)
    window_of = window_of_row(order)
    for g in range(order.num_groups):
        read = np.bincount(window_of[order.rows(order.positions_of_group(g))], minlength=len(counts))
        expected = np.zeros(len(counts), np.int64)
        expected[order.windows_of_group(g)] = order.rows_per_window[order.windows_of_group(g)]
        assert read.tolist() == expected.tolist()


@given(windows, seeds, epochs, st.integers(1, 50))
@settings(deadline=None)
def test_groups_follow_each_other_and_share_no_window(counts, seed, epoch, group):
    order = WindowedOrder(counts, seed, epoch, group)
    groups = range(order.num_groups)
    assert [p for g in groups for p in order.positions_of_group(g)] == list(range(order.num_rows))
    assert sorted(w for g in groups for w in order.windows_of_group(g).tolist()) == list(range(len(counts)))
    assert [order.group_of(p) for g in groups for p in order.positions_of_group(g)] == [
        g for g in groups for _ in order.positions_of_group(g)
    ]
    assert all(order.windows_of_group(g).size == group for g in list(groups)[:-1])


@given(windows, seeds, epochs, st.integers(1, 9), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_positions_may_be_asked_in_any_sequence(counts, seed, epoch, group, random):
    """The kernel remembers the last group; no sequence of questions may let that show."""
    order = WindowedOrder(counts, seed, epoch, group)
    positions = random.choices(range(order.num_rows), k=50) if order.num_rows else []
    alone = [int(order.rows([position])[0]) for position in positions]
    assert order.rows(positions).tolist() == alone
    assert positions_of(order, alone) == positions


def test_windows_come_in_the_order_of_their_keyed_permutation():
    order = WindowedOrder([5] * 100, seed=7, epoch=3, group=10)
    sequence = np.concatenate([order.windows_of_group(g) for g in range(10)])
    assert (sequence == Permutation(100, derive_key(7, "windows", 3))(np.arange(100))).all()


def test_windows_without_rows_cost_nothing_and_break_nothing():
    order = WindowedOrder([0, 0, 5, 0, 0, 0, 3, 0], seed=7, epoch=0, group=1)
    assert sorted(order.rows(range(8)).tolist()) == list(range(8))
    sizes = [len(order.positions_of_group(g)) for g in range(8)]
    assert sorted(sizes) == [0, 0, 0, 0, 0, 0, 3, 5]


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_an_epoch_without_rows_is_empty(counts):
    order = WindowedOrder(counts, seed=7, epoch=0, group=2)
    assert order.num_rows == 0
    assert order.rows([]).tolist() == []
    with pytest.raises(IndexError, match="position 0 is out of range: there are 0"):
        order.rows([0])


@pytest.mark.parametrize("group", [1, 16, 2**62])
def test_one_window_is_shuffled_in_itself(group):
    order = WindowedOrder([1000], seed=7, epoch=0, group=group)
    rows = order.rows(np.arange(1000))
    assert order.num_groups == 1
    assert sorted(rows.tolist()) == list(range(1000)) != rows.tolist()


def test_a_group_larger_than_all_windows_mixes_everything():
    order = WindowedOrder([100] * 10, seed=7, epoch=0, group=1000)
    assert (order.num_groups, order.positions_of_group(0)) == (1, range(1000))
    read = window_of_row(order)[order.rows(np.arange(100))]
    assert np.unique(read).size == 10


def test_the_callers_array_is_not_kept():
    counts = np.array([3, 2])
    order = WindowedOrder(counts, seed=7, epoch=0, group=1)
    counts[:] = 9
    assert order.rows_per_window.tolist() == [3, 2]
    with pytest.raises(ValueError, match="read-only"):
        order.rows_per_window[0] = 9


def test_a_group_or_position_that_does_not_exist_is_named():
    order = WindowedOrder([3, 2], seed=7, epoch=0, group=1)
    for outside in (-1, 2):
        with pytest.raises(IndexError, match=f"group {outside} is out of range: there are 2"):
            order.windows_of_group(outside)
        with pytest.raises(IndexError, match=f"group {outside} is out of range: there are 2"):
            order.positions_of_group(outside)
    with pytest.raises(IndexError, match="position 5 is out of range: there are 5"):
        order.group_of(5)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"rows_per_window\[1\] is -2: a window cannot hold"):
        WindowedOrder([1, -2], seed=0, epoch=0, group=1)
    with pytest.raises(ValueError, match=r"one dimension, got shape \(1, 2\)"):
        WindowedOrder([[1, 2]], seed=0, epoch=0, group=1)
    with pytest.raises(TypeError, match="every entry of rows_per_window must be an integer, got an array of float64"):
        WindowedOrder([1.5], seed=0, epoch=0, group=1)
    with pytest.raises(ValueError, match="add up to more than the 4,611,686,018,427,387,904 rows"):
        WindowedOrder([2**62, 2**62, 2**62], seed=0, epoch=0, group=1)
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        WindowedOrder([1], seed=0, epoch=0, group=0)
    for make in (lambda: FullOrder(1, 0, -1), lambda: WindowedOrder([1], seed=0, epoch=-1, group=1)):
        with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
            make()
    for make in (lambda: FullOrder(-1, 0, 0), lambda: SequentialOrder(-1)):
        with pytest.raises(ValueError, match="num_rows must be at least 0, got -1"):
            make()

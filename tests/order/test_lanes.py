"""Lanes: a bijection for any windows and any world, in which a rank meets only its own part of the data."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order import LaneOrder

windows = st.lists(st.integers(0, 12), min_size=1, max_size=20)
seeds, epochs = st.integers(0, 2**70), st.integers(0, 2**40)


def every_row(order: LaneOrder) -> np.ndarray:
    return order.rows(np.arange(order.num_rows))


@given(windows, seeds, epochs, st.integers(1, 9), st.integers(1, 70))
@settings(deadline=None)
def test_an_epoch_has_every_row_exactly_once(counts, seed, epoch, group, lanes):
    order = LaneOrder(counts, seed, epoch, group, lanes)
    assert order.num_rows == sum(counts)
    assert sorted(every_row(order).tolist()) == list(range(sum(counts)))


@given(windows, seeds, epochs, st.integers(1, 5), st.integers(1, 30), st.data())
@settings(deadline=None)
def test_positions_may_be_asked_in_any_sequence(counts, seed, epoch, group, lanes, data):
    order = LaneOrder(counts, seed, epoch, group, lanes)
    if order.num_rows:
        positions = data.draw(st.lists(st.integers(0, order.num_rows - 1), max_size=40))
        assert order.rows(positions).tolist() == [int(order.rows([each])[0]) for each in positions]


@given(windows, seeds, epochs, st.integers(1, 5), st.integers(1, 12), st.integers(1, 16), st.data())
@settings(deadline=None)
def test_what_is_said_to_be_used_is_all_that_ranks_read_and_when(counts, seed, epoch, group, lanes, world, data):
    order = LaneOrder(counts, seed, epoch, group, lanes)
    if not order.num_rows:
        return
    begin = data.draw(st.integers(0, order.num_rows - 1))
    end = data.draw(st.integers(begin + 1, order.num_rows))
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=3))
    first, last, used = order.uses(begin, end, world, ranks)
    window_of = np.repeat(np.arange(len(counts)), counts)
    for position, row in enumerate(every_row(order)):
        if begin <= position < end and position % world in ranks:
            assert ((first <= position) & (position <= last) & (used == window_of[row])).any()


@given(seeds, st.integers(0, 50), st.sampled_from([1, 2, 3, 6, 12, 24, 5, 7, 10, 18]), st.integers(1, 3))
@settings(deadline=None)
def test_a_rank_meets_its_share_of_the_windows_and_the_same_ones_in_every_epoch(seed, epoch, world, group):
    """24 lanes of 4 windows, none of which is cut: 1 / gcd(world, 24) of them, whatever the world."""
    counts, lanes = [200] * 96, 24
    for rank in range(world):
        met = []
        for each in (0, epoch):
            order = LaneOrder(counts, seed, each, group, lanes)
            offset = each * order.num_rows
            rows = np.arange(-(offset - rank) % world, order.num_rows, world)  # of the run: rank, rank + world, ...
            met.append(np.unique(order.rows(rows) // 200))
            said = order.uses(0, order.num_rows, world, [(rank - offset) % world])[2]
            assert np.array_equal(np.unique(said), met[-1])
        assert len(met[0]) == 96 // math.gcd(world, lanes)
        assert np.array_equal(met[0], met[1])


@given(windows, seeds, epochs, st.integers(1, 5), st.integers(1, 12))
@settings(deadline=None)
def test_after_its_last_position_a_window_is_not_read_again(counts, seed, epoch, group, lanes):
    order = LaneOrder(counts, seed, epoch, group, lanes)
    window_of, last = np.repeat(np.arange(len(counts)), counts), order.last_positions()
    for position, row in enumerate(every_row(order)):
        assert position <= last[window_of[row]]


def test_golden_values_belong_to_version_1():
    order = LaneOrder([3, 0, 2, 4, 1, 5], seed=7, epoch=0, group=2, lanes=4)
    assert every_row(order).tolist() == GOLDEN[0]
    assert every_row(LaneOrder([3, 0, 2, 4, 1, 5], seed=7, epoch=1, group=2, lanes=4)).tolist() == GOLDEN[1]
    large = LaneOrder(np.full(1000, 10**6), seed=7, epoch=3, group=2, lanes=96)
    assert large.rows([0, 1, 2, 10**9 - 1]).tolist() == GOLDEN[2]


GOLDEN = [
    [5, 10, 14, 1, 7, 8, 12, 2, 6, 11, 13, 0, 4, 9, 3],
    [1, 6, 11, 12, 0, 7, 10, 14, 2, 5, 8, 13, 9, 3, 4],
    [275193343, 33159485, 528484260, 744999964],
]


def test_lanes_differ_between_epochs_and_seeds():
    some = [every_row(LaneOrder([50] * 20, seed, epoch, 2, 4)) for seed in (7, 8) for epoch in (0, 1)]
    assert max(int((a == b).sum()) for i, a in enumerate(some) for b in some[:i]) < 30  # 4 to 8 are expected


def test_lanes_survive_pickling():
    order = LaneOrder([5, 0, 9, 3], seed=7, epoch=3, group=2, lanes=3)
    assert every_row(pickle.loads(pickle.dumps(order))).tolist() == every_row(order).tolist()


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match="lanes must be at least 1, got 0"):
        LaneOrder([3], seed=1, epoch=0, group=1, lanes=0)
    with pytest.raises(IndexError, match="position 3 is out of range: there are 3"):
        LaneOrder([3], seed=1, epoch=0, group=1, lanes=2).rows([3])

"""Draws by weight and deals of classes: exact quotas, by arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order import ClassDeal, WeightedDraw
from penstock.order._draw import exact_sum

few = settings(max_examples=50, deadline=None)
weight_lists = st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(lambda weights: max(weights) > 1e-3)


@few
@given(weight_lists, st.integers(1, 200), st.integers(0, 50), st.integers())
def test_a_sample_comes_as_often_as_its_share_rounded_up_or_down(
    weights: list[float], num_rows: int, epoch: int, seed: int
) -> None:
    draw = WeightedDraw(np.array(weights), num_rows, seed)
    counts = np.bincount(draw.samples(epoch, np.arange(num_rows)), minlength=len(weights))
    expected = num_rows * np.array(weights) / sum(weights)
    assert counts.sum() == num_rows
    assert (np.abs(counts - expected) < 1 + 1e-6).all()


@few
@given(weight_lists, st.data(), st.integers(0, 50))
def test_without_replacement_no_sample_comes_twice(weights: list[float], data: st.DataObject, epoch: int) -> None:
    num_rows = data.draw(st.integers(1, int(np.count_nonzero(weights))))
    draw = WeightedDraw(np.array(weights), num_rows, 7, replacement=False)
    found = draw.samples(epoch, np.arange(num_rows))
    assert len(set(found.tolist())) == num_rows
    assert all(weights[sample] > 0 for sample in found.tolist())


def test_weights_of_any_size_are_drawn() -> None:
    for weights in ([1.0, 5e-324], [1e308, 1e308, 1e-300], [1.0, 1e-30, 1e-200], [3.0] * 7 + [1e-9]):
        draw = WeightedDraw(np.array(weights), len(weights), 7, replacement=False)
        assert sorted(draw.samples(0, np.arange(len(weights))).tolist()) == list(range(len(weights)))
        counts = np.bincount(WeightedDraw(np.array(weights), 50, 7).samples(0, np.arange(50)))
        assert counts.sum() == 50


def test_over_epochs_the_mean_is_the_share() -> None:
    weights = np.random.default_rng(1).random(50)
    draw = WeightedDraw(weights, 20, 7)
    counts = sum(np.bincount(draw.samples(epoch, np.arange(20)), minlength=50) for epoch in range(500))
    np.testing.assert_allclose(counts / 500, 20 * weights / weights.sum(), atol=0.01)


def test_a_draw_is_the_one_it_always_was() -> None:
    draw = WeightedDraw(np.array([1.0, 2.0, 0.0, 5.5]), 12, 7)
    assert draw.samples(3, np.arange(12)).tolist() == [0, 0, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1.0, -1.0], {}, "the weight of sample 1 is -1.0"),
        ([1.0, np.nan], {}, "the weight of sample 1 is nan"),
        ([0.0, 0.0], {}, "all weights are 0"),
        ([[1.0]], {}, "one number per sample"),
        (["a"], {}, "one number per sample"),
        ([1.0, 0.0], {"num_rows": 2, "replacement": False}, "1 samples have a weight above 0"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightedDraw(**{"weights": np.array(weights), "num_rows": 1, "seed": 7, **options})


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.one_of(st.none(), st.integers()), st.integers(0, 99))
def test_every_round_holds_each_class_once_and_every_pass_each_member(
    sizes: list[int], seed: int | None, start: int
) -> None:
    deal = ClassDeal(np.array(sizes), seed)
    ends = np.cumsum(sizes)
    members = deal.members(np.arange(200 * len(sizes)))
    classes = np.searchsorted(ends, members, side="right")
    rounds = classes.reshape(200, len(sizes))
    assert (np.sort(rounds, axis=1) == np.arange(len(sizes))).all()
    for number, size in enumerate(sizes):
        own = members[classes == number]
        passes = own[: 200 // size * size].reshape(-1, size)
        assert (np.sort(passes, axis=1) == np.arange(ends[number] - size, ends[number])).all()
    assert deal.members([start]).tolist() == [members[start]]


@few
@given(st.lists(st.integers(2, 9), min_size=1, max_size=8), st.data())
def test_no_member_comes_twice_in_the_rounds_that_ask_for_it(sizes: list[int], data: st.DataObject) -> None:
    rounds, seed = data.draw(st.integers(1, min(sizes))), data.draw(st.sampled_from([None, 7]))
    members = ClassDeal(np.array(sizes), seed, rounds).members(np.arange(rounds * len(sizes) * 60))
    for epoch in members.reshape(60, -1):
        assert len(set(epoch.tolist())) == len(epoch)
    assert len(set(members.tolist())) == sum(sizes)  # over the epochs all of them come


def test_a_deal_is_the_one_it_always_was() -> None:
    assert ClassDeal(np.array([2, 3, 1]), 7).members(range(12)).tolist() == [3, 5, 0, 5, 1, 4, 5, 0, 2, 5, 1, 3]


def test_classes_that_mean_nothing_are_refused() -> None:
    for sizes in ([], [1, 0]):
        with pytest.raises(ValueError, match="at least one member"):
            ClassDeal(np.array(sizes, np.int64), 7)
    with pytest.raises(ValueError, match="the smallest class has 2"):
        ClassDeal(np.array([2, 5]), 7, 3)


@given(st.lists(st.floats(0, 1, allow_subnormal=True), max_size=300), st.integers(0, 3))
def test_the_fast_sum_is_the_exact_one(numbers: list[float], copies: int) -> None:
    values = np.tile(np.array(numbers, np.float64), 400 * copies or 1)
    assert exact_sum(values) == math.fsum(values)


@pytest.mark.parametrize("exponent", [0, 1, 10, 60, 300, 1000])
def test_the_fast_sum_is_exact_for_numbers_of_very_different_size(exponent: int) -> None:
    rng = np.random.default_rng(exponent)
    values = rng.random(200_000) * 2.0 ** -rng.integers(0, exponent + 1, 200_000)
    assert exact_sum(values) == math.fsum(values)

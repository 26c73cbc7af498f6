"""Batches as arithmetic: rows, epochs, tails and ranks, with no data at all."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan._steps import Steps

TAILS = ["carry", "short", "pad", "drop"]
steps = st.builds(Steps, st.integers(1, 40), st.integers(1, 24), st.sampled_from(TAILS))


@given(steps, st.integers(1, 4))
def test_the_batches_of_some_epochs_hold_every_row_once_but_for_what_the_tail_says(steps: Steps, epochs: int) -> None:
    counts: Counter[int] = Counter()
    repeated = 0
    for epoch in range(epochs):
        for step in range(steps.num_batches(epoch)):
            rows, marks = steps.rows_at(steps.row_of(step, epoch))
            is_repeated = np.zeros(len(rows), bool) if marks is None else marks
            assert (marks is None) == (steps.tail != "pad")
            counts.update(rows[~is_repeated].tolist())
            repeated += int(is_repeated.sum())
            if steps.tail != "short":
                assert len(rows) == steps.global_size
    assert set(counts.values()) <= {1}
    total = epochs * steps.num_rows
    if steps.tail == "carry":  # the last batch may reach into the next epoch
        assert sorted(counts) == list(range(-(-total // steps.global_size) * steps.global_size))
    elif steps.tail == "drop":
        assert total - len(counts) == epochs * steps.num_dropped()
        assert steps.num_dropped() < steps.global_size
    else:
        assert sorted(counts) == list(range(total))
    assert repeated == (epochs * (-steps.num_rows % steps.global_size) if steps.tail == "pad" else 0)


@given(steps, st.integers(0, 3), st.data())
def test_ranks_take_every_wth_row(steps: Steps, epoch: int, data: st.DataObject) -> None:
    world_size = data.draw(st.sampled_from([w for w in range(1, 17) if steps.global_size % w == 0]))
    row = epoch * steps.num_rows
    rows, marks = steps.rows_at(row)
    for rank in range(world_size):
        own = [row for place, row in enumerate(rows.tolist()) if place % world_size == rank]
        found, own_marks = steps.rows_at(row, rank, world_size)
        assert found.tolist() == own
        assert (own_marks is None) == (marks is None)
        assert own_marks is None or own_marks.tolist() == marks[rank::world_size].tolist()


@given(steps, st.integers(0, 5))
def test_only_carry_lets_a_batch_span_two_epochs(steps: Steps, epoch: int) -> None:
    for step in range(steps.num_batches(epoch)):
        row = steps.row_of(step, epoch)
        assert row // steps.num_rows == epoch
        if steps.tail != "carry":
            assert (steps.rows_at(row)[0] // steps.num_rows == epoch).all()


def test_padding_repeats_the_epoch_from_its_start_as_often_as_it_takes() -> None:
    rows, is_repeated = Steps(3, 8, "pad").rows_at(6)
    assert rows.tolist() == [6, 7, 8, 6, 7, 8, 6, 7]
    assert is_repeated is not None
    assert is_repeated.tolist() == [False] * 3 + [True] * 5


def test_with_carry_an_epoch_smaller_than_a_batch_can_have_no_batch_of_its_own() -> None:
    steps = Steps(3, 10, "carry")
    assert [steps.num_batches(epoch) for epoch in range(5)] == [1, 0, 0, 1, 0]
    with pytest.raises(IndexError, match=r"Epoch 1 has no steps \(3 rows, batches of 10, tail='carry'\); step 0"):
        steps.row_of(0, 1)


@pytest.mark.parametrize("step", [-1, 3, 10**9])
def test_a_step_out_of_range_is_refused_with_the_range(step: int) -> None:
    with pytest.raises(IndexError, match=rf"Epoch 2 has steps 0 to 2 .*; step {step} is asked for"):
        Steps(10, 4, "short").row_of(step, 2)


def test_negative_epochs_and_rows_are_refused() -> None:
    with pytest.raises(IndexError, match="epochs count from 0"):
        Steps(10, 4, "carry").row_of(0, -1)
    with pytest.raises(IndexError, match="Row -1"):
        Steps(10, 4, "carry").rows_at(-1)


def test_a_batch_that_ranks_cannot_share_is_refused_with_one_that_they_can() -> None:
    with pytest.raises(ValueError, match=r"10 rows cannot be shared evenly by 4 ranks; batch\(12\) could"):
        Steps(10, 10, "carry").rows_at(0, 0, 4)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="ranks go from 0 to world_size - 1"):
        Steps(10, 10, "carry").rows_at(0, rank, world_size)


def batches_from(steps: Steps, row: int, end: int) -> list[int]:
    """First rows of the batches met from `row` on, one after the other; what fills no batch under "drop" is none."""
    met, at = [], steps.skip_tail(row)
    while at < end:
        if steps.tail != "drop" or at % steps.num_rows + steps.global_size <= steps.num_rows:
            met.append(at)
        at = steps.skip_tail(steps.next_row(at))
    return met


@given(steps, st.integers(0, 100), st.integers(0, 120))
def test_batches_between_two_rows_are_those_met_by_going_from_batch_to_batch(steps: Steps, row: int, more: int) -> None:
    assert steps.num_batches_between(row, row + more) == len(batches_from(steps, row, row + more))


@given(steps, st.integers(0, 3))
def test_going_from_batch_to_batch_meets_the_steps_of_every_epoch(steps: Steps, epochs: int) -> None:
    rows = [steps.row_of(step, epoch) for epoch in range(epochs) for step in range(steps.num_batches(epoch))]
    assert batches_from(steps, 0, epochs * steps.num_rows) == rows


@given(st.integers(1, 30), st.integers(1, 8))
def test_parts_of_a_share_are_consecutive_rows_that_together_are_the_share(size: int, num_parts: int) -> None:
    parts = [Steps(100, size, "carry").rows_at(0, 0, 1, part, num_parts)[0] for part in range(num_parts)]
    assert np.concatenate(parts).tolist() == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(steps, st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
def test_parts_are_as_many_on_every_rank_none_too_large_and_counted_before_they_come(
    steps: Steps, world_size: int, size: int, num_parts: int, row: int
) -> None:
    steps = dataclasses.replace(steps, global_size=world_size * size * num_parts)
    end = (row // steps.num_rows + 2) * steps.num_rows
    starts = batches_from(steps, row, end)
    assert steps.num_parts_between(row, end, num_parts) == sum(steps.num_parts(at, num_parts) for at in starts)
    for at in starts:
        shares = [steps.rows_at(at, rank, world_size)[0] for rank in range(world_size)]
        parts = steps.num_parts(at, num_parts)
        sizes = [
            [len(steps.rows_at(at, rank, world_size, part, parts)[0]) for part in range(parts)]
            for rank in range(world_size)
        ]
        assert max(map(max, sizes)) <= size
        assert min(sizes[0]) > 0
        assert parts == num_parts or parts == -(-len(shares[0]) // size)

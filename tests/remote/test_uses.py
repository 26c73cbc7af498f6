"""What is fetched and evicted follows from when each shard is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.remote import NEVER, Uses, choose_evictions


def uses(*entries: tuple[int, int, int], end: int = 1000) -> Uses:
    """(first row, last row, shard) of each use of folder 0."""
    first, last, shard = np.array(sorted(entries), np.int64).reshape(-1, 3).T
    return Uses(first_row=first, last_row=last, folder=np.zeros_like(shard), shard=shard, end=end)


def test_a_shard_in_use_is_needed_now_and_one_between_two_uses_at_the_second() -> None:
    plan = uses((0, 9, 0), (10, 19, 1), (50, 59, 0))
    assert plan.next_rows(5, 3).tolist() == [5, 10, NEVER]
    assert plan.next_rows(15, 3).tolist() == [50, 15, NEVER]
    assert plan.next_rows(60, 3).tolist() == [NEVER, NEVER, NEVER]


def test_uses_of_one_folder_leave_those_of_others_out() -> None:
    both = Uses(
        first_row=np.array([0, 1]), last_row=np.array([5, 6]), folder=np.array([0, 1]), shard=np.array([3, 4]), end=9
    )
    assert both.of_folder(1).next_rows(0, 5).tolist() == [NEVER, NEVER, NEVER, NEVER, 1]


@pytest.mark.parametrize(
    ("num_bytes", "needed_at", "expected"),
    [(0, 5, []), (10, 5, [2]), (11, 5, [2, 0]), (31, 5, None), (10, 100, [2]), (11, 100, None)],
)
def test_what_is_needed_last_is_evicted_first_and_nothing_that_is_needed_sooner(
    num_bytes: int, needed_at: int, expected: list[int] | None
) -> None:
    """Three cached shards of ten bytes: needed at row 80, at row 3 and never again."""
    found = choose_evictions(np.array([80, 3, NEVER]), np.array([10, 10, 10]), num_bytes, needed_at)
    assert (None if found is None else found.tolist()) == expected


def fetched_by_next_use(trace: list[int], room: int) -> int:
    """How many fetches a cache of `room` shards of one size needs for this sequence of shards."""
    plan = uses(*((row, row, shard) for row, shard in enumerate(trace)), end=len(trace))
    cached: list[int] = []
    fetched = 0
    for row, shard in enumerate(trace):
        if shard in cached:
            continue
        fetched += 1
        next_rows = plan.next_rows(row, 8)
        gone = choose_evictions(next_rows[cached], np.ones(len(cached)), len(cached) + 1 - room, row)
        assert gone is not None
        cached = [each for place, each in enumerate(cached) if place not in gone.tolist()] + [shard]
    return fetched


def fewest_fetches(trace: list[int], room: int) -> int:
    """The same by trying every choice."""
    states = {frozenset[int](): 0}
    for shard in trace:
        after: dict[frozenset[int], int] = {}
        for cached, cost in states.items():
            choices = [cached] if shard in cached else [cached | {shard}]
            if len(choices[0]) > room:
                choices = [(cached - {gone}) | {shard} for gone in cached]
            for each in choices:
                after[each] = min(after.get(each, 1 << 30), cost + (shard not in cached))
        states = after
    return min(states.values())


@given(st.lists(st.integers(0, 4), max_size=14), st.integers(1, 4))
def test_no_other_choice_of_evictions_fetches_less(trace: list[int], room: int) -> None:
    assert fetched_by_next_use(trace, room) == fewest_fetches(trace, room)

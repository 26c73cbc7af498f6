"""A simulated cache makes the fetcher's choices, and its arithmetic of waiting is that of a link and a clock."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.remote import Uses, choose_evictions, most_in_use, simulate_cache


def uses(*entries: tuple[int, int, int]) -> Uses:
    """(first row, last row, shard) of each use."""
    first, last, shard = np.array(sorted(entries), np.int64).reshape(-1, 3).T.copy()
    return Uses(first_row=first, last_row=last, folder=np.zeros_like(shard), shard=shard, end=1 << 40)


@st.composite
def runs(draw: st.DrawFn) -> Uses:
    """Shards that are read for some rows, left, and read again."""
    entries = []
    for shard in range(draw(st.integers(1, 7))):
        row = draw(st.integers(0, 10))
        for _ in range(draw(st.integers(1, 5))):
            length = draw(st.integers(0, 6))
            entries.append((row, row + length, shard))
            row += length + draw(st.integers(2, 12))
    return uses(*entries)


def fetched_by(plan: Uses, room: int, *, by_recency: bool = False) -> list[int]:
    """The rows at which a cache of `room` shards of one byte fetches, by the functions that the fetcher calls."""
    cached: dict[int, tuple[int, int]] = {}  # shard -> (last row of its use, the use)
    fetched = []
    of_uses = zip(plan.first_row.tolist(), plan.last_row.tolist(), plan.shard.tolist(), strict=True)
    for use, (first, last, shard) in enumerate(of_uses):
        if shard not in cached:
            fetched.append(first)
            missing = len(cached) + 1 - room
            if by_recency and missing > 0:
                gone = sorted((each for each in cached if cached[each][0] < first), key=lambda each: cached[each])
                gone = gone[:missing]
            else:
                names = list(cached)
                chosen = choose_evictions(plan.next_rows(first, 7)[names], np.ones(len(names)), missing, first)
                assert chosen is not None
                gone = [names[place] for place in chosen]
            for each in gone:
                del cached[each]
        cached[shard] = (last, use)
    return fetched


@given(runs(), st.integers(0, 4))
def test_it_fetches_what_the_fetcher_would(plan: Uses, spare: int) -> None:
    """Ties aside, whose order does not change how much is fetched."""
    sizes = np.ones(7, np.int64)
    room = most_in_use(plan, sizes) + spare
    found = simulate_cache(plan, sizes, room)
    assert len(found.rows) == len(fetched_by(plan, room))
    by_recency = simulate_cache(plan, sizes, room, by_recency=True)
    assert by_recency.rows.tolist() == fetched_by(plan, room, by_recency=True)
    assert len(found.rows) <= len(by_recency.rows)
    assert not found.waits.any()


@given(runs())
def test_a_cache_for_everything_fetches_each_shard_once(plan: Uses) -> None:
    found = simulate_cache(plan, np.full(7, 10), 70)
    assert len(found.rows) == len(set(plan.shard.tolist()))
    assert (found.sizes == 10).all()


@given(runs())
def test_what_is_in_use_is_the_least_that_a_cache_can_be(plan: Uses) -> None:
    sizes = np.arange(1, 8)
    in_use = [
        sizes[plan.shard[(plan.first_row <= row) & (plan.last_row >= row)]].sum() for row in range(plan.last_row.max())
    ]
    assert most_in_use(plan, sizes) >= max(in_use, default=0)
    assert (
        most_in_use(plan, sizes)
        == sizes[plan.shard[(plan.first_row <= (row := _fullest(plan, sizes))) & (plan.last_row >= row)]].sum()
    )


def _fullest(plan: Uses, sizes: np.ndarray) -> int:
    rows = range(int(plan.last_row.max()) + 1)
    return max(rows, key=lambda row: sizes[plan.shard[(plan.first_row <= row) & (plan.last_row >= row)]].sum())


def test_it_waits_where_the_link_is_late_and_for_no_longer() -> None:
    """100 bytes a second, a second a row: the second shard is there in time, the third 2 seconds late."""
    plan = uses((0, 3, 0), (4, 5, 1), (6, 9, 2))
    found = simulate_cache(plan, np.array([100, 300, 500]), 1000, bandwidth=100, seconds_per_row=1)
    assert found.finished.tolist() == [1, 4, 9]
    assert found.waits.tolist() == [1, 0, 2]  # the run is at row 6 after 7 seconds, and waits for the 9th


def test_without_room_a_fetch_starts_when_a_shard_is_left() -> None:
    plan = uses((0, 3, 0), (4, 5, 1))
    found = simulate_cache(plan, np.array([100, 100]), 150, bandwidth=100, seconds_per_row=1)
    assert found.finished.tolist() == [1, 6]  # the first is read from second 1 to second 5
    assert found.waits.tolist() == [1, 1]


def test_nothing_is_fetched_for_nothing() -> None:
    found = simulate_cache(uses(), np.empty(0, np.int64), 1, bandwidth=math.inf)
    assert not len(found.rows)
    assert most_in_use(uses(), np.empty(0, np.int64)) == 0


@pytest.mark.parametrize("room", [1, 5])
def test_a_cache_that_is_too_small_is_exceeded_rather_than_stuck(room: int) -> None:
    plan = uses((0, 9, 0), (0, 9, 1), (10, 19, 2))
    assert len(simulate_cache(plan, np.full(3, 10), room).rows) == 3

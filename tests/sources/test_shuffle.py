from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.sources._stream_shuffle import buffer_contents, draw, draw_last_slots, draw_slots, permutation

from .examples import read_all, recipe_of


def simulate(key: int, size: int, num_out: int, num_records: int) -> tuple[list[int], int]:
    """Slots, and records read, of a buffer that is filled, drawn from and drained one record at a time."""
    slots = list(range(min(size, num_records)))
    num_in = len(slots)
    for output in range(num_out):
        slot = int(draw(key, output, 1)[0]) % len(slots)
        if num_in < num_records:
            slots[slot] = num_in
            num_in += 1
        else:
            slots[slot] = slots[-1]
            slots.pop()
    return slots, num_in


@given(st.integers(0, 2**64 - 1), st.integers(1, 20), st.integers(0, 60), st.data())
def test_the_contents_of_the_buffer_are_those_of_filling_and_drawing_step_by_step(
    key: int, size: int, num_records: int, data: st.DataObject
) -> None:
    num_out = data.draw(st.integers(0, num_records))
    slots, num_in = simulate(key, size, num_out, num_records)
    assert buffer_contents(key, size, num_out, num_in).tolist() == slots


def test_contents_are_found_at_once_after_a_billion_records() -> None:
    contents = buffer_contents(7, 1000, 10**9, 10**9 + 1000).tolist()
    assert len(set(contents)) == 1000
    assert 10**9 - 30_000 < min(contents) <= max(contents) == 10**9 + 999


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 50))
def test_draws_are_the_same_however_they_are_asked_for(key: int, first: int, skipped: int, count: int) -> None:
    assert draw(key, first, skipped + count)[skipped:].tolist() == draw(key, first + skipped, count).tolist()


@given(st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_a_permutation_holds_every_number_once(key: int, size: int) -> None:
    assert sorted(permutation(key, size)) == list(range(size))


def test_draws_and_orders_are_these_for_ever() -> None:
    assert draw(7, 5, 2).tolist() == [12850608683640892364, 5466832663749895058]
    assert draw_slots(7, 0, 6, 1000).tolist() == [692, 655, 120, 522, 30, 364]
    assert draw_last_slots(7, 0, 4) == [0, 2, 0, 0]
    assert permutation(7, 6) == [4, 1, 3, 2, 5, 0]


def test_epochs_seeds_and_parts_have_orders_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{number}\n" for number in range(500)))
    orders = [
        tuple(record["text"] for record in read_all(recipe_of(path, shuffle_buffer=100, seed=seed), epoch=epoch))
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9
    assert all(sorted(order, key=int) == [str(number) for number in range(500)] for order in orders)


def test_a_buffer_moves_records_far_and_chunks_move_farther(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{number}\n" for number in range(20_000)))

    def moved() -> float:
        records = read_all(recipe_of(path, shuffle_buffer=100))
        return float(np.abs(np.array([int(record["text"]) for record in records]) - np.arange(20_000)).mean())

    assert 50 < moved() < 1000
    monkeypatch.setattr("penstock.sources._stream_shares._CHUNK_BYTES", 4000)
    assert moved() > 4000

"""An epoch that other ranks and workers go on with: each record once, whoever reads it."""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StateError
from penstock.sources import PartRun, Recipe, check_state, join_states

from .examples import KINDS, Record, as_counted, folders, recipe_of, write


def go_on(recipe: Recipe, state: Any, stops: list[int | None]) -> tuple[Any, list[Record]]:
    """As many parts as there are stops, each until it has handed out so many records: their state, what they gave."""
    runs = [PartRun(recipe, part=part, num_parts=len(stops), epoch=0, state=state) for part in range(len(stops))]
    given_out = [record for run, stop in zip(runs, stops, strict=True) for record in itertools.islice(run, stop)]
    states = json.loads(json.dumps([run.state() for run in runs]))
    return check_state(states, recipe), given_out


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([0, 1, 2, 5, 40]),
    st.lists(st.integers(16, 200), min_size=2, max_size=2),
)
def test_any_number_of_parts_go_on_any_number_of_times_and_each_record_comes_once(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
    stops: list[list[int]],
    num_last: int,
    buffer: int,
    blocks: list[int],
) -> None:
    _, files, reading = data.draw(folders([kind]))
    paths, expected = write(tmp_path_factory.mktemp("files"), files)
    recipes = [recipe_of(paths, block_bytes=size, reading=reading, shuffle_buffer=buffer) for size in blocks]
    state, found = None, []
    for recipe, each in zip(itertools.cycle(recipes), [*stops, [None] * num_last], strict=False):
        state, records = go_on(recipe, state, each)
        found += records
    assert as_counted(found) == as_counted(expected)
    assert go_on(recipes[0], state, [None] * 3)[1] == []


def test_chunks_that_are_shuffled_go_to_other_parts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sources._stream_shares._CHUNK_BYTES", 2000)
    (tmp_path / "a.txt").write_text("".join(f"{number}\n" for number in range(9000)))
    recipe = recipe_of(tmp_path, shuffle_buffer=50, block_bytes=300)
    state, found = None, []
    for stops in ([100, 2000], [900, 10, 0, 500, 77], [1, 2, 3], [None] * 7):
        state, records = go_on(recipe, state, stops)
        found += records
    assert sorted(int(record["text"]) for record in found) == list(range(9000))


def test_what_is_left_is_shared_equally(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {1_000_000 + number}}}\n' for number in range(100_000)))
    recipe = recipe_of(tmp_path, block_bytes=4096)
    state, _ = go_on(recipe, None, [1000])
    runs = [PartRun(recipe, part=part, num_parts=8, epoch=0, state=state) for part in range(8)]
    sizes = [sum(1 for _ in run) for run in runs]
    assert sum(sizes) == 99_000
    assert max(sizes) - min(sizes) < 500


def test_a_state_of_many_parts_is_small(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.jsonl").write_text("".join(f'{{"n": {row}}}\n' for row in range(2000)))
    for buffer in (0, 100):
        recipe = recipe_of(tmp_path, shuffle_buffer=buffer)
        state, _ = go_on(recipe, None, [100] * 16)
        assert len(json.dumps(state)) < 2048
        state, _ = go_on(recipe, state, [100] * 24)
        assert len(json.dumps(state)) < 8192


def test_a_state_of_512_parts_takes_a_few_kilobytes_and_says_the_same(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.jsonl").write_text("".join(f'{{"n": {10**6 * number + row}}}\n' for row in range(9000)))
    recipe = recipe_of(tmp_path, block_bytes=300)
    runs = [PartRun(recipe, part=part, num_parts=512, epoch=0) for part in range(512)]
    found = [record["n"] for part, run in enumerate(runs) for record in itertools.islice(run, 50 + part % 37)]
    states = [run.state() for run in runs]
    joined = json.loads(json.dumps(join_states(states)))
    assert len(json.dumps(joined)) < 8192
    assert check_state(joined, recipe) == check_state(states, recipe)
    found += [record["n"] for record in go_on(recipe, check_state(joined, recipe), [None] * 3)[1]]
    assert sorted(found) == [10**6 * number + row for number in range(8) for row in range(9000)]


@pytest.mark.parametrize(
    "numbers", [None, 7, "", "not compressed", "c$~d", base64.b85encode(zlib.compress(b"[1]")).decode()]
)
def test_compressed_numbers_that_are_damaged_are_refused(tmp_path: Path, numbers: Any) -> None:
    (tmp_path / "a.txt").write_text("a\n" * 100)
    recipe = recipe_of(tmp_path)
    state = PartRun(recipe, part=0, num_parts=1, epoch=0).state() | {"version": 3, "numbers": numbers}
    with pytest.raises(StateError, match="The state is damaged: its numbers cannot be read"):
        check_state(state, recipe)


def test_states_of_different_times_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n" * 100)
    recipe = recipe_of(tmp_path)
    one = PartRun(recipe, part=0, num_parts=2, epoch=0).state()
    other = PartRun(recipe, part=1, num_parts=2, epoch=1).state()
    with pytest.raises(StateError, match=r"States of different times cannot go on together: their epoch is \[0, 1\]"):
        join_states([one, other])

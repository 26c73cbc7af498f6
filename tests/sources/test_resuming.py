from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DatasetChanged, StateError
from penstock.sources import PartRun, Recipe, check_state, start_state

from .examples import KINDS, every_state, folders, read_all, recipe_of, write


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([0, 1, 2, 5, 40]), st.integers(16, 200), st.integers(16, 200))
def test_going_on_from_the_state_at_any_record_equals_not_stopping(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
    num_parts: int,
    buffer: int,
    block: int,
    later_block: int,
) -> None:
    _, files, reading = data.draw(folders([kind]))
    paths, _ = write(tmp_path_factory.mktemp("files"), files)
    recipe = recipe_of(paths, block_bytes=block, reading=reading, shuffle_buffer=buffer)
    later = recipe_of(paths, block_bytes=later_block, reading=reading, shuffle_buffer=buffer)
    part = data.draw(st.integers(0, num_parts - 1))
    whole = list(PartRun(recipe, part=part, num_parts=num_parts, epoch=1))
    for state, handed_out in every_state(PartRun(recipe, part=part, num_parts=num_parts, epoch=1)):
        state = json.loads(json.dumps(state))
        check_state(state, later)
        rest = PartRun(later, part=part, num_parts=num_parts, epoch=0, state=state)
        assert rest.epoch == 1
        assert handed_out + list(rest) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"types": {"value": "float32", "label": "int64"}, "names": ("value", "label"), "quote": None},
        {"types": "infer", "header": False, "names": ("value", "label")},
        {"header": False, "null_values": ("", "NA"), "missing": "nan", "types": {"f0": "float32"}},
    ],
    ids=str,
)
def test_a_state_fits_however_the_files_are_read(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "numbers.csv").write_text("".join(f"{number},{number % 2}\n" for number in range(20)))
    recipe = recipe_of(tmp_path / "numbers.csv", reading=dict(options))
    run = PartRun(recipe, part=0, num_parts=1, epoch=0)
    first = list(itertools.islice(run, 7))
    state = json.loads(json.dumps(run.state()))
    check_state(state, recipe)
    assert first + list(PartRun(recipe, part=0, num_parts=1, epoch=0, state=state)) == read_all(recipe)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.lists(st.integers(0, 60), min_size=2, max_size=6))
def test_stopping_again_and_again_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, num_records: int, buffer: int, stops: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "numbers.txt"
    path.write_text("".join(f"{number}\n" for number in range(num_records)))
    recipe = recipe_of(path, block_bytes=32, shuffle_buffer=buffer)
    handed_out = []
    state = start_state(recipe, 0)
    for stop in [*stops, num_records]:
        run = PartRun(recipe, part=0, num_parts=1, epoch=0, state=state)
        handed_out += list(itertools.islice(run, stop))
        state = run.state()
    assert handed_out == read_all(recipe)


def test_a_state_says_what_was_handed_out_and_is_small(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(50_000)))
    for buffer in (0, 1000):
        run = PartRun(recipe_of(tmp_path, shuffle_buffer=buffer), part=0, num_parts=1, epoch=3)
        assert len(list(itertools.islice(run, 20_000))) == 20_000
        state = run.state()
        assert (state["epoch"], state["num_parts"], state["at"][0][:3]) == (3, 1, [0, 0, 20_000])
        assert len(json.dumps(state)) < 1024


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    return path


def state_after(num_records: int, recipe: Recipe) -> dict[str, Any]:
    run = PartRun(recipe, part=0, num_parts=1, epoch=0)
    list(itertools.islice(run, num_records))
    return run.state()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shuffle_buffer": 8}, "Different: shuffle_buffer was 0, is 8"),
        ({"seed": 1}, "Different: seed was 0, is 1"),
        ({"reading": {"encoding": "latin-1"}}, r"reading was .*'utf-8'.* is .*'iso8859-1'"),
    ],
)
def test_a_state_of_other_settings_is_refused_with_what_differs(numbers: Path, change: dict, message: str) -> None:
    state = state_after(10, recipe_of(numbers))
    with pytest.raises(StateError, match=message):
        check_state(state, recipe_of(numbers, **change))


def test_a_stream_that_left_records_out_does_not_go_on_as_one_that_stops_at_them(numbers: Path) -> None:
    state = state_after(10, recipe_of(numbers, on_error="skip"))
    with pytest.raises(StateError, match="on_error was skip, is raise"):
        check_state(state, recipe_of(numbers))


def test_a_state_of_other_files_is_refused(numbers: Path) -> None:
    state = state_after(10, recipe_of(numbers))
    with numbers.open("a") as file:
        file.write("one more\n")
    with pytest.raises(StateError, match=r"files was 1 files of 290 bytes .* is 1 files of 299 bytes"):
        check_state(state, recipe_of(numbers))
    numbers.rename(numbers.with_name("others.txt"))
    with pytest.raises(StateError, match="files was"):
        check_state(state, recipe_of(numbers.with_name("others.txt")))


def test_a_state_holds_for_the_same_files_in_another_folder(numbers: Path, tmp_path: Path) -> None:
    state = state_after(10, recipe_of(numbers))
    copy = tmp_path / "elsewhere" / numbers.name
    copy.parent.mkdir()
    shutil.copy2(numbers, copy)
    check_state(state, recipe_of(copy))


def test_files_written_again_are_warned_about_and_refused_where_no_record_begins(numbers: Path) -> None:
    recipe = recipe_of(numbers, block_bytes=20)
    state = state_after(50, recipe)
    numbers.write_text("x" * 290)
    os.utime(numbers, ns=(1, 1))
    with pytest.warns(UserWarning, match="rewritten since the state was saved"):
        check_state(state, recipe_of(numbers))
    with pytest.raises(DatasetChanged, match="no record begins at byte"):
        list(PartRun(recipe_of(numbers), part=0, num_parts=1, epoch=0, state=state))


def test_fewer_records_than_were_read_before_are_refused(numbers: Path) -> None:
    state = state_after(50, recipe_of(numbers, shuffle_buffer=20))
    numbers.write_text("x" * 290)
    with pytest.raises(DatasetChanged, match="The files hold 1 records for this part, but 70 had been read"):
        list(PartRun(recipe_of(numbers, shuffle_buffer=20), part=0, num_parts=1, epoch=0, state=state))


def test_a_state_that_lacks_parts_is_refused(numbers: Path) -> None:
    recipe = recipe_of(numbers)
    state = PartRun(recipe, part=1, num_parts=4, epoch=0).state()
    with pytest.raises(StateError, match=r"holds part 1 of 4 .*, and this is part 2. .* states of all ranks as a list"):
        PartRun(recipe, part=2, num_parts=4, epoch=0, state=state)
    with pytest.raises(StateError, match=r"holds part 1 of 4 .*, and now there are 3"):
        PartRun(recipe, part=1, num_parts=3, epoch=0, state=state)


@pytest.mark.parametrize("state", [None, {}, {"version": 1}, "x", [1]])
def test_what_is_no_state_is_refused(numbers: Path, state: Any) -> None:
    with pytest.raises(StateError, match="Not the state of a stream"):
        check_state(state, recipe_of(numbers))


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"at": [["3"]]},
        {"at": None},
        {"num_parts": 0},
        {"left": []},
        {"left": [1, [[0, 9], [8, 10]], [], []]},
    ],
)
def test_a_damaged_state_is_refused(numbers: Path, change: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="The state is damaged"):
        check_state({**state_after(1, recipe_of(numbers)), **change}, recipe_of(numbers))


def test_a_state_of_another_version_is_refused(numbers: Path) -> None:
    with pytest.raises(StateError, match="version 99; this Penstock reads versions 1 to 3"):
        check_state({**state_after(1, recipe_of(numbers)), "version": 99}, recipe_of(numbers))


def test_going_on_reads_one_block_and_not_the_file_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number:>9}\n" for number in range(10_000)))
    run = PartRun(recipe_of(path, block_bytes=100), part=0, num_parts=1, epoch=0)
    list(itertools.islice(run, 9_995))
    assert run.state()["at"][0][9] == 99_900

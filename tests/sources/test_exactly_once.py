from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SchemaError
from penstock.sources import PartRun

from .examples import KINDS, as_counted, folders, read_all, recipe_of, write


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 4), st.integers(16, 300))
def test_every_record_comes_exactly_once_over_any_workers_and_ranks(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject, workers: int, ranks: int, block: int
) -> None:
    _, files, reading = data.draw(folders([kind]))
    paths, expected = write(tmp_path_factory.mktemp("files"), files)
    recipe = recipe_of(paths, block_bytes=block, reading=reading)
    assert read_all(recipe) == expected
    assert as_counted(read_all(recipe, workers * ranks)) == as_counted(expected)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 12), st.integers(0, 2))
def test_a_shuffle_hands_out_every_record_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject, num_parts: int, buffer: int, epoch: int
) -> None:
    _, files, reading = data.draw(folders([kind]))
    paths, expected = write(tmp_path_factory.mktemp("files"), files)
    recipe = recipe_of(paths, block_bytes=64, reading=reading, shuffle_buffer=buffer, seed=7)
    assert as_counted(read_all(recipe, num_parts, epoch)) == as_counted(expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("ab\n", max_size=6), max_size=8), st.sampled_from(["\n\n", "ab", "aa", "-"]), st.integers(1, 9))
def test_documents_between_separators_are_cut_where_reading_from_the_top_cuts_them(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], separator: str, num_parts: int
) -> None:
    text = separator.join(pieces)
    path = tmp_path_factory.getbasetemp() / "documents.txt"
    path.write_text(text)
    recipe = recipe_of(path, block_bytes=5, reading={"text_unit": "separator", "separator": separator})
    expected = text.split(separator)
    expected = expected[:-1] if not expected[-1] else expected
    assert [record["text"] for record in read_all(recipe, num_parts)] == expected


def test_a_line_longer_than_all_ranges_is_given_once_and_the_parts_inside_it_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 100_000 + "\nlast")
    recipe = recipe_of(path, block_bytes=64)
    parts = [list(PartRun(recipe, part=part, num_parts=8, epoch=0)) for part in range(8)]
    assert [[len(record["text"]) for record in part] for part in parts] == [[5, 100_000], *[[]] * 6, [4]]


def test_a_text_file_can_be_one_record(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"{number}\nand more\n")
    recipe = recipe_of(tmp_path, text_unit="file")
    assert [record["text"][0] for record in read_all(recipe)] == list("01234")
    assert as_counted(read_all(recipe, 3)) == as_counted(read_all(recipe))


def test_columns_are_chosen_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": 2}\n{"b": 3}\n')
    (tmp_path / "a.csv").write_text("a,b\n1,2\n,3\n")
    assert read_all(recipe_of(tmp_path / "a.jsonl", columns=["a"])) == [{"a": 1}, {"a": None}]
    assert read_all(recipe_of(tmp_path / "a.csv", columns=["a"])) == [{"a": "1"}, {"a": ""}]


def test_a_record_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2.5, "m": null}\n{"n": "x"}\n')
    for block in (1, 10, 1000):
        assert read_all(recipe_of(tmp_path, block_bytes=block)) == [{"n": 1}, {"n": 2.5, "m": None}, {"n": "x"}]


def test_a_csv_file_without_a_header_gives_every_record_and_its_types(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,a\n2,b\n")
    with pytest.raises(SchemaError, match=r"a\.csv: the first line may be data.*header=False"):
        read_all(recipe_of(tmp_path / "a.csv"))
    recipe = recipe_of(tmp_path / "a.csv", reading={"names": ("n", "text"), "types": "infer"})
    assert read_all(recipe) == [{"n": 1, "text": "a"}, {"n": 2, "text": "b"}]
    assert recipe.facts["reading"]["types"] == {"n": "int64"}


@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_lines_that_end_with_a_carriage_return_alone_come_once_wherever_the_header_is_cut(
    tmp_path: Path, bom: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(f"{bom}x,name\r1,one\r2,two\r".encode())
    recipe = recipe_of(path, block_bytes=64, reading={"quoted_newlines": False, "header": True})
    for num_parts in range(1, path.stat().st_size + 2):
        assert read_all(recipe, num_parts) == [{"x": "1", "name": "one"}, {"x": "2", "name": "two"}]

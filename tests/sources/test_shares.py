from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sources import PartRun, Recipe, SourceFile, SourceOptions, why_unsplittable
from penstock.sources._stream_shares import FileRange, everything, strands_of_parts

from .examples import recipe_of

SIZES = st.lists(st.integers(0, 10_000), min_size=1, max_size=30)


def shares_of(files: list[SourceFile], num_parts: int) -> list[list[FileRange]]:
    recipe = Recipe(files=tuple(files), options=SourceOptions())
    return [strands[-1].pieces for strands in strands_of_parts(recipe, everything(recipe, num_parts), num_parts, 0)]


@given(SIZES, st.integers(1, 20))
def test_every_byte_is_in_one_share_and_shares_are_equal_to_a_byte(sizes: list[int], num_parts: int) -> None:
    files = [SourceFile(f"/{number}.jsonl", size, "") for number, size in enumerate(sizes)]
    shares = shares_of(files, num_parts)
    pieces = [piece for share in shares for piece in share]
    for file in files:
        edges = [(piece.begin, piece.end) for piece in pieces if piece.file == file]
        assert [begin for begin, _ in edges] == [0, *(end for _, end in edges)][: len(edges)]
        assert sum(end - begin for begin, end in edges) == file.num_bytes
    amounts = [sum(piece.end - piece.begin for piece in share) for share in shares]
    assert max(amounts) - min(amounts) <= 1


@given(SIZES, st.integers(1, 20))
def test_whole_files_go_to_one_part_each_and_no_part_has_more_than_a_file_too_much(
    sizes: list[int], num_parts: int
) -> None:
    files = [SourceFile(f"/{number}.jsonl.gz", size, "") for number, size in enumerate(sizes)]
    shares = shares_of(files, num_parts)
    assert Counter(piece.file.path for share in shares for piece in share) == Counter(file.path for file in files)
    amounts = [sum(piece.file.num_bytes + 1 for piece in share) for share in shares]
    assert max(amounts) - min(amounts) <= max(sizes) + 1


def test_files_of_unknown_size_are_dealt_out_in_turn() -> None:
    files = [SourceFile(f"http://server/{number}.jsonl", -1, "", is_seekable=False) for number in range(6)]
    assert why_unsplittable(files[0], SourceOptions()) == "is on a server that does not support ranges"
    assert [len(share) for share in shares_of(files, 3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("a.jsonl", {}, ""),
        ("a.jsonl.zst", {}, "is compressed"),
        ("a.csv", {}, "may have newlines in quoted fields"),
        ("a.csv", {"quoted_newlines": False}, ""),
        ("a.tsv", {"quote": None}, ""),
        ("a.txt", {"text_unit": "line"}, ""),
        ("a.txt", {"text_unit": "file"}, "is one record"),
        ("a.parquet", {}, ""),
    ],
)
def test_what_cannot_be_entered_in_its_middle_says_why(name: str, options: dict, reason: str) -> None:
    assert why_unsplittable(SourceFile(f"/{name}", 1, ""), SourceOptions(**options)) == reason


def test_row_groups_are_dealt_out_evenly(tmp_path: Path) -> None:
    for number in range(2):
        table = pa.table({"n": range(1000 * number, 1000 * number + 1000)})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=100)
    recipe = recipe_of(tmp_path)
    for num_parts, expected in ((1, {2000}), (2, {1000}), (4, {500}), (20, {100})):
        parts = [len(list(PartRun(recipe, part=part, num_parts=num_parts, epoch=0))) for part in range(num_parts)]
        assert set(parts) == expected

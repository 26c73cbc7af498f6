"""What is read from a file, counted at the store that gives it: a file system of fsspec that remembers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from penstock.sources import PartRun

from .examples import recipe_of


class CountingFileSystem(LocalFileSystem):
    """Local files under counted://, with every range that was asked for."""

    protocol = "counted"
    ranges: ClassVar[list[tuple[int, int]]] = []

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **named: Any) -> bytes:
        assert start is not None
        assert end is not None
        self.ranges.append((start, end))
        return super().cat_file(path, start=start, end=end, **named)

    def info(self, path: str, **named: Any) -> dict[str, Any]:
        return super().info(path.removeprefix("counted://"), **named)


@pytest.fixture(autouse=True)
def ranges() -> Iterator[list[tuple[int, int]]]:
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    CountingFileSystem.ranges.clear()
    return CountingFileSystem.ranges


def times_read(ranges: list[tuple[int, int]], size: int) -> np.ndarray:
    """How often each byte was read."""
    counts = np.zeros(size + 1, np.int64)
    for begin, end in ranges:
        counts[begin] += 1
        counts[end] -= 1
    return np.cumsum(counts)[:-1]


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_no_more_is_read_twice_than_the_end_of_the_line_at_each_border(
    tmp_path: Path, ranges: list, num_parts: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {number}, "text": "{"word " * (number % 50)}"}}\n' for number in range(20_000)))
    recipe = recipe_of(f"counted://{path}", block_bytes=64 << 10)
    runs = [PartRun(recipe, part=part, num_parts=num_parts, epoch=0) for part in range(num_parts)]
    assert len(list(itertools.chain(*runs))) == 20_000
    counts = times_read(ranges, path.stat().st_size)
    assert counts.min() == 1
    assert (counts > 1).sum() <= (num_parts - 1) * ((4 << 10) + 300)


@pytest.mark.parametrize("shuffle_buffer", [0, 50])
@pytest.mark.parametrize("order", [[0], [1, 0], [3, 0, 5, 1, 6, 2, 4]])
@pytest.mark.parametrize(
    ("name", "reading"),
    [("a.jsonl", {}), ("a.csv", {"quote": None}), ("a.txt", {"text_unit": "separator", "separator": "|"})],
)
def test_ranges_of_a_shuffled_part_read_no_more_twice_either(
    tmp_path: Path,
    ranges: list,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    reading: dict,
    order: list[int],
    shuffle_buffer: int,
) -> None:
    monkeypatch.setattr("penstock.sources._stream_shares._CHUNK_BYTES", 100_000)  # of 32 MB
    path = tmp_path / name
    path.write_text("".join(f'{{"n": {number}, "text": "{"word " * (number % 50)}"}}\n' for number in range(10_000)))
    path.write_text(path.read_text().replace("\n", "|") if "separator" in reading else path.read_text())
    recipe = recipe_of(f"counted://{path}", block_bytes=64 << 10, reading=reading, shuffle_buffer=shuffle_buffer)
    for part in order:
        list(PartRun(recipe, part=part, num_parts=len(order), epoch=0))
    size = path.stat().st_size
    num_borders = sum(begin > 0 for begin, _ in ranges) if shuffle_buffer else len(order) - 1
    counts = times_read(ranges, size)[4 << 10 if name == "a.csv" else 0 :]  # each range reads a CSV header
    assert counts.min() == 1
    assert (counts > 1).sum() <= num_borders * ((4 << 10) + 300)


def test_the_first_record_costs_one_block_wherever_the_part_begins(tmp_path: Path, ranges: list) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some line\n" * 1_000_000)
    run = PartRun(recipe_of(f"counted://{path}", block_bytes=64 << 10), part=3, num_parts=4, epoch=0)
    assert next(iter(run)) == {"text": "some line"}
    assert ranges[0][0] == 7_499_999
    assert sum(end - begin for begin, end in ranges) <= (64 << 10) + 1


@pytest.mark.parametrize("content", ["one\ntwo\n", "one\ntwo"])
def test_a_small_file_is_one_request(tmp_path: Path, ranges: list, content: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content)
    assert len(list(PartRun(recipe_of(f"counted://{path}"), part=0, num_parts=1, epoch=0))) == 2
    assert ranges == [(0, len(content))]


def test_going_on_reads_from_the_block_and_not_from_the_start(tmp_path: Path, ranges: list) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some line\n" * 1_000_000)
    recipe = recipe_of(f"counted://{path}", block_bytes=64 << 10)
    run = PartRun(recipe, part=0, num_parts=1, epoch=0)
    list(itertools.islice(run, 700_000))
    ranges.clear()
    next(iter(PartRun(recipe, part=0, num_parts=1, epoch=0, state=run.state())))
    assert sum(end - begin for begin, end in ranges) <= (64 << 10) + 1


def test_a_csv_header_costs_each_part_4_kb(tmp_path: Path, ranges: list) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "1,2\n" * 100_000)
    recipe = recipe_of(f"counted://{path}", block_bytes=64 << 10, reading={"quote": None})
    runs = [PartRun(recipe, part=part, num_parts=4, epoch=0) for part in range(4)]
    assert len(list(itertools.chain(*runs))) == 100_000
    assert (times_read(ranges, path.stat().st_size)[4 << 10 :] > 1).sum() <= 3 * ((4 << 10) + 10)

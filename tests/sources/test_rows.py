from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import csv

from penstock.errors import FormatError
from penstock.sources import SourceOptions, Split, list_files, plan_splits, read_rows, read_split
from penstock.sources._csv import Quoted

from .gathering import as_dicts


def rows_and_errors(path: Path, options: SourceOptions, place: int | None = None) -> tuple[list[dict], int]:
    """Records and the number of bad ones; -1 where the file cannot be read to its end."""
    values, num_errors = [], 0
    try:
        for split in plan_splits(list_files(path, options), options, 1 << 30):  # none for an empty file
            for rows in read_rows(split, options, place):
                values += rows.values
                num_errors += len(rows.errors)
    except FormatError:
        num_errors = -1
    return values, num_errors


def columns_and_errors(path: Path, options: SourceOptions) -> tuple[list[dict], int]:
    """The same by `read_split`."""
    values, num_errors = [], 0
    try:
        for split in plan_splits(list_files(path, options), options, 1 << 30):
            for records in read_split(split, options):
                values += as_dicts(records)
                num_errors += len(records.errors)
    except FormatError:
        num_errors = -1
    return values, num_errors


def by_pyarrow(content: bytes) -> tuple[list[dict], int]:
    """Rows of "x,y" and the number of bad ones, by pyarrow's parser with all of the file at once."""
    bad: list[Any] = []
    if not content.strip(b"\r\n"):
        return [], 0
    table = csv.read_csv(
        pa.BufferReader(content),
        read_options=csv.ReadOptions(use_threads=False, block_size=len(content) + 1, column_names=["x", "y"]),
        parse_options=csv.ParseOptions(invalid_row_handler=lambda row: bad.append(row) or "skip"),
        convert_options=csv.ConvertOptions(column_types={"x": pa.string(), "y": pa.string()}),
    )
    return table.to_pylist(), len(bad)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from('a,"\n\r'), max_size=40), st.integers(1, 30))
@example('5" pipe,"a\nb"\n"c"d"\n,"e\n",2\n', 1)
def test_quotes_anywhere_mean_what_they_mean_to_pyarrow_with_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, block: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "quotes.csv"
    path.write_bytes(b"x,y\n" + text.encode())
    found, num_errors = rows_and_errors(path, SourceOptions(batch_bytes=block))
    is_open_at_its_end = '"' in text and "\n" in text[text.index('"') :]  # it may be, and then it is an error
    assert (found, num_errors) == by_pyarrow(text.encode()) or (num_errors == -1 and is_open_at_its_end)


def borders_by_character(text: str) -> tuple[list[int], bool]:
    """Where records end, and whether a quote is open at the end of a record with a newline in it."""
    borders, opened, at_start, place = [0], -1, True, 0
    while place < len(text):
        character = text[place]
        if opened >= 0 and character == '"':
            if text[place + 1 : place + 2] == '"':
                place += 1
            else:
                opened = -1
        elif opened < 0:
            if at_start and character == '"':
                opened = place
            if character == "\n":
                borders.append(place + 1)
        at_start = opened < 0 and character in ",\r\n"
        place += 1
    return borders, opened >= 0 and "\n" in text[borders[-1] :]


@settings(max_examples=200)
@given(st.text(st.sampled_from('a,"\n\r'), max_size=30))
def test_records_end_where_going_through_the_characters_says(text: str) -> None:
    borders, is_open = borders_by_character(text)
    quotes = Quoted(b'"', b",")
    assert quotes.last(text.encode()) == borders[-1]
    assert quotes.are_open_after(text.encode()) is is_open


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 30))
def test_any_bytes_are_the_lines_that_read_split_finds(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, block: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(content)
    expected, num_errors = columns_and_errors(path, SourceOptions(text_unit="line"))
    found, num_found = rows_and_errors(path, SourceOptions(text_unit="line", batch_bytes=block))
    assert num_found == num_errors
    if num_errors >= 0:
        assert [row["text"] for row in found] == [row["text"] for row in expected]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(['{"a": 1}', "{}", "", " ", "1", '{"a": [', "1]}", '{"a": 1},{"b": 2}', '"', "\r"])))
def test_only_a_line_that_is_one_object_is_a_record(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_text("\n".join(lines))
    found, num_errors = rows_and_errors(path, SourceOptions())
    assert found == [{"a": 1} if line == '{"a": 1}' else {} for line in lines if line in ('{"a": 1}', "{}")]
    assert num_errors == sum(line.strip() not in ('{"a": 1}', "{}", "") for line in lines)


@pytest.mark.parametrize("header_bytes", [10, 5000, 70_000])
def test_headers_of_any_length_are_read(tmp_path: Path, header_bytes: int) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'x,"{"n" * header_bytes}\n"\n1,2\n')
    assert rows_and_errors(path, SourceOptions(header=True)) == ([{"x": "1", "n" * header_bytes + "\n": "2"}], 0)


def test_reading_begins_again_at_any_block(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x\n" + "".join(f'"{number}\n"\n' for number in range(100)))
    options = SourceOptions(batch_bytes=50)
    split = Split("csv", str(path), 0, path.stat().st_size, 0)
    blocks = list(read_rows(split, options))
    assert len(blocks) > 10
    for number, block in enumerate(blocks):
        rest = [value for rows in blocks[number:] for value in rows.values]
        assert rows_and_errors(path, options, block.place) == (rest, 0)


def test_rows_of_nothing_but_spaces_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("x\ty\n \t \n \t ")
    for read in (rows_and_errors, columns_and_errors):
        assert read(path, SourceOptions(quote=None)) == ([{"x": " ", "y": " "}] * 2, 0)

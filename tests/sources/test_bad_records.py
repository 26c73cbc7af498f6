from __future__ import annotations

import contextlib
import dataclasses
import gzip
import itertools
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError, SchemaError, StorageError
from penstock.sources import PartRun, check_state

from .examples import Record, read_all, recipe_of

BAD = {
    "a.jsonl": (b'{"n": 1}\nno json\n[2]\n{"n": "\\ud800"}\n{"n": 4}\n{"n":\n5}\n\xff\n', [{"n": 1}, {"n": 4}], 6),
    "a.csv": (b"x,y\n1,2\n3\n\xff,4\n5,6,7\n8,9\n", [{"x": "1", "y": "2"}, {"x": "8", "y": "9"}], 3),
    "a.txt": (b"one\n\xff\xfe\ntwo", [{"text": "one"}, {"text": "two"}], 1),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_stops_the_stream_or_is_left_out_and_counted(tmp_path: Path, name: str, caplog) -> None:
    content, good, num_bad = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=rf"{name}: .*byte .*on_error='skip'"):
        read_all(recipe_of(tmp_path))
    for block in (1, 1 << 20):
        run = PartRun(recipe_of(tmp_path, on_error="skip", block_bytes=block), part=0, num_parts=1, epoch=0)
        with caplog.at_level(logging.WARNING):
            assert list(run) == good
        assert run.state()["at"][0][4] == num_bad
        assert f"skipped {num_bad} bad records" in caplog.text


GOOD = {"a.jsonl": b'{"n": 1}', "a.csv": b"1,2", "a.txt": b"good"}
WRONG = {"a.jsonl": [b"no json", b"\xff", b"[1]"], "a.csv": [b"1", b"\xff,1", b"1,2,3"], "a.txt": [b"\xff"]}
BLANK = {"a.jsonl": [b"", b" "], "a.csv": [b""], "a.txt": []}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(GOOD)), st.sampled_from([1, 30, 1 << 20]), st.sampled_from([0, 2]), st.data())
def test_good_records_before_a_bad_one_come_first_and_skipping_may_go_on_from_there(
    tmp_path_factory: pytest.TempPathFactory, name: str, block_bytes: int, shuffle_buffer: int, data: st.DataObject
) -> None:
    choices = st.sampled_from([GOOD[name], *WRONG[name], *BLANK[name]])
    lines = data.draw(st.lists(choices, max_size=12))
    path = tmp_path_factory.mktemp("lines") / name
    path.write_bytes(b"x,y\n" * (name == "a.csv") + b"".join(line + b"\n" for line in lines))
    stopping = recipe_of(path, block_bytes=block_bytes, shuffle_buffer=shuffle_buffer)
    skipping = dataclasses.replace(stopping, on_error="skip")
    all_records = read_all(skipping)
    run = PartRun(stopping, part=0, num_parts=1, epoch=0)
    records: list[Record] = []
    with contextlib.suppress(FormatError):
        records.extend(iter(run))
    num_wrong = sum(line in WRONG[name] for line in lines)
    if num_wrong:
        before = itertools.takewhile(lambda line: line not in WRONG[name], lines)
        assert len(records) == max(0, list(before).count(GOOD[name]) - shuffle_buffer)
    check_state(run.state(), skipping)
    rest = PartRun(skipping, part=0, num_parts=1, epoch=0, state=run.state())
    assert records + list(rest) == all_records
    assert rest.state()["at"][0][4] == num_wrong


def test_a_record_over_the_limit_is_an_error_that_names_its_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short\n" + "x" * 5000)
    with pytest.raises(FormatError, match=r"a\.txt: the record at byte 6 does not end within max_record_bytes=100"):
        read_all(recipe_of(tmp_path, block_bytes=50, reading={"max_record_bytes": 100}))


def test_a_quote_that_is_never_closed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,y\n1,"open\n' + "2,b\n" * 100)
    with pytest.raises(FormatError, match=r"a\.csv: the last record opens a quote that is never closed"):
        read_all(recipe_of(tmp_path, block_bytes=20))


def test_files_that_change_or_go_while_reading_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("line\n" * 100)
    recipe = recipe_of(path)
    path.write_text("line\n")
    with pytest.raises(StorageError, match=r"a\.txt: the file has 5 bytes, but had at least 500"):
        read_all(recipe)
    path.unlink()
    with pytest.raises(StorageError, match=r"a\.txt: the file was removed"):
        read_all(recipe)


def test_a_truncated_gzip_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"line\n" * 10_000)[:-20])
    with pytest.raises(FormatError, match="truncated or damaged"):
        read_all(recipe_of(path))


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_parquet_file_without_a_byte_is_an_error(tmp_path: Path, num_parts: int) -> None:
    pq.write_table(pa.table({"n": range(9)}), tmp_path / "a.parquet", row_group_size=3)
    (tmp_path / "b.parquet").touch()
    with pytest.raises(FormatError, match=r"b\.parquet: the parquet file is truncated or damaged"):
        read_all(recipe_of(tmp_path), num_parts)


def test_a_column_that_is_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(SchemaError, match=r"no column 'z'; the header has 'x', 'y'"):
        read_all(recipe_of(tmp_path, columns=["z"]))


def test_text_has_one_column(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert read_all(recipe_of(tmp_path, columns=["text"])) == [{"text": "x"}]
    with pytest.raises(SchemaError, match="records of text files have only 'text'"):
        recipe_of(tmp_path, columns=["path"])


def test_only_formats_that_can_be_streamed_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.tar is webdataset; a stream reads csv, jsonl, parquet, text"):
        recipe_of(tmp_path)
    with pytest.raises(ValueError, match="is object; a stream reads"):
        recipe_of([{"n": 1}])
    with pytest.raises(FileNotFoundError, match="no file matches"):
        recipe_of(tmp_path / "*.jsonl")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"shuffle_buffer": -1}, ValueError, "shuffle_buffer=-1; give a number of records"),
        ({"seed": 1.5}, TypeError, "seed=1.5; it must be an integer"),
        ({"on_error": "ignore"}, ValueError, "the choices are 'raise' and 'skip'"),
        ({"columns": "text"}, TypeError, r"give a list, as in \['text'\]"),
        ({"format": "xml"}, ValueError, "format='xml'; the choices are"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict, error: type, message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(error, match=message):
        recipe_of(tmp_path, **settings)

"""What the first rows decide: columns and types, and an error that names file and reason when they decide nothing."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.errors import FormatError, SchemaError
from penstock.preparation import prepare
from penstock.transforms import KeepColumns, Tokenize


def keep(path: Path, rows: list[dict[str, Any]], **options: Any) -> penstock.Dataset:
    """The rows as a dataset of their columns."""
    source = path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(source, path / "data", workers=1, **options)
    return penstock.open(path / "data")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"text": "a"}]', r"a\.json: row 0: .*holds list.*one object a line: `jq"),
        ("a.json", '{\n "text": "a"\n}', r"a\.json: row 0: .*is not JSON.*one object a line: `jq"),
        ("a.csv", "a,b\n1\n", r"a\.csv: row 0: .*has 1 fields, and the header 2"),
        ("a.csv", "a,a\n1,2\n", r"a\.csv: the header names 'a' more than once"),
    ],
)
def test_a_source_without_a_good_row_is_refused_with_its_first_fault(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=message):
        prepare(tmp_path / name, tmp_path / "data", workers=1)
    assert not (tmp_path / "data").exists()


def test_a_source_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(SchemaError, match=r"a\.csv: neither it nor the files before it have any rows"):
        prepare(tmp_path / "a.csv", tmp_path / "data", workers=1)


def test_a_column_that_no_row_has_is_asked_about(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"Column 'body' is null, here in every row\. Is the name right"):
        keep(tmp_path, [{"text": "a"}], transform=Tokenize("bytes", "body"))
    with pytest.raises(SchemaError, match=r"rows\.jsonl: Column 'body' cannot be kept.*is the name right"):
        keep(tmp_path, [{"text": "a"}], transform=KeepColumns(["body"]))


def test_columns_that_tools_keep_book_in_are_left_out_and_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("0.txt")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"hi"))
    done = prepare(tmp_path / "a.tar", tmp_path / "data", workers=1)
    assert penstock.open(tmp_path / "data").schema.to_json() == {"txt": "bytes"}
    assert done.notes == ("Left out '__key__': names of columns may not start with '__'.",)


def test_a_name_that_no_column_can_have_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"rows\.jsonl: 'a\.b' cannot name a column.*Name the columns to keep"):
        keep(tmp_path, [{"a.b": 1}])


def test_integers_are_never_rounded(tmp_path: Path) -> None:
    ds = keep(tmp_path, [{"n": 2**64 - 1}, {"n": 1}])
    assert (ds[0]["n"], ds[0]["n"].dtype) == (2**64 - 1, np.uint64)
    with pytest.raises(SchemaError, match="integers of more than 64 bits"):
        keep(tmp_path, [{"n": 2**64}, {"n": 1}], overwrite=True)
    with pytest.raises(FormatError, match="row 0: Column 'n' holds 9007199254740993; float64 was expected"):
        keep(tmp_path, [{"n": 2**53 + 1}, {"n": 0.5}], overwrite=True)


def test_arrays_of_several_lengths_are_a_ragged_column(tmp_path: Path) -> None:
    rows = [{"x": np.arange(length * 2, dtype=np.float32).reshape(length, 2)} for length in (1, 3)]
    prepare(rows, tmp_path / "data")
    ds = penstock.open(tmp_path / "data")
    assert ds.schema.to_json() == {"x": "float32[*,2]"}
    assert all(np.array_equal(ds[place]["x"], rows[place]["x"]) for place in range(2))


def test_a_column_of_a_wrong_type_is_named_with_its_file(tmp_path: Path) -> None:
    for name, column in (("a", ["text"]), ("b", [5])):
        pq.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
    with pytest.raises(SchemaError, match=r"b\.parquet: Column 'text' of the source is int64"):
        prepare(tmp_path / "*.parquet", tmp_path / "data", transform=Tokenize("bytes"), workers=1)


def test_other_columns_need_another_destination_or_overwrite(tmp_path: Path) -> None:
    keep(tmp_path, [{"n": 1}])
    with pytest.raises(SchemaError, match=r"has the columns \{'n': 'int64'\}; the sources now give \{'n': 'bytes'\}"):
        keep(tmp_path, [{"n": "one"}])
    assert keep(tmp_path, [{"n": "one"}], overwrite=True)[0]["n"] == b"one"

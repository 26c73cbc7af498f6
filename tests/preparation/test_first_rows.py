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
from penstock.sources import SourceOptions
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
        ("a.json", '[{"text": "a"}]', r"a\.json: row 0: .*holds list.*one object per line: `jq"),
        ("a.json", '{\n "text": "a"\n}', r"a\.json: row 0: .*is not JSON.*one object per line: `jq"),
        ("a.csv", "a,b\n1\n", r"a\.csv: row 0: .*has 1 fields, but the header has 2"),
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
    with pytest.raises(SchemaError, match=r"a\.csv: neither this nor the files before it have any rows"):
        prepare(tmp_path / "a.csv", tmp_path / "data", workers=1)


def test_lists_of_large_integers_are_stored_exactly(tmp_path: Path) -> None:
    hashes = [[1, 2**63 + 5], [3, 2**64 - 1]]
    rows = [{"hashes": each} for each in hashes]
    for kind, name in ((pa.list_(pa.uint64()), "lists"), (pa.list_(pa.uint64(), 2), "pairs")):
        pq.write_table(pa.table({"hashes": pa.array(hashes, kind)}), tmp_path / f"{name}.parquet")
        prepare(tmp_path / f"{name}.parquet", tmp_path / name, workers=1)
        assert [sample.tolist() for sample in penstock.open(tmp_path / name)[:]["hashes"]] == hashes
    for options in ({}, {"transform": KeepColumns({"hashes": "uint64[2]"})}):
        kept = keep(tmp_path, rows, overwrite=True, **options)
        assert kept.schema["hashes"].dtype == np.uint64
        assert kept[:]["hashes"].tolist() == hashes


@pytest.mark.parametrize(
    ("rows", "spec", "message"),
    [
        ([[0.5], [0.5, 2**53 + 1]], None, "'x' cannot be kept: its first rows hold integers that no 64-bit type holds"),
        ([[0.5, 2**53 + 1]], "float64[*]", r"row 0: Column 'x' holds \[0.5, 9007199254740993\]"),
        ([[1], [-1, 2**63 + 5]], "int64[*]", "row 1: Column 'x' holds"),
        ([0.5, 1e39], "float32", r"row 1: Column 'x' holds 1e\+39"),
        ([[0.5], [7e4]], "float16[*]", r"row 1: Column 'x' holds \[70000.0\]"),
    ],
)
def test_a_number_that_the_column_cannot_hold_is_refused(
    tmp_path: Path, rows: list[Any], spec: str | None, message: str
) -> None:
    with pytest.raises((FormatError, SchemaError), match=message):
        keep(tmp_path, [{"x": row} for row in rows], transform=KeepColumns({"x": spec} if spec else ["x"]))


def test_floats_are_rounded_to_narrower_ones_and_infinity_stays(tmp_path: Path) -> None:
    kept = keep(tmp_path, [{"x": 0.1}, {"x": float("inf")}], transform=KeepColumns({"x": "bfloat16"}))
    assert kept[:]["x"].astype(np.float32).tolist() == [0.10009765625, float("inf")]


def test_a_column_that_no_row_has_is_asked_about(tmp_path: Path) -> None:
    said = r"rows\.jsonl: There is no field 'text'\. The fields are 'body', 'size'\. .*column='body' \(--column body\)"
    with pytest.raises(SchemaError, match=said):
        keep(tmp_path, [{"body": "a", "size": 1}], transform=Tokenize("bytes"), on_error="skip")
    with pytest.raises(SchemaError, match=r"no field 'txt'\..* Did you mean 'text'\? .*column='text'"):
        keep(tmp_path, [{"text": "a"}], transform=Tokenize("bytes", "txt"))
    with pytest.raises(SchemaError, match=r"Column 'body' cannot be kept: .* no such field\. The fields are 'text'"):
        keep(tmp_path, [{"text": "a"}], transform=KeepColumns(["body"]))
    with pytest.raises(SchemaError, match=r"rows\.jsonl: Column 'body' cannot be kept.*nothing but nulls"):
        keep(tmp_path, [{"text": "a", "body": None}], transform=KeepColumns(["body"]))


def test_columns_that_tools_keep_book_in_are_left_out_and_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("0.txt")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"hi"))
    done = prepare(tmp_path / "a.tar", tmp_path / "data", workers=1)
    assert penstock.open(tmp_path / "data").schema.to_json() == {"txt": "bytes"}
    assert done.notes == ("Left out '__key__': a column needs a name, which must not start with '__'.",)


def test_a_name_that_no_column_can_have_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(
        SchemaError, match=r"rows\.jsonl: 'a\.b' cannot name a column.*Name the columns to keep.*--typed-members"
    ):
        keep(tmp_path, [{"a.b": 1}])


def test_integers_are_never_rounded(tmp_path: Path) -> None:
    ds = keep(tmp_path, [{"n": 2**64 - 1}, {"n": 1}])
    assert (ds[0]["n"], ds[0]["n"].dtype) == (2**64 - 1, np.uint64)
    with pytest.raises(SchemaError, match="integers of more than 64 bits"):
        keep(tmp_path, [{"n": 2**64}, {"n": 1}], overwrite=True)
    with pytest.raises(
        FormatError, match="row 0: Column 'n' holds 9007199254740993; by the first rows, or keep=, float64 was expected"
    ):
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


def test_no_record_of_a_csv_file_without_a_header_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("5.1,setosa\n4.9,setosa\n7.0,versicolor\n")
    for on_error in ("raise", "skip"):
        with pytest.raises(SchemaError, match=r"a\.csv: the first line may be data.*--no-header.*--names.*--header"):
            prepare(path, tmp_path / "data", workers=1, on_error=on_error)
    done = prepare(path, tmp_path / "data", workers=1, reading=SourceOptions(names=("length", "kind"), types="infer"))
    assert (done.num_samples, done.notes) == (3, ())
    ds = penstock.open(tmp_path / "data")
    assert ds.schema.to_json() == {"length": "float64", "kind": "bytes"}
    assert [float(sample["length"]) for sample in ds] == [5.1, 4.9, 7.0]


def test_files_of_one_glob_agree_on_their_columns_by_name_and_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("n,text\n1,a\n")
    (tmp_path / "1.csv").write_text("text,n\nb,2\n")
    prepare(f"{tmp_path}/*.csv", tmp_path / "data", workers=1)
    assert [bytes(sample["text"]) for sample in penstock.open(tmp_path / "data")] == [b"a", b"b"]
    (tmp_path / "2.csv").write_text("text,m\nc,3\n")
    with pytest.raises(SchemaError, match=r"2\.csv: .*'m'"):
        prepare(f"{tmp_path}/*.csv", tmp_path / "other", workers=1)
    (tmp_path / "2.csv").write_text("text\nc\n")
    with pytest.raises((SchemaError, FormatError), match=r"2\.csv: .*'n'"):
        prepare(f"{tmp_path}/*.csv", tmp_path / "other", workers=1)
    (tmp_path / "2.csv").write_text("3,c\n4,d\n")
    with pytest.raises(SchemaError, match=r"2\.csv: the first line may be data"):
        prepare(f"{tmp_path}/*.csv", tmp_path / "other", workers=1)


def test_numbers_that_stay_text_are_said_to(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("n,zip,text\n1,02134,a\n2,10115,b\n")
    [note] = prepare(path, tmp_path / "text", workers=1).notes
    assert "Stored as text, like all CSV fields without a type: 'n'. " in note
    missing = SourceOptions(types={"n": "float32"}, missing="nan")
    path.write_text("n,zip,text\n1,02134,a\n,10115,b\n")
    assert prepare(path, tmp_path / "numbers", workers=1, reading=missing).notes == ()
    assert np.isnan([sample["n"] for sample in penstock.open(tmp_path / "numbers")]).tolist() == [False, True]
    with pytest.raises(FormatError, match="Column 'n' is null"):
        prepare(path, tmp_path / "nulls", workers=1, reading=SourceOptions(types="infer"))


def test_the_unnamed_index_that_pandas_writes_is_left_out_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",kind,text\n0,x,a\n1,y,b\n")
    [note] = prepare(tmp_path / "a.csv", tmp_path / "data", workers=1).notes
    assert note == "Left out '': a column needs a name, which must not start with '__'."
    assert list(penstock.open(tmp_path / "data").schema.to_json()) == ["kind", "text"]
    (tmp_path / "b.csv").write_text("Sepal.Length\n5.1\n4.9\n")
    with pytest.raises(SchemaError, match=r"'Sepal\.Length' cannot name a column.*--header --names"):
        prepare(tmp_path / "b.csv", tmp_path / "other", workers=1)
    renamed = SourceOptions(header=True, names=("length",), types="infer")
    assert prepare(tmp_path / "b.csv", tmp_path / "other", workers=1, reading=renamed).num_samples == 2

"""Names with dots: the column that is called so, else a field of a column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SchemaError
from penstock.sources import SourceOptions, list_files, plan_splits, read_split

values = st.one_of(st.none(), st.integers(-5, 5))
objects = st.fixed_dictionaries({"a": st.one_of(st.none(), st.fixed_dictionaries({"b": values, "c": values}))})


def read(path: Path, *names: str) -> list[dict[str, Any]]:
    options = SourceOptions(columns=names)
    batches = [
        records
        for split in plan_splits(list_files(path, options), options, 1 << 20)
        for records in read_split(split, options)
    ]
    lists = [{name: pa.array(column).to_pylist() for name, column in each.columns.items()} for each in batches]
    return [dict(zip(each, row, strict=True)) for each in lists for row in zip(*each.values(), strict=True)]


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(objects, min_size=1, max_size=8))
def check_fields(folder: Path, rows: list[dict[str, Any]]) -> None:
    kind = pa.schema([("a", pa.struct([("b", pa.int64()), ("c", pa.int64())]))])
    pq.write_table(pa.Table.from_pylist(rows, schema=kind), folder / "a.parquet")
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = [{"a.b": (row["a"] or {}).get("b")} for row in rows]
    assert read(folder / "a.parquet", "a.b") == expected
    assert read(folder / "a.jsonl", "a.b") == expected


def test_a_field_of_a_null_is_null_and_others_are_as_they_are(tmp_path: Path) -> None:
    check_fields(tmp_path)


def test_a_column_with_a_dot_in_its_name_comes_first(tmp_path: Path) -> None:
    rows = [{"a.b": 1, "a": {"b": 2}}] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text("a.b,c\nx,y\nz,w\n")
    assert read(tmp_path / "a.parquet", "a.b") == read(tmp_path / "a.jsonl", "a.b") == [{"a.b": 1}] * 3
    assert read(tmp_path / "a.csv", "a.b") == [{"a.b": "x"}, {"a.b": "z"}]


def test_a_field_that_is_not_there_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [{"b": 1}], "c": ["x"]}), tmp_path / "a.parquet")
    for name, field in (("a.d", "d"), ("c.d", "d"), ("a.b.d", "d")):
        with pytest.raises(SchemaError, match=f"no column '{name}': there is no field '{field}' in values of type"):
            read(tmp_path / "a.parquet", name)
    with pytest.raises(SchemaError, match=r"no column 'x\.y'; the file has 'a', 'c'"):
        read(tmp_path / "a.parquet", "x.y")

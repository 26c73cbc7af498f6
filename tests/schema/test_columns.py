from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError, SchemaError
from penstock.schema import Column, Schema


@pytest.mark.parametrize(
    ("spec", "dtype", "shape", "kind"),
    [
        ("int64", "<i8", (), "fixed"),
        ("uint8[224,224,3]", "u1", (224, 224, 3), "fixed"),
        ("float32[0]", "<f4", (0,), "fixed"),
        ("uint16[*]", "<u2", (), "ragged"),
        ("float32[*,16]", "<f4", (16,), "ragged"),
        ("bool[*,2,0]", "?", (2, 0), "ragged"),
        ("bytes", "u1", (), "bytes"),
    ],
)
def test_a_type_is_read_from_one_line(spec: str, dtype: str, shape: tuple[int, ...], kind: str) -> None:
    column = Column.parse("x", spec)
    assert (column.name, column.dtype, column.shape, column.kind) == ("x", np.dtype(dtype), shape, kind)
    assert column.spec == spec
    assert column.is_ragged == (kind != "fixed")


def test_spaces_in_a_shape_mean_nothing() -> None:
    assert Column.parse("x", "int8[ 2, 3 ]").spec == "int8[2,3]"


def test_the_bytes_of_one_item_follow_from_dtype_and_shape() -> None:
    assert Column.parse("x", "complex64[3,5]").item_bytes == 120
    assert Column.parse("x", "complex64[3,0]").item_bytes == 0
    assert Column.parse("x", "int32[*]").item_bytes == 4
    assert Column.parse("x", "bytes").item_bytes == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "has the type ''. Write 'int64'"),
        ("int64[", "has the type"),
        ("int64[]", "is not a shape"),
        ("int64[-1]", "has the type"),
        ("int64[3,*]", "is not a shape"),
        ("int64[*,*]", "is not a shape"),
        ("int64[3,]", "is not a shape"),
        ("int64[1 2]", "is not a shape"),
        ("int64[1234567890]", "is not a shape"),
        ("INT64", "has the type"),
        ("int64 ", "has the type"),
        ("int64\n", "has the type"),
        ("int128", "'int128' is not a dtype that a shard can hold. Known: bool, uint8"),
        ("str", "'str' is not a dtype"),
        ("object", "'object' is not a dtype"),
        ("float8_e4m3", "is not a dtype"),
        ("uint8[" + ",".join(["1"] * 33) + "]", "33 dimensions of 1 bytes; the limits are 32"),
        ("int64[999999999,999999999]", "the limits are 32 and 1,099,511,627,776"),
        ("int64[0,999999999,999999999]", "the limits are 32 and 1,099,511,627,776"),
        (5, "has the type 5"),
        (None, "has the type None"),
        (["int64"], "has the type"),
    ],
)
def test_a_type_that_means_nothing_is_refused(spec: object, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Column.parse("x", spec)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", "a.b", "__crc32c__", "__x", "a\nb", "\0", "\x7f", "x" * 201, "\ud800", 5, None, b"x"]
)
def test_a_name_that_would_clash_or_not_print_is_refused(name: object) -> None:
    with pytest.raises(SchemaError, match="cannot name a column: 1 to 200 printable characters"):
        Column.parse(name, "int64")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x", "_x", "x__", "größe", "a b", "a/b", "😀", "x" * 200])
def test_any_other_name_is_fine(name: str) -> None:
    assert Column.parse(name, "int64").name == name


@given(st.text(max_size=30) | st.from_regex(r"[a-z0-9_]{1,8}(\[[0-9*, ]{0,12}\])?", fullmatch=True))
def test_any_text_is_a_column_or_a_schema_error(spec: str) -> None:
    try:
        column = Column.parse("x", spec)
    except SchemaError:
        return
    assert Column.parse("x", column.spec) == column


def test_a_schema_is_a_mapping_in_the_order_given() -> None:
    schema = Schema.parse({"b": "int64", "a": "bytes"})
    assert list(schema) == ["b", "a"]
    assert len(schema) == 2
    assert "a" in schema
    assert "c" not in schema
    assert schema.to_json() == {"b": "int64", "a": "bytes"}
    assert str(schema) == "b: int64, a: bytes"
    assert schema == Schema.parse(schema.to_json())
    assert schema != Schema.parse({"a": "bytes", "b": "int64"})
    assert pickle.loads(pickle.dumps(schema)) == schema


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(SchemaError, match=r"No column 'c'; the columns are 'b', 'a'\."):
        Schema.parse({"b": "int64", "a": "bytes"})["c"]


def test_columns_are_selected_in_the_order_asked_for() -> None:
    schema = Schema.parse({"a": "int8", "b": "int16", "c": "int32"})
    assert schema.select(["c", "a"]).to_json() == {"c": "int32", "a": "int8"}


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_selecting_nothing_or_a_column_twice_is_refused(names: list[str]) -> None:
    with pytest.raises(SchemaError, match="at least one column, each once"):
        Schema.parse({"a": "int8", "b": "int16"}).select(names)


def test_a_dataset_has_at_least_one_and_at_most_1024_columns() -> None:
    assert len(Schema.parse({f"c{number}": "int8" for number in range(1024)})) == 1024
    with pytest.raises(SchemaError, match="at least one column"):
        Schema.parse({})
    with pytest.raises(SchemaError, match="1,025 columns requested; a dataset can have at most 1,024"):
        Schema.parse({f"c{number}": "int8" for number in range(1025)})


def test_a_schema_error_is_also_the_type_error_people_catch() -> None:
    with pytest.raises(TypeError):
        Column.parse("x", "nothing")
    assert issubclass(SchemaError, PenstockError)

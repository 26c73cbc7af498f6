"""Hashes of samples: the published XXH64, of the content alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import SchemaError
from penstock.schema import HASH_COLUMN, Ragged, Schema
from penstock.shards import content_columns, hash_samples, read_manifest


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=100), min_size=1, max_size=20))
def test_hashes_are_those_of_any_other_implementation(samples: list[bytes]) -> None:
    joined = Ragged.from_lengths(np.frombuffer(b"".join(samples), np.uint8), [len(each) for each in samples], True)
    assert hash_samples([joined]).tolist() == [xxhash.xxh64_intdigest(each) for each in samples]


def test_every_length_up_to_several_stripes_is_hashed_right() -> None:
    data = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    joined = Ragged.from_lengths(data[: sum(range(200))], list(range(200)), True)
    expected = [xxhash.xxh64_intdigest(joined[number]) for number in range(200)]
    assert hash_samples([joined]).tolist() == expected


@pytest.mark.parametrize("dtype", ["uint8", "bool", "uint16", "int64", "float32", "float16"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)])
def test_a_fixed_column_is_hashed_sample_by_sample(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 2, (7, *shape)).astype(dtype)
    assert hash_samples([values]).tolist() == [xxhash.xxh64_intdigest(value.tobytes()) for value in values]


def test_several_columns_are_hashed_by_their_hashes_side_by_side() -> None:
    one, other = np.arange(5), np.arange(5, 10).astype("uint8")
    both = [
        xxhash.xxh64_intdigest(b"".join(xxhash.xxh64_intdigest(each.tobytes()).to_bytes(8, "little") for each in pair))
        for pair in zip(one, other, strict=True)
    ]
    assert hash_samples([one, other]).tolist() == both


@pytest.mark.parametrize(
    ("columns", "content"),
    [
        ({"tokens": "uint16[*]", "text": "bytes", "image": "bytes"}, ("tokens",)),
        ({"text": "bytes", "image": "bytes", "label": "int64"}, ("image",)),
        ({"label": "int64", "text": "bytes"}, ("text",)),
        ({"x": "float32", "origin": "int64[2]", "y": "int64"}, ("x", "y")),
        ({"origin": "int64[2]"}, ("origin",)),
        ({"origin": "bytes", "x": "int64"}, ("origin", "x")),
    ],
)
def test_the_content_of_a_sample_is_its_data_not_what_is_said_about_it(
    columns: dict[str, str], content: tuple[str, ...]
) -> None:
    assert content_columns(Schema.parse(columns)) == content
    assert content_columns(Schema.parse(columns).with_hashes()) == content


def test_nobody_can_name_a_column_as_the_hashes_are_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="cannot name a column"):
        penstock.DatasetWriter(tmp_path / "ds", {"x": "int64", HASH_COLUMN: "uint64"})
    with pytest.raises(SchemaError, match="cannot name a column"):
        penstock.from_arrays({HASH_COLUMN: np.arange(3)})


@pytest.mark.parametrize(
    "columns", [{HASH_COLUMN: "uint64"}, {"x": "int64", HASH_COLUMN: "int64"}, {HASH_COLUMN: "uint64", "x": "int64"}]
)
def test_hashes_of_another_type_or_place_are_refused(columns: dict[str, str]) -> None:
    with pytest.raises(SchemaError):
        Schema.parse_stored(columns)


def test_what_a_writer_appends_to_a_prepared_dataset_is_hashed_too(tmp_path: Path) -> None:
    penstock.prepare([{"x": 1}, {"x": 2}], tmp_path / "ds", workers=1)
    with penstock.DatasetWriter(tmp_path / "ds", {"x": "int64"}, mode="append") as writer:
        writer.write({"x": 3})
        writer.write_batch({"x": [4, 5]})
    ds = penstock.open(tmp_path / "ds")
    assert list(ds.schema) == ["x"]
    assert HASH_COLUMN in read_manifest(tmp_path / "ds").schema
    stored = np.empty(5, np.uint64)
    ds.storage.read_fixed(ds.storage.schema[HASH_COLUMN], np.arange(5), stored)
    assert stored.tolist() == hash_samples([np.arange(1, 6)]).tolist()

"""Maps of rows that return uneven values: what a batch then holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import SchemaError
from penstock.schema import Ragged

from .examples import tokens_dataset

Row = dict[str, Any]


def column(values: list[Any], *, ragged: Any = ()) -> Any:
    """What a batch holds after a map that returns these values, row by row."""
    plan = penstock.from_arrays({"x": np.arange(len(values))})
    return plan.map(lambda row: {"value": values[int(row["x"])]}, ragged=ragged).batch(len(values)).read(0)["value"]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.sampled_from([(), (4,), (2, 3)]))
def test_values_of_uneven_length_make_a_ragged_column(lengths: list[int], shape: tuple[int, ...]) -> None:
    values = [np.random.default_rng(length).random((length, *shape)) for length in lengths]
    found = column(values, ragged="value")
    assert isinstance(found, Ragged)
    assert all(np.array_equal(one, other) for one, other in zip(found, values, strict=True))
    undeclared = column(values)
    assert isinstance(undeclared, Ragged) == (len(set(lengths)) > 1)
    assert [np.asarray(one).tolist() for one in undeclared] == [value.tolist() for value in values]


def test_lists_and_tensors_of_uneven_length_make_one_too_and_empty_lists_are_of_the_others_kind() -> None:
    boxes = column([[], [[1, 2, 3, 4]], [[5, 6, 7, 8]] * 2])
    assert boxes.values.dtype == np.int64
    assert boxes.values.shape == (3, 4)
    assert boxes.lengths.tolist() == [0, 1, 2]
    assert column([torch.ones(2), torch.ones(3)]).values.dtype == np.float32
    assert column([[], []]).shape == (2, 0)


def test_text_is_a_list_and_bytes_are_byte_strings() -> None:
    assert column(["", "é", "long text"]) == ["", "é", "long text"]
    assert list(column([b"", b"\0ab", b"c"])) == [b"", b"\0ab", b"c"]
    assert list(column([b"", b""])) == [b"", b""]
    assert column([b"a"]).is_bytes


def test_values_uneven_in_another_dimension_are_a_list_of_arrays() -> None:
    images = [np.zeros((size, size + 1, 3), np.uint8) for size in (2, 5)]
    assert [image.shape for image in column(images)] == [(2, 3, 3), (5, 6, 3)]
    assert [value.ndim for value in column([np.zeros(2), np.zeros((2, 2))])] == [1, 2]
    polygons = column([[[1, 2], [3, 4, 5]], [[6]]])
    assert [[points.tolist() for points in row] for row in polygons] == [[[1, 2], [3, 4, 5]], [[6]]]


def test_dicts_are_dicts_of_columns() -> None:
    targets = [{"boxes": np.zeros((n, 4)), "size": {"height": n}, "name": str(n)} for n in (1, 0)]
    found = column(targets)
    assert found["boxes"].lengths.tolist() == [1, 0]
    assert found["size"]["height"].tolist() == [1, 0]
    assert found["name"] == ["1", "0"]
    even = column(targets[:1], ragged=["value.boxes"])
    assert isinstance(even["boxes"], Ragged)


def test_a_column_that_a_function_gives_back_stays_what_it_was() -> None:
    for lengths in ([5, 0, 2], [3, 3], [4]):
        data = tokens_dataset(lengths)
        plain = data.batch(len(lengths)).read(0)["tokens"]
        mapped = data.map(lambda row: row).map(lambda row: {**row, "n": 1}).batch(len(lengths)).read(0)["tokens"]
        assert isinstance(mapped, Ragged)
        assert [one.tolist() for one in mapped] == [one.tolist() for one in plain]


def test_a_column_that_is_padded_to_one_length_is_an_array() -> None:
    def pad(row: Row) -> Row:
        row["tokens"] = np.resize(row["tokens"], 4)
        return row

    assert tokens_dataset([5, 3, 2]).map(pad).batch(3).read(0)["tokens"].shape == (3, 4)


def test_the_next_map_gets_rows_of_whatever_the_one_before_returned() -> None:
    def make(row: Row) -> Row:
        n = int(row["x"])
        return {"target": {"boxes": np.ones((n, 4)), "image": np.ones((n, n))}, "name": "a" * n, "raw": b"b" * n}

    def look(row: Row) -> Row:
        n = len(row["name"])
        assert row["target"]["boxes"].shape == (n, 4)
        assert row["target"]["image"].shape == (n, n)
        assert row["raw"] == b"b" * n
        return row | {"n": n}

    data = penstock.from_arrays({"x": np.arange(4)})
    batch = data.map(make, ragged="target.boxes").map(look).batch(4).read(0)
    assert batch["n"].tolist() == [0, 1, 2, 3]
    one = data.map(make, ragged="target.boxes").map(look).batch(1).read(2)
    assert isinstance(one["target"]["boxes"], Ragged)


def test_what_is_said_to_be_ragged_must_be() -> None:
    with pytest.raises(SchemaError, match=r"returned 'value' as int64 \[\]; rows of a ragged column differ in their"):
        column([1, 2], ragged="value")
    with pytest.raises(ValueError, match="a function of a batch returns `Ragged` columns itself"):
        tokens_dataset([2]).map(lambda batch: batch, batched=True, ragged="tokens")
    with pytest.raises(TypeError, match=r"map\(ragged=\(1,\)\): the names of columns are needed"):
        tokens_dataset([2]).map(lambda batch: batch, ragged=[1])  # type: ignore[list-item]


def test_only_a_plan_that_says_ragged_has_another_fingerprint() -> None:
    from .functions import jitter

    data = tokens_dataset([2, 3])
    plain, said = data.map(jitter), data.map(jitter, ragged="tokens")
    assert plain.fingerprint != said.fingerprint
    assert plain.order_fingerprint == said.order_fingerprint
    assert data.map(jitter, ragged=()).fingerprint == plain.fingerprint
    assert "map(jitter, ragged=['tokens'])" in repr(said)

"""What crosses the network: bodies of safetensors, and requests in paths."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load

from guarding import guarded
from penstock.errors import FormatError, SchemaError
from penstock.loader import PlacedArray, PlacedRagged
from penstock.schema import Ragged
from penstock.service._wire import BatchRequest, decode, encode
from penstock.shards import checksum

DTYPES = st.sampled_from(["bool", "uint8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64"])
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.text("abcxyz_0123456789", min_size=1, max_size=6)
VALUES = st.recursive(
    ARRAYS | PLAIN | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def received(parts: dict[str, Any], body: memoryview) -> dict[str, Any]:
    """The batch that lies in a body."""
    return {
        key: part.view(body) if isinstance(part, PlacedArray | PlacedRagged) else part for key, part in parts.items()
    }


def travelled(batch: dict[str, Any]) -> dict[str, Any]:
    body = memoryview(b"".join(encode(batch, "one").buffers))
    values, arrangement = decode(body)
    assert arrangement == "one"
    return received(values, body)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, Ragged):
        return same(left.values, right.values) and same(left.offsets, right.offsets) and left.is_bytes == right.is_bytes
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_a_batch_arrives_as_it_was_sent(batch: dict[str, Any]) -> None:
    assert same(travelled(batch), batch)


@given(st.lists(st.integers(0, 5), max_size=6), st.booleans())
def test_rows_of_uneven_length_arrive_as_they_were_sent(lengths: list[int], is_bytes: bool) -> None:
    ragged = Ragged.from_lengths(np.arange(sum(lengths), dtype=np.uint8), lengths, is_bytes)
    assert same(travelled({"x": ragged}), {"x": ragged})


@given(st.lists(st.lists(st.binary(max_size=3), max_size=3), max_size=4))
def test_rows_of_several_byte_strings_arrive_as_they_were_sent(rows: list[list[bytes]]) -> None:
    strings = [each for row in rows for each in row]
    values = Ragged.from_lengths(np.frombuffer(b"".join(strings), np.uint8), list(map(len, strings)), True)
    ragged = Ragged.from_lengths(values, list(map(len, rows)))
    assert same(travelled({"x": ragged}), {"x": ragged})
    assert list(travelled({"x": [ragged]})["x"][0]) == rows


@given(st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=5))
def test_a_body_is_a_safetensors_file_whose_arrays_are_aligned(batch: dict[str, Any]) -> None:
    body = b"".join(encode(batch, "one").buffers)
    assert same(load(body), batch)
    values, _ = decode(memoryview(body))
    assert all(array.offset % np.dtype(array.dtype).itemsize == 0 for array in values.values())


def test_bodies_have_one_length_and_one_checksum_however_they_are_cut() -> None:
    body = encode({"x": np.arange(1000), "y": np.zeros(7, np.uint8)}, "one")
    whole = b"".join(body.buffers)
    assert len(whole) == body.num_bytes
    assert body.checksum() == checksum(whole)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([None]), {1}, object(), np.datetime64("2020-01-01")])
def test_what_cannot_travel_is_named_with_its_type(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"'x' .*cannot be sent|dtype"):
        encode({"x": value}, "one")


def test_names_that_would_meet_on_the_way_are_refused() -> None:
    batch = {"x": Ragged(np.arange(2), np.array([0, 2])), "x.values": np.arange(3)}
    with pytest.raises(SchemaError, match=r"'x\.values'"):
        encode(batch, "one")


@given(st.binary(max_size=200), st.integers(0, 300))
def test_a_damaged_or_forged_body_is_a_format_error_and_nothing_else(noise: bytes, place: int) -> None:
    body = bytearray(b"".join(encode({"x": np.arange(20), "y": {"z": b"ab"}}, "one").buffers))
    body[place : place + len(noise)] = noise
    try:
        values, _ = decode(memoryview(body))
        received(values, memoryview(body))
    except FormatError:
        pass


@pytest.mark.parametrize("form", ["raw", "tensor"])
def test_an_answer_cannot_become_more_than_was_sent(form: str) -> None:
    """A megabyte that is in a list a thousand times would be copied a thousand times."""
    megabyte = np.zeros(1 << 20, np.uint8)
    whole = b"".join(encode({"x": megabyte}, "one").buffers)
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    for count, names in ((1000, ["x"] * 1000), (1000, [f"x{number}" for number in range(1000)])):
        forged = dict.fromkeys(names, header["x"])
        said = {"x": {"list": [{form: name} for name in names]}}
        metadata = {"penstock.form": json.dumps(said), "penstock.arrangement": "one"}
        text = json.dumps({"__metadata__": metadata, **forged}).encode()
        body = memoryview(bytearray(len(text).to_bytes(8, "little") + text + megabyte.tobytes()))
        with guarded(), pytest.raises(FormatError, match=r"claim to be 1,048,576,000|is not a batch \(KeyError: 'x'\)"):
            assert len(decode(body)[0]["x"]) == count


@given(st.tuples(*[st.integers(0, 2**62 - 1)] * 2, st.integers(1, 9), st.integers(1, 9)))
def test_a_request_is_read_back_from_its_path(numbers: tuple[int, int, int, int]) -> None:
    row, rank, world, steps = numbers
    request = BatchRequest("ab12", row, steps, rank % world, world, 0, 1)
    segments = request.path.split("/")[3:]
    assert BatchRequest.parse(dict(zip(BatchRequest._fields, segments, strict=True))) == request


@pytest.mark.parametrize(
    "segments",
    [
        "f/-1/1/0/1/0/1",
        "f/0/0/0/1/0/1",
        "f/0/1/1/1/0/1",
        "f/0/1/0/1/1/1",
        "f/x/1/0/1/0/1",
        "f/0/2/0/1/1/2",
        f"f/{2**62}/1/0/1/0/1",
        "f/٣/1/0/1/0/1",
    ],
)
def test_numbers_without_meaning_are_refused(segments: str) -> None:
    with pytest.raises(ValueError, match=r"range|number|parts"):
        BatchRequest.parse(dict(zip(BatchRequest._fields, segments.split("/"), strict=True)))

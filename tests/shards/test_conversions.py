"""Every dtype is read into every other as numpy converts it, wherever its bytes are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.schema import Ragged, Schema
from penstock.shards import ArrayStorage, Spans

NUMBERS = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float32", "float64"]
dtypes = st.sampled_from(NUMBERS)


def some_values(dtype: str, count: int, seed: int) -> NDArray[Any]:
    """Numbers that every dtype has, and of integers any, at an address of any kind."""
    rng = np.random.default_rng(seed)
    drawn = rng.bytes(count * 8) if "int" in dtype and seed % 2 else rng.integers(0, 100, count, np.int64).tobytes()
    values = np.frombuffer(drawn, np.int64)
    memory = np.zeros(count * 8 + 16, np.uint8)
    placed = memory[seed % 8 :][: count * np.dtype(dtype).itemsize].view(dtype)
    placed[:] = values.astype(dtype)
    return placed


def converted(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    return values.astype(dtype)


@given(dtypes, dtypes, st.integers(0, 40), st.integers(0, 9), st.integers(0, 2**32))
def test_samples_are_converted_as_numpy_does(stored: str, wanted: str, num_samples: int, width: int, seed: int) -> None:
    if stored.startswith("float") and wanted != stored:
        seed -= seed % 2
    values = some_values(stored, num_samples * width, seed).reshape(num_samples, width)
    schema = Schema.parse({"x": f"{stored}[{width}]"})
    storage = ArrayStorage(schema, {"x": values})
    indices = np.random.default_rng(seed).integers(-num_samples, max(1, num_samples), 2 * num_samples if width else 0)
    indices = indices[::2]  # in memory, every other one
    if not num_samples or not width:
        return
    out = np.full((len(indices), width), 77, wanted)
    storage.read_fixed(schema["x"], indices, out)
    assert out.tolist() == converted(values[indices], wanted).tolist()


@given(dtypes, dtypes, st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(0, 2**32))
def test_parts_of_samples_are_converted_as_numpy_does(stored: str, wanted: str, lengths: list[int], seed: int) -> None:
    values = some_values(stored, sum(lengths), seed)
    schema = Schema.parse({"x": f"{stored}[*]"})
    storage = ArrayStorage(schema, {"x": Ragged.from_lengths(values, lengths)})
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, len(lengths), 20)
    firsts = rng.integers(0, np.array(lengths)[indices] + 1)
    sizes = rng.integers(0, np.array(lengths)[indices] - firsts + 1)
    out = np.full(sizes.sum(), 77, wanted)
    storage.read_spans(schema["x"], Spans(indices, firsts, sizes, np.cumsum(sizes) - sizes), out)
    begins = (np.cumsum(lengths) - lengths)[indices] + firsts
    parts = [values[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    assert out.tolist() == converted(np.concatenate(parts), wanted).tolist()


@given(dtypes, dtypes, st.integers(1, 30), st.integers(1, 10), st.integers(0, 2**32))
def test_a_stream_of_elements_is_converted_as_numpy_does(
    stored: str, wanted: str, num_samples: int, length: int, seed: int
) -> None:
    values = some_values(stored, num_samples * 3, seed)
    schema = Schema.parse({"x": f"{stored}[*]"})
    storage = ArrayStorage(schema, {"x": Ragged.from_lengths(values, [3] * num_samples)})
    length = min(length, len(values))
    firsts = np.random.default_rng(seed).integers(0, len(values) - length + 1, 7)
    out = np.full((7, length), 77, wanted)
    storage.read_stream(schema["x"], firsts, out)
    expected = [converted(values[first : first + length], wanted).tolist() for first in firsts]
    assert out.tolist() == expected


def test_any_byte_but_zero_is_true() -> None:
    flags = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    schema = Schema.parse({"x": "bool"})
    out = np.empty((4,), np.int64)
    ArrayStorage(schema, {"x": flags}).read_fixed(schema["x"], np.arange(4), out)
    assert out.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("first", [-1, 1, 5])
def test_elements_that_do_not_exist_are_refused_before_they_are_read(first: int) -> None:
    schema = Schema.parse({"x": "int64[*]"})
    storage = ArrayStorage(schema, {"x": Ragged.from_lengths(np.arange(4), [2, 2])})
    with pytest.raises(TypeError, match="shards_gather_stream does not take"):
        storage.read_stream(schema["x"], np.array([first]), np.empty((1, 4), np.int64))

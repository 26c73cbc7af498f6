"""Datasets to write and read back, their bytes as the yardstick: NaNs and negative zeros must survive."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import penstock
from penstock.schema import Column, Ragged, Schema

DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)

# The first example compiles kernels, so no deadline.
law = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
short_law = settings(law, max_examples=25)

Sample = dict[str, Any]


@dataclass(frozen=True)
class Written:
    """A dataset as it was handed to the writer."""

    columns: dict[str, str]
    samples: list[Sample]
    shard_bytes: int

    @property
    def schema(self) -> Schema:
        return Schema.parse(self.columns)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes away; in memory where possible, because every dataset written is synced."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="penstock-test-") as folder:
        yield Path(folder)


def random_array(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of random bytes: every NaN payload occurs."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    return (raw & 1 if dtype == np.bool_ else raw).view(dtype).reshape(shape)


def random_value(rng: np.random.Generator, column: Column, length: int) -> Any:
    if column.kind == "bytes":
        return rng.bytes(length)
    if column.kind == "byte_strings":
        return [rng.bytes(int(size)) for size in rng.integers(0, 5, length % 4)]
    shape = (length, *column.shape) if column.is_ragged else column.shape
    return random_array(rng, column.dtype, shape)


def random_samples(columns: Mapping[str, str], lengths: list[int], seed: int) -> list[Sample]:
    """One sample per length; the ragged columns of a sample differ a little in length."""
    rng = np.random.default_rng(seed)
    schema = Schema.parse(columns)
    return [
        {column.name: random_value(rng, column, (length + place) % 23) for place, column in enumerate(schema.columns)}
        for length in lengths
    ]


@st.composite
def specs(draw: st.DrawFn) -> str:
    """Any type that a column can have, sizes of 0 included."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(["bytes", "bytes[*]"]))
    sizes = [str(size) for size in draw(st.lists(st.integers(0, 4), max_size=3))]
    if draw(st.booleans()):
        sizes.insert(0, "*")
    return draw(st.sampled_from(DTYPES)) + (f"[{','.join(sizes)}]" if sizes else "")


names = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="."), min_size=1, max_size=8).filter(
    lambda name: not name.startswith("__")
)


@st.composite
def datasets(draw: st.DrawFn, *, min_samples: int = 0) -> Written:
    """Any schema, from no sample to a few dozen, in shards of one sample and up."""
    columns = draw(st.dictionaries(names, specs(), min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(0, 12), min_size=min_samples, max_size=20))
    shard_bytes = draw(st.sampled_from([1, 40, 300, 1 << 20]))
    return Written(columns, random_samples(columns, lengths, draw(st.integers(0, 2**32))), shard_bytes)


def write(path: Path, written: Written, **options: Any) -> Path:
    """Write a dataset sample by sample."""
    with penstock.DatasetWriter(path, written.columns, shard_bytes=written.shard_bytes, **options) as writer:
        for sample in written.samples:
            writer.write(sample)
    return path


def as_batch(written: Written, samples: list[Sample]) -> dict[str, Any]:
    """Samples as `write_batch` takes them."""
    batch: dict[str, Any] = {}
    for column in written.schema.columns:
        values = [sample[column.name] for sample in samples]
        batch[column.name] = values if column.is_ragged else _stack(column, values)
    return batch


def _stack(column: Column, values: list[NDArray[Any]]) -> NDArray[Any]:
    return np.stack(values) if values else np.empty((0, *column.shape), column.dtype)


def to_bytes(value: Any) -> tuple[Any, ...]:
    """What must be equal: dtype, shape and every byte."""
    if isinstance(value, bytes):
        return (value,)
    if isinstance(value, list):
        return len(value), b"".join(len(each).to_bytes(8, "little") + each for each in value)
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def assert_sample(found: Sample, expected: Sample) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert to_bytes(found[name]) == to_bytes(expected[name]), name


def assert_columns(found: Mapping[str, Any], written: Written, samples: list[Sample]) -> None:
    """Columns read at once are these samples, side by side."""
    assert list(found) == list(written.columns)
    for column in written.schema.columns:
        values, expected = found[column.name], [sample[column.name] for sample in samples]
        assert len(values) == len(expected)
        assert isinstance(values, Ragged) == column.is_ragged
        if not column.is_ragged:
            assert to_bytes(values) == to_bytes(_stack(column, expected))
            continue
        assert values.is_nested == (column.kind == "byte_strings")
        if values.is_nested:
            assert list(values) == expected
            continue
        assert values.values.dtype == column.dtype
        assert values.values.shape[1:] == column.shape
        assert values.offsets[0] == 0
        assert values.offsets[-1] == len(values.values)
        assert [to_bytes(value) for value in values] == [to_bytes(value) for value in expected]


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def shard_paths(path: Path) -> list[Path]:
    return sorted(path.glob("shard-*.safetensors"))

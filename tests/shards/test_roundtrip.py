"""Write-then-read is the identity, byte for byte, whatever the way in and the way out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import SchemaError
from penstock.schema import Column, dtype_from_name
from penstock.shards import read_manifest

from .folders import add_provenance
from .independent_reader import read_dataset
from .strategies import (
    DTYPES,
    Written,
    as_batch,
    assert_columns,
    assert_sample,
    datasets,
    files_of,
    law,
    random_samples,
    scratch,
    shard_paths,
    short_law,
    to_bytes,
    write,
)

IOS = ("map", "pread")
CHECKS = ("window", "open", "never")


@law
@given(datasets(), st.sampled_from(IOS), st.sampled_from(CHECKS))
def test_what_is_written_is_what_is_read(written: Written, io: Any, check: Any) -> None:
    with scratch() as folder:
        ds = penstock.open(write(folder / "ds", written), io=io, check=check)
        assert len(ds) == len(written.samples)
        assert ds.schema == written.schema
        for index, expected in enumerate(written.samples):
            assert_sample(ds[index], expected)
            assert_sample(ds[index - len(ds)], expected)
        assert_columns(ds[:], written, written.samples)


@law
@given(datasets(min_samples=1), st.data())
def test_any_indices_are_read_alike_by_map_by_pread_and_from_ram(written: Written, data: st.DataObject) -> None:
    count = len(written.samples)
    indices = data.draw(st.lists(st.integers(-count, count - 1), max_size=30))
    with scratch() as folder:
        mapped = penstock.open(write(folder / "ds", written), io="map")
        for ds in (mapped, penstock.open(folder / "ds", io="pread"), mapped.in_memory()):
            assert_columns(ds.read(indices), written, [written.samples[index] for index in indices])


@pytest.mark.parametrize("name", ["100%d", '"checksums":"', "é\\%%"])
def test_names_that_look_like_parts_of_a_header_are_names(name: str, tmp_path: Path) -> None:
    with penstock.DatasetWriter(tmp_path / "ds", {name: "uint16[*]"}) as writer:
        writer.write_batch({name: [[1, 2], [3]]})
    (shard,) = shard_paths(tmp_path / "ds")
    with safetensors.safe_open(shard, "numpy") as file:
        assert file.get_tensor(f"{name}.values").tolist() == [1, 2, 3]
    assert penstock.open(tmp_path / "ds").lengths(name).tolist() == [2, 1]


@short_law
@given(datasets(), st.data())
def test_slices_are_those_of_a_list(written: Written, data: st.DataObject) -> None:
    chosen = data.draw(st.slices(len(written.samples)))
    with scratch() as folder:
        for io in IOS:
            ds = penstock.open(write(folder / io, written), io=io)
            assert_columns(ds[chosen], written, written.samples[chosen])


@law
@given(datasets(), st.data())
def test_batches_and_samples_give_the_same_files(written: Written, data: st.DataObject) -> None:
    count = len(written.samples)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    with scratch() as folder:
        one_by_one = files_of(write(folder / "a", written))
        with penstock.DatasetWriter(folder / "b", written.columns, shard_bytes=written.shard_bytes) as writer:
            for begin, end in zip([0, *cuts], [*cuts, count], strict=True):
                writer.write_batch(as_batch(written, written.samples[begin:end]))
        assert files_of(folder / "b") == one_by_one


@short_law
@given(datasets(), st.data())
def test_appending_continues_the_dataset(written: Written, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(written.samples)))
    with scratch() as folder:
        write(folder / "ds", Written(written.columns, written.samples[:cut], written.shard_bytes))
        write(folder / "ds", Written(written.columns, written.samples[cut:], written.shard_bytes), mode="append")
        assert_columns(penstock.open(folder / "ds")[:], written, written.samples)


@short_law
@given(datasets())
def test_a_dataset_in_ram_is_the_dataset(written: Written) -> None:
    with scratch() as folder:
        ds = penstock.open(write(folder / "ds", written)).in_memory()
    assert ds.schema == written.schema
    for found, expected in zip(ds, written.samples, strict=True):
        assert_sample(found, expected)
    for column in written.schema.columns:
        if column.is_ragged:
            assert ds.lengths(column.name).tolist() == [len(sample[column.name]) for sample in written.samples]


@short_law
@given(datasets(min_samples=1), st.sampled_from(IOS))
def test_lengths_are_those_of_the_samples(written: Written, io: Any) -> None:
    with scratch() as folder:
        ds = penstock.open(write(folder / "ds", written), io=io)
        for column in written.schema.columns:
            if column.is_ragged:
                assert ds.lengths(column.name).tolist() == [len(sample[column.name]) for sample in written.samples]


@short_law
@given(datasets())
def test_a_reader_written_from_the_documentation_alone_reads_the_same(written: Written) -> None:
    with scratch() as folder:
        write(folder / "ds", written)
        read = read_dataset(folder / "ds")
    for name in written.columns:
        assert read[name] == [to_bytes(sample[name])[-1] for sample in written.samples]


def test_the_documentation_holds_for_many_blocks_for_appended_samples_and_for_provenance(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    columns = {"x": "uint16[*]", "row": "float32[3]"}
    samples = [{"x": rng.integers(0, 9, size, np.uint16), "row": rng.random(3, np.float32)} for size in (700_000, 0, 3)]
    for mode in ("create", "append"):
        with penstock.DatasetWriter(tmp_path, columns, mode=mode, attributes={mode: [1.5]}) as writer:
            for sample in samples:
                writer.write(sample)
    add_provenance(tmp_path, {"sources": []})
    read = read_dataset(tmp_path)
    assert {name: [sample[name].tobytes() for sample in 2 * samples] for name in columns} == read


@short_law
@given(datasets())
def test_the_safetensors_library_opens_every_shard(written: Written) -> None:
    with scratch() as folder:
        entries = read_manifest(write(folder / "ds", written)).shards
        done = 0
        for entry in entries:
            samples = written.samples[done : done + entry.num_samples]
            done += entry.num_samples
            with safetensors.safe_open(folder / "ds" / entry.name, "pt") as file:
                assert_tensors(file, written, samples)
        assert done == len(written.samples)


def assert_tensors(file: Any, written: Written, samples: list[dict[str, Any]]) -> None:
    assert json.loads(file.metadata()["columns"]) == written.columns
    for column in written.schema.stored.columns:
        values = [_tensor_of(column, sample) for sample in samples]
        name = column.name
        if column.is_ragged:
            edges = np.concatenate([[0], np.cumsum([len(value) for value in values])])
            assert file.get_tensor(f"{column.name}.offsets").tolist() == edges.tolist()
            name = f"{column.name}.values"
        tensor = file.get_tensor(name)
        expected = np.concatenate(values) if column.is_ragged else np.stack(values)
        assert tuple(tensor.shape) == expected.shape
        assert str(tensor.dtype) == f"torch.{column.dtype.name}"
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == expected.tobytes()


def _tensor_of(column: Column, sample: dict[str, Any]) -> Any:
    """What a sample puts into a column that shards hold."""
    value = sample[column.name.removesuffix(".sizes")]
    if column.name.endswith(".sizes"):
        return np.array([len(each) for each in value], np.int64)
    joined = b"".join(value) if isinstance(value, list) else value
    return np.frombuffer(joined, np.uint8) if isinstance(joined, bytes) else joined


@law
@given(datasets(min_samples=1))
def test_every_tensor_is_aligned_and_the_data_begins_on_a_page(written: Written) -> None:
    with scratch() as folder:
        for path in shard_paths(write(folder / "ds", written)):
            raw = path.read_bytes()
            begin = 8 + int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:begin])
            assert begin % 4096 == 0
            header.pop("__metadata__")
            tensors = [entry["data_offsets"] for entry in header.values()]
            # No gap and no overlap, in file order, up to the last byte.
            assert [0, *(end for _, end in tensors)] == [*(start for start, _ in tensors), len(raw) - begin]
            for column in written.schema.columns:
                name = f"{column.name}.values" if column.is_ragged else column.name
                assert header[name]["data_offsets"][0] % column.dtype.itemsize == 0
                if column.is_ragged:
                    assert header[f"{column.name}.offsets"]["data_offsets"][0] % 8 == 0
            assert header["__crc32c__"]["data_offsets"][0] % 4 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("io", IOS)
def test_all_bytes_of_each_dtype_survive(dtype: str, io: Any, tmp_path: Path) -> None:
    kind = dtype_from_name(dtype)
    raw = np.arange(256, dtype=np.uint8).repeat(kind.itemsize)
    every = (raw & 1 if dtype == "bool" else raw).view(kind)
    with penstock.DatasetWriter(tmp_path / "ds", {"x": dtype, "r": f"{dtype}[*]"}) as writer:
        writer.write_batch({"x": every, "r": [every, every[:0], *[every[:1]] * 254]})
    ds = penstock.open(tmp_path / "ds", io=io)
    columns = ds.read(range(256))
    assert to_bytes(columns["x"]) == to_bytes(every)
    assert to_bytes(columns["r"][0]) == to_bytes(every)
    assert b"".join(sample["x"].tobytes() for sample in ds) == every.tobytes()


WIDER = [
    ("bool", "int64"),
    ("bool", "float32"),
    ("uint8", "uint16"),
    ("uint16", "int64"),
    ("uint16", "uint64"),
    ("int8", "float16"),
    ("int32", "float64"),
    ("int64", "float64"),
    ("float16", "float32"),
    ("float32", "float64"),
    ("float32", "complex64"),
    ("complex64", "complex128"),
    ("bfloat16", "float32"),
    ("float8_e5m2", "float32"),
    ("float8_e4m3fn", "float64"),
    ("uint16", ">i8"),
]


@pytest.mark.parametrize(("stored", "wanted"), WIDER)
@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("shape", ["", "[3]", "[2,0]"])
def test_out_may_be_wider_and_is_filled_and_returned(
    stored: str, wanted: str, io: Any, shape: str, tmp_path: Path
) -> None:
    written = Written({"x": stored + shape}, random_samples({"x": stored + shape}, [0] * 40, 3), 64)
    ds = penstock.open(write(tmp_path / "ds", written), io=io)
    indices = [5, -1, 5, 0, 39, 7]
    plain = ds.read(indices)["x"]
    out = np.full((6, *plain.shape[1:]), 1, np.dtype(wanted))
    with np.errstate(all="ignore"):  # signalling NaNs among the random bytes
        assert ds.read(indices, out={"x": out})["x"] is out
        np.testing.assert_array_equal(out, plain.astype(wanted))


@pytest.mark.parametrize("io", IOS)
def test_out_need_not_be_contiguous(io: Any, tmp_path: Path) -> None:
    samples = [{"x": np.array([n, n + 1])} for n in range(30)]
    ds = penstock.open(write(tmp_path / "ds", Written({"x": "int64[2]"}, samples, 50)), io=io)
    out = np.zeros((8, 4), np.int64)
    ds.read([29, 0, 3, 3], out={"x": out[::2, ::2]})
    assert out.tolist() == [[29, 0, 30, 0], [0] * 4, [0, 0, 1, 0], [0] * 4, *[[3, 0, 4, 0], [0] * 4] * 2]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"x": np.empty(3, np.int16)}, r"'x': out is int16 of shape \[3\]; writeable int32 \(or wider\)"),
        ({"x": np.empty(3, np.float32)}, "out is float32"),
        ({"x": np.empty(3, np.uint64)}, "out is uint64"),
        ({"x": np.empty(2, np.int64)}, r"shape \[2\]; .* shape \[3\] is needed"),
        ({"x": np.empty((3, 1), np.int64)}, r"shape \[3, 1\]"),
        ({"x": np.broadcast_to(np.int32(0), 3)}, "out is read-only int32"),
        ({"r": np.empty(3, np.int32)}, "'r' is ragged; its size is not known"),
        ({"y": np.empty(3, np.int32)}, "No column 'y'"),
    ],
)
@pytest.mark.parametrize("io", IOS)
def test_an_out_that_does_not_fit_is_refused(out: Any, message: str, io: Any, tmp_path: Path) -> None:
    written = Written({"x": "int32", "r": "int32[*]"}, [{"x": 1, "r": [1]}] * 3, 1 << 20)
    ds = penstock.open(write(tmp_path / "ds", written), io=io)
    with pytest.raises(SchemaError, match=message):
        ds.read([0, 1, 2], out=out)


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("columns", [{"x": "int32"}, {"x": "int32[*]"}, {"x": "bytes"}, {"x": "int32[0]"}])
def test_an_empty_dataset_is_a_dataset(columns: dict[str, str], io: Any, tmp_path: Path) -> None:
    ds = penstock.open(write(tmp_path / "ds", Written(columns, [], 100)), io=io, check="open")
    assert len(ds) == 0
    assert list(ds) == []
    assert len(ds[:]["x"]) == len(ds.read([])["x"]) == 0
    assert len(ds.in_memory()) == 0
    for index in (0, -1):
        with pytest.raises(IndexError, match="out of range for 0 samples"):
            ds[index]
        with pytest.raises(IndexError, match="out of range for 0 samples"):
            ds.read([index])


@pytest.mark.parametrize("index", [7, -8, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("io", [*IOS, "ram"])
@pytest.mark.parametrize("spec", ["int64", "int64[*]"])
def test_an_index_out_of_range_is_an_error(spec: str, io: Any, index: int, tmp_path: Path) -> None:
    samples = random_samples({"x": spec}, [1] * 7, 0)
    ds = penstock.open(write(tmp_path / "ds", Written({"x": spec}, samples, 20)), io="map" if io == "ram" else io)
    ds = ds.in_memory() if io == "ram" else ds
    with pytest.raises(IndexError, match="out of range for 7 samples"):
        ds.read([0, index])
    with pytest.raises(IndexError, match="out of range for 7 samples"):
        ds[index]


def test_unsigned_indices_beyond_int64_do_not_wrap_around(tmp_path: Path) -> None:
    ds = penstock.from_arrays({"x": np.arange(3)})
    with pytest.raises(IndexError, match="18446744073709551615 is out of range"):
        ds.read(np.array([2**64 - 1], np.uint64))
    assert ds.read(np.array([2, 0], np.uint64))["x"].tolist() == [2, 0]


def test_a_sample_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    samples = [{"x": b"a"}, {"x": b"b" * 5000}, {"x": b"c"}]
    path = write(tmp_path / "ds", Written({"x": "bytes"}, samples, 100))
    assert [shard.num_samples for shard in read_manifest(path).shards] == [1, 1, 1]
    assert [sample["x"] for sample in penstock.open(path)] == [b"a", b"b" * 5000, b"c"]


def test_columns_of_many_blocks_and_windows_are_read_right(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2**16, (3000, 2048), np.uint16)  # 12 MB: three windows, 24 blocks
    lengths = rng.integers(0, 9000, 3000)
    tokens = penstock.Ragged(rng.integers(0, 256, lengths.sum(), np.uint8), np.concatenate([[0], np.cumsum(lengths)]))
    with penstock.DatasetWriter(tmp_path / "ds", {"x": "uint16[2048]", "t": "uint8[*]"}, shard_bytes=10 << 20) as w:
        w.write_batch({"x": rows, "t": tokens})
    indices = rng.integers(0, 3000, 500)
    for io in IOS:
        found = penstock.open(tmp_path / "ds", io=io).read(indices)
        assert np.array_equal(found["x"], rows[indices])
        assert all(np.array_equal(found["t"][place], tokens[index]) for place, index in enumerate(indices.tolist()))


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        ("uint8", 256, r"holds uint8 \(0 to 255\); the values go from 256 to 256"),
        ("uint8", -1, "go from -1 to -1"),
        ("uint16[*]", [1, 70000], "go from 1 to 70000. Declare a wider dtype"),
        ("int64", 1.5, "float64 would lose information"),
        ("int64", [1], r"an array of shape \[1\] does not fit"),
        ("int64[2]", [1, 2, 3], r"an array of shape \[3\] does not fit"),
        ("int64[*]", 5, r"an array of shape \[\] does not fit"),
        ("int64[*]", [[1]], "does not fit"),
        ("bool", 1, "int64 would lose information"),
        ("float32", 1j, "complex128 would lose information"),
        ("bfloat16", 1j, "complex128 would lose information"),
        ("bfloat16", np.zeros((), "V2"), "is not a number"),
        ("int64", "5", "str is not a number"),
        ("int64", None, "NoneType is not a number"),
        ("int64[*]", [1, [2]], "this value cannot be converted to an array"),
        ("int64", 2**64, "is not a number"),
        ("bytes", "text", "holds bytes, not str: encode it"),
        ("bytes", 5, "holds bytes; this value is int"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_nothing_is_written(
    spec: str, value: Any, message: str, tmp_path: Path
) -> None:
    with penstock.DatasetWriter(tmp_path / "ds", {"good": "int64", "x": spec}) as writer:
        with pytest.raises(SchemaError, match=message) as caught:
            writer.write({"good": 1, "x": value})
        assert "Column 'x'" in str(caught.value)
        with pytest.raises(SchemaError):
            writer.write_batch({"good": [1], "x": [value]})
    assert len(penstock.open(tmp_path / "ds")) == 0


def test_missing_and_unknown_columns_are_named(tmp_path: Path) -> None:
    with penstock.DatasetWriter(tmp_path / "ds", {"a": "int64", "b": "int64"}) as writer:
        with pytest.raises(SchemaError, match=r"missing here: \['b'\], unknown: \['c'\]"):
            writer.write({"a": 1, "c": 2})
        with pytest.raises(SchemaError, match=r"the same number of samples; these have \{'a': 2, 'b': 1\}"):
            writer.write_batch({"a": [1, 2], "b": [1]})


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 2, 1, 3], [], [0, 2**62, -(2**62), 3]])
def test_a_ragged_whose_offsets_are_unsound_is_refused(offsets: list[int], tmp_path: Path) -> None:
    ragged = penstock.Ragged(np.arange(3), np.array(offsets, np.int64))
    with (
        penstock.DatasetWriter(tmp_path / "ds", {"x": "int64[*]"}) as writer,
        pytest.raises(SchemaError, match="offsets must be non-decreasing, from 0 to the number of values"),
    ):
        writer.write_batch({"x": ragged})


def bfloat16(*bits: int) -> Any:
    return np.array(bits, np.uint16).view(ml_dtypes.bfloat16)


GOLDEN = Written(
    {"tokens": "uint16[*]", "label": "int64", "half": "bfloat16[2]", "jpeg": "bytes"},
    [
        {"tokens": [1, 2, 3], "label": -7, "half": bfloat16(0x3FC0, 0x8000), "jpeg": b"\xff\xd8"},
        {"tokens": [], "label": 2**62, "half": bfloat16(0x7FC0, 0x7F80), "jpeg": b""},
        {"tokens": [65535], "label": 0, "half": bfloat16(0, 0x4040), "jpeg": b"\x00" * 5},
    ],
    80,
)
GOLDEN_MANIFEST = """\
{
 "format": "penstock",
 "version": 1,
 "columns": {"tokens": "uint16[*]", "label": "int64", "half": "bfloat16[2]", "jpeg": "bytes"},
 "samples": 3,
 "attributes": {"source": "golden"},
 "shards": [
  {"name": "shard-000000-e9d4358165ace985.safetensors", "samples": 2, "values": {"tokens": 3, "jpeg": 2}, \
"bytes": 4200, "header_bytes": 4096, "header_crc32c": "04b97b7d"},
  {"name": "shard-000001-42694fa2958c5605.safetensors", "samples": 1, "values": {"tokens": 1, "jpeg": 5}, \
"bytes": 4171, "header_bytes": 4096, "header_crc32c": "3911859b"}
 ],
 "crc32c": "d8b069cb"
}
"""
GOLDEN_HEADER = (
    '{"__metadata__":{"format":"penstock","columns":"{\\"tokens\\":\\"uint16[*]\\",\\"label\\":\\"int64\\",'
    '\\"half\\":\\"bfloat16[2]\\",\\"jpeg\\":\\"bytes\\"}","checksums":"799dd587"},'
    '"tokens.offsets":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
    '"label":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},'
    '"jpeg.offsets":{"dtype":"I64","shape":[2],"data_offsets":[24,40]},'
    '"__crc32c__":{"dtype":"U32","shape":[6],"data_offsets":[40,64]},'
    '"tokens.values":{"dtype":"U16","shape":[1],"data_offsets":[64,66]},'
    '"half":{"dtype":"BF16","shape":[1,2],"data_offsets":[66,70]},'
    '"jpeg.values":{"dtype":"U8","shape":[5],"data_offsets":[70,75]}}'
)
GOLDEN_DATA = bytes.fromhex(
    "0000000000000000 0100000000000000"  # tokens.offsets
    "0000000000000000"  # label
    "0000000000000000 0500000000000000"  # jpeg.offsets
    "cde74c0b 8ab2288c a065512a 0000ffff 7f900bf6 35767245"  # __crc32c__
    "ffff"  # tokens.values
    "0000 4040"  # half
    "0000000000"  # jpeg.values
)
GOLDEN_SHARDS = {
    "shard-000000-e9d4358165ace985.safetensors": "1661c7f7f2415f5e86451ff391fa485fe6d903825420f092bb9ec2ddcf8d9f9a",
    "shard-000001-42694fa2958c5605.safetensors": "6ea2483d85572bccc44eab58196c1297540e8a2a7729fc539a9d22f7aa84a4b4",
}


def test_format_version_1_never_changes_by_a_byte(tmp_path: Path) -> None:
    files = files_of(write(tmp_path / "ds", GOLDEN, attributes={"source": "golden"}))
    assert files.pop("manifest.json").decode() == GOLDEN_MANIFEST
    last = files["shard-000001-42694fa2958c5605.safetensors"]
    assert last[:8] == (4088).to_bytes(8, "little")
    assert last[8:4096].decode() == GOLDEN_HEADER.ljust(4088)
    assert last[4096:] == GOLDEN_DATA
    assert {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()} == GOLDEN_SHARDS


def test_fingerprints_never_change(tmp_path: Path) -> None:
    path = write(tmp_path / "ds", GOLDEN, attributes={"source": "golden"})
    assert read_manifest(path).fingerprint == "78746ed461fc8888ca49d777ec144612"
    assert penstock.open(path).fingerprint == "1b9f7051902c71c5215db52e0e69c221"

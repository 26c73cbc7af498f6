"""The table of dtypes against the safetensors library, which is what "every dtype" means."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch

from penstock.errors import SchemaError
from penstock.schema import dtype_from_name, dtype_name, dtype_tag

TAGS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
# What safetensors 0.8 has besides: numbers of four and six bits, which no array can address.
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def write_tensor(path: Path, tag: str, num_items: int, data: bytes) -> Path:
    header = json.dumps({"x": {"dtype": tag, "shape": [num_items], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def dtypes_of_the_library(path: Path) -> set[str]:
    """What its parser lists when it meets a dtype that it does not know."""
    with pytest.raises(safetensors.SafetensorError) as caught, safetensors.safe_open(path, "np"):
        pass
    listed = str(caught.value).partition("expected one of")[2].partition("at line")[0]
    return {name.strip(" `") for name in listed.split(",")}


def test_every_dtype_of_the_library_is_in_the_table_unless_it_is_packed(tmp_path: Path) -> None:
    known = dtypes_of_the_library(write_tensor(tmp_path / "x", "NOT_A_DTYPE", 1, b"\0"))
    assert known == {*TAGS.values(), *PACKED}


@pytest.mark.parametrize(("name", "tag"), TAGS.items())
def test_a_name_leads_to_a_little_endian_dtype_its_tag_and_back(name: str, tag: str) -> None:
    dtype = dtype_from_name(name)
    assert (dtype_name(dtype), dtype_tag(dtype)) == (name, tag)
    assert dtype.newbyteorder("<") == dtype
    assert dtype == np.dtype(getattr(ml_dtypes, name, None) or name)


@pytest.mark.parametrize(("name", "tag"), TAGS.items())
def test_the_library_opens_a_tensor_of_each_dtype_with_the_same_bytes(name: str, tag: str, tmp_path: Path) -> None:
    dtype = dtype_from_name(name)
    data = bytes([0, 1] * dtype.itemsize)
    path = write_tensor(tmp_path / "x", tag, len(data) // dtype.itemsize, data)
    with safetensors.safe_open(path, "pt") as file:
        tensor = file.get_tensor("x")
    assert tensor.element_size() == dtype.itemsize
    assert tensor.view(torch.uint8).numpy().tobytes() == data
    assert str(tensor.dtype) == f"torch.{name}"


@pytest.mark.parametrize("dtype", ["U3", "S3", "O", "M8[ns]", "longdouble", "c16", "V2", "i4,i4"])
def test_a_dtype_that_no_shard_can_hold_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(SchemaError, match=r"No shard can hold dtype .* Known: bool, uint8"):
        dtype_name(np.dtype(dtype))


def test_a_big_endian_dtype_has_the_name_of_the_little_endian_one() -> None:
    assert dtype_name(np.dtype(">i4")) == "int32"

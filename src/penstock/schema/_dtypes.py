"""The dtypes a column can have, each with its two names, and Python's numbers as arrays without numpy's rounding.

Safetensors uses a short tag ("U16", "BF16"), people write numpy's name ("uint16", "bfloat16").
One table maps between them. Every safetensors dtype that fills whole bytes is here; the packed four- and
six-bit floats are not, because neither numpy nor a memory map can address half a byte.

numpy has no integer type for -1 beside 2**63, so it makes floats of a list that holds an int64 and a larger integer:
`np.asarray([1, 2**63 + 5])` is `[1.0, 2.0**63]`. Hashes of 64 bits are such lists. It rounds large integers among
floats, too. Only floats beyond 2**53 can be rounded integers, so other lists cost no more than a comparison.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.errors import SchemaError

_TAG_OF_NAME = {
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


_NAME_OF_TAG = {tag: name for name, tag in _TAG_OF_NAME.items()}


@functools.cache
def dtype_from_name(name: str) -> np.dtype[Any]:
    """The little-endian dtype called `name`."""
    if name not in _TAG_OF_NAME:
        raise SchemaError(f"{name!r} is not a dtype that a shard can hold. Known: {', '.join(_TAG_OF_NAME)}.")
    if _is_extended(name):
        import ml_dtypes  # 40 ms to import, and most datasets have neither

        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return extended
    dtype = np.dtype(name)
    # numpy prints an explicit byte order ('<u2'), even if it is the machine's own.
    return dtype if sys.byteorder == "little" else dtype.newbyteorder("<")


def _is_extended(name: str) -> bool:
    """Whether numpy itself does not know the dtype, nor torch how to hand it to numpy."""
    return name == "bfloat16" or name.startswith("float8")


@functools.cache  # numpy rebuilds a dtype's name each time, in 9 us
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name of `dtype` as people write it; `SchemaError` when no shard can hold it."""
    if dtype.name not in _TAG_OF_NAME:
        raise SchemaError(f"No shard can hold dtype {dtype.name!r}. Known: {', '.join(_TAG_OF_NAME)}.")
    return dtype.name


def dtype_tag(dtype: np.dtype[Any]) -> str:
    """Name of `dtype` in a safetensors header."""
    return _TAG_OF_NAME[dtype_name(dtype)]


def dtype_from_tag(tag: str) -> np.dtype[Any]:
    """Dtype by its name in a safetensors header; `SchemaError` if unknown."""
    if tag not in _NAME_OF_TAG:
        raise SchemaError(f"{str(tag)[:20]!r} is not a safetensors dtype that numpy can hold.")
    return dtype_from_name(_NAME_OF_TAG[tag])


def name_of_dtype(dtype: DTypeLike) -> str:
    """Name of a dtype given as text, which may be one that numpy itself does not know, or as numpy's own.

    Raises:
        SchemaError: no shard can hold it, or its bytes are in the other order, which a name does not say.
    """
    if isinstance(dtype, str):
        return dtype_name(dtype_from_name(dtype))
    given = np.dtype(dtype)
    if given.newbyteorder("<") != given:
        raise SchemaError(
            f"dtype {given.str} is big-endian; shards and raw files hold little-endian numbers. "
            f"Write them so: array.astype({given.newbyteorder('<').str!r})."
        )
    return dtype_name(given)


def array_of_tensor(tensor: Any) -> NDArray[Any]:
    """A torch tensor as an array, of any dtype and from any device; it shares the memory of one on the CPU."""
    tensor, name = tensor.detach().cpu(), str(tensor.dtype).removeprefix("torch.")
    if not _is_extended(name):
        plain: NDArray[Any] = tensor.numpy()
        return plain
    torch = sys.modules["torch"]
    bits: NDArray[Any] = tensor.view(torch.int16 if name == "bfloat16" else torch.uint8).numpy()
    return bits.view(dtype_from_name(name))


_FIRST_INEXACT = 2.0**53
_END_OF_UINT64 = 1 << 64


def exact_array(value: Any) -> NDArray[Any]:
    """The value as `np.asarray` gives it, but integers that it would round as uint64, or else as objects.

    >>> exact_array([1, 2**63 + 5]).tolist(), exact_array([-1, 2**63 + 5]).dtype
    ([1, 9223372036854775813], dtype('O'))
    """
    array = np.asarray(value)
    if array.dtype.kind != "f" or not isinstance(value, (list, tuple)) or not (np.abs(array) >= _FIRST_INEXACT).any():
        return array
    items = np.array(value, object)
    pairs = [pair for pair in zip(items.ravel().tolist(), array.ravel().tolist(), strict=True) if _is_whole(pair[0])]
    if len(pairs) == items.size and all(0 <= item < _END_OF_UINT64 for item, _ in pairs):
        return items.astype(np.uint64)
    return array if all(int(item) == number for item, number in pairs) else items


def _is_whole(item: Any) -> bool:
    return isinstance(item, (int, np.integer))


def common_dtype(arrays: list[NDArray[Any]]) -> np.dtype[Any]:
    """The dtype that holds all arrays: numpy's, but uint64 for integers that numpy would make floats of.

    >>> common_dtype([np.array([1]), np.array([2**63 + 5])])
    dtype('uint64')
    """
    dtype: np.dtype[Any] = np.result_type(*{array.dtype for array in arrays})
    is_whole = all(array.dtype.kind in "iub" for array in arrays)
    if dtype.kind == "f" and is_whole and not any((array < 0).any() for array in arrays):
        return np.dtype(np.uint64)
    return dtype

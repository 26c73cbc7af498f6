"""Dtypes, columns and schemas, and the one-line language they are written in.

"int64"               one number per sample
"uint8[224,224,3]"    an array of a fixed shape
"uint16[*]"           an array whose first dimension differs from sample to sample
"float32[*,16]"       the same, followed by fixed dimensions
"bytes"               a byte string: an encoded image, a text
"bytes[*]"            any number of byte strings: the images of a document

A stored schema may have one more column, `__xxh64__`: a hash of each sample, which Penstock writes and never shows.

Safetensors uses a short tag for a dtype ("U16", "BF16"), people write numpy's name ("uint16", "bfloat16"): one table
has both. Every safetensors dtype that fills whole bytes is in it; the packed four- and six-bit floats are not, because
neither numpy nor a memory map can address half a byte.

numpy has no integer type for -1 beside 2**63, so it makes floats of a list that holds an int64 and a larger integer:
`np.asarray([1, 2**63 + 5])` is `[1.0, 2.0**63]`. Hashes of 64 bits are such lists. It rounds large integers among
floats, too. Only floats beyond 2**53 can be rounded integers, so other lists cost no more than a comparison.
"""

from __future__ import annotations

import functools
import math
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.errors import SchemaError, did_you_mean

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

Kind = Literal["fixed", "ragged", "bytes", "byte_strings"]

MAX_COLUMNS = 1024
MAX_DIMENSIONS = 32
# numpy refuses an array whose sizes multiply past 2**63 even when one of them is 0.
MAX_ITEM_BYTES = 1 << 40
_SPEC = re.compile(r"(?P<dtype>[a-z0-9_]+)(\[(?P<shape>[0-9*, ]*)\])?", re.ASCII)
HASH_COLUMN = "__xxh64__"
LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "domain", "source", "subset", "language", "lang")
"""Names that people give to columns of classes or sources."""
_HASH_SPEC = "uint64"
# A dot would collide with `x.values` and `x.offsets`, two underscores with `__crc32c__`; a lone surrogate has no
# UTF-8, so safetensors would not open the file. `__key__` is what WebDataset calls the name of a sample.
_NAME = re.compile(r"(?!__(?!key__$))[^\x00-\x1f\x7f.\ud800-\udfff]{1,200}")


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
    both = zip(items.ravel().tolist(), array.ravel().tolist(), strict=True)
    pairs = [pair for pair in both if isinstance(pair[0], (int, np.integer))]
    if len(pairs) == items.size and all(0 <= item < _END_OF_UINT64 for item, _ in pairs):
        return items.astype(np.uint64)
    return array if all(int(item) == number for item, number in pairs) else items


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


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a dataset: its name, dtype and shape.

    >>> Column.parse("tokens", "uint16[*]")
    Column(name='tokens', dtype=dtype('uint16'), shape=(), kind='ragged')
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of one sample, or of one element of a ragged sample."""
    kind: Kind = "fixed"

    @classmethod
    def parse(cls, name: str, spec: str) -> Column:
        """Column called `name` from its one-line description."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SchemaError(
                f"{reprlib.repr(name)} cannot name a column: "
                "1 to 200 printable characters, no dot, not starting with '__' (but '__key__' is fine)."
            )
        if spec in ("bytes", "bytes[*]"):
            return cls(name, np.dtype("u1"), (), "bytes" if spec == "bytes" else "byte_strings")
        match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
        if match is None:
            raise SchemaError(
                f"Column {name!r} has the type {reprlib.repr(spec)}. "
                "Write 'int64', 'uint8[224,224,3]', 'uint16[*]', 'bytes' or 'bytes[*]'."
            )
        kind, shape = _parse_shape(name, spec, match["shape"])
        dtype = dtype_from_name(match["dtype"])
        _check_item(name, dtype, shape)
        return cls(name, dtype, shape, kind)

    @property
    def spec(self) -> str:
        """The one-line description that `parse` reads."""
        if self.kind in ("bytes", "byte_strings"):
            return "bytes" if self.kind == "bytes" else "bytes[*]"
        dimensions = [*(["*"] if self.is_ragged else []), *map(str, self.shape)]
        return dtype_name(self.dtype) + (f"[{','.join(dimensions)}]" if dimensions else "")

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in length; byte strings do."""
        return self.kind != "fixed"

    @property
    def is_per_token(self) -> bool:
        """Whether a sample can have a number for each of its tokens, as a loss mask has."""
        return self.kind == "ragged" and not self.shape

    @property
    def stored(self) -> tuple[Column, ...]:
        """The columns that a shard holds for it: the strings of a `bytes[*]` lie side by side, with their sizes beside.

        No other column's tensors have the names of the sizes', because no name has a dot.
        """
        if self.kind != "byte_strings":
            return (self,)
        sizes = Column(f"{self.name}.sizes", np.dtype("<i8"), (), "ragged")
        return (Column(self.name, self.dtype, (), "bytes"), sizes)

    @property
    def num_items(self) -> int:
        """Numbers in one sample, or in one element of a ragged sample."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one sample, or of one element of a ragged sample."""
        return self.num_items * self.dtype.itemsize


def _parse_shape(name: str, spec: str, text: str | None) -> tuple[Kind, tuple[int, ...]]:
    if text is None:
        return "fixed", ()
    first, *rest = [part.strip() for part in text.split(",")]
    sizes = rest if first == "*" else [first, *rest]
    if not all(size.isdigit() and len(size) < 10 for size in sizes):
        raise SchemaError(
            f"Column {name!r}: {reprlib.repr(spec)} is not a shape: use numbers, with at most one '*' in front."
        )
    return ("ragged" if first == "*" else "fixed"), tuple(int(size) for size in sizes)


def _check_item(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    num_bytes = dtype.itemsize * math.prod(max(1, size) for size in shape)
    if len(shape) > MAX_DIMENSIONS or num_bytes > MAX_ITEM_BYTES:
        raise SchemaError(
            f"Column {name!r} has {len(shape)} dimensions of {num_bytes:,} bytes; "
            f"the limits are {MAX_DIMENSIONS} and {MAX_ITEM_BYTES:,}."
        )


@dataclass(frozen=True, slots=True)
class Schema(Mapping[str, Column]):
    """The columns of a dataset, in order.

    >>> schema = Schema.parse({"tokens": "uint16[*]", "label": "int64"})
    >>> schema["label"].dtype
    dtype('int64')
    >>> schema.to_json()
    {'tokens': 'uint16[*]', 'label': 'int64'}
    """

    columns: tuple[Column, ...]

    @classmethod
    def parse(cls, columns: Mapping[str, str]) -> Schema:
        """Schema from `{name: one-line description}`."""
        if not columns:
            raise SchemaError("A dataset needs at least one column.")
        if len(columns) > MAX_COLUMNS:
            raise SchemaError(f"{len(columns):,} columns requested; a dataset can have at most {MAX_COLUMNS:,}.")
        return cls(tuple(Column.parse(name, spec) for name, spec in columns.items()))

    @classmethod
    def parse_stored(cls, columns: Mapping[str, str]) -> Schema:
        """Schema from a manifest, which may end with a column of sample hashes."""
        shown = dict(columns)
        is_hashed = shown.pop(HASH_COLUMN, None) == _HASH_SPEC and list(columns)[-1] == HASH_COLUMN
        return cls.parse(shown).with_hashes() if is_hashed else cls.parse(columns)

    def with_hashes(self) -> Schema:
        """The same columns, plus a hash of each sample."""
        return Schema((*self.columns, Column(HASH_COLUMN, np.dtype("<u8"), ())))

    @property
    def stored(self) -> Schema:
        """The columns that a shard holds."""
        if all(column.kind != "byte_strings" for column in self.columns):
            return self
        return Schema(tuple(part for column in self.columns for part in column.stored))

    @property
    def shown(self) -> Schema:
        """The columns that people see."""
        return Schema(tuple(column for column in self.columns if column.name != HASH_COLUMN))

    def to_json(self) -> dict[str, str]:
        """The form that `parse_stored` reads; without hashes, `parse` reads it too."""
        return {column.name: column.spec for column in self.columns}

    def select(self, names: Iterable[str]) -> Schema:
        """Schema of these columns, in this order; a single one may come without a list."""
        chosen = tuple(self[name] for name in ((names,) if isinstance(names, str) else names))
        if not chosen or len(set(chosen)) != len(chosen):
            raise SchemaError(f"Choose at least one column, each once; the columns are {', '.join(map(repr, self))}.")
        return Schema(chosen)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise SchemaError(
            f"No column {name!r}; the columns are {', '.join(map(repr, self))}.{did_you_mean(name, self)}"
        )

    def get(self, name: str, default: Any = None) -> Any:
        """The column called `name`, or `default`."""
        return next((column for column in self.columns if column.name == name), default)

    def __contains__(self, name: object) -> bool:
        return any(column.name == name for column in self.columns)

    def __iter__(self) -> Iterator[str]:
        return (column.name for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __str__(self) -> str:
        return ", ".join(f"{column.name}: {column.spec}" for column in self.columns)

"""Where each tensor lies in a shard file, as a pure function of schema and counts.

A shard is a safetensors file: a u64 header length, a JSON header, the bytes. A fixed column `x` is
the tensor `x`; a ragged one is `x.values` and `x.offsets` (n + 1 numbers from 0); `__crc32c__` holds
the checksums of their blocks. Tensors are sorted by decreasing item size, so that each is aligned, and
spaces after the header put the first on a page boundary: safetensors allows spaces and forbids gaps.

Because nothing here is a choice, a header is not interpreted when a shard is opened: the only header
that its manifest allows is computed and compared, byte for byte, and entry by entry if another program
made it. Overlaps, gaps, huge shapes and wrong dtypes cannot pass, and none of them needs its own rule.

CRC32C over blocks of 512 KiB.

Small enough to pin down a flipped bit to half a megabyte, large enough that the table takes 8 bytes
per MiB and the checksum runs at 14 GB/s without the GIL. Each tensor has its own blocks, counted from
its first byte, so reading one column never checks another.
"""

import functools
import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import crc32c
import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.schema import Column, Schema, dtype_tag

BLOCK_BYTES = 512 << 10


def checksum(data: bytes | bytearray | memoryview | NDArray[np.uint8], before: int = 0) -> int:
    """CRC32C of `data`; with `before`, the checksum of earlier bytes, that of those bytes followed by `data`."""
    return int(crc32c.crc32c(data.data if isinstance(data, np.ndarray) else data, before))


def num_blocks(num_bytes: int) -> int:
    """Blocks that `num_bytes` bytes fill; the last may be short."""
    return -(-num_bytes // BLOCK_BYTES)


def block_checksums(data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """CRC32C of each block of `data`."""
    starts = range(0, len(data), BLOCK_BYTES)
    return np.array([checksum(data[start : start + BLOCK_BYTES]) for start in starts], np.uint32)


def join_checksums(checksums: Iterable[int]) -> int:
    """CRC32C of whole blocks side by side, from the CRC32C of each, so that one call can check many blocks."""
    low, second, third, high = _moves()
    joined = 0
    for value in checksums:
        moved = low[joined & 255] ^ second[joined >> 8 & 255] ^ third[joined >> 16 & 255] ^ high[joined >> 24]
        joined = moved ^ value
    return joined


@functools.cache
def _moves() -> list[list[int]]:
    """What each byte of a checksum becomes if a block follows: crc(a + b) = move(crc(a)) ^ crc(b), with linear move.

    Measured on the library itself, bit by bit (1 ms, once).
    """
    zeros = bytes(BLOCK_BYTES)
    nothing = crc32c.crc32c(zeros)
    bits = [crc32c.crc32c(zeros, 1 << bit) ^ nothing for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0]
        for bit in bits[8 * byte : 8 * byte + 8]:
            table += [entry ^ bit for entry in table]
        tables.append(table)
    return tables


MAX_HEADER_BYTES = 16 << 20
ALIGNMENT = 4096  # a page on most machines; a constant, so that every machine writes the same bytes
CHECKSUMS = "__crc32c__"
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MAX_TENSOR_BYTES = 1 << 62
_OFFSET, _CHECKSUM = np.dtype("<i8"), np.dtype("<u4")
_BEFORE_CHECKSUM = b'"checksums":"'


def values_name(column: Column) -> str:
    """Name of the tensor that holds a column's numbers."""
    return f"{column.name}.values" if column.is_ragged else column.name


def offsets_name(column: Column) -> str:
    """Name of the tensor that says where a ragged column's samples begin."""
    return f"{column.name}.offsets"


class Tensor(NamedTuple):
    """One tensor of a shard: bytes `begin` to `end`, counted from the end of the header."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int
    first_block: int
    """Place of its first block in the table of checksums."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin

    @property
    def is_addressable(self) -> bool:
        """Whether an array of this size can have its shape: numpy multiplies all sizes but the zeros, and so do we."""
        return (
            self.num_bytes > 0
            or math.prod(max(1, size) for size in self.shape) * self.dtype.itemsize <= _MAX_TENSOR_BYTES
        )

    def to_json(self) -> dict[str, Any]:
        """Its entry in a safetensors header."""
        return {
            "dtype": dtype_tag(self.dtype),
            "shape": list(self.shape),
            "data_offsets": [self.begin, self.end],
        }


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one shard in file order, and the bytes they take."""

    schema: Schema
    num_samples: int
    tensors: Mapping[str, Tensor]
    data_bytes: int

    @property
    def is_addressable(self) -> bool:
        """Whether every tensor can be an array."""
        return all(tensor.is_addressable for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is the same about a tensor in all shards of a schema."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int
    counts: str | None
    """The ragged column whose elements are its rows; None if it has one per sample."""
    num_more: int = 0


@functools.lru_cache(64)
def _kinds(schema: Schema) -> tuple[_Kind, ...]:
    """The tensors of every shard of a schema, in file order."""
    found = []
    for column in schema.stored.columns:
        counts = column.name if column.is_ragged else None
        found.append(_Kind(values_name(column), column.dtype, column.shape, column.item_bytes, counts))
        if column.is_ragged:
            found.append(_Kind(offsets_name(column), _OFFSET, (), _OFFSET.itemsize, None, num_more=1))
    found.append(_Kind(CHECKSUMS, _CHECKSUM, (), _CHECKSUM.itemsize, CHECKSUMS))
    return tuple(sorted(found, key=lambda kind: -kind.dtype.itemsize))


def plan_layout(schema: Schema, num_samples: int, num_values: Mapping[str, int]) -> Layout:
    """Layout of a shard of `num_samples` samples, with `num_values` elements in each ragged column."""
    kinds, num_rows = _kinds(schema), {**num_values, CHECKSUMS: 0}
    counts = [num_samples + kind.num_more if kind.counts is None else num_rows[kind.counts] for kind in kinds]
    blocks = [num_blocks(count * kind.row_bytes) for count, kind in zip(counts, kinds, strict=True)]
    tensors, begin, block, all_blocks = {}, 0, 0, sum(blocks)
    for kind, count, size in zip(kinds, counts, blocks, strict=True):
        rows = all_blocks if kind.name == CHECKSUMS else count
        end = begin + rows * kind.row_bytes
        tensors[kind.name] = Tensor(kind.name, kind.dtype, (rows, *kind.shape), begin, end, block)
        begin, block = end, block + size
    return Layout(schema, num_samples, tensors, begin)


def build_header(layout: Layout, table_checksum: int) -> bytes:
    """Header of a shard, preceded by its length and padded to a page."""
    numbers = [number for tensor in layout.tensors.values() for number in (tensor.shape[0], tensor.begin, tensor.end)]
    text = (_header_format(layout.schema) % (table_checksum, *numbers)).encode()
    padded = -(-(_LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT - _LENGTH_BYTES
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


@functools.lru_cache(64)
def _header_format(schema: Schema) -> str:
    """JSON of a header: the checksum of the table, and rows, begin and end of each tensor, are to be filled in."""
    metadata = _as_format(_metadata(schema, 0)).removesuffix('00000000"}') + '%08x"}'
    parts = [f"{_as_format(_METADATA)}:{metadata}"]
    for kind in _kinds(schema):
        shape = ",".join(["%d", *map(str, kind.shape)])
        tag = _as_format(dtype_tag(kind.dtype))
        parts.append(f'{_as_format(kind.name)}:{{"dtype":{tag},"shape":[{shape}],"data_offsets":[%d,%d]}}')
    return f"{{{','.join(parts)}}}"


def _as_format(value: object) -> str:
    return json.dumps(value, separators=(",", ":")).replace("%", "%%")


def match_header(raw: bytes, layout: Layout) -> int | None:
    """Checksum of the table, if a header is byte for byte what `build_header` makes; None if it may be wrong."""
    begin = raw.find(_BEFORE_CHECKSUM) + len(_BEFORE_CHECKSUM)
    try:
        value = int(raw[begin : begin + 8], 16)
    except ValueError:
        return None
    return value if raw == build_header(layout, value) else None


def _metadata(schema: Schema, table_checksum: int) -> dict[str, str]:
    return {
        "format": "penstock",
        "columns": _columns_text(schema),
        "checksums": f"{table_checksum:08x}",
    }


@functools.lru_cache(64)
def _columns_text(schema: Schema) -> str:
    return json.dumps(schema.to_json(), separators=(",", ":"))


def read_header(raw: bytes, layout: Layout, where: str) -> int:
    """Compare a shard's header with the only one `layout` allows; return the checksum of its table.

    Raises:
        FormatError: any difference, naming the tensor, what was found and what belongs there.
    """
    known = match_header(raw, layout)
    if known is not None:  # nearly always, in a fifth of the time
        return known
    entries = _parse(raw, where)
    metadata = entries.pop(_METADATA, None)
    if len(entries) != len(layout.tensors):
        raise FormatError(f"{where}: the header lists {len(entries):,} tensors; there should be {len(layout.tensors)}.")
    for tensor in layout.tensors.values():
        found = entries.get(tensor.name)
        if found != tensor.to_json():
            raise FormatError(
                f"{where}: tensor {tensor.name!r} should be {json.dumps(tensor.to_json())}, "
                f"but the header says {reprlib.repr(found)}."
            )
    return _table_checksum(metadata, layout.schema, where)


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        entries = json.loads(raw[_LENGTH_BYTES:])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the header is not JSON ({type(error).__name__}: {error}).") from None
    if not isinstance(entries, dict):
        raise FormatError(f"{where}: the header is JSON, but not an object.")
    return entries


def _table_checksum(metadata: object, schema: Schema, where: str) -> int:
    try:
        assert isinstance(metadata, dict)
        value = int(metadata["checksums"], 16)
    except (AssertionError, KeyError, TypeError, ValueError):
        raise FormatError(f"{where}: the header has no checksum of the table of checksums.") from None
    if metadata != _metadata(schema, value):
        raise FormatError(f"{where}: the header describes columns other than {schema}.")
    return value

"""The offsets of a whole shard, read and checked without opening the shard for good.

Lengths are asked of all shards at once, often of more than may stay open. What they need of a small shard are a few
kilobytes: its header, the offsets, and the table of checksums. Three reads take 30 us; an open shard, with a map and a
row of addresses, takes 200.

Nothing is judged here. If anything is not exactly as Penstock writes it, or too long to be worth a copy, the answer is
None; the caller then opens the shard, which says what is wrong.
"""

import os
import stat

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Schema
from penstock.shards._layout import BLOCK_BYTES, CHECKSUMS, checksum, match_header, offsets_name, plan_layout
from penstock.shards._manifest import ShardEntry

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OFFSET = np.dtype("<i8")


def read_offsets(
    path: str, entry: ShardEntry, schema: Schema, column: Column, *, is_trusted: bool
) -> NDArray[np.int64] | None:
    """All offsets of a ragged column, or None; if `is_trusted`, their checksum is not compared."""
    layout = plan_layout(schema, entry.num_samples, entry.num_values)
    tensor, table = layout.tensors[offsets_name(column)], layout.tensors[CHECKSUMS]
    num_bytes = entry.header_bytes + layout.data_bytes
    is_small = tensor.num_bytes <= BLOCK_BYTES and table.num_bytes <= BLOCK_BYTES
    if not is_small or entry.num_bytes != num_bytes or not layout.is_addressable:
        return None
    spans = (0, entry.header_bytes), *((entry.header_bytes + each.begin, each.num_bytes) for each in (tensor, table))
    parts = _read(path, num_bytes, spans)
    if parts is None:
        return None
    header, raw, sums = parts
    if checksum(header) != entry.header_checksum or len(raw) != tensor.num_bytes:
        return None
    table_checksum = match_header(header, layout)
    if table_checksum is None:
        return None
    if not is_trusted:
        expected = sums[4 * tensor.first_block : 4 * tensor.first_block + 4]
        if checksum(sums) != table_checksum or checksum(raw) != int.from_bytes(expected, "little"):
            return None
    offsets = np.frombuffer(raw, _OFFSET)
    is_valid = offsets[0] >= 0 and offsets[-1] <= entry.num_values[column.name]
    return offsets if is_valid and bool((offsets[1:] >= offsets[:-1]).all()) else None


def _read(path: str, num_bytes: int, spans: tuple[tuple[int, int], ...]) -> list[bytes] | None:
    """The bytes at each (begin, length) of a regular file of this size."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
            return None
        return [os.pread(descriptor, length, begin) for begin, length in spans]
    except OSError:
        return None
    finally:
        os.close(descriptor)

"""The compiled loops that copy samples out of many shards in one pass.

A table has one row per shard: `FILE`, `SIZE`, then `COLUMN_WIDTH` numbers per column, addresses among
them. Nothing is resolved in Python per sample: the kernel finds the shard, tests one state, and copies,
converting the dtype on the way, without the GIL. Measured on 32 rows of 2048 uint16 to int64: 26 us;
numpy's gather and conversion of a single array takes 32.

# NOTE [what may be dereferenced]
#   An address in a table is valid as long as the table is referenced: `Table.held` keeps the maps.
#   A sample lies inside its tensor because shard sizes were checked when the shard was opened, and
#   offsets are tested here each time they are read. Reading a file that shrank would fault, so its
#   size is checked whenever a call enters a shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from penstock.compiled import compiled
from penstock.shards._layout import BLOCK_BYTES
from penstock.shards._storage import ABSENT, COUNT, FILE, OFFSET_FLAGS, OFFSETS, READY, SIZE, STATE, VALUE_FLAGS, VALUES

DONE = -1
_SEEK_END = 2

# numba describes this to its compiler, not to a type checker.
_lseek: Any = types.ExternalFunction("lseek", types.int64(types.int32, types.int64, types.int32))


def _describe_pointer(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


_pointer: Any = intrinsic(_describe_pointer)


@compiled
def _find(starts: NDArray[np.int64], index: int) -> int:
    low, high = 0, len(starts) - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= index:
            low = middle
        else:
            high = middle
    return low


@compiled
def _can_enter(table: NDArray[np.int64], shard: int, slot: int) -> bool:
    """Whether the shard is open and its file still has its size."""
    if table[shard, slot + STATE] == ABSENT:
        return False
    file = table[shard, FILE]
    return bool(file < 0 or _lseek(np.int32(file), 0, _SEEK_END) == table[shard, SIZE])


@compiled
def _enter(table: NDArray[np.int64], starts: NDArray[np.int64], slot: int, index: int, previous: int) -> int:
    """The shard that holds `index`, or -1 if it cannot be entered; `previous` was entered before."""
    shard = _find(starts, index)
    return shard if shard == previous or _can_enter(table, shard, slot) else -1


@compiled
def _from_front(index: int, num_samples: int) -> int:
    """The index as a non-negative one, or -1 if there is no such sample."""
    if index < 0:
        index += num_samples
    return index if 0 <= index < num_samples else -1


@compiled
def _are_checked(flags_address: int, begin: int, end: int) -> bool:
    """Whether the blocks that hold bytes `begin` to `end` of a tensor were checked."""
    first, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
    flags = carray(_pointer(flags_address + first), max(0, last - first + 1), dtype=np.uint8)
    for flag in flags:  # noqa: SIM110 - numba compiles no generator expressions
        if flag == 0:
            return False
    return True


@compiled
def _find_sample(
    table: NDArray[np.int64], starts: NDArray[np.int64], slot: int, index: int, item_bytes: int
) -> tuple[int, int]:
    """(address, number of elements) of a ragged sample; (0, 0) if it is unchecked or its offsets are invalid."""
    shard = _find(starts, index)
    sample = index - starts[shard]
    is_ready = table[shard, slot + STATE] == READY
    if not (is_ready or _are_checked(table[shard, slot + OFFSET_FLAGS], sample * 8, sample * 8 + 16)):
        return 0, 0
    edges = carray(_pointer(table[shard, slot + OFFSETS] + sample * 8), 2, dtype=np.int64)
    begin, end = edges[0], edges[1]
    if begin < 0 or end < begin or end > table[shard, slot + COUNT]:
        return 0, 0
    if not (is_ready or _are_checked(table[shard, slot + VALUE_FLAGS], begin * item_bytes, end * item_bytes)):
        return 0, 0
    return table[shard, slot + VALUES] + begin * item_bytes, end - begin


@compiled
def gather(
    table: NDArray[np.int64],
    starts: NDArray[np.int64],
    slot: int,
    indices: NDArray[np.int64],
    begin: int,
    out: NDArray[Any],
    like: NDArray[Any],
) -> int:
    """Copy samples `indices[begin:]` of a fixed column into the rows of `out`; `like` has the stored dtype.

    Returns `DONE`, or the place in `indices` of the first sample that is not open or not checked, or
    `-2 - place` of an index out of range. Everything before that place is done.
    """
    num_items = out.shape[1]
    row_bytes = num_items * like.itemsize
    num_samples = starts[-1]
    entered = np.uint64(0)
    previous = -1
    for place in range(begin, len(indices)):
        index = _from_front(indices[place], num_samples)
        if index < 0:
            return -2 - place
        shard = _find(starts, index)
        if shard != previous:
            bit = np.uint64(1) << np.uint64(shard & 63)
            if len(starts) > 65 or not entered & bit:
                if not _can_enter(table, shard, slot):
                    return place
                entered |= bit
            previous = shard
        at = (index - starts[shard]) * row_bytes
        flags = table[shard, slot + VALUE_FLAGS]
        if table[shard, slot + STATE] != READY and not _are_checked(flags, at, at + row_bytes):
            return place
        source = carray(_pointer(table[shard, slot + VALUES] + at), num_items, dtype=like.dtype)
        for item in range(num_items):
            out[place, item] = source[item]
    return DONE


@compiled
def locate(
    table: NDArray[np.int64],
    starts: NDArray[np.int64],
    slot: int,
    indices: NDArray[np.int64],
    begin: int,
    item_bytes: int,
    sources: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> int:
    """Address of each ragged sample, and where it ends when they are laid side by side.

    Returns as `gather` does; a sample whose offsets decrease or exceed the values counts as not checked,
    so that the caller examines it and raises.
    """
    num_samples = starts[-1]
    previous = -1
    total = ends[begin - 1] if begin else 0
    for place in range(begin, len(indices)):
        index = _from_front(indices[place], num_samples)
        if index < 0:
            return -2 - place
        previous = _enter(table, starts, slot, index, previous)
        if previous < 0:
            return place
        address, size = _find_sample(table, starts, slot, index, item_bytes)
        if address == 0:
            return place
        sources[place] = address
        total += size
        ends[place] = total
    return DONE


@compiled
def measure(
    table: NDArray[np.int64],
    starts: NDArray[np.int64],
    slot: int,
    indices: NDArray[np.int64],
    begin: int,
    lengths: NDArray[np.int64],
) -> int:
    """Length of each ragged sample, from its offsets alone. Returns as `locate` does."""
    previous = -1
    for place in range(begin, len(indices)):
        shard = _enter(table, starts, slot, indices[place], previous)
        if shard < 0:
            return place
        previous = shard
        at = (indices[place] - starts[shard]) * 8
        is_ready = table[shard, slot + STATE] == READY
        if not (is_ready or _are_checked(table[shard, slot + OFFSET_FLAGS], at, at + 16)):
            return place
        edges = carray(_pointer(table[shard, slot + OFFSETS] + at), 2, dtype=np.int64)
        if edges[0] < 0 or edges[1] < edges[0] or edges[1] > table[shard, slot + COUNT]:
            return place
        lengths[place] = edges[1] - edges[0]
    return DONE


@compiled
def copy_spans(sources: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[Any], like: NDArray[Any]) -> None:
    """Copy each located sample to its place in `out`; `ends` are in items of `out`."""
    begin = 0
    for place in range(len(sources)):
        size = ends[place] - begin
        source = carray(_pointer(sources[place]), size, dtype=like.dtype)
        for item in range(size):
            out[begin + item] = source[item]
        begin = ends[place]


@compiled
def gather_spans(
    table: NDArray[np.int64],
    starts: NDArray[np.int64],
    slot: int,
    indices: NDArray[np.int64],
    firsts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    targets: NDArray[np.int64],
    begin: int,
    out: NDArray[Any],
    like: NDArray[Any],
) -> int:
    """Copy `sizes[k]` elements from `firsts[k]` of sample `indices[k]` to `out[targets[k]:]`, for k from `begin`.

    Returns as `locate` does; a span that exceeds its sample counts as invalid.
    """
    previous = -1
    for place in range(begin, len(indices)):
        previous = _enter(table, starts, slot, indices[place], previous)
        if previous < 0:
            return place
        address, size = _find_sample(table, starts, slot, indices[place], like.itemsize)
        first, wanted, target = firsts[place], sizes[place], targets[place]
        if address == 0 or first < 0 or wanted < 0 or first + wanted > size:
            return place
        source = carray(_pointer(address + first * like.itemsize), wanted, dtype=like.dtype)
        for item in range(wanted):
            out[target + item] = source[item]
    return DONE


@compiled
def gather_stream(
    table: NDArray[np.int64],
    value_starts: NDArray[np.int64],
    slot: int,
    firsts: NDArray[np.int64],
    begin: int,
    out: NDArray[Any],
    like: NDArray[Any],
) -> int:
    """Copy a row of consecutive elements from each of `firsts[begin:]`, across samples and shards.

    `value_starts` is to elements what `starts` is to samples. Returns as `gather` does.
    """
    for place in range(begin, len(firsts)):
        at, done, length = firsts[place], 0, out.shape[1]
        while done < length:
            shard = _enter(table, value_starts, slot, at, -1)
            if shard < 0:
                return place
            first = at - value_starts[shard]
            size = min(length - done, value_starts[shard + 1] - at)
            flags, width = table[shard, slot + VALUE_FLAGS], like.itemsize
            is_ready = table[shard, slot + STATE] == READY
            if not (is_ready or _are_checked(flags, first * width, (first + size) * width)):
                return place
            source = carray(_pointer(table[shard, slot + VALUES] + first * like.itemsize), size, dtype=like.dtype)
            for item in range(size):
                out[place, done + item] = source[item]
            at, done = at + size, done + size
    return DONE

"""The loops that copy samples out of many shards in one pass, in C: what each does, and how it is called.

Nothing is resolved in Python per sample, and nothing holds the GIL. Measured on 32 rows of 2048 uint16 to int64: 26 us;
numpy's gather and conversion of a single array takes 32. What may be dereferenced is noted in `_kernels.c`.
Indices may be every other one of an array; a kernel wants them in one piece.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.native import ARRAY, INT, kernel

DONE = -1

_gather = kernel("shards_gather", ARRAY, ARRAY, INT, ARRAY, INT, ARRAY, ARRAY)
_locate = kernel("shards_locate", ARRAY, ARRAY, INT, ARRAY, INT, INT, ARRAY, ARRAY)
_measure = kernel("shards_measure", ARRAY, ARRAY, INT, ARRAY, INT, ARRAY)
_copy_spans = kernel("shards_copy_spans", ARRAY, ARRAY, ARRAY)
_gather_spans = kernel("shards_gather_spans", ARRAY, ARRAY, INT, *[ARRAY] * 4, INT, ARRAY, ARRAY)
_gather_stream = kernel("shards_gather_stream", ARRAY, ARRAY, INT, ARRAY, INT, ARRAY, ARRAY)
_read_files = kernel("shards_read_files", *[ARRAY] * 5)


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
    return _gather(table, starts, slot, np.ascontiguousarray(indices), begin, out, like)


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
    return _locate(table, starts, slot, np.ascontiguousarray(indices), begin, item_bytes, sources, ends)


def measure(
    table: NDArray[np.int64],
    starts: NDArray[np.int64],
    slot: int,
    indices: NDArray[np.int64],
    begin: int,
    lengths: NDArray[np.int64],
) -> int:
    """Length of each ragged sample, from its offsets alone. Returns as `locate` does; no index may be negative."""
    return _measure(table, starts, slot, np.ascontiguousarray(indices), begin, lengths)


def copy_spans(
    sources: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[np.uint8], like: NDArray[np.uint8]
) -> None:
    """Copy the bytes of each located sample to its place in `out`; `ends` are in bytes."""
    _copy_spans(sources, ends, out)


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

    Returns as `locate` does, and no index may be negative; a span that exceeds its sample counts as invalid.
    """
    spans = map(np.ascontiguousarray, (indices, firsts, sizes, targets))
    return _gather_spans(table, starts, slot, *spans, begin, out, like)


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
    return _gather_stream(table, value_starts, slot, np.ascontiguousarray(firsts), begin, out, like)


def read_files(
    descriptors: NDArray[np.int64],
    begins: NDArray[np.int64],
    sizes: NDArray[np.int64],
    targets: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> int:
    """Read `sizes[k]` bytes from byte `begins[k]` of the open file `descriptors[k]` to `out[targets[k]:]`, for every k.

    Returns `DONE`, or the first k of which not all bytes were read.
    """
    return _read_files(*map(np.ascontiguousarray, (descriptors, begins, sizes, targets)), out)

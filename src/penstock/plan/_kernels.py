"""The loops that write everything a packed batch holds beside its tokens, in C: what each does, and how it is called.

Row numbers may be every other one of an array, as ranks share the rows of a step; a kernel wants them in one piece.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.native import ARRAY, INT, kernel

_extent = kernel("plan_extent", ARRAY, ARRAY)
_count_pieces = kernel("plan_count_pieces", *[ARRAY] * 6)
_count_set = kernel("plan_count_set", *[ARRAY] * 3)
_collect = kernel("plan_collect", *[ARRAY] * 8, INT, *[ARRAY] * 3)
_find_targets = kernel("plan_find_targets", *[ARRAY] * 3, INT, ARRAY)
_lay_out = kernel("plan_lay_out", *[ARRAY] * 4, INT, INT, *[ARRAY] * 7)
_deal = kernel("plan_deal", *[ARRAY] * 3, INT, *[ARRAY] * 3)
_cut = kernel("plan_cut", ARRAY, INT, INT, INT, ARRAY)
_LEAST_WORK, _ROUNDS = 1 << 14, 2


def extent(numbers: NDArray[np.int64]) -> tuple[int, int]:
    """(least, greatest) of some numbers; for a batch of them, a tenth of the time of numpy's two calls."""
    found = np.empty(2, np.int64)
    _extent(np.ascontiguousarray(numbers), found)
    least, greatest = found.tolist()
    return least, greatest


def count_set(flags: NDArray[np.uint8], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many flags from each edge to the next are not 0."""
    counts = np.empty(len(edges) - 1, np.int64)
    _count_set(flags, edges, counts)
    return counts


def collect(
    slots: NDArray[np.int64],
    rows: NDArray[np.int64],
    row_bases: NDArray[np.int64],
    row_offsets: NDArray[np.int32],
    piece_bases: NDArray[np.int64],
    documents: NDArray[np.int32],
    parts: NDArray[Any],
    first_documents: NDArray[np.int64],
    length: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(row offsets, documents, starts) of the pieces in row `rows[k]` of window `slots[k]`, for all k."""
    offsets = np.empty(len(rows) + 1, np.int64)
    windows = (slots, np.ascontiguousarray(rows), row_bases, row_offsets, piece_bases)
    _count_pieces(*windows, offsets)
    found, starts = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    _collect(*windows, documents, parts, first_documents, length, offsets, found, starts)
    return offsets, found, starts


def find_targets(
    row_offsets: NDArray[np.int64], sizes: NDArray[np.int64], rows: NDArray[np.int64], length: int
) -> NDArray[np.int64]:
    """Where each piece goes in the flat batch, when row r of the pieces is row `rows[r]` of the batch."""
    targets = np.empty(len(sizes), np.int64)
    _find_targets(row_offsets, sizes, np.ascontiguousarray(rows), length, targets)
    return targets


def lay_out(
    row_offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    bases: NDArray[np.int64],
    is_target: NDArray[np.uint8],
    shifted: bool,
    pad: int,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    document_ids: NDArray[np.int32],
    borders: NDArray[np.int32],
    row_targets: NDArray[np.int64],
) -> tuple[int, int]:
    """Fill the arrays of a batch whose tokens stand in `input_ids`; return (segments, longest segment).

    `bases` is the position of each piece's first token; `is_target`, one byte per place of the batch or
    empty, says which tokens may be predicted; `shifted` puts the label of a token one place before it.
    """
    counted = np.empty(2, np.int64)
    filled = (input_ids, labels, position_ids, document_ids, borders, row_targets)
    _lay_out(row_offsets, sizes, bases, is_target, shifted, pad, *filled, counted)
    num_segments, longest = counted.tolist()
    return num_segments, longest


def deal(costs: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows bin by bin, what each bin costs), costs as equal as bins of these sizes allow, or nearly so.

    Bin b has rows `starts[b]` to `starts[b + 1]` of those returned. Costs are not negative, and 2**40 at most.
    """
    dealt, sums = np.empty(len(costs), np.int64), np.empty(len(starts) - 1, np.int64)
    work = max(_LEAST_WORK, _ROUNDS * len(costs) * len(costs) // len(sums))
    by_cost = np.argsort(-costs, kind="stable")
    _deal(costs, by_cost, starts, work, np.empty(2 * len(sums), np.int64), sums, dealt)
    return dealt, sums


def cut(lengths: NDArray[np.int64], tokens: int, multiple: int, unit: int) -> NDArray[np.int64]:
    """Where each batch of rows of these lengths begins, and finally their number.

    A batch has as many rows as `tokens` hold when all are as wide as the longest, rounded up to a multiple of `unit`;
    their number is a multiple of `multiple`, of which even the longest rows fit, but for what is left over at the end.
    """
    borders = np.empty(len(lengths) // multiple + 2, np.int64)
    count = _cut(lengths, tokens, multiple, unit, borders)
    return borders[: count + 1]

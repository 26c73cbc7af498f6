"""The loops of packing, in C: what each does, and the arrays it works on.

Arrays are allocated here, also those that a kernel only needs while it runs.
"""

import numpy as np
import numpy.typing as npt

from penstock.native import ARRAY, INT, WORD, kernel

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_count_pieces = kernel("packing_count_pieces", ARRAY, ARRAY)
_count_rows = kernel("packing_count_rows", *[ARRAY] * 4)
_lay_out = kernel("packing_lay_out", ARRAY, INT, *[ARRAY] * 6)
_lay_out_vectors = kernel("packing_lay_out_vectors", ARRAY, ARRAY, INT, INT, *[ARRAY] * 7)
_sort_keys = kernel("packing_sort_keys", *[ARRAY] * 4)
_cut = kernel("packing_cut", ARRAY, INT, *[ARRAY] * 3)
_sort_falling = kernel("packing_sort_falling", *[ARRAY] * 3)
_gather_rows = kernel("packing_gather_rows", *[ARRAY] * 4)
shuffle_groups = kernel("packing_shuffle_groups", ARRAY, ARRAY, WORD, WORD)
"""Shuffle each group of values, those between two offsets, in place; by a key and the number of a stream."""
_take_pieces = kernel("packing_take_pieces", *[ARRAY] * 7)


def count_pieces(kept: Int64s, length: int) -> Int64s:
    """How many pieces of each length cutting makes; entry 0 counts what has no piece."""
    histogram = np.zeros(length + 1, np.int64)
    _count_pieces(kept, histogram)
    return histogram


def count_rows(histogram: Int64s) -> int:
    """The number of rows of the layout without a limit on documents, a whole shelf at a time."""
    return _count_rows(histogram, np.zeros_like(histogram), *_bitmap(histogram))


def lay_out(histogram: Int64s, num_pieces: int, max_documents: int) -> tuple[Int32s, Int32s]:
    """The row of every slot, slots being the pieces by decreasing length; and the number of pieces in each row."""
    slot_rows, row_sizes = np.empty(num_pieces, np.int32), np.zeros(num_pieces, np.int32)
    tops, below = np.empty(len(histogram), np.int32), np.empty(num_pieces, np.int32)
    num_rows = _lay_out(histogram, max_documents, slot_rows, row_sizes, tops, below, *_bitmap(histogram))
    return slot_rows, row_sizes[:num_rows].copy()


def sort_keys(keys: Words) -> Int32s:
    """The places of these keys, the largest first and equal ones in order."""
    order = np.empty(len(keys), np.int32)
    _sort_keys(keys.copy(), order, np.empty_like(keys), np.empty_like(order))
    return order


def lay_out_vectors(documents: Int64s, budgets: Int64s, num_opened: int) -> tuple[Int32s, Int32s]:
    """The row of every document, and the number of documents in each row; see `_kernels.c`.

    Args:
        documents: What each takes of every budget; one row of numbers per document.
        budgets: What a row has, tokens first.
        num_opened: So many rows are filled evenly; 0 opens rows as they are needed, and fills the tightest.
    """
    count, length = len(documents), int(budgets[0])
    num_classes = max(2, min(_MOST_CLASSES, int(budgets[1]) + 1, _MOST_SHELVES // (length + 1)))
    slot_rows, row_sizes, below = np.empty(count, np.int32), np.zeros(count, np.int32), np.empty(count, np.int32)
    rooms, tops = np.empty(documents.size, np.int64), np.empty(num_classes * (length + 1), np.int32)
    words = np.zeros(num_classes * ((length >> 6) + 1), np.uint64)
    summary = np.zeros(num_classes * ((length >> 12) + 1), np.uint64)
    scratch = (rooms, tops, below, words, summary)
    num_rows = _lay_out_vectors(documents, budgets, num_classes, num_opened, slot_rows, row_sizes, *scratch)
    return slot_rows, row_sizes[:num_rows].copy()


_MOST_CLASSES, _MOST_SHELVES = 17, 1 << 24
"""Classes of rows by the room left in the second budget, and shelves of all classes: 64 MiB."""


def _bitmap(histogram: Int64s) -> tuple[Words, Words]:
    """One bit for each shelf, and one for each word of those."""
    length = len(histogram) - 1
    return np.zeros((length >> 6) + 1, np.uint64), np.zeros((length >> 12) + 1, np.uint64)


def cut(kept: Int64s, length: int, num_pieces: int) -> tuple[Int64s, Int64s, Int32s]:
    """Documents, starts and lengths of all pieces, in the order of the documents."""
    pieces = np.empty(num_pieces, np.int64), np.empty(num_pieces, np.int64), np.empty(num_pieces, np.int32)
    _cut(kept, length, *pieces)
    return pieces


def sort_falling(lengths: Int32s, run_offsets: Int64s) -> Int32s:
    """The pieces by decreasing length; those of `length - k` tokens begin at `run_offsets[k]`."""
    ordered = np.empty(len(lengths), np.int32)
    _sort_falling(lengths, run_offsets.copy(), ordered)
    return ordered


def gather_rows(dealt: Int32s, slot_rows: Int32s, row_offsets: Int64s) -> Int32s:
    """The pieces row by row, given the piece dealt to each slot and the row of each slot."""
    pieces = np.empty(len(dealt), np.int32)
    _gather_rows(dealt, slot_rows, row_offsets.copy(), pieces)
    return pieces


def take_pieces(pieces: Int32s, documents: Int64s, starts: Int64s, lengths: Int32s) -> tuple[Int64s, Int64s, Int32s]:
    """Document, start and length of each piece, in the order of `pieces`."""
    count = len(pieces)
    taken = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int32)
    _take_pieces(pieces, documents, starts, lengths, *taken)
    return taken

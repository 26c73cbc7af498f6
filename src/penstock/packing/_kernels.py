"""The loops of packing, compiled: best fit in O(1) per piece, counting sort, and keyed shuffles.

Unfinished rows are kept on *shelves*: shelf f holds the rows with room for f more tokens. The best fit for a
piece of s tokens is any row of the lowest occupied shelf f >= s, which a bitmap of occupied shelves finds:
one bit per shelf in 64-bit words, one summary bit per word, and a scan over the summary (one word per
4,096 tokens of a row: 32 at 128 k, too few for a third level to pay). The shelf of untouched rows,
f = length, is never empty, so a search always ends and a new row is no special case.

Pieces come in runs of equal length s. If f is the lowest shelf that fits, one of its rows takes f // s pieces
in a row: after each its room is below f, so it stays the best fit as long as it fits. `count_rows` goes one step
further and moves all rows of a shelf at once, knowing only how many there are.

Invariant: `count_rows(h)` equals the number of rows of `lay_out(h)` without a limit, because rows with the
same room are alike. With a limit on documents they are not: then the row touched last goes first,
which depends on lengths only, so the count still does not depend on the key.

All numbers are integers and every shift is on uint64: the result is the same on every platform. Beware of
mixing int64 and uint64 here: numba turns them into float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock import splitmix
from penstock.compiled import compiled

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ONE, _HALF, _TOP_SIX = np.uint64(1), np.uint64(32), np.uint64(58)
_NOBODY = np.int32(-1)
_GAMMA, _mix = splitmix.GAMMA, compiled(splitmix.mix)


# --- the bitmap of occupied shelves -----------------------------------------------------------------------

# De Bruijn: multiplied by each of the 64 powers of two, this word has a different top 6 bits.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_EXPONENTS = np.empty(64, np.int64)
_EXPONENTS[[(int(_DE_BRUIJN) << exponent & (1 << 64) - 1) >> 58 for exponent in range(64)]] = range(64)


@compiled
def _make_bitmap(length: int) -> tuple[Words, Words]:
    """Bit f & 63 of words[f >> 6]: shelf f is occupied; bit w & 63 of summary[w >> 6]: words[w] is not 0.

    The arrays are passed one by one, not as a named tuple: numba counts references to a tuple's members at each
    call, which made a layout 1.5 times as slow.
    """
    words, summary = np.zeros((length >> 6) + 1, np.uint64), np.zeros((length >> 12) + 1, np.uint64)
    _mark(words, summary, length)
    return words, summary


@compiled
def _mark(words: Words, summary: Words, shelf: int) -> None:
    word = shelf >> 6
    words[word] |= _ONE << np.uint64(shelf & 63)
    summary[word >> 6] |= _ONE << np.uint64(word & 63)


@compiled
def _clear(words: Words, summary: Words, shelf: int) -> None:
    word = shelf >> 6
    words[word] &= ~(_ONE << np.uint64(shelf & 63))
    if words[word] == 0:
        summary[word >> 6] &= ~(_ONE << np.uint64(word & 63))


@compiled
def _lowest_from(words: Words, summary: Words, shelf: int) -> int:
    """The lowest occupied shelf with room for `shelf` tokens; there is one, that of untouched rows."""
    word = shelf >> 6
    bits = words[word] >> np.uint64(shelf & 63)
    if bits != 0:
        return shelf + _lowest_bit(bits)
    group, skipped = (word + 1) >> 6, np.uint64((word + 1) & 63)
    bits = summary[group] >> skipped << skipped
    while bits == 0:
        group += 1
        bits = summary[group]
    word = (group << 6) + _lowest_bit(bits)
    return (word << 6) + _lowest_bit(words[word])


@compiled
def _lowest_bit(word: np.uint64) -> int:
    """The place of the lowest 1 in a word that is not 0; numba has no public name for `cttz`."""
    alone = word & (~word + _ONE)
    return int(_EXPONENTS[(alone * _DE_BRUIJN) >> _TOP_SIX])


# --- the layout: from a histogram of piece lengths to rows ------------------------------------------------


@compiled
def count_pieces(kept: Int64s, length: int) -> Int64s:
    """How many pieces of each length cutting makes; entry 0 counts what has no piece."""
    histogram = np.zeros(length + 1, np.int64)
    for size in kept:
        if size > length:  # divide only here: it costs more than the rest of the loop
            histogram[length] += size // length
            size %= length
        histogram[size] += 1
    return histogram


@compiled
def count_rows(histogram: Int64s) -> int:
    """The number of rows of the layout without a limit on documents, a whole shelf at a time."""
    length = histogram.size - 1
    untouched = histogram.sum() + 1  # one more than can be used, so that this shelf never empties
    on_shelf = np.zeros(length + 1, np.int64)
    on_shelf[length] = untouched
    words, summary = _make_bitmap(length)
    for size in range(length, 0, -1):
        left = histogram[size]
        while left > 0:
            left = _fill_shelf(on_shelf, words, summary, _lowest_from(words, summary, size), size, left)
    return int(untouched - on_shelf[length])


@compiled
def _fill_shelf(on_shelf: Int64s, words: Words, summary: Words, shelf: int, size: int, left: int) -> int:
    """Give up to `left` pieces to the rows of one shelf; return how many are left for the next shelf."""
    each = _quotient(shelf, size)
    num_full = min(on_shelf[shelf], left // each if each > 1 else left)
    _move(on_shelf, words, summary, shelf, shelf - each * size, num_full)
    left -= num_full * each
    if left > 0 and on_shelf[shelf] > 0:  # one row takes the rest of the run
        _move(on_shelf, words, summary, shelf, shelf - left * size, 1)
        left = 0
    if on_shelf[shelf] == 0:
        _clear(words, summary, shelf)
    return left


@compiled
def _move(on_shelf: Int64s, words: Words, summary: Words, old: int, new: int, num_rows: int) -> None:
    on_shelf[old] -= num_rows
    if num_rows > 0 and new > 0:  # full rows are never needed again
        on_shelf[new] += num_rows
        _mark(words, summary, new)


@compiled
def _quotient(room: int, size: int) -> int:
    """`room // size` for room >= size, without the division in the commonest case."""
    return 1 if room < 2 * size else room // size


@compiled
def lay_out(histogram: Int64s, num_pieces: int, max_documents: int) -> tuple[Int32s, Int32s]:
    """The row of every slot, slots being the pieces by decreasing length; and the number of pieces in each row."""
    length = histogram.size - 1
    slot_rows = np.empty(num_pieces, np.int32)
    row_sizes = np.zeros(num_pieces, np.int32)
    words, summary = _make_bitmap(length)
    tops = np.full(length + 1, _NOBODY, np.int32)  # shelf -> the row put there last
    tops[length] = 0  # untouched rows are in order and never run out, so this also counts the rows taken
    below = np.arange(1, num_pieces + 1, dtype=np.int32)  # row -> the next one on its shelf
    slot = 0
    for size in range(length, 0, -1):
        run_end = slot + histogram[size]
        while slot < run_end:
            shelf = _lowest_from(words, summary, size)
            row = _take_row(tops, below, words, summary, shelf)
            num_taken = min(_quotient(shelf, size), run_end - slot, max_documents - row_sizes[row])
            slot_rows[slot : slot + num_taken] = row
            slot += num_taken
            row_sizes[row] += num_taken
            room = shelf - num_taken * size
            if room > 0 and row_sizes[row] < max_documents:
                _put_row(tops, below, words, summary, room, row)
    return slot_rows, row_sizes[: tops[length]].copy()


@compiled
def _take_row(tops: Int32s, below: Int32s, words: Words, summary: Words, shelf: int) -> int:
    row = tops[shelf]
    tops[shelf] = below[row]
    if tops[shelf] == _NOBODY:
        _clear(words, summary, shelf)
    return int(row)


@compiled
def _put_row(tops: Int32s, below: Int32s, words: Words, summary: Words, shelf: int, row: int) -> None:
    below[row] = tops[shelf]
    tops[shelf] = row
    _mark(words, summary, shelf)


# --- the deal: from documents to the slots of a layout ----------------------------------------------------


@compiled
def cut(kept: Int64s, length: int, num_pieces: int) -> tuple[Int64s, Int64s, Int32s]:
    """Documents, starts and lengths of all pieces, in the order of the documents."""
    documents = np.empty(num_pieces, np.int64)
    starts = np.empty(num_pieces, np.int64)
    lengths = np.empty(num_pieces, np.int32)
    piece = 0
    for document in range(kept.size):
        start, end = 0, kept[document]
        while start < end:  # a range with a step would divide: 2.5 times as slow
            documents[piece], starts[piece] = document, start
            lengths[piece] = min(length, end - start)
            start += length
            piece += 1
    return documents, starts, lengths


@compiled
def sort_falling(lengths: Int32s, run_offsets: Int64s) -> Int32s:
    """The pieces by decreasing length; those of `length - k` tokens begin at `run_offsets[k]`."""
    length = run_offsets.size - 1
    ends = run_offsets.copy()
    ordered = np.empty(lengths.size, np.int32)
    for piece in range(lengths.size):
        run = length - lengths[piece]
        ordered[ends[run]] = piece
        ends[run] += 1
    return ordered


@compiled
def gather_rows(dealt: Int32s, slot_rows: Int32s, row_offsets: Int64s) -> Int32s:
    """The pieces row by row, given the piece dealt to each slot and the row of each slot."""
    ends = row_offsets.copy()
    pieces = np.empty(dealt.size, np.int32)
    for slot in range(dealt.size):
        row = slot_rows[slot]
        pieces[ends[row]] = dealt[slot]
        ends[row] += 1
    return pieces


@compiled
def shuffle_groups(values: Int32s, offsets: Int64s, key: np.uint64, stream: np.uint64) -> None:
    """Shuffle each group `offsets[g]:offsets[g + 1]` in place (Fisher-Yates over SplitMix64).

    Scaling 32 random bits to n choices favours some by at most n / 2**32: 2e-5 at 75,000 equal lengths.
    """
    state = _mix(_mix(key) + stream)
    for group in range(offsets.size - 1):
        first = offsets[group]
        for last in range(offsets[group + 1] - 1, first, -1):
            state += _GAMMA
            draw = (_mix(state) >> _HALF) * np.uint64(last - first + 1)
            other = first + np.int64(draw >> _HALF)
            values[last], values[other] = values[other], values[last]


@compiled
def take_pieces(pieces: Int32s, documents: Int64s, starts: Int64s, lengths: Int32s) -> tuple[Int64s, Int64s, Int32s]:
    """Document, start and length of each piece, in the order of `pieces`; numpy would widen the indices first."""
    taken = np.empty(pieces.size, np.int64), np.empty(pieces.size, np.int64), np.empty(pieces.size, np.int32)
    for place, piece in enumerate(pieces):
        taken[0][place] = documents[piece]
        taken[1][place] = starts[piece]
        taken[2][place] = lengths[piece]
    return taken

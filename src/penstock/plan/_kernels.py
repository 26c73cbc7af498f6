"""The compiled loop that writes everything a packed batch holds beside its tokens.

Labels, positions, document ids and borders all come from one list of pieces, never from token ids.
One pass per row, each array in a loop of its own so that it is vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compiled import compiled
from penstock.plan._stages import IGNORED


@compiled
def extent(numbers: NDArray[np.int64]) -> tuple[int, int]:
    """(least, greatest) of some numbers; for a batch of them, a tenth of the time of numpy's two calls."""
    least = greatest = numbers[0]
    for number in numbers:
        least, greatest = min(least, number), max(greatest, number)
    return least, greatest


@compiled
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
    offsets = np.zeros(len(rows) + 1, np.int64)
    for k in range(len(rows)):
        at = row_bases[slots[k]] + rows[k]
        offsets[k + 1] = offsets[k] + row_offsets[at + 1] - row_offsets[at]
    found, starts = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    for k in range(len(rows)):
        slot = slots[k]
        begin = piece_bases[slot] + row_offsets[row_bases[slot] + rows[k]]
        for piece in range(offsets[k + 1] - offsets[k]):
            found[offsets[k] + piece] = first_documents[slot] + documents[begin + piece]
            starts[offsets[k] + piece] = np.int64(parts[begin + piece]) * length
    return offsets, found, starts


@compiled
def find_targets(
    row_offsets: NDArray[np.int64], sizes: NDArray[np.int64], rows: NDArray[np.int64], length: int
) -> NDArray[np.int64]:
    """Where each piece goes in the flat batch, when row r of the pieces is row `rows[r]` of the batch."""
    targets = np.empty(len(sizes), np.int64)
    for row in range(len(rows)):
        at = rows[row] * length
        for piece in range(row_offsets[row], row_offsets[row + 1]):
            targets[piece] = at
            at += sizes[piece]
    return targets


@compiled
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
    num_rows, length = input_ids.shape
    segment, longest = 0, 0
    borders[0] = 0
    for row in range(num_rows):
        at, targets = 0, 0
        for piece in range(row_offsets[row], row_offsets[row + 1]):
            end = at + sizes[piece]
            _fill_positions(position_ids[row], at, end, bases[piece])
            _fill(document_ids[row], at, end, piece)
            _fill_labels(labels[row], input_ids[row], at, end, shifted)
            at = end
            targets += max(0, sizes[piece] - 1)
            segment += 1
            longest = max(longest, sizes[piece])
            borders[segment] = row * length + at
        if len(is_target):
            targets -= _hide(labels[row], is_target[row * length : (row + 1) * length], at, shifted)
        row_targets[row] = targets
        if at < length:
            _fill(input_ids[row], at, length, pad)
            _fill(labels[row], at, length, IGNORED)
            _fill_positions(position_ids[row], at, length, 0)
            _fill(document_ids[row], at, length, -1)
            segment += 1
            longest = max(longest, length - at)
            borders[segment] = (row + 1) * length
    return segment, longest


@compiled
def _fill(array: NDArray[Any], begin: int, end: int, value: int) -> None:
    for place in range(begin, end):
        array[place] = value


@compiled
def _fill_positions(array: NDArray[np.int64], begin: int, end: int, base: int) -> None:
    for place in range(begin, end):
        array[place] = base + place - begin


@compiled
def _fill_labels(labels: NDArray[np.int64], tokens: NDArray[np.int64], begin: int, end: int, shifted: bool) -> None:
    if end <= begin:
        return
    if shifted:  # the last token of a piece has nothing to predict
        for place in range(begin, end - 1):
            labels[place] = tokens[place + 1]
        labels[end - 1] = IGNORED
    else:  # the model shifts: the first token of a piece must not be predicted from the piece before
        labels[begin] = IGNORED
        for place in range(begin + 1, end):
            labels[place] = tokens[place]


@compiled
def _hide(labels: NDArray[np.int64], is_target: NDArray[np.uint8], end: int, shifted: bool) -> int:
    """Ignore the labels of tokens that are not targets; return how many were not ignored before."""
    hidden = 0
    for place in range(end):
        source = place + 1 if shifted else place
        if source < end and is_target[source] == 0 and labels[place] != IGNORED:
            labels[place] = IGNORED
            hidden += 1
    return hidden

"""From a row back to its position: inverses written from the description, sharing no code with the kernels.

Nothing in Penstock asks this way round; the tests do, because what can be undone is a bijection.
"""

from __future__ import annotations

import itertools

import numpy as np

from penstock.order import FullOrder, Order, Permutation, SequentialOrder, WindowedOrder, derive_key

WORD = 2**64 - 1
GAMMA, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def child_key(key: int, number: int) -> int:
    """The key of a numbered part."""
    z = (key + (number + 1) * GAMMA) & WORD
    z = ((z ^ (z >> 30)) * M1) & WORD
    z = ((z ^ (z >> 27)) * M2) & WORD
    return z ^ (z >> 31)


def undo(size: int, key: int, index: int) -> int:
    """The position that the network with this key takes to `index`."""
    bits = ((size - 1).bit_length() + 1) // 2
    radix = -(-size // 2**bits)
    passes = 12 if size < 64 else 6 if size < 65_536 else 4

    def hashed(half: int, number: int) -> int:
        h = ((half + key + number * GAMMA) * M1) & WORD
        return (((h ^ (h >> 32)) * M2) & WORD) >> 32

    while True:
        left, right = divmod(index, 2**bits)
        for number in range(2 * passes - 2, -2, -2):
            left = (left - hashed(right, number + 1) * radix // 2**32) % radix
            right = (right - hashed(left, number)) % 2**bits
        index = left * 2**bits + right
        if index < size:
            return index


def invert(permutation: Permutation, indices: np.ndarray) -> list[int]:
    """The position of each number of a permutation."""
    key = child_key(permutation.key, 0)
    return [undo(permutation.size, key, index) for index in np.asarray(indices).tolist()]


def positions_of(order: Order, rows: np.ndarray) -> list[int]:
    """The position of each row of an epoch."""
    if isinstance(order, SequentialOrder):
        return np.asarray(rows).tolist()
    if isinstance(order, FullOrder):
        return invert(Permutation(order.num_rows, derive_key(order.seed, "full", order.epoch)), rows)
    assert isinstance(order, WindowedOrder)
    return _windowed_positions(order, np.asarray(rows).tolist())


def _windowed_positions(order: WindowedOrder, rows: list[int]) -> list[int]:
    key = derive_key(order.seed, "rows", order.epoch)
    counts = order.rows_per_window.tolist()
    starts = list(itertools.accumulate(counts, initial=0))
    before, group_of = {}, {}
    for group in range(order.num_groups):
        place = 0
        for window in order.windows_of_group(group).tolist():
            before[window], group_of[window] = place, group
            place += counts[window]
    found = []
    for row in rows:
        window = next(number for number, start in enumerate(starts[1:]) if row < start)
        positions = order.positions_of_group(group_of[window])
        place = before[window] + row - starts[window]
        found.append(positions.start + undo(len_of(positions), child_key(key, group_of[window]), place))
    return found


def len_of(positions: range) -> int:
    """`len` that knows numbers beyond 2**63."""
    return positions.stop - positions.start

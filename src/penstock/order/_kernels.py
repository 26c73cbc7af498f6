"""The loops of this room, in C: what each does, and how it is called.

Indices and results are int64; a kernel that maps indices returns the place of the first that is out of range, or -1.

Price: 42 M numbers/s/core for any size from 65,536 to 2**62, 25 M below, 10 M below 64, on an AMD EPYC at
2.4 GHz (benchmarks/bench_order.py).
"""

import numpy as np
from numpy.typing import NDArray

from penstock.native import ARRAY, INT, WORD, kernel

Int64 = NDArray[np.int64]

_permute = kernel("order_permute", ARRAY, ARRAY, INT, WORD)
_windowed_rows = kernel("order_windowed_rows", ARRAY, ARRAY, INT, WORD, INT, ARRAY, ARRAY, ARRAY)
_lane_rows = kernel("order_lane_rows", ARRAY, ARRAY, INT, WORD, INT, ARRAY, ARRAY, ARRAY, ARRAY, INT, INT)
_shuffle_strata = kernel("order_shuffle_strata", ARRAY, ARRAY, INT, WORD, INT)
_pick = kernel("order_pick", INT, INT, WORD, WORD, WORD, ARRAY)
_deal_evenly = kernel("order_deal_evenly", ARRAY, ARRAY, ARRAY, ARRAY)
_deal_classes = kernel("order_deal_classes", ARRAY, ARRAY, INT, WORD, INT, ARRAY, ARRAY, ARRAY)


def permute(positions: Int64, out: Int64, size: int, key: np.uint64) -> int:
    """Apply the permutation of [0, size) under `key` to each position."""
    return _permute(positions, out, size, int(key))


def windowed_rows(
    positions: Int64,
    out: Int64,
    size: int,
    key: np.uint64,
    group: int,
    group_starts: Int64,
    slot_starts: Int64,
    shifts: Int64,
) -> int:
    """Position -> row: permute inside its group, then find the slot (window) that it fell into."""
    arguments = (int(key), group, group_starts, slot_starts, shifts)
    return _windowed_rows(positions, out, size, *arguments)


def lane_rows(
    positions: Int64,
    out: Int64,
    size: int,
    key: np.uint64,
    group: int,
    group_starts: Int64,
    slot_starts: Int64,
    shifts: Int64,
    lane_groups: Int64,
    quota: int,
    turn: int,
) -> int:
    """Position -> row: find the lane whose turn it is, then as for windows."""
    arguments = (int(key), group, group_starts, slot_starts, shifts, lane_groups, quota, turn)
    return _lane_rows(positions, out, size, *arguments)


def shuffle_strata(rows: Int64, out: Int64, size: int, key: np.uint64, stratum: int) -> int:
    """Permute every `stratum` consecutive numbers among themselves, each stratum under its own key."""
    return _shuffle_strata(rows, out, size, int(key), stratum)


def pick(begin: int, end: int, key: int, least: int, most: int, out: Int64) -> int:
    """Fill `out` with those of the numbers `begin` to `end` whose word under `key` is from `least` to `most`; count."""
    return _pick(begin, end, key, least, most, out)


def deal_evenly(quotas: Int64, out: Int64) -> None:
    """Fill `out` with quotas[k] times k, spread evenly: earliest deadline first."""
    _deal_evenly(quotas, out, np.empty_like(quotas), np.empty_like(quotas))


def deal_classes(
    rows: Int64, out: Int64, size: int, key: np.uint64, is_shuffled: bool, sizes: Int64, starts: Int64, used: Int64
) -> int:
    """Row -> member: permute the classes of the round, then the members of the class in its cycle."""
    arguments = (int(key), is_shuffled, sizes, starts, used)
    return _deal_classes(rows, out, size, *arguments)

"""The loops of this room, in C: what each does, and how it is called.

Indices and results are int64. A kernel that maps indices takes them, an array for the results, what the indices must be
below, a key and what else it needs; it returns the place of the first index that is out of range, or -1.

Price: 42 M numbers/s/core for any size from 65,536 to 2**62, 25 M below, 10 M below 64, on an AMD EPYC at
2.4 GHz (benchmarks/bench_order.py).
"""

import numpy as np
from numpy.typing import NDArray

from penstock.native import ARRAY, INT, WORD, kernel

Int64 = NDArray[np.int64]

permute = kernel("order_permute", ARRAY, ARRAY, INT, WORD)
"""Position -> number, by the permutation under a key."""
windowed_rows = kernel("order_windowed_rows", ARRAY, ARRAY, INT, WORD, INT, ARRAY, ARRAY, ARRAY)
"""Position -> row: permute inside its group, then find the slot (window) that it fell into. Takes `group`, where groups
and slots start, and the shifts."""
lane_rows = kernel("order_lane_rows", ARRAY, ARRAY, INT, WORD, INT, ARRAY, ARRAY, ARRAY, ARRAY, INT, INT)
"""Position -> row: find the lane whose turn it is, then as for windows. Takes, beside that, the lanes' first groups,
their quota and the first turn."""
shuffle_strata = kernel("order_shuffle_strata", ARRAY, ARRAY, INT, WORD, INT)
"""Permute so many consecutive numbers among themselves, each stratum under its own key."""
deal_classes = kernel("order_deal_classes", ARRAY, ARRAY, INT, WORD, INT, ARRAY, ARRAY, ARRAY)
"""Row -> member: permute the classes of the round, then the members of the class in its cycle. Takes whether they are
shuffled, the classes' sizes, where they start, and how many places of a cycle are used."""
pick = kernel("order_pick", INT, INT, WORD, WORD, WORD, ARRAY)
"""Fill an array with those of the numbers between two whose word under a key is from a least to a greatest; count."""
_deal_evenly = kernel("order_deal_evenly", ARRAY, ARRAY, ARRAY, ARRAY)


def deal_evenly(quotas: Int64, out: Int64) -> None:
    """Fill `out` with quotas[k] times k, spread evenly: earliest deadline first."""
    _deal_evenly(quotas, out, np.empty_like(quotas), np.empty_like(quotas))

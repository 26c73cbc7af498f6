"""The loop of this room, in C: what it does, and how it is called."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.native import ARRAY, INT, kernel

Int64 = NDArray[np.int64]

_simulate_cache = kernel("remote_simulate_cache", *[ARRAY] * 6, INT, INT, *[ARRAY] * 8)


def simulate_cache(
    shards: Int64,
    firsts: Int64,
    lasts: Int64,
    nexts: Int64,
    sizes: Int64,
    room: int,
    rates: tuple[float, float],
    *,
    by_recency: bool,
) -> tuple[Int64, NDArray[np.float64], NDArray[np.float64]]:
    """(uses for which a shard is fetched, seconds at which each is there, seconds that the run waits for it)."""
    in_use, idle, fetches = (np.empty(len(shards), np.int64) for _ in range(3))
    since, finished, waits = (np.empty(len(shards), np.float64) for _ in range(3))
    keys = lasts if by_recency else -nexts
    current, given = np.full(len(sizes), -1, np.int64), np.array(rates, np.float64)
    scratch = (current, in_use, idle, since)
    of_uses = (shards, firsts, lasts, nexts, keys, sizes)
    count = _simulate_cache(*of_uses, room, by_recency, given, *scratch, fetches, finished, waits)
    return fetches[:count], finished[:count], waits[:count]

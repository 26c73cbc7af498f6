"""A cache, simulated: what a node fetches, and how long it waits, from when it reads which shard.

Time is counted in rows of the run. Where a use begins, its shard must be there. What is fetched for it takes the place
of the shard whose next use begins last, as `choose_evictions` decides, or, to compare, of the one that was left first
(LRU). Nothing in use is evicted. Fetches follow each other in the order of their uses, and each starts as soon as the
one before it is done and there is room for it, however early: the next use of everything is known.

Price: 0.3 µs per use, and 80 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.remote import _kernels
from penstock.remote._uses import NEVER, Int64, Uses

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CacheRun:
    """Every fetch of a run, in order."""

    rows: Int64
    """The row at which each is needed."""
    sizes: Int64
    """Bytes."""
    finished: Float64
    """Seconds from the start of the run."""
    waits: Float64
    """Seconds that the run waits for each."""


def simulate_cache(
    uses: Uses,
    sizes: Int64,
    room: int,
    *,
    bandwidth: float = math.inf,
    seconds_per_row: float = 0.0,
    by_recency: bool = False,
) -> CacheRun:
    """What a cache of `room` bytes fetches; if that is less than what is in use at a time, it is exceeded.

    Args:
        uses: Those of one folder.
        sizes: Bytes of each shard.
        bandwidth: Bytes per second.
        seconds_per_row: How long the run takes for a row if it need not wait.
        by_recency: Evict the shard that was left first, and not that whose next use is last.
    """
    order = np.lexsort((uses.first_row, uses.shard))
    nexts = np.full(len(uses), NEVER, np.int64)
    is_same = uses.shard[order][1:] == uses.shard[order][:-1]
    nexts[order[:-1][is_same]] = uses.first_row[order[1:][is_same]]
    arrays = (uses.shard, uses.first_row, uses.last_row, nexts, np.asarray(sizes, np.int64))
    rates = (seconds_per_row, bandwidth)
    fetches, finished, waits = _kernels.simulate_cache(*arrays, room, rates, by_recency=by_recency)
    return CacheRun(rows=uses.first_row[fetches], sizes=sizes[uses.shard[fetches]], finished=finished, waits=waits)


def most_in_use(uses: Uses, sizes: Int64, lead: int = 0) -> int:
    """The most bytes that are in use at a time, if readers are up to `lead` rows apart: no cache can be smaller."""
    rows = np.concatenate([uses.first_row, uses.last_row + 1 + lead])
    changes = np.concatenate([sizes[uses.shard], -sizes[uses.shard]])
    order = np.lexsort((changes, rows))  # at the same row what ends goes first
    return int(np.cumsum(changes[order]).max(initial=0))

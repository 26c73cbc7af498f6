"""When a run reads which shard, and what a cache makes of it: what to fetch next, and what to evict.

A plan knows its whole order, so it can say between which rows of the run each shard is read. Both decisions of a cache
that is smaller than the data follow from that alone:

    fetch    the shard whose next use begins first
    evict    the shard whose next use begins last (Belady 1966), and none that is needed before the one to be fetched

No other choice fetches less. They are pure functions, so a simulation makes the same ones as the fetcher does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

NEVER = 2**62
"""The next use of a shard that is not used again, as far as is known."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Uses:
    """Which shards a run reads between two of its rows, in the order in which they are first needed.

    Entry k says that shard `shard[k]` of folder `folder[k]` is read from row `first_row[k]` to row `last_row[k]`. A
    shard has several entries if it is read, left and read again.
    """

    first_row: Int64
    last_row: Int64
    folder: Int64
    """Which of the folders of shards that the plan reads."""
    shard: Int64
    """Number of the shard in its folder."""
    end: int
    """Nothing is said of this row and those after it."""

    def __len__(self) -> int:
        return len(self.shard)

    def of_folder(self, folder: int) -> Uses:
        """The uses of one folder's shards."""
        own = self.folder == folder
        arrays = {name: getattr(self, name)[own] for name in ("first_row", "last_row", "folder", "shard")}
        return Uses(**arrays, end=self.end)

    def next_rows(self, row: int, num_shards: int) -> Int64:
        """For each shard of a single folder, the first row from `row` on that may read it; `NEVER` if none does."""
        found = np.full(num_shards, NEVER, np.int64)
        coming = np.flatnonzero(self.last_row >= row)[::-1]  # of a shard's entries the first is written last
        found[self.shard[coming]] = np.maximum(self.first_row[coming], row)
        return found


def choose_evictions(next_rows: Int64, sizes: Int64, num_bytes: int, needed_at: int) -> Int64 | None:
    """Places of the cached shards to evict so that `num_bytes` become free, for a shard that is needed at a row.

    None if evicting all that are needed later than that would not be enough: then the fetch has to wait.

    Args:
        next_rows: The next use of each cached shard; of shards with equal ones, the first are evicted first.
        sizes: Bytes of each.
        num_bytes: What is missing.
        needed_at: The next use of the shard that the room is for.
    """
    by_use = np.argsort(-next_rows, kind="stable")
    later = by_use[next_rows[by_use] > needed_at]
    count = int(np.searchsorted(np.cumsum(sizes[later]), num_bytes)) + 1 if num_bytes > 0 else 0
    return later[:count] if count <= len(later) else None

"""An order in which every rank of a run reads a part of the data of its own.

Ranks take turns: rank r of w reads rows r, r + w, r + 2w, ... of the run. If any row may be anywhere, each of them
needs all of the data. So the data is dealt to lanes, once for all epochs, and the lanes take turns as well:

    by seed     windows are permuted; lane l has rows l q to (l + 1) q of that sequence, q = N // L; the rest is a tail
    by epoch    the windows of each lane are permuted, every `group` of them are mixed
    row R       of the run, R = epoch * N + p: lane R mod L, its (p // L)-th row; after q L rows comes the tail

    lane 0      | 4 4 4 4 0 0 |        windows 4, 0, 3, ... of the sequence, cut where a lane ends
    lane 1      | 0 0 3 3 3 3 |
    rows        lane 0, lane 1, lane 0, lane 1, ...

This is a bijection for any windows, lanes and rows, and a function of seed, epoch and row alone: the number of ranks
may change at any row. What depends on it is only how much each of them needs. Rank r meets lanes l with l = r mod
gcd(w, L), and so 1 / gcd(w, L) of the data: 1 / w if w divides L, everything if they have no factor in common. In every
epoch it is the same part, so what a cache holds is needed again.

Price: O(windows + lanes) to build, about six times what `WindowedOrder` takes for 100,000 windows and 1,024 lanes. Per
row two divisions more, and the next row is of another group: 2 to 3 times as long for rows in sequence, little longer
for scattered ones (benchmarks/bench_order.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from penstock.order import _kernels
from penstock.order._border import MAX_ROWS, Int64, checked_counts, checked_number, derive_key, map_indices
from penstock.order._orders import Permutation
from penstock.schema import offsets_of
from penstock.splitmix import mix


@dataclass(frozen=True, slots=True, eq=False)
class LaneOrder:
    """One epoch of lanes that take turns.

    >>> order = LaneOrder(np.array([3, 0, 2, 4]), seed=7, epoch=0, group=2, lanes=2)
    >>> sorted(order.rows(range(9)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8]

    Raises:
        ValueError: as for `WindowedOrder`, or `lanes` is less than 1.
    """

    rows_per_window: Int64
    seed: int
    epoch: int
    group: int
    """Windows of a lane that are read together."""
    lanes: int

    num_rows: int = field(init=False)
    _quota: int = field(init=False, repr=False)
    """Rows of a lane."""
    _turn: int = field(init=False, repr=False)
    """The lane of the epoch's first row."""
    _rows_key: int = field(init=False, repr=False)
    _windows: Int64 = field(init=False, repr=False)  # slot -> window; lanes are filled up to whole groups
    _slot_starts: Int64 = field(init=False, repr=False)  # slot -> its first place; then num_rows
    _shifts: Int64 = field(init=False, repr=False)  # slot -> row minus place
    _group_starts: Int64 = field(init=False, repr=False)  # group -> its first place; then num_rows
    _lane_groups: Int64 = field(init=False, repr=False)  # lane -> its first group; the tail is the last lane

    def __post_init__(self) -> None:
        counts = checked_counts(self.rows_per_window)
        epoch, lanes = checked_number("epoch", self.epoch), checked_number("lanes", self.lanes, at_least=1)
        group = checked_number("group", self.group, at_least=1, at_most=MAX_ROWS)
        num_rows = int(counts.sum())
        quota = num_rows // lanes
        windows, starts, sizes, lane_of = self._cut(counts, lanes, quota)
        drawn = mix(np.arange(len(windows), dtype=np.uint64) + np.uint64(derive_key(self.seed, "in lanes", epoch)))
        by_lane = np.lexsort((drawn, lane_of))
        per_lane = np.bincount(lane_of, minlength=lanes + 1)
        groups_before = offsets_of(-(-per_lane // min(group, max(1, len(windows)))))
        group = min(group, max(1, len(windows)))
        slots = np.arange(len(windows)) + np.repeat(groups_before[:-1] * group - offsets_of(per_lane)[:-1], per_lane)
        slot_windows, slot_rows, shifts = (np.zeros(int(groups_before[-1]) * group, np.int64) for _ in range(3))
        slot_windows[slots], slot_rows[slots] = windows[by_lane], sizes[by_lane]
        slot_starts = offsets_of(slot_rows)
        shifts[slots] = starts[by_lane] - slot_starts[slots]
        found = {
            "rows_per_window": counts,
            "group": group,
            "num_rows": num_rows,
            "_quota": quota,
            "_turn": epoch * num_rows % lanes,
            "_rows_key": derive_key(self.seed, "rows", epoch),
            "_windows": slot_windows,
            "_slot_starts": slot_starts,
            "_shifts": shifts,
            "_group_starts": np.append(slot_starts[:-1:group], num_rows),
            "_lane_groups": groups_before,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def _cut(self, counts: Int64, lanes: int, quota: int) -> tuple[Int64, Int64, Int64, Int64]:
        """(window, first row, rows, lane) of each part of a window that is in one lane; the same in every epoch."""
        sequence = Permutation(counts.size, derive_key(self.seed, "lanes"))(np.arange(counts.size))
        places = offsets_of(counts[sequence])
        cuts = np.sort(np.concatenate([places, np.arange(lanes + 1) * quota]), kind="stable")
        cuts = cuts[np.diff(cuts, prepend=-1) > 0]
        begins = cuts[:-1]
        slots = np.searchsorted(places, begins, side="right") - 1
        windows = sequence[slots]
        first_rows = offsets_of(counts)[windows] + begins - places[slots]
        lane_of = np.minimum(begins // quota, lanes) if quota else np.full(len(begins), lanes)
        return windows, first_rows, np.diff(cuts), lane_of

    def __reduce__(self) -> tuple[type[LaneOrder], tuple[Int64, int, int, int, int]]:
        return LaneOrder, (self.rows_per_window, self.seed, self.epoch, self.group, self.lanes)

    def rows(self, positions: ArrayLike) -> Int64:
        return map_indices(
            _kernels.lane_rows,
            "position",
            positions,
            self.num_rows,
            self._rows_key,
            self.group,
            self._group_starts,
            self._slot_starts,
            self._shifts,
            self._lane_groups,
            self._quota,
            self._turn,
        )

    def uses(
        self, begin: int, end: int, world_size: int = 1, remainders: Sequence[int] = (0,)
    ) -> tuple[Int64, Int64, Int64]:
        """(first position, last position, window) of the windows that some positions from `begin` to `end` may be in.

        They are those whose number, divided by `world_size`, leaves one of `remainders`. A window that is in two lanes
        may be named twice.
        """
        common = math.gcd(world_size, self.lanes)
        met = np.unique([(each + self._turn) % common for each in remainders])
        lanes = (np.arange(0, self.lanes, common)[:, None] + met).reshape(-1)
        turns = (lanes - self._turn) % self.lanes
        first = np.maximum(-((turns - begin) // self.lanes), 0)
        last = np.minimum((end - 1 - turns) // self.lanes, self._quota - 1)
        of_lanes = self._uses(lanes * self._quota, first, last, turns, self.lanes)
        start = self._quota * self.lanes
        bases, first, last = (np.array([each]) for each in (start, max(begin - start, 0), end - 1 - start))
        begins, ends, windows = zip(of_lanes, self._uses(bases, first, last, bases, 1), strict=True)
        return np.concatenate(begins), np.concatenate(ends), np.concatenate(windows)

    def _uses(self, bases: Int64, first: Int64, last: Int64, turns: Int64, step: int) -> tuple[Int64, Int64, Int64]:
        """The same for rows `first` to `last` of lanes: row k of one has place `base + k`, position `turn + step k`."""
        some = first <= last
        bases, first, last, turns = (each[some] for each in (bases, first, last, turns))
        low = np.searchsorted(self._group_starts, bases + first, side="right") - 1
        high = np.searchsorted(self._group_starts, bases + last, side="right")
        counts = (high - low) * self.group
        starts = offsets_of(counts)
        slots = np.repeat(low * self.group - starts[:-1], counts) + np.arange(starts[-1])
        bases, turns = np.repeat(bases, counts), np.repeat(turns, counts)
        groups, used = slots // self.group, self._slot_starts[slots] < self._slot_starts[slots + 1]
        begins = turns + (self._group_starts[groups] - bases) * step
        ends = turns + (self._group_starts[groups + 1] - 1 - bases) * step
        return begins[used], ends[used], self._windows[slots][used]

    def last_positions(self) -> Int64:
        """The position after which a window is not read again, for each window."""
        _, ends, windows = self.uses(0, self.num_rows)
        found = np.zeros(self.rows_per_window.size, np.int64)
        np.maximum.at(found, windows, ends)
        return found

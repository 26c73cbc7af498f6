"""Which shards the next rows of a run need, and between which rows: what fetches them ahead goes by it.

    RowRange    rows of the run, all of them or those of some ranks
    Reads       samples, or elements of a column, and the rows between which they are read: what a row source says
    Uses        the same for shards (`penstock.remote`)

A row source answers in storage windows, from its order alone; `ShardLayer` knows their shards. So a group of windows
costs a few searches, however many rows it has. Rows that may be anywhere (a full shuffle, classes dealt in turn) are
looked up one by one, some thousands together; beyond a million of them, everything is said to be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import ShardLayer
from penstock.shards import ShardFolder, TarStorage

if TYPE_CHECKING:
    from penstock.remote import Uses

Int64 = NDArray[np.int64]
Rows = NDArray[np.int64]
"""Absolute row numbers."""
_FEWEST, _CHUNKS, _MOST = 256, 256, 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RowRange:
    """Rows `begin` to `end` of a run whose number, divided by `world_size`, leaves one of `remainders`."""

    begin: int
    end: int
    world_size: int = 1
    remainders: tuple[int, ...] = (0,)

    def between(self, begin: int, end: int) -> RowRange:
        """Those of them from `begin` on and before `end`."""
        return RowRange(max(self.begin, begin), min(self.end, end), self.world_size, self.remainders)

    def shifted(self, by: int) -> RowRange:
        """The rows `by` further on."""
        remainders = tuple((each + by) % self.world_size for each in self.remainders)
        return RowRange(self.begin + by, self.end + by, self.world_size, remainders)

    def numbers(self) -> Int64:
        """Each of them."""
        firsts = np.sort((np.array(self.remainders, np.int64) - self.begin) % self.world_size)
        rounds = np.arange(self.begin, max(self.begin, self.end), self.world_size)
        found: Int64 = (rounds[:, None] + firsts).reshape(-1)
        return found[found < self.end]

    @property
    def count(self) -> int:
        """How many there are, give or take a round of ranks."""
        return (self.end - self.begin) * len(self.remainders) // self.world_size

    def epochs(self, num_rows: int) -> Iterator[tuple[int, RowRange]]:
        """(epoch, those of them that are in it), for epochs of `num_rows` rows."""
        begin = self.begin
        while begin < self.end:
            epoch = begin // num_rows
            stop = min(self.end, (epoch + 1) * num_rows)
            yield epoch, self.between(begin, stop)
            begin = stop


class Spans(NamedTuple):
    """Between rows `first_rows[k]` and `last_rows[k]`, places `begins[k]` to `ends[k]` are read."""

    first_rows: Int64
    last_rows: Int64
    begins: Int64
    ends: Int64

    def shifted(self, by: int) -> Spans:
        """The same for rows `by` further on."""
        return self._replace(first_rows=self.first_rows + by, last_rows=self.last_rows + by)

    def widened(self, by: int, rows: RowRange) -> Spans:
        """The same `by` rows earlier and later, as far as `rows` go."""
        first = np.clip(self.first_rows - by, rows.begin, rows.end - 1)
        return self._replace(first_rows=first, last_rows=np.clip(self.last_rows + by, rows.begin, rows.end - 1))

    def of_windows(self, starts: Int64) -> Spans:
        """The same for windows, of which these are numbers, that begin at `starts`."""
        return self._replace(begins=starts[self.begins], ends=starts[self.ends])


class Reads(NamedTuple):
    """What is read, and the shards where it is."""

    spans: Spans
    layers: tuple[ShardLayer, ...]


def join_spans(parts: Iterable[Spans]) -> Spans:
    """One after the other."""
    found = list(parts)
    return (
        Spans(*(np.concatenate([np.empty(0, np.int64), *each]) for each in zip(*found, strict=True))) if found else _NO
    )


_NO = Spans(*[np.empty(0, np.int64)] * 4)


def scattered(rows: RowRange, find: Callable[[Int64], Int64], num_places: int) -> Spans:
    """Where rows may be anywhere: the place of each, some thousands of rows at a time."""
    if rows.begin >= rows.end:
        return _NO
    if rows.count > _MOST:
        return Spans(*(np.array([each]) for each in (rows.begin, rows.end - 1, 0, num_places)))
    numbers = rows.numbers()
    size = max(_FEWEST, -(-len(numbers) // _CHUNKS))
    parts = []
    for begin in range(0, len(numbers), size):
        some = numbers[begin : begin + size]
        places = np.unique(find(some))
        first, last = (np.full(len(places), each, np.int64) for each in (some[0], some[-1]))
        parts.append(Spans(first, last, places, places + 1))
    return join_spans(parts)


def make_uses(reads: Iterable[Reads], numbers: Mapping[ShardFolder | TarStorage, int], begin: int, end: int) -> Uses:
    """The shards that are read from row `begin` on and before row `end`; `numbers` are those of their folders."""
    from penstock.remote import Uses  # with the clients of stores come 30 ms of imports

    found: list[tuple[Int64, ...]] = [(np.empty(0, np.int64),) * 4]
    for spans, layers in reads:
        for layer in layers:
            which, shards = layer.find(spans.begins, spans.ends)
            folders = np.full(len(shards), numbers[layer.folder])
            found.append((folders, shards, spans.first_rows[which], spans.last_rows[which]))
    folders, shards, first_rows, last_rows = _merge(*(np.concatenate(each) for each in zip(*found, strict=True)))
    by_row = np.argsort(first_rows, kind="stable")
    return Uses(
        first_row=first_rows[by_row],
        last_row=last_rows[by_row],
        folder=folders[by_row],
        shard=shards[by_row],
        end=end,
    )


def _merge(folders: Int64, shards: Int64, first_rows: Int64, last_rows: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Uses of a shard that overlap, or follow each other, as one."""
    order = np.lexsort((first_rows, shards, folders))
    folders, shards, first_rows, last_rows = (each[order] for each in (folders, shards, first_rows, last_rows))
    if not len(order):
        return folders, shards, first_rows, last_rows
    is_other = np.concatenate([[True], (np.diff(folders) != 0) | (np.diff(shards) != 0)])
    base = first_rows.min()
    lift = (np.cumsum(is_other) - 1) * (last_rows.max() - base + 2)  # so that a maximum stays inside its shard
    reached = np.maximum.accumulate(last_rows - base + lift)
    is_new = is_other.copy()
    is_new[1:] |= (first_rows - base + lift)[1:] > reached[:-1] + 1
    starts = np.flatnonzero(is_new)
    ends = np.append(starts[1:], len(order)) - 1
    return folders[starts], shards[starts], first_rows[starts], (reached - lift + base)[ends]

"""Batches of as many rows as fit into a budget of tokens, padding included.

    batch(tokens=65_536, multiple=8)      8 x 8,192, or 16 x 4,096, or 512 x 128, whatever the next rows are

A batch takes rows in order, `multiple` at a time, as long as rows times the width of the longest is within the budget.
Where it ends depends on the lengths of its rows, so batches cannot be found by division. Nor are they counted from the
start of the run: an epoch is cut into chunks, and each begins with a new batch. So the batches of a chunk follow from
its lengths alone, and a run opens at any row for the price of one chunk, some thousands of look-ups.

    epoch   | chunk 0                     | chunk 1                     | ...          borders: the plan's alone
    batches |-----|---|------|----|-------|---|-------|---|-----|-------|              the last may be smaller

    price of a chunk's end      less than one batch in 128 is smaller than it could be
    the number of batches       of an epoch takes the lengths of all its rows, 0.07 µs each, when it is first asked

Nothing here depends on ranks. The budget is that of all of them, and a rank has 1/w of the rows, which are no wider.
So the number of ranks must divide `multiple`, which stands where other plans have their batch size: ranks and
micro-batches divide it, and every batch has at least as many rows.

A run that goes on from a state of other batches may stand inside a batch of these. It takes batches from there on as
if a chunk began, and those of the next chunk are everybody's again.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StageError
from penstock.plan import _kernels
from penstock.plan._accounts import BatchLedger
from penstock.plan._rows import RowSource
from penstock.plan._stages import TOKENS, Pad
from penstock.plan._steps import MAX_ROW, Steps, checked_epoch

_SAMPLED_ROWS = 1024
_CHUNK_BATCHES = 128
_KEPT_CHUNKS, _KEPT_BORDERS = 8, 64

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Chunk:
    """The rows between two places where a batch begins in any case."""

    lengths: Int64
    stand_ins: Int64 | None
    """Which row of the chunk comes in place of each, where rows that are too long are dropped."""


@dataclass(frozen=True, eq=False)
class BudgetSteps(Steps):
    """Batches of at most `tokens` tokens, in rows that are a multiple of `global_size`."""

    rows: RowSource
    tokens: int
    drops: bool
    """Whether rows that are too long are left out; otherwise they are an error."""

    def __post_init__(self) -> None:
        if self.rows.row_length is not None:
            raise StageError(
                f"batch(tokens={self.tokens:,}): all rows have {self.rows.row_length:,} places; "
                f"batch({max(1, self.tokens // self.rows.row_length)}) is the same."
            )
        if self.longest < self._unit:
            raise ValueError(
                f"batch(tokens={self.tokens:,}, multiple={self.global_size}): that leaves "
                f"{self.tokens // self.global_size:,} tokens for a row; they are {self._unit:,} wide at least."
            )
        if self.num_rows:
            self.rows.costs(np.arange(1), TOKENS)  # a column that does not fit is an error here

    @property
    def size(self) -> str:
        return f"{self.tokens:,} tokens"

    @property
    def hides_repeated(self) -> bool:
        return self.drops or self.tail == "pad"

    @functools.cached_property
    def longest(self) -> int:
        """Tokens in the longest row that there may be: `multiple` rows of them still fit."""
        return self.tokens // self.global_size // self._unit * self._unit

    @functools.cached_property
    def _unit(self) -> int:
        """The width of rows is a multiple of this."""
        stage = None if self.rows.piece_source is None else self.rows.piece_source.stage
        return stage.multiple if isinstance(stage, Pad) else 1

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows in a chunk: at least 128 batches; whole buckets of rows that are sorted by length."""
        stage = None if self.rows.piece_source is None else self.rows.piece_source.stage
        bucket = stage.bucket or 1 if isinstance(stage, Pad) else 1
        unit = bucket if bucket % self.global_size == 0 else self.global_size
        mean = max(1.0, float(self._tokens(0, min(_SAMPLED_ROWS, self.num_rows)).mean()))
        return unit * max(1, -(-int(_CHUNK_BATCHES * self.tokens / mean) // unit))

    def num_batches(self, epoch: int) -> int:
        epoch = checked_epoch(epoch)
        return self.num_batches_between(self._first_of(epoch), (epoch + 1) * self.num_rows)

    def next_row(self, row: int) -> int:
        return int(self._borders(row)[1])

    def are_regular(self, row: int, num_steps: int) -> bool:
        """Never: batches differ."""
        return False

    def num_batches_between(self, row: int, end: int) -> int:
        total = 0
        while row < end:
            start, stop = self._chunk_at(row)
            if row == start and stop <= end:
                found, row = self._count(start), stop
            else:
                starts = self._starts(row)
                found, row = int(np.searchsorted(starts, end)), max(stop, int(self._borders(row)[-1]))
            total += found
        return total

    def num_parts_between(self, row: int, end: int, num_parts: int) -> int:
        total = self.num_batches_between(row, end) * num_parts
        if self.tail in ("short", "even"):  # the last batch of an epoch may have fewer
            while row < end:
                row, rest = self._end_of_epoch(row), (self._end_of_epoch(row) - row) % self.global_size
                total -= num_parts - -(-rest * num_parts // self.global_size) if rest else 0
        return total

    def num_before(self, row: int) -> int:
        return self.num_batches_between(self._first_of(row // self.num_rows), row) if self.num_rows else 0

    def number_at(self, row: int) -> int:
        return self.num_batches_between(0, row)

    def row_at(self, number: int) -> int:
        row = self._walk(0, number, MAX_ROW)
        assert row is not None, "a run has no end"
        return row

    def rows_of(self, row: int, places: Int64) -> tuple[Int64, NDArray[np.bool_] | None]:
        rows, is_repeated = super().rows_of(row, places)
        if not self.drops:
            return rows, is_repeated
        found = rows.copy()
        starts = np.array([self._chunk_at(each)[0] for each in rows.tolist()], np.int64)
        for start in np.unique(starts).tolist():
            stand_ins = self._chunk(start).stand_ins
            if stand_ins is not None:
                here = starts == start
                found[here] = start + stand_ins[rows[here] - start]
        is_dropped = found != rows
        return found, is_dropped if is_repeated is None else is_dropped | is_repeated

    def chunks_of(self, begin: int, end: int) -> tuple[int, int]:
        """Where the chunks of rows `begin` to `end` begin and end."""
        return self._chunk_at(begin)[0], self._chunk_at(end - 1)[1]

    def ledger(self, epoch: int) -> BatchLedger:
        """The account of the batches that begin in an epoch."""
        total, row = BatchLedger(), self._first_of(epoch)
        while row < (epoch + 1) * self.num_rows:
            total += self._ledger_of_chunk(row)
            row = self._chunk_at(row)[1]
        return total

    def _ledger_of_chunk(self, start: int) -> BatchLedger:
        chunk, begins, stop = self._chunk(start), self._starts(start) - start, int(self._borders(start)[-1]) - start
        if not len(begins):
            return BatchLedger()
        widths = -(-np.maximum(np.maximum.reduceat(chunk.lengths, begins), 1) // self._unit) * self._unit
        is_long = np.zeros(stop, np.bool_)
        if chunk.stand_ins is not None:
            is_long = (chunk.stand_ins != np.arange(len(chunk.lengths)))[:stop]
        return BatchLedger(
            num_batches=len(begins),
            num_tokens=int(chunk.lengths[:stop][~is_long].sum()),
            num_places=int((np.diff(begins, append=stop) * widths).sum()),
            rows_too_long=int(is_long.sum()),
            tokens_too_long=int(self.rows.costs(start + np.flatnonzero(is_long), TOKENS).sum()),
        )

    def _find(self, step: int, epoch: int) -> int | None:
        return self._walk(self._first_of(epoch), step, (epoch + 1) * self.num_rows)

    def _refuse(self, world_size: int) -> str:
        least = math.lcm(self.global_size, world_size)
        return (
            f"Batches of {self.tokens:,} tokens have a multiple of {self.global_size} rows, which {world_size} ranks "
            f"cannot share evenly; batch(tokens={self.tokens}, multiple={least}) could."
        )

    def _walk(self, row: int, number: int, end: int) -> int | None:
        """Where the batch begins that comes `number` batches after the start of a chunk, if before `end`."""
        while row < end:
            if number < (count := self._count(row)):
                found = int(self._starts(row)[number])
                return found if found < end else None
            number, row = number - count, self._chunk_at(row)[1]
        return None

    def _first_of(self, epoch: int) -> int:
        """Where the first batch of an epoch begins; with "carry", the one before may reach into it."""
        start = epoch * self.num_rows
        return start + -start % self.global_size if self.tail == "carry" else start

    def _chunk_at(self, row: int) -> tuple[int, int]:
        """Where the chunk of a row begins and ends."""
        epoch = row // self.num_rows
        while self._first_of(epoch) > row:
            epoch -= 1
        first = self._first_of(epoch)
        start = row - (row - first) % self.chunk_rows
        after = epoch + 1
        while self._first_of(after) == first:  # epochs shorter than the least batch have none of their own
            after += 1
        return start, min(start + self.chunk_rows, self._first_of(after))

    def _make_chunk(self, start: int) -> _Chunk:
        lengths = self._tokens(start, self._chunk_at(start)[1])
        is_long = lengths > self.longest
        if not is_long.any():
            return _Chunk(lengths, None)
        if not self.drops or is_long.all():
            self._refuse_row(start + int(np.flatnonzero(is_long)[0]), int(lengths[is_long][0]))
        before = np.maximum.accumulate(np.where(is_long, -1, np.arange(len(lengths))))
        stand_ins = np.where(before < 0, np.flatnonzero(~is_long)[0], before)
        return _Chunk(lengths[stand_ins], stand_ins)

    def _refuse_row(self, row: int, size: int) -> None:
        raise StageError(
            f"batch(tokens={self.tokens:,}, multiple={self.global_size}): {self.rows.describe(row)} has {size:,} "
            f"tokens, and {self.global_size} rows may have {self.longest:,} each. pad(length={self.longest}) cuts such "
            "documents, batch(long='drop') leaves them out."
        )

    def _cut(self, row: int) -> Int64:
        """Where batches begin from a row on to the end of its chunk, and finally where the last one ends."""
        start, _ = self._chunk_at(row)
        borders = row + _kernels.cut(
            self._chunk(start).lengths[row - start :], self.tokens, self.global_size, self._unit
        )
        last = int(borders[-2])
        if (
            borders[-1] - last
        ) % self.global_size:  # rows left over, at the end of an epoch, or behind a row of no batch
            end = last + self.global_size
            borders[-1] = end if self.tail == "carry" else min(end, self._end_of_epoch(row))
            if self.tail == "drop" and borders[-1] < end and len(borders) > 2:
                borders = borders[:-1]
        return borders

    def _starts(self, row: int) -> Int64:
        """Where batches begin from a row on to the end of its chunk."""
        borders = self._borders(row)
        is_rest = self.tail == "drop" and borders[1] - borders[0] < self.global_size
        return borders[:0] if is_rest else borders[:-1]

    def _tokens(self, begin: int, end: int) -> Int64:
        return self.rows.costs(np.arange(begin, end), TOKENS).astype(np.int64)

    @functools.cached_property
    def _chunk(self) -> functools._lru_cache_wrapper[_Chunk]:
        return functools.lru_cache(_KEPT_CHUNKS)(self._make_chunk)

    @functools.cached_property
    def _borders(self) -> functools._lru_cache_wrapper[Int64]:
        return functools.lru_cache(_KEPT_BORDERS)(self._cut)

    @functools.cached_property
    def _count(self) -> functools._lru_cache_wrapper[int]:
        """Batches that begin in the chunk that begins at a row."""
        return functools.lru_cache(None)(lambda start: len(self._starts(start)))

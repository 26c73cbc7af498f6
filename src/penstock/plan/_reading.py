"""One batch, from the number of its first row to the arrays that a rank gets.

row -> rows of the batch -> rows of this rank and part -> arrays -> targets counted over all ranks -> maps

Where a mapped function fails and `map(fn, on_error="skip")` says so, another row stands in. A batch must stay full, and
stay a pure function of the plan, so the row in place of a failed one is a function of its number alone: a chain of rows
of the same epoch is drawn from the seed and the number, and the first at which no function fails is taken, as it would
come in its own place. Wherever the batch is computed, it is the same row.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.order import derive_key
from penstock.plan._budget import BudgetSteps
from penstock.plan._compose import ROW_TARGETS
from penstock.plan._dealing import Dealer
from penstock.plan._mapping import first_row, run_map
from penstock.plan._rows import BatchArrays, PieceSource, RowSource
from penstock.plan._stages import IGNORED, Map
from penstock.plan._steps import Steps
from penstock.plan._uses import Reads, RowRange, Rows
from penstock.schema import offsets_of

IS_REPEATED = "is_repeated"
IS_REPLACED, NUM_REPLACED = "is_replaced", "num_replaced"

_log = logging.getLogger(__name__)
_MOST_TRIES = 16
_CHUNK_ROWS = 1 << 10
_KEPT_CHUNKS = 4


class TargetSums:
    """Targets in consecutive rows of the run, for `num_targets_global`.

    A keyed shuffle scatters the rows of a batch, and nothing but looking up each of them says how many targets they
    have: 0.015 to 0.05 µs a row, of which the permutation takes 0.011. Where lengths alone say it, that is done for
    1,024 rows at once, and sums are kept: a smaller batch then costs two look-ups. A larger one is counted by itself,
    since each worker process counts, whichever of the batches it reads. Where a loss mask has to be read, the batch's
    is.
    """

    def __init__(self, source: PieceSource) -> None:
        self._source = source
        self._sums = functools.lru_cache(_KEPT_CHUNKS)(self._sum_up)

    def reach(self, num_rows: int) -> int:
        """How many rows before and after it a batch of `num_rows` may look up."""
        return max(num_rows, _CHUNK_ROWS) if self._source.counts_ahead else num_rows

    def between(self, begin: int, end: int) -> int:
        """Targets in rows `begin` to `end`, which may be in several epochs."""
        if end - begin >= _CHUNK_ROWS or not self._source.counts_ahead:
            return self.of(np.arange(begin, end))
        total, num_rows = 0, self._source.num_rows
        while begin < end:
            first = begin - begin % num_rows
            chunk, place = divmod(begin - first, _CHUNK_ROWS)
            size = min(end - begin, first + num_rows - begin, _CHUNK_ROWS - place)
            sums = self._sums(first, chunk)
            total += int(sums[place + size] - sums[place])
            begin += size
        return total

    def of(self, rows: Rows) -> int:
        """Targets in these rows."""
        return int(self._source.count_targets(rows).sum())

    def _sum_up(self, first: int, chunk: int) -> NDArray[np.int64]:
        """Targets in the first 0, 1, 2, ... rows of a chunk of the epoch whose first row is `first`."""
        begin = first + chunk * _CHUNK_ROWS
        rows = np.arange(begin, min(begin + _CHUNK_ROWS, first + self._source.num_rows))
        return offsets_of(self._source.count_targets(rows))


@dataclass(frozen=True, slots=True)
class BatchReader:
    """Reads the batches of a plan."""

    rows: RowSource
    steps: Steps
    maps: tuple[Map, ...]
    seed: int
    """What the generators of mapped functions derive from."""
    targets: TargetSums | None
    """Of rows that are made of pieces."""
    dealer: Dealer | None = None
    """What deals rows to ranks by their costs; without one, they are dealt in turn."""
    ranks_are_apart: bool = False
    """Whether ranks read different shards, so that none of them can say what the others have."""

    def read_at(
        self, row: int, rank: int, world_size: int, part: int, num_parts: int, out: Mapping[str, NDArray[Any]] | None
    ) -> BatchArrays:
        """A rank's part of the batch that starts at an absolute row."""
        own, is_repeated = self.rows_at(row, rank, world_size, part, num_parts)
        batch = self.rows.read(own, out)
        is_hidden = is_repeated if self.steps.hides_repeated else None
        if is_hidden is not None and self.rows.makes_labels:
            batch["labels"][is_hidden] = IGNORED
        if ROW_TARGETS in batch:
            counts = batch.pop(ROW_TARGETS)
            num_targets = int(counts.sum() if is_hidden is None else counts[~is_hidden].sum())
            is_all = world_size == num_parts == 1
            batch["num_targets"] = num_targets
            if is_all:
                batch["num_targets_global"] = num_targets
            elif world_size == 1 or not self.ranks_are_apart:
                batch["num_targets_global"] = self._count_targets(row, world_size)
        if self.maps:
            batch = self._map(batch, own)
        if is_repeated is not None:
            batch[IS_REPEATED] = is_repeated
        return batch

    def rows_at(
        self, row: int, rank: int, world_size: int, part: int = 0, num_parts: int = 1
    ) -> tuple[Rows, NDArray[np.bool_] | None]:
        """(absolute rows of a rank's part of the batch at `row`, which of them only fill it up; None if none can)."""
        return (self.dealer or self.steps).rows_at(row, rank, world_size, part, num_parts)

    def reads(self, begin: int, end: int, ranks: Iterable[int], world_size: int) -> Iterator[Reads]:
        """What ranks read for the batches from row `begin` on, where one starts, up to row `end`."""
        size, tail, own = self.steps.global_size, self.steps.tail, tuple(ranks)
        reach = size if self.dealer is not None else 0
        if self.targets is not None and (world_size == 1 or not self.ranks_are_apart):  # targets that all ranks have
            reach = max(reach, self.targets.reach(size))
        if self.rows.num_rows == 0 or begin >= end:
            return
        asked = looked_at = RowRange(begin, end)
        if isinstance(self.steps, BudgetSteps):  # where a batch ends takes the lengths of its chunk
            reach = max(reach, self.steps.chunk_rows + size)
            looked_at = RowRange(*self.steps.chunks_of(begin, end))
        parts = [part for _, part in looked_at.epochs(self.rows.num_rows)]
        for part in [asked] if tail == "carry" and not reach else parts:
            rows = RowRange(part.begin, part.end, world_size, tuple((part.begin + rank) % world_size for rank in own))
            first = part.begin // self.rows.num_rows * self.rows.num_rows
            stop = first + self.rows.num_rows
            shown = part if looked_at is asked else asked
            if not reach:
                yield from self.rows.reads(rows)
            else:
                wider = RowRange(max(first, part.begin - reach), min(stop, part.end + reach))
                yield from (Reads(spans.widened(reach, shown), layers) for spans, layers in self.rows.reads(wider))
            last = asked.between(max(part.begin, stop - size), part.end)
            if tail in ("pad", "even") and last.begin < last.end:  # what fills up the last batch is read with it
                repeated = (
                    RowRange(first, min(first + size, stop))
                    if tail == "pad"
                    else RowRange(max(first, stop - size), stop)
                )
                yield from (Reads(spans.widened(stop, last), layers) for spans, layers in self.rows.reads(repeated))

    def _count_targets(self, row: int, world_size: int) -> int:
        """Targets in all rows of the batch at `row`, over all ranks and parts."""
        assert self.targets is not None, "rows that count their targets are made of pieces"
        num_real = self.steps.num_real(row)
        if isinstance(self.steps, BudgetSteps) and self.steps.drops:
            rows, is_dropped = self.steps.rows_of(row, np.arange(num_real))
            return self.targets.of(rows[is_dropped == 0])
        total = self.targets.between(row, row + num_real)
        if self.steps.tail == "even":  # the repeated rows are predicted once more
            repeated = self.steps.num_filled(row, world_size) - num_real
            passes, rest = divmod(repeated, num_real)
            total += passes * total + self.targets.between(row, row + rest)
        return total

    def _map(self, batch: BatchArrays, rows: Rows) -> BatchArrays:
        """The rows after all maps; where one may skip, with what was replaced."""
        replacing = _Replacing(self.seed, self.rows.num_rows)
        for number in range(len(self.maps)):
            batch = self._run_stage(number, batch, rows, replacing)
        if any(stage.on_error == "skip" for stage in self.maps):
            is_replaced = np.zeros(len(rows), np.bool_)
            is_replaced[list(replacing.places)] = True
            batch |= {IS_REPLACED: is_replaced, NUM_REPLACED: len(replacing.places)}
        return batch

    def count_replaced(self, epoch: int) -> int:
        """Rows of an epoch that another stands in for: all of them are computed, a batch of one rank at a time."""
        first, size, counted = epoch * self.rows.num_rows, self.steps.global_size, 0
        for begin in range(first, first + self.rows.num_rows, size):
            rows = np.arange(begin, min(begin + size, first + self.rows.num_rows))
            batch = self.rows.read(rows, None)
            if ROW_TARGETS in batch:
                num_targets = int(batch.pop(ROW_TARGETS).sum())
                batch |= {"num_targets": num_targets, "num_targets_global": num_targets}
            counted += self._map(batch, rows)[NUM_REPLACED]
        return counted

    def _run_stage(self, number: int, batch: BatchArrays, rows: Rows, replacing: _Replacing | None) -> BatchArrays:
        """The rows after one map; without `replacing`, a row that fails is an error."""
        stage = self.maps[number]

        def replace(place: int, error: Exception) -> dict[str, Any]:
            if replacing is None or stage.on_error == "raise":
                raise error
            return replacing.stand_in(place, int(rows[place]), error, lambda row: self._alone(row, number))

        return run_map(stage, batch, rows, derive_key(self.seed, "map", number), self.rows.describe, replace)

    def _alone(self, row: int, last: int) -> BatchArrays:
        """One row after the maps up to the last; whatever fails is an error."""
        rows = np.array([row])
        batch = self.rows.read(rows, None)
        for number in range(last + 1):
            batch = self._run_stage(number, batch, rows, None)
        return batch


@dataclass(slots=True)
class _Replacing:
    """The replaced rows of one batch."""

    seed: int
    num_rows: int
    """Rows in an epoch."""
    places: set[int] = field(default_factory=set)
    """Of the replaced rows in the batch."""

    def stand_in(self, place: int, row: int, error: Exception, compute: Callable[[int], BatchArrays]) -> dict[str, Any]:
        """What stands in place of a row that failed; `compute` gives a batch of one row alone, with the maps so far.

        Raises:
            Exception: the row's own error, when every row that was tried instead failed, too.
        """
        first = row // self.num_rows * self.num_rows
        for attempt in range(_MOST_TRIES):
            instead = first + derive_key(self.seed, "instead", row, attempt) % self.num_rows
            try:
                found = first_row(compute(instead))
            except Exception as other:  # noqa: BLE001 - whatever a user's function raises
                _log.debug("Row %d cannot stand in for row %d: %r", instead, row, other)
                continue
            _log.info("Row %d is replaced by row %d: %s: %s", row, instead, type(error).__name__, error)
            self.places.add(place)
            return found
        error.add_note(f"and {_MOST_TRIES} other rows that were tried in its place failed as well")
        raise error

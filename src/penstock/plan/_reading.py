"""One batch, from the number of its first row to the arrays that a rank gets.

row -> rows of the batch -> rows of this rank and part -> arrays -> targets counted over all ranks -> maps

Where a mapped function fails and `map(fn, on_error="skip")` says so, another row stands in. A batch must stay full, and
stay a pure function of the plan, so the row in place of a failed one is a function of its number alone: a chain of rows
of the same epoch is drawn from the seed and the number, and the first at which no function fails is taken, as it would
come in its own place. Wherever the batch is computed, it is the same row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.order import derive_key
from penstock.plan._compose import ROW_TARGETS
from penstock.plan._mapping import first_row, run_map
from penstock.plan._rows import BatchArrays, Rows, RowSource
from penstock.plan._stages import IGNORED, Map
from penstock.plan._steps import Steps

IS_REPEATED = "is_repeated"
IS_REPLACED, NUM_REPLACED = "is_replaced", "num_replaced"

_log = logging.getLogger(__name__)
_MOST_TRIES = 16


@dataclass(frozen=True, slots=True)
class BatchReader:
    """Reads the batches of a plan."""

    rows: RowSource
    steps: Steps
    maps: tuple[Map, ...]
    seed: int
    """What the generators of mapped functions derive from."""

    def read_at(
        self, row: int, rank: int, world_size: int, part: int, num_parts: int, out: Mapping[str, NDArray[Any]] | None
    ) -> BatchArrays:
        """A rank's part of the batch that starts at an absolute row."""
        rows, is_repeated = self.steps.rows_at(row, world_size)
        own = self.steps.part(self.steps.share(rows, rank, world_size), part, num_parts)
        batch = self.rows.read(own, out)
        if ROW_TARGETS in batch or is_repeated is not None:
            places = self.steps.part(self.steps.share(np.arange(len(rows)), rank, world_size), part, num_parts)
            is_hidden = is_repeated if self.steps.tail == "pad" else None
            self._account(batch, rows, places, is_hidden)
        if self.maps:
            batch = self._map(batch, own)
        if is_repeated is not None:
            batch[IS_REPEATED] = is_repeated[places]
        return batch

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
            self._account(batch, rows, np.arange(len(rows)), None)
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

    def _account(self, batch: BatchArrays, rows: Rows, places: Rows, is_hidden: NDArray[np.bool_] | None) -> None:
        """Count targets, those of hidden rows as none; `places` are this share's among `rows`."""
        is_real = np.ones(len(rows), np.bool_) if is_hidden is None else ~is_hidden
        if self.rows.makes_labels and not is_real[places].all():
            batch["labels"][~is_real[places]] = IGNORED
        if ROW_TARGETS in batch:
            own = int(batch.pop(ROW_TARGETS)[is_real[places]].sum())
            is_real[places] = False  # by place: repeated rows are in several
            batch["num_targets"], batch["num_targets_global"] = own, own + self._count_targets(rows[is_real])

    def _count_targets(self, rows: Rows) -> int:
        """Targets in rows that other ranks, or other parts, read."""
        packed = self.rows.as_pieces
        assert packed is not None  # only packed rows have targets to count
        return int(packed.count_targets(rows).sum()) if len(rows) else 0


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

"""One batch, from the number of its first row to the arrays that a rank gets.

row -> rows of the batch -> rows of this rank and part -> arrays -> targets counted over all ranks -> maps
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.order import derive_key
from penstock.plan._mapping import run_map
from penstock.plan._replacing import Replacing
from penstock.plan._steps import Steps
from penstock.rows import ROW_TARGETS, BatchArrays, Rows, RowSource
from penstock.stages import IGNORED, Map

IS_REPEATED = "is_repeated"
IS_REPLACED, NUM_REPLACED = "is_replaced", "num_replaced"


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
        replacing = Replacing(self.seed, self.rows.num_rows)
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

    def _run_stage(self, number: int, batch: BatchArrays, rows: Rows, replacing: Replacing | None) -> BatchArrays:
        """The rows after one map; nothing is replaced without a place to count it."""
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

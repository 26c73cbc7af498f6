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
from penstock.plan._compose import ROW_TARGETS
from penstock.plan._mapping import run_map
from penstock.plan._rows import Batch, Rows, RowSource
from penstock.plan._stages import IGNORED, Map
from penstock.plan._steps import Steps

IS_REPEATED = "is_repeated"


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
    ) -> Batch:
        """A rank's part of the batch that starts at an absolute row."""
        rows, is_repeated = self.steps.rows_at(row, world_size)
        own = self.steps.part(self.steps.share(rows, rank, world_size), part, num_parts)
        batch = self.rows.read(own, out)
        if ROW_TARGETS in batch or is_repeated is not None:
            places = self.steps.part(self.steps.share(np.arange(len(rows)), rank, world_size), part, num_parts)
            is_hidden = is_repeated if self.steps.tail == "pad" else None
            self._account(batch, rows, places, is_hidden)
        for number, stage in enumerate(self.maps):
            batch = run_map(stage, batch, own, derive_key(self.seed, "map", number), self.rows.describe)
        if is_repeated is not None:
            batch[IS_REPEATED] = is_repeated[places]
        return batch

    def _account(self, batch: Batch, rows: Rows, places: Rows, is_hidden: NDArray[np.bool_] | None) -> None:
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

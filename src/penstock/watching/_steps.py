"""Steps of a run of any length, in bounded memory: sums of everything, the latest in full, the rest as means.

    add(row) -> 1024 rows -> totals        exact sums
                          -> latest        the last 4,096 steps, as they were
                          -> blocks        the whole run: at most 2,048 sums of `steps_per_block` consecutive steps
                          -> waits         how many waits of which length, in bins of a sixteenth of an octave
                          -> longest       the steps that waited longest

When the blocks are full, each two become one. All of it takes about 1 MB.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ROWS_AT_ONCE = 1024
_MOST_LATEST = 4096
_MOST_BLOCKS = 2048
_MOST_LONGEST = 20
_BINS_PER_OCTAVE = 16
_SHORTEST = 1e-7
_NUM_BINS = 40 * _BINS_PER_OCTAVE

Matrix = NDArray[np.float64]


class StepRow(NamedTuple):
    """One step. NaN: not measured."""

    begin: float
    """When its batch was asked for, on the clock of `time.perf_counter`."""
    wait: float
    """Seconds in `next()`."""
    step: float
    """Seconds from the batch to the next request."""
    transfer: float
    """Seconds of the step that went to copies to the device."""
    cpu: float
    """Processor seconds of the training thread; this and the next three since they were last read."""
    delay: float
    """Seconds that it was ready to run and had no core."""
    minor_faults: float
    major_faults: float
    queued: float
    """Batches that were ready when it asked."""


COLUMNS = {name: place for place, name in enumerate(StepRow._fields)}


class StepHistory:
    """Takes rows, and keeps no more than it may."""

    def __init__(self) -> None:
        self._incoming: list[StepRow] = []
        self.num_steps = 0
        self._sums = np.zeros(len(COLUMNS))
        self._known = np.zeros(len(COLUMNS))
        self._latest: Matrix = np.empty((0, len(COLUMNS)))
        self._blocks = np.zeros((_MOST_BLOCKS, 2, len(COLUMNS)))
        """(sums, how many are known) of each block."""
        self.steps_per_block = 1
        self._waits = np.zeros(_NUM_BINS, np.int64)
        self._longest: Matrix = np.empty((0, 1 + len(COLUMNS)))

    def add(self, row: StepRow) -> None:
        """Keep one step, for now as it is: putting it into an array takes 20 µs if numpy's code is cold."""
        self._incoming.append(row)
        if len(self._incoming) == _ROWS_AT_ONCE:
            self.flush()

    @property
    def num_added(self) -> int:
        """Steps so far, those that wait for the next flush included."""
        return self.num_steps + len(self._incoming)

    def flush(self) -> None:
        """Bring everything up to date with what was added."""
        if not self._incoming:
            return
        rows = np.array(self._incoming)
        numbered = np.column_stack([np.arange(self.num_steps, self.num_steps + len(rows)), rows])
        self._add_blocks(rows)
        self._sums += np.nansum(rows, axis=0)
        self._known += np.isfinite(rows).sum(axis=0)
        self._latest = np.concatenate([self._latest, rows])[-_MOST_LATEST:]
        self._waits += np.bincount(_bins(rows[:, COLUMNS["wait"]]), minlength=_NUM_BINS)
        longest = np.concatenate([self._longest, numbered])
        self._longest = longest[np.argsort(-longest[:, 1 + COLUMNS["wait"]], kind="stable")[:_MOST_LONGEST]]
        self.num_steps += len(rows)
        self._incoming.clear()

    def total(self, column: str) -> float:
        """Sum over all steps in which it was measured; NaN when it never was."""
        self.flush()
        place = COLUMNS[column]
        return float(self._sums[place]) if self._known[place] else math.nan

    def mean(self, column: str) -> float:
        """Over all steps in which it was measured; NaN when it never was."""
        return self.total(column) / max(1.0, float(self._known[COLUMNS[column]]))

    def wait_quantile(self, share: float) -> float:
        """Seconds that this share of the waits stayed below, to 5 %."""
        self.flush()
        if not self.num_steps:
            return math.nan
        place = int(np.searchsorted(np.cumsum(self._waits), share * self.num_steps))
        return _SHORTEST * 2 ** ((place + 0.5) / _BINS_PER_OCTAVE) if place else 0.0

    def latest(self) -> tuple[int, Matrix]:
        """(number of the first, rows) of the latest steps."""
        self.flush()
        return self.num_steps - len(self._latest), self._latest

    def longest(self) -> list[tuple[int, float]]:
        """(step, seconds) of the longest waits, longest first."""
        self.flush()
        return [(int(row[0]), float(row[1 + COLUMNS["wait"]])) for row in self._longest]

    def means(self, column: str) -> Matrix:
        """Of each block of `steps_per_block` steps, over the whole run."""
        self.flush()
        place = COLUMNS[column]
        blocks = self._blocks[: -(-self.num_steps // self.steps_per_block)]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(blocks[:, 0, place] / blocks[:, 1, place])

    def _add_blocks(self, rows: Matrix) -> None:
        numbers = np.arange(self.num_steps, self.num_steps + len(rows))
        while numbers[-1] // self.steps_per_block >= _MOST_BLOCKS:
            halved = self._blocks.reshape(_MOST_BLOCKS // 2, 2, 2, len(COLUMNS)).sum(axis=1)
            self._blocks = np.concatenate([halved, np.zeros_like(halved)])
            self.steps_per_block *= 2
        is_known = np.isfinite(rows)
        np.add.at(
            self._blocks, numbers // self.steps_per_block, np.stack([np.where(is_known, rows, 0.0), is_known], axis=1)
        )


def _bins(seconds: Matrix) -> NDArray[np.int64]:
    places = np.log2(np.maximum(seconds, _SHORTEST) / _SHORTEST) * _BINS_PER_OCTAVE
    return np.asarray(np.clip(places, 0, _NUM_BINS - 1), np.int64)

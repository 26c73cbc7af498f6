"""From a sample back to the file and row it was prepared from.

`penstock prepare` notes beside the manifest which stretch of which file each stretch of samples came from:
`origins = {"files": [path, ...], "splits": [[file, begin, end, samples, rows], ...]}`. `rows` is null where
sample k of a split is its row k; else runs `[first sample, first row, stride]`. A sixth element, the number of
files, says that the split is a group of files from `file` on, one row each. A dataset that was shuffled has a
column `origin` instead: (split, row) of each sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.shards import Storage

ORIGIN_COLUMN = "origin"


class Provenance:
    """The notes of one dataset, read when first asked."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        origins = storage.provenance().get("origins") or {}
        self._files: list[str] = origins.get("files", [])
        self._splits: list[list[Any]] = origins.get("splits", [])
        self._ends = np.cumsum([split[3] for split in self._splits], dtype=np.int64)

    def origin(self, index: int) -> str | None:
        """File and row of a stored sample, in words; None when nothing was noted."""
        if not self._splits:
            return None
        if ORIGIN_COLUMN in self._storage.schema:
            number, row = self._storage.value(self._storage.schema[ORIGIN_COLUMN], index).tolist()
        else:
            number = int(np.searchsorted(self._ends, index, side="right"))
            if number >= len(self._splits):
                return None
            before = int(self._ends[number - 1]) if number else 0
            row = _row_of(self._splits[number][4], index - before)
        file, begin, end, _, _, *num_files = self._splits[number]
        if num_files:  # a group of small files, each of them one row
            return str(self._files[file + row])
        return f"{self._files[file]} [{begin}:{end}], row {row}"


def _row_of(runs: list[list[int]] | None, sample: int) -> int:
    if runs is None:
        return sample
    firsts = [run[0] for run in runs]
    first, row, stride = runs[int(np.searchsorted(firsts, sample, side="right")) - 1]
    return row + (sample - first) * stride

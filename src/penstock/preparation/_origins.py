"""From which row of which file a sample came, in a few numbers.

Most transforms give one sample per row, so almost every split needs no more than its count. Where rows
are skipped or give several samples, runs `[first sample, first row, stride]` say the rest: stride 1 is
one sample per row, stride 0 several of the same row. A transform that keeps no order in this, such as a
filter that drops every second row, would make the manifest grow with the data: it gets a column instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.preparation._plan import paths_of
from penstock.preparation._record import Rows
from penstock.sources import Split

Int64 = NDArray[np.int64]
# About 20 bytes of manifest each.
_MAX_RUNS = 20_000


class Trace:
    """Rows of the samples of one split, as they come."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._runs: list[list[int]] = []
        self._last_row = 0
        self._stride: int | None = None
        """None while the last run has one sample, and may still become either kind."""

    def add(self, rows: Int64) -> None:
        """The next samples came from these rows, which never fall."""
        if not len(rows):
            return
        if not self._runs:
            self._begin(0, int(rows[0]))
            self.num_samples, self._last_row, rows = 1, int(rows[0]), rows[1:]
        steps = np.diff(rows, prepend=self._last_row)
        borders = [0, *(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(steps)]
        for begin, end in itertools.pairwise(borders):
            if begin < end:
                self._add_steps(rows, int(steps[begin]), begin, end)
        self.num_samples += len(rows)
        self._last_row = int(rows[-1]) if len(rows) else self._last_row

    def rows(self) -> Rows:
        """The runs, or None when sample k is row k.

        Raises:
            SchemaError: there are too many for a manifest.
        """
        if not self._runs or self._runs == [[0, 0, 1]]:
            return None
        if len(self._runs) > _MAX_RUNS:
            raise SchemaError(
                f"Rows are left out or repeated so often that {len(self._runs):,} runs would be needed to trace the "
                "samples of one split. Keep each sample's origin as a column: origins='column', --origins column, "
                "and --overwrite what is unfinished."
            )
        return self._runs

    def _add_steps(self, rows: Int64, step: int, begin: int, end: int) -> None:
        """Rows `begin` to `end`, each `step` after the one before."""
        if step not in (0, 1):
            for place in range(begin, end):
                self._begin(self.num_samples + place, int(rows[place]))
        elif self._stride is None:
            self._stride = self._runs[-1][2] = step
        elif self._stride != step:
            self._begin(self.num_samples + begin, int(rows[begin]))
            if end - begin > 1:
                self._stride = self._runs[-1][2] = step

    def _begin(self, sample: int, row: int) -> None:
        self._runs.append([sample, row, 1])
        self._stride = None


@dataclass(frozen=True, slots=True)
class SplitOrigin:
    """Which rows of which files the samples of one split are."""

    paths: tuple[str, ...]
    is_group: bool
    """Whether row r is the file at place r, rather than a row of the one file."""
    begin: int
    end: int
    num_samples: int
    rows: Rows

    @classmethod
    def of(cls, split: Split, num_samples: int, rows: Rows) -> Self:
        """Origin of the samples that a finished task made of a split."""
        return cls(paths_of(split), bool(split.paths), split.begin, split.end, num_samples, rows)


def origins_to_json(origins: Iterable[SplitOrigin]) -> dict[str, Any]:
    """The manifest's section: files, and for each split `[file, begin, end, samples, rows]`.

    A split that is a group of files has their number behind that: row r of it is file `file + r`.
    """
    files: list[str] = []
    numbers: dict[str, int] = {}
    splits: list[list[Any]] = []
    for origin in origins:
        number = len(files) if origin.is_group else numbers.setdefault(origin.paths[0], len(files))
        if number == len(files):
            files += origin.paths
        group = [len(origin.paths)] if origin.is_group else []
        splits.append([number, origin.begin, origin.end, origin.num_samples, origin.rows, *group])
    return {"files": files, "splits": splits}


def origins_from_json(section: Mapping[str, Any]) -> list[SplitOrigin]:
    """What `origins_to_json` gave."""
    files, origins = section["files"], []
    for number, begin, end, num_samples, rows, *group in section["splits"]:
        paths = tuple(files[number : number + (group[0] if group else 1)])
        origins.append(SplitOrigin(paths, bool(group), begin, end, num_samples, rows))
    return origins

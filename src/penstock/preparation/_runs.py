"""Whether the sources hold one class after the other, seen in a few rows from a few places.

A windowed shuffle mixes about a gigabyte at a time, so below that no order of the sources matters. Above it, the first
rows of eight splits are read. If rows of one place have the same label far more often than rows of different ones,
samples are permuted when they are written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.schema import LABEL_COLUMNS
from penstock.sources import SourceOptions, Split, peek_split

_LEAST_BYTES = 1 << 30
_PLACES = 8
_ROWS = 256
_IN_RUNS = 0.5


def find_runs(splits: Sequence[Split], reading: SourceOptions, columns: Collection[str]) -> str | None:
    """The first of these columns of classes that comes in runs; None if there is none, or the sources are small."""
    names = [name for name in LABEL_COLUMNS if name in columns]
    if not names or sum(max(0, split.num_bytes) for split in splits) < _LEAST_BYTES or len(splits) < 2:
        return None
    chosen = {int(number) for number in np.linspace(0, len(splits) - 1, _PLACES)}
    peeks = [_peek(splits[number], reading, names) for number in sorted(chosen)]
    return next((name for name in names if _comes_in_runs([peek[name] for peek in peeks if name in peek])), None)


def _peek(split: Split, reading: SourceOptions, names: Sequence[str]) -> dict[str, list[str]]:
    """Labels of the first rows of a split; what is damaged is for its task to report."""
    try:
        records = next((each for each in peek_split(split, reading) if each.num_rows), None)
    except FormatError:
        return {}
    found = records.columns if records is not None else {}
    return {name: [str(label) for label in found[name][:_ROWS]] for name in names if name in found}


def _comes_in_runs(places: Sequence[Sequence[str]]) -> bool:
    if len(places) < 2:
        return False
    names, numbers = np.unique([label for place in places for label in place], return_inverse=True)
    ends = np.cumsum([len(place) for place in places])[:-1]
    within = np.mean([_alike(part, len(names)) for part in np.split(numbers, ends)])
    across = _alike(numbers, len(names))
    return across < 1 and bool((within - across) / (1 - across) > _IN_RUNS)


def _alike(numbers: NDArray[np.int64], num_labels: int) -> float:
    """How often two of these are the same."""
    shares = np.bincount(numbers, minlength=num_labels) / max(1, len(numbers))
    return float((shares**2).sum())

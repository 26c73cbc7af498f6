"""Parts of a dataset, decided sample by sample: a split looks at one sample's key and the seed, and at nothing else.

So a sample stays in its part when others are added, removed or moved, however the data is stored. Samples with the
same key are in the same part: copies of a document never end up in both training and validation data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import whole_number
from penstock.order import derive_key, draw_shares, share_ranges
from penstock.samples._keys import By
from penstock.samples._samples import Samples
from penstock.schema import Schema
from penstock.splitmix import GAMMA, mix

_CHUNK = 1 << 20
_WORDS = ("content", "index", "file")


@dataclass(frozen=True, slots=True)
class SplitPart:
    """The samples whose number from 0 to 1, drawn by key and seed, lies between two shares."""

    begin: float
    end: float
    seed: int
    by: By = "index"

    def indices(self, before: Samples) -> NDArray[np.int64]:
        """The samples of this part, in order."""
        parts = [np.empty(0, np.int64)]
        for begin in range(0, len(before), _CHUNK):
            chunk = np.arange(begin, min(begin + _CHUNK, len(before)), dtype=np.int64)
            shares = self._draw(before, chunk)
            parts.append(chunk[(shares >= self.begin) & (shares < self.end)])
        return np.concatenate(parts)

    def _draw(self, before: Samples, chunk: NDArray[np.int64]) -> NDArray[np.float64]:
        if self.by != "index":
            return draw_shares(before.keys.of(self.by, before.locate(chunk)), self.seed)
        drawn = mix(chunk.view(np.uint64) * GAMMA + np.uint64(derive_key(self.seed, "split")))
        shares: NDArray[np.float64] = drawn / 2.0**64
        return shares

    @property
    def identity(self) -> str:
        """The numbers of the recipe."""
        numbers = f"split {self.begin!r} {self.end!r} {self.seed}"
        return numbers if self.by == "index" else f"{numbers} by {self.by!r}"

    def to_json(self) -> list[Any]:
        """The numbers of the recipe, and what it goes by, unless that is the index."""
        by = list(self.by) if isinstance(self.by, tuple) else self.by
        return [self.begin, self.end, self.seed, *([] if by == "index" else [by])]

    @classmethod
    def from_json(cls, begin: float, end: float, seed: int, by: str | list[str] = "index") -> SplitPart:
        """The inverse of `to_json`."""
        known: Any = tuple(by) if isinstance(by, list) else by
        if not isinstance(known, tuple) and known not in _WORDS:
            raise ValueError(f"a split by {by!r}")
        return cls(float(begin), float(end), int(seed), known)


def split_parts(
    fractions: Mapping[str, float], seed: int, by: str | Sequence[str], schema: Schema
) -> dict[str, SplitPart]:
    """One part per name; together they take every sample exactly once.

    Raises:
        TypeError: the fractions have no names, or the seed is not an int.
        ValueError: a fraction is not positive, they do not add up to 1, or `by` can mean two things.
    """
    ranges = share_ranges(fractions)
    seed, key = whole_number("split", "seed", seed), _as_by(by, schema)
    return {name: SplitPart(begin, end, seed, key) for name, (begin, end) in ranges.items()}


def _as_by(by: str | Sequence[str], schema: Schema) -> By:
    """What `by` means: one of three words, or columns."""
    if not isinstance(by, str):
        return tuple(by)
    if by not in _WORDS:
        return (by,)
    if by in schema:
        raise ValueError(
            f"split(by={by!r}): there is a column of that name, too. Write by=[{by!r}] to go by the column."
        )
    return cast(By, by)

"""Which samples of a storage a dataset shows: small recipes that any process can apply again.

A split is decided sample by sample, by a keyed hash of the sample's number, and never looks at how
many samples there are: appending data moves no sample from one side to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.identity import digest
from penstock.order import derive_key
from penstock.plan._arguments import whole_number

_CHUNK = 1 << 20


class Selection(Protocol):
    """A recipe that picks samples out of those before it."""

    def indices(self, num_samples: int) -> NDArray[np.int64]:
        """Which of `num_samples` samples remain, in order."""
        ...

    @property
    def identity(self) -> str:
        """What tells this recipe from another."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """These samples, in this order."""

    chosen: NDArray[np.int64]

    def indices(self, num_samples: int) -> NDArray[np.int64]:
        """The samples, counted from the front."""
        chosen = np.where(self.chosen < 0, self.chosen + num_samples, self.chosen)
        wrong = (chosen < 0) | (chosen >= num_samples)
        if wrong.any():
            raise IndexError(f"Index {self.chosen[wrong][0]} is out of range for {num_samples:,} samples.")
        return chosen

    @property
    def identity(self) -> str:
        """Digest of the samples."""
        return "take " + digest(self.chosen.tobytes())


@dataclass(frozen=True, slots=True)
class SplitPart:
    """The part of a split between two shares."""

    begin: float
    end: float
    seed: int

    def indices(self, num_samples: int) -> NDArray[np.int64]:
        """Samples whose hash, as a number from 0 to 1, lies in the part."""
        key = np.uint64(derive_key(self.seed, "split"))
        parts = [np.empty(0, np.int64)]
        for begin in range(0, num_samples, _CHUNK):
            chunk = np.arange(begin, min(begin + _CHUNK, num_samples), dtype=np.int64)
            shares = _hash(chunk.view(np.uint64), key) / 2.0**64
            parts.append(chunk[(shares >= self.begin) & (shares < self.end)])
        return np.concatenate(parts)

    @property
    def identity(self) -> str:
        """The numbers of the recipe."""
        return f"split {self.begin!r} {self.end!r} {self.seed}"


def split_parts(fractions: Mapping[str, float], seed: int) -> dict[str, SplitPart]:
    """One recipe per name; together they take every sample exactly once.

    Raises:
        TypeError: the fractions have no names, or the seed is not an int.
        ValueError: a fraction is not positive, or they do not add up to 1.
    """
    if not isinstance(fractions, Mapping):
        raise TypeError(f"Fractions have names, as in {{'train': 0.9, 'test': 0.1}}; these are {fractions!r}.")
    if not fractions or any(not fraction > 0 for fraction in fractions.values()):
        raise ValueError(f"Fractions must be positive; these are {dict(fractions)}.")
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(f"Fractions must add up to 1; {dict(fractions)} add up to {sum(fractions.values())}.")
    seed = whole_number("split", "seed", seed)
    edges = np.concatenate([[0.0], np.cumsum(list(fractions.values()))]).tolist()
    edges[-1] = 2.0  # whatever rounding did, the last part takes all that is left
    return {name: SplitPart(edges[place], edges[place + 1], seed) for place, name in enumerate(fractions)}


def _hash(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser over `numbers + key` (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))

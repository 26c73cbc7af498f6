"""Which part of a split a sample is in: decided by a number from 0 to 1 that depends only on its key and the seed.

So a sample stays in its part whatever is added, removed or moved around it, and a part whose range of numbers grows
keeps all the samples it had.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.order._keys import derive_key
from penstock.splitmix import mix


def draw_shares(keys: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """A number from 0 to 1 for each key."""
    drawn: NDArray[np.float64] = mix(keys + np.uint64(derive_key(seed, "split by key"))) / 2.0**64
    return drawn


def share_ranges(fractions: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """The range of numbers of each part; together they cover every number exactly once.

    Raises:
        TypeError: the fractions have no names.
        ValueError: a fraction is not positive, or they do not add up to 1.

    >>> share_ranges({"train": 0.75, "val": 0.25})
    {'train': (0.0, 0.75), 'val': (0.75, 2.0)}
    """
    if not isinstance(fractions, Mapping):
        raise TypeError(f"Fractions must have names, as in {{'train': 0.9, 'test': 0.1}}; these are {fractions!r}.")
    if not fractions or any(not fraction > 0 for fraction in fractions.values()):
        raise ValueError(f"Fractions must be positive; these are {dict(fractions)}.")
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(f"Fractions must add up to 1; {dict(fractions)} add up to {sum(fractions.values())}.")
    edges = np.concatenate([[0.0], np.cumsum(list(fractions.values()))]).tolist()
    edges[-1] = 2.0  # however rounding went, the last part takes the rest
    return {name: (edges[number], edges[number + 1]) for number, name in enumerate(fractions)}

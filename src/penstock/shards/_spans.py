"""Parts of samples, and where each goes: what packing asks of a storage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """`sizes[k]` elements from element `firsts[k]` of sample `indices[k]` go to place `targets[k]`."""

    indices: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    targets: NDArray[np.int64]


def check_span(first: int, size: int, length: int) -> None:
    """Refuse a span that leaves its sample."""
    if first < 0 or size < 0 or first + size > length:
        raise IndexError(f"Elements {first:,} to {first + size:,} are asked of a sample that has {length:,}.")

"""Lengths in bins of doubling width: documents differ by factors, not by amounts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BINS = 64
_BAR = 30


class Histogram(NamedTuple):
    """How many lengths fall in [0], [1], [2, 3], [4, 7], [8, 15], ..."""

    counts: tuple[int, ...]
    total: int
    shortest: int
    longest: int

    @property
    def mean(self) -> float:
        """Mean length, or 0 if there are none."""
        return self.total / max(1, sum(self.counts))

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        bins = [{"from": low, "to": high, "count": count} for low, high, count in self._bins()]
        return {"shortest": self.shortest, "longest": self.longest, "mean": self.mean, "bins": bins}

    def lines(self, limit: int | None = None) -> list[str]:
        """One line per bin: range, count, bar; if there are more than `limit`, bins at the thinner end are merged."""
        bins = self._bins()
        while limit is not None and len(bins) > max(1, limit):
            is_low_end = bins[0][2] + bins[1][2] <= bins[-1][2] + bins[-2][2]
            place = 0 if is_low_end else len(bins) - 2
            (low, _, first), (_, high, second) = bins[place : place + 2]
            bins[place : place + 2] = [(low, high, first + second)]
        largest = max((count for _, _, count in bins), default=0)
        return [
            f"{f'{low:,}' if low == high else f'{low:,} to {high:,}':>24} {count:>14,}  "
            + "█" * round(_BAR * count / max(1, largest))
            for low, high, count in bins
        ]

    def _bins(self) -> list[tuple[int, int, int]]:
        """(shortest, longest, count) of each bin from the first to the last that is not empty."""
        used = [place for place, count in enumerate(self.counts) if count]
        return [
            (1 << (place - 1) if place else 0, (1 << place) - 1 if place else 0, self.counts[place])
            for place in (range(used[0], used[-1] + 1) if used else ())
        ]


def histogram(chunks: Iterable[NDArray[np.int64]]) -> Histogram:
    """Histogram of lengths that arrive in chunks, so that they need not fit in memory."""
    import numpy as np

    counts = np.zeros(_BINS, np.int64)
    total, shortest, longest = 0, 2**62, 0
    for lengths in chunks:
        if len(lengths):
            # frexp gives the exponent e with 2^(e-1) <= length < 2^e, and 0 for 0.
            counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=_BINS)
            total += int(lengths.sum())
            shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    return Histogram(tuple(counts.tolist()), total, min(shortest, longest), longest)

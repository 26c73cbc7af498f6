"""Readable numbers, the same in every medium; and a histogram of lengths.

Its bins have doubling width: documents differ by factors, not by amounts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.report._page import Finding, Gain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_BYTE_UNITS = (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_SECOND_UNITS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6))
_BINS = 64
_BAR = 30


def format_seconds(seconds: float) -> str:
    """Three digits and a unit.

    >>> format_seconds(0.0142), format_seconds(75.04), format_seconds(0.0000031)
    ('14.2 ms', '1 min 15 s', '3.1 µs')
    """
    if not math.isfinite(seconds):
        return "–"
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    factor, unit = next(((factor, unit) for least, unit, factor in _SECOND_UNITS if seconds >= least), (1e6, "µs"))
    return f"{format_number(seconds * factor)} {unit}"


def format_bytes(count: float) -> str:
    """Bytes with a decimal unit: 1 GB is 10^9, as disks and networks count.

    >>> format_bytes(2_530_000_000)
    '2.53 GB'
    """
    for unit, size in _BYTE_UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def format_number(number: float) -> str:
    """Three significant digits, never in powers of ten; thousands are separated.

    >>> format_number(28.4123), format_number(1234567.0), format_number(0.0), format_number(1.0)
    ('28.4', '1,234,567', '0', '1')
    """
    if not math.isfinite(number):
        return "–"
    if abs(number) >= 100:
        return f"{number:,.0f}"
    digits = 2 - math.floor(math.log10(abs(number))) if abs(number) >= 1e-4 else 0
    text = f"{number:.{min(6, max(0, digits))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_gain(gain: Gain) -> str:
    """A ratio with its margin, unless it may be wrong by all of itself.

    >>> format_gain(Gain(ratio=1.461, error=0.09)), format_gain(Gain(ratio=13.6)), format_gain(Gain(ratio=7, error=7))
    ('1.46 ± 0.09 ×', '13.6 ×', 'roughly 7.0 ×')
    """
    if gain.error >= gain.ratio:
        return f"roughly {gain.ratio:.1f} ×"
    digits = 2 if gain.ratio < 10 else 1
    return f"{gain.ratio:.{digits}f}{f' ± {gain.error:.{digits}f}' if gain.error else ''} ×"


def describe_gain(finding: Finding) -> str:
    """What a finding's change gives: the measured gain, the most it could give, or nothing."""
    if finding.gain is not None:
        return f"{format_gain(finding.gain)} measured"
    return "" if finding.limit is None else f"at most {finding.limit.ratio:.2f} ×"


FigureLine = tuple[str, int | str, str]
"""A name, its figure (text if it has a unit), and what to know about it."""


def align_figures(lines: Iterable[FigureLine]) -> str:
    """One line for each figure, in columns.

    >>> print(align_figures([("rows", 1200, ""), ("padding", 31, "places without a token")]))
    rows     1,200
    padding     31  places without a token
    """
    shown = [(name, figure if isinstance(figure, str) else f"{figure:,}", note) for name, figure, note in lines]
    names, figures = (max((len(line[place]) for line in shown), default=0) for place in (0, 1))
    return "\n".join(f"{name:<{names}}  {figure:>{figures}}  {note}".rstrip() for name, figure, note in shown)


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

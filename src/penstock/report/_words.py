"""Readable numbers, the same in every medium; and a table of them as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.report._page import Finding, Gain

_BYTE_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_SECOND_UNITS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6))


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
    """A ratio and its error.

    >>> format_gain(Gain(ratio=1.461, error=0.09)), format_gain(Gain(ratio=1.0))
    ('× 1.46 ± 0.09', '× 1.00')
    """
    return f"× {gain.ratio:.2f}" + (f" ± {gain.error:.2f}" if gain.error else "")


def describe_gain(finding: Finding) -> str:
    """What a finding's change gives: the measured gain, the most it could give, or nothing."""
    if finding.gain is not None:
        return f"{format_gain(finding.gain)} measured"
    return "" if finding.limit is None else f"at most × {finding.limit.ratio:.2f}"


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


class TextTable(NamedTuple):
    """Names of the columns, and rows of as many cells. Never folded, even if wider than the terminal.

    >>> print(TextTable(("num_workers", "steps/s"), [("0", "41.3"), ("2", "133")]))
    num_workers  steps/s
              0     41.3
              2      133
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.header))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

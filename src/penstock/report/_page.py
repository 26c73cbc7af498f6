"""The page: everything that a report of a run can show, as plain data, and how its numbers are written.

    Page ── verdict, headlines
         ── findings     what to change, by measured gain; each may point at steps
         ── lanes        who did what when: spans of time, one lane per thread or process
         ── steps        wait and step of every step, or of every few
         ── charts       figures over time
         ── arms         settings that were tried
         ── tables       other figures, in rows
         ── slowest      samples
         ── machine      facts

Whatever is empty is not shown. Text may come from strangers (file names, errors, reprs); each medium escapes it.

As plain data it is JSON, or a trace for ui.perfetto.dev and chrome://tracing, with lanes as threads and charts as
counters. The format is Chrome's trace events, in JSON: times in microseconds, one object per span.

Numbers look the same in every medium. A histogram of lengths has bins of doubling width: documents differ by factors,
not by amounts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LANES, _CHARTS = 1, 2
"""Processes of a trace."""

Tone = Literal["good", "bad", "plain"]
SpanKind = Literal["step", "wait", "start", "sample", "collate", "handover", "idle"]
"""What a span of time was spent on. `start`: workers starting; `idle`: a worker without work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How much faster: a ratio of step rates, with half the width of its 95 % interval."""

    ratio: float
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One of the few numbers at the top."""

    value: str
    """Number and unit: `28.4/s`."""
    label: str
    """What it is, in a few words."""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to change, or to know."""

    id: str
    """A short name that programs can rely on: `prefetch`."""
    title: str
    evidence: tuple[str, ...] = ()
    """Sentences with the numbers that show it."""
    change: str = ""
    """The line to write, or what to do."""
    where: str = ""
    """`train.py:24`."""
    price: str = ""
    """What the change costs: `+0.2 MB of memory`."""
    gain: Gain | None = None
    """Measured by trying it; None if it was not tried."""
    limit: Gain | None = None
    """If it cannot be tried here, the most that it could give."""
    steps: tuple[tuple[int, int], ...] = ()
    """Steps that show it, as ranges (first, one past the last): a click highlights them."""
    link: str = ""
    """A page that shows how: an address, which is linked if it is `https://`, or a path in the docs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of time in a lane, in seconds from the start of the page."""

    start: float
    duration: float
    kind: SpanKind
    label: str = ""
    step: int | None = None
    """The step that its batch is for: a click follows the batch through all lanes."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(SpanKind):
            raise ValueError(f"kind={self.kind!r}; the choices are {', '.join(get_args(SpanKind))}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One thread or process: spans in the order of their start, which should hardly overlap, to be readable."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Wait and step of consecutive steps, in seconds; in a long run an entry is the mean of `steps_per_entry` steps."""

    wait: tuple[float, ...]
    step: tuple[float, ...]
    first: int = 0
    steps_per_entry: int = 1

    def __post_init__(self) -> None:
        if len(self.wait) != len(self.step):
            raise ValueError(f"{len(self.wait)} waits for {len(self.step)} steps; give one wait for each step.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart; gaps that were not measured (NaN) are bridged."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Figures over time: each line has a value for each of the times."""

    title: str
    unit: str
    """`cores`, `GB`, `steps/s`: written on the axis."""
    times: tuple[float, ...]
    """Seconds from the start of the page."""
    lines: tuple[Line, ...]
    note: str = ""
    """A sentence under the chart."""

    @classmethod
    def of(cls, title: str, unit: str, times: NDArray[Any], lines: Mapping[str, NDArray[Any]], note: str = "") -> Chart:
        """From arrays; lines of which nothing was measured are left out."""
        columns = {name: tuple(values.tolist()) for name, values in lines.items()}
        drawn = (Line(name=name, values=values) for name, values in columns.items() if any(map(math.isfinite, values)))
        return cls(title=title, unit=unit, times=tuple(times.tolist()), lines=tuple(drawn), note=note)

    def __post_init__(self) -> None:
        for line in self.lines:
            if len(line.values) != len(self.times):
                raise ValueError(
                    f"{self.title}: {len(line.values)} values of {line.name!r} at {len(self.times)} times."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Settings that were tried in turns with the others."""

    name: str
    gain: Gain
    steps_per_second: float
    wait_seconds: float
    step_seconds: float
    cores: float | None = None
    """CPU time that it used, in cores."""
    is_baseline: bool = False
    """The run as it is."""
    is_advised: bool = False
    """What a finding says to change to."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureTable:
    """Names of the columns, and rows of figures, each with a name in its first cell.

    As text it is never folded, even if wider than the terminal.

    >>> print(FigureTable(header=("num_workers", "steps/s"), rows=(("0", "41.3"), ("2", "133"))))
    num_workers  steps/s
              0     41.3
              2      133
    """

    title: str = ""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"{self.title}: {len(row)} cells under {len(self.header)} names: {row!r}.")

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ((cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSample:
    """A sample that took long to make."""

    index: str
    """Its place in the dataset, or whatever names it."""
    seconds: float
    cpu_seconds: float | None = None
    step: int | None = None
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A name and a value, both for people."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report of a run, ready to be drawn."""

    title: str
    """What was run, and by what: `penstock doctor · train.py`."""
    verdict: str
    """One sentence."""
    tone: Tone = "plain"
    headlines: tuple[Headline, ...] = ()
    findings: tuple[Finding, ...] = ()
    """In the order in which they are shown."""
    lanes: tuple[Lane, ...] = ()
    steps: StepTimes | None = None
    charts: tuple[Chart, ...] = ()
    arms: tuple[Arm, ...] = ()
    tables: tuple[FigureTable, ...] = ()
    slowest: tuple[SlowSample, ...] = ()
    machine: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    """What readers must know to trust the numbers: one sentence each."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the names of the fields."""
        return dataclasses.asdict(self)


def to_perfetto(page: Page) -> str:
    """JSON text of all of the page's lanes and charts, however much that is."""
    events = [
        _named("process_name", _LANES, 0, page.title),
        _named("process_name", _CHARTS, 0, "figures over time"),
        *(event for place, lane in enumerate(page.lanes, 1) for event in _lane_events(lane, place)),
        *(event for chart in page.charts for event in _chart_events(chart)),
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"verdict": page.verdict}})


def _lane_events(lane: Lane, place: int) -> Iterator[dict[str, Any]]:
    yield _named("thread_name", _LANES, place, lane.name)
    yield {"ph": "M", "name": "thread_sort_index", "pid": _LANES, "tid": place, "args": {"sort_index": place}}
    for span in lane.spans:
        yield {
            "ph": "X",
            "pid": _LANES,
            "tid": place,
            "name": span.label or span.kind,
            "cat": span.kind,
            "ts": span.start * 1e6,
            "dur": span.duration * 1e6,
            "args": {} if span.step is None else {"step": span.step},
        }


def _chart_events(chart: Chart) -> Iterator[dict[str, Any]]:
    name = f"{chart.title} ({chart.unit})"
    for place, moment in enumerate(chart.times):
        values = {line.name: line.values[place] for line in chart.lines if math.isfinite(line.values[place])}
        if values:
            yield {"ph": "C", "pid": _CHARTS, "tid": 0, "name": name, "ts": moment * 1e6, "args": values}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


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

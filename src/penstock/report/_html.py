"""The page as one HTML file: below half a megabyte, without network access, for light, dark, narrow and print.

Text and tables are written here, so that they work without JavaScript; what moves (lanes, steps, charts) is drawn
by `resources/page.js` from the JSON at the end. Text from strangers is escaped on the way in, and the page allows no
script but its own: its content security policy names that script by its digest, and no address at all.

It is small enough to mail: long runs are cut or averaged to what a screen can show, and the page says so.
Half a megabyte is enough for `_MOST_SPANS` spans (about 20 bytes each); a screen has fewer columns than `_MOST_STEPS`.
"""

import dataclasses
import html
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from string import Template
from typing import Any, NamedTuple

from penstock.errors import printable
from penstock.report._page import (
    Arm,
    Chart,
    Fact,
    FigureTable,
    Finding,
    Gain,
    Headline,
    Lane,
    Line,
    Page,
    SlowSample,
    StepTimes,
    describe_gain,
    format_gain,
    format_number,
    format_seconds,
)

_MOST_SPANS = 8000
_MOST_STEPS = 2000
_MOST_POINTS = 400
_MOST_ROWS = 50
_MOST_LINES = 64
_LONGEST_TEXT = 1000
"""Characters of one text; more than anybody reads, but less than fills a page."""
_KINDS = {
    "step": ("training step", "step"),
    "wait": ("waiting for a batch", "wait"),
    "start": ("starting", "start"),
    "sample": ("samples", "samples"),
    "collate": ("collate", "collate"),
    "handover": ("hand-over", "hand-over"),
    "idle": ("nothing to do", "idle"),
}
"""Names of spans in the legend, and on the spans; `page.css` has a colour for each."""

_HOW_TO_MOVE = "Drag to move, pinch or ctrl-wheel to zoom, click a span to follow its batch through the lanes."


def fit_page(page: Page) -> Page:
    """The page with no more than fits, and a note about what was left out."""
    lanes, note = _fit_lanes(page)
    charts = tuple(_fit_chart(chart) for chart in page.charts[:_MOST_LINES])
    left_out = [
        f"{len(rows) - _MOST_ROWS} more {name} are not shown."
        for name, rows in (
            ("findings", page.findings),
            ("settings", page.arms),
            ("samples", page.slowest),
            *((f"rows of {table.title}", table.rows) for table in page.tables),
        )
        if len(rows) > _MOST_ROWS
    ]
    return dataclasses.replace(
        page,
        lanes=lanes,
        steps=None if page.steps is None else _fit_steps(page.steps),
        charts=charts,
        findings=page.findings[:_MOST_ROWS],
        arms=page.arms[:_MOST_ROWS],
        slowest=page.slowest[:_MOST_ROWS],
        tables=tuple(dataclasses.replace(table, rows=table.rows[:_MOST_ROWS]) for table in page.tables),
        notes=(*page.notes, *note, *left_out),
    )


def _fit_lanes(page: Page) -> tuple[tuple[Lane, ...], tuple[str, ...]]:
    """All spans, or those of the time around the first steps that a finding points at."""
    lanes = page.lanes[:_MOST_LINES]
    spans = sorted((span for lane in lanes for span in lane.spans), key=lambda span: span.start)
    if len(spans) <= _MOST_SPANS:
        return lanes, ()
    wanted = next((first for finding in page.findings for first, _ in finding.steps), None)
    place = next((place for place, span in enumerate(spans) if span.step is not None and span.step == wanted), 0)
    begin = min(max(0, place - _MOST_SPANS // 8), len(spans) - _MOST_SPANS)
    kept = spans[begin : begin + _MOST_SPANS]
    first, last = kept[0].start, kept[-1].start
    note = f"The lanes show {format_seconds(last - first)} of the run; a Perfetto trace has all of it."
    shown = (tuple(span for span in lane.spans if first <= span.start <= last) for lane in lanes)
    return tuple(Lane(name=lane.name, spans=spans) for lane, spans in zip(lanes, shown, strict=True)), (note,)


def _fit_steps(times: StepTimes) -> StepTimes:
    if len(times.wait) <= _MOST_STEPS:
        return times
    size = math.ceil(len(times.wait) / _MOST_STEPS)
    wait, step = (tuple(_means(values, size)) for values in (times.wait, times.step))
    return StepTimes(wait=wait, step=step, first=times.first, steps_per_entry=times.steps_per_entry * size)


def _fit_chart(chart: Chart) -> Chart:
    if len(chart.times) <= _MOST_POINTS:
        return chart
    size = math.ceil(len(chart.times) / _MOST_POINTS)
    lines = tuple(Line(name=line.name, values=tuple(_means(line.values, size))) for line in chart.lines)
    return dataclasses.replace(chart, times=tuple(_means(chart.times, size)), lines=lines)


def _means(values: Sequence[float], size: int) -> list[float]:
    """Means of every `size` values, not counting those that were not measured."""
    groups = [[each for each in values[at : at + size] if math.isfinite(each)] for at in range(0, len(values), size)]
    return [sum(group) / len(group) if group else math.nan for group in groups]


def script_data(page: Page) -> str:
    """What the script draws, as JSON that cannot close its own tag."""
    labels = [*dict.fromkeys(["", *(span.label for lane in page.lanes for span in lane.spans)])]
    places = {label: place for place, label in enumerate(labels)}
    steps = page.steps if page.steps is not None and page.steps.wait else None
    data = {
        "kinds": [{"id": kind, "name": name, "short": short} for kind, (name, short) in _KINDS.items()],
        "labels": [printable(label[:_LONGEST_TEXT]) for label in labels],
        "lanes": [_lane_data(lane, places) for lane in page.lanes],
        "findings": [finding.steps for finding in page.findings],
        "steps": steps
        and {
            "first": steps.first,
            "per": steps.steps_per_entry,
            "wait": _short(steps.wait),
            "step": _short(steps.step),
        },
        "charts": [
            {"times": _short(chart.times), "lines": [_short(line.values) for line in chart.lines]}
            for chart in page.charts
        ],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _lane_data(lane: Lane, labels: dict[str, int]) -> dict[str, Any]:
    """Columns instead of objects, and differences instead of starts: a third of the bytes."""
    spans = sorted(lane.spans, key=lambda span: span.start)
    starts = [round(span.start * 1e6) for span in spans]
    kinds = {kind: place for place, kind in enumerate(_KINDS)}
    return {
        "name": printable(lane.name[:_LONGEST_TEXT]),
        "start": [start - before for before, start in itertools.pairwise([0, *starts])],
        "duration": [round(span.duration * 1e6) for span in spans],
        "kind": [kinds[span.kind] for span in spans],
        "step": [span.step for span in spans],
        "label": [labels[span.label] for span in spans],
    }


def _short(values: Iterable[float]) -> list[float | None]:
    """Five digits are more than a screen shows; what was not measured is null."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def render_html(page: Page) -> str:
    """A complete HTML document."""
    import base64  # here, not at the top: every command imports this room
    import hashlib

    page = fit_page(page)
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = (
        _headlines(page.headlines),
        *map(_figure_table, page.tables),
        _findings(page),
        _lanes(page),
        _steps(page),
        _charts(page.charts),
        _arms(page.arms),
        _slowest(page.slowest),
        _machine(page.machine),
    )
    return Template(_resource("page.html")).substitute(
        title=_safe(page.title),
        verdict=_safe(page.verdict),
        tone=page.tone,
        sections="\n".join(filter(None, sections)),
        notes="".join(f"<p>{_safe(note)}</p>" for note in page.notes),
        style=_resource("page.css"),
        script=script,
        script_digest=f"sha256-{digest}",
        data=script_data(page),
    )


def _resource(name: str) -> str:
    from importlib import resources

    return resources.files("penstock.report").joinpath("resources", name).read_text(encoding="utf-8")


def _safe(text: str) -> str:
    """Text from a stranger as HTML, in a tag or in an attribute."""
    text = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
    return html.escape(printable(text, keep="\n\t"))


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>\n" + "\n".join(parts) + "\n</section>"


def _headlines(headlines: Sequence[Headline]) -> str:
    cells = (
        f'<div class="{each.tone}"><b>{_safe(each.value)}</b><span>{_safe(each.label)}</span></div>'
        for each in headlines
    )
    return f'<div class="headlines">{"".join(cells)}</div>' if headlines else ""


class _Scale:
    """Where ratios lie on a line that includes all of them, and 1."""

    def __init__(self, gains: Iterable[Gain]) -> None:
        gains = [*gains]
        self.low = min([1.0, *(gain.ratio - gain.error for gain in gains)])
        self.high = max([1.1, *(gain.ratio + gain.error for gain in gains)])

    def style(self, gain: Gain) -> str:
        """CSS variables for one gain: where 1, its interval and its middle are."""
        ratios = {"one": 1.0, "low": gain.ratio - gain.error, "mid": gain.ratio, "high": gain.ratio + gain.error}
        places = {name: 1 + 98 * (ratio - self.low) / (self.high - self.low) for name, ratio in ratios.items()}
        return ";".join(f"--{name}:{percent:.2f}%" for name, percent in places.items())


def _findings(page: Page) -> str:
    if not page.findings:
        return ""
    scale = _Scale(gain for finding in page.findings for gain in (finding.gain, finding.limit) if gain is not None)
    has_gains = any(finding.gain for finding in page.findings)
    title = "What to change, by measured gain" if has_gains else "What to know"
    return _section(title, *(_finding(finding, scale) for finding in page.findings))


def _finding(finding: Finding, scale: _Scale) -> str:
    kinds = ["finding", "measured" if finding.gain else "limited" if finding.limit else "told"]
    kinds += ["has-steps"] if finding.steps else []
    parts = [
        f'<article class="{" ".join(kinds)}" data-id="{_safe(finding.id)}">',
        f'<div class="head"><h3>{_safe(finding.title)}</h3><span class="amount">{describe_gain(finding)}</span></div>',
    ]
    if shown := finding.gain or finding.limit:
        marks = ["base", "bar" if finding.gain else "limit", *(["error"] if finding.gain and shown.error else [])]
        drawn = "".join(f'<i class="{mark}"></i>' for mark in marks)
        parts += [f'<div class="scale" style="{scale.style(shown)}">{drawn}</div>']
    parts += [f"<p>{_safe(sentence)}</p>" for sentence in finding.evidence]
    parts += [_change(finding), "</article>"]
    return "\n".join(parts)


def _change(finding: Finding) -> str:
    parts, actions = [], []
    if finding.change:
        parts += [f"<code>{_safe(finding.change)}</code>"]
        actions += ['<button type="button" class="copy">copy</button>']
    parts += [f'<span class="dim">{_safe(text)}</span>' for text in (finding.where, finding.price) if text]
    if finding.link.startswith("https://"):
        parts += [f'<a href="{_safe(finding.link)}" rel="noreferrer">how</a>']
    elif finding.link:
        parts += [f'<span class="dim">how: {_safe(finding.link)}</span>']
    if finding.steps:
        actions += ['<button type="button" class="show" aria-pressed="false">show its steps</button>']
    parts += [f'<span class="actions">{"".join(actions)}</span>'] if actions else []
    return f'<div class="change">{"".join(parts)}</div>' if parts else ""


def _legend(kinds: Iterable[str]) -> str:
    cells = (
        f'<span><i style="background:var(--{kind})"></i>{_KINDS[kind][0]}</span>' for kind in _KINDS if kind in kinds
    )
    return f'<div class="legend">{"".join(cells)}</div>'


def _lanes(page: Page) -> str:
    kinds = {span.kind for lane in page.lanes for span in lane.spans}
    if not kinds:
        return ""
    buttons = (("zoom-out", "−", "zoom out"), ("zoom-in", "+", "zoom in"), ("zoom-all", "all", "show everything"))
    zoom = "".join(f'<button type="button" id="{id}" title="{title}">{text}</button>' for id, text, title in buttons)
    return _section(
        "Step by step",
        f'<div class="toolbar">{_legend(kinds)}<div class="zoom">{zoom}</div></div>',
        '<div class="figure"><div id="lanes"></div><div id="overview"></div></div>',
        f'<p class="readout" id="lanes-readout" aria-live="polite">{_HOW_TO_MOVE}</p>',
        "<noscript><p>Lanes and charts need JavaScript.</p></noscript>",
    )


def _steps(page: Page) -> str:
    if page.steps is None or not page.steps.wait:
        return ""
    size = page.steps.steps_per_entry
    title = "Wait and step, each step" if size == 1 else f"Wait and step, means of {size:,} steps"
    hint = "Click a step to see it in the lanes." if page.lanes else ""
    return _section(
        title,
        f'<div class="toolbar">{_legend(("step", "wait"))}</div>',
        '<div class="figure" id="steps"></div>',
        f'<p class="readout" id="steps-readout" aria-live="polite">{hint}</p>',
    )


def _charts(charts: Sequence[Chart]) -> str:
    return _section("Over time", '<div class="charts">', *map(_chart, charts), "</div>") if charts else ""


def _chart(chart: Chart) -> str:
    names = (
        f'<span><i style="background:var(--line-{place % 6})"></i>{_safe(line.name)} <b></b></span>'
        for place, line in enumerate(chart.lines)
    )
    note = f'<p class="hint">{_safe(chart.note)}</p>' if chart.note else ""
    title = f"<h3>{_safe(chart.title)} <span>{_safe(chart.unit)}</span></h3>"
    return f'<div class="chart">{title}<div class="legend">{"".join(names)}</div><div class="figure"></div>{note}</div>'


class _Row(NamedTuple):
    """A row of a table: attributes of its tag, and cells, which are HTML."""

    attributes: str
    cells: tuple[str, ...]


def _table(headers: Sequence[str], rows: Sequence[_Row]) -> str:
    """A table without empty columns. A header may be followed by a colon and the class of its column."""
    shown = [place for place in range(len(headers)) if any(row.cells[place] for row in rows)]
    names, kinds = zip(*(header.partition(":")[::2] for header in headers), strict=True)
    head = "".join(f'<th class="{kinds[place]}">{names[place]}</th>' for place in shown)
    body = "".join(
        f"<tr {row.attributes}>" + "".join(f'<td class="{kinds[place]}">{row.cells[place]}</td>' for place in shown)
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _arms(arms: Sequence[Arm]) -> str:
    if not arms:
        return ""
    scale = _Scale(arm.gain for arm in arms)
    headers = ("settings", "gain", ":drawn", "steps/s", "wait", "step", "cores")
    hint = '<p class="hint">Bars are 95 % intervals: if two overlap, the difference is within the noise.</p>'
    return _section("Settings tried on this job, in turns", _table(headers, [_arm(arm, scale) for arm in arms]), hint)


def _arm(arm: Arm, scale: _Scale) -> _Row:
    kind = "advised" if arm.is_advised else "baseline" if arm.is_baseline else "tried"
    marks = '<i class="base"></i><i class="range"></i><i class="dot"></i>'
    name = _safe(arm.name) + (" ★" if arm.is_advised else "")
    cells = (
        name + (f'<br><span class="dim">{_safe(arm.note)}</span>' if arm.note else ""),
        format_gain(arm.gain),
        f'<div class="scale interval" style="{scale.style(arm.gain)}">{marks}</div>',
        format_number(arm.steps_per_second),
        format_seconds(arm.wait_seconds),
        format_seconds(arm.step_seconds),
        "" if arm.cores is None else format_number(arm.cores),
    )
    return _Row(f'class="{kind}"', cells)


def _figure_table(table: FigureTable) -> str:
    headers = [_safe(name).replace(":", "&#58;") for name in table.header]
    return _section(_safe(table.title), _table(headers, [_Row("", tuple(map(_safe, row))) for row in table.rows]))


def _slowest(samples: Sequence[SlowSample]) -> str:
    if not samples:
        return ""
    longest = max(sample.seconds for sample in samples) or 1.0
    headers = ("sample", "took", "", "computing", "worker:words")
    hint = '<p class="hint">Blue is computing, red is waiting: for a disk, a network, a lock, or a free core.</p>'
    return _section("Slowest samples", _table(headers, [_sample(sample, longest) for sample in samples]), hint)


def _sample(sample: SlowSample, longest: float) -> _Row:
    used = sample.seconds if sample.cpu_seconds is None else min(sample.cpu_seconds, sample.seconds)
    shares = (100 * seconds / longest for seconds in (used, sample.seconds - used))
    portion = "".join(f'<i style="--share:{share:.1f}%"></i>' for share in shares)
    cells = (
        _safe(sample.index),
        format_seconds(sample.seconds),
        f'<span class="portion">{portion}</span>',
        "" if sample.cpu_seconds is None else format_seconds(sample.cpu_seconds),
        _safe(sample.worker),
    )
    return _Row("" if sample.step is None else f'data-step="{sample.step}"', cells)


def _machine(facts: Sequence[Fact]) -> str:
    cells = "".join(f"<dt>{_safe(fact.name)}</dt><dd>{_safe(fact.value)}</dd>" for fact in facts)
    return _section("The machine", f"<dl>{cells}</dl>") if facts else ""

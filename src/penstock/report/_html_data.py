"""How much of a page goes into an HTML file, and what its script draws: lanes, steps and charts, as JSON.

It is small enough to mail: long runs are cut or averaged to what a screen can show, and the page says so.
Half a megabyte is enough for `_MOST_SPANS` spans (about 20 bytes each); a screen has fewer columns than `_MOST_STEPS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import printable
from penstock.report._page import Chart, Lane, Line, Page, StepTimes
from penstock.report._words import format_seconds

_MOST_SPANS = 8000
_MOST_STEPS = 2000
_MOST_POINTS = 400
_MOST_ROWS = 50
_MOST_LINES = 64
LONGEST_TEXT = 1000
"""Characters of one text; more than anybody reads, but less than fills a page."""
KINDS = {
    "step": ("training step", "step"),
    "wait": ("waiting for a batch", "wait"),
    "start": ("starting", "start"),
    "sample": ("samples", "samples"),
    "collate": ("collate", "collate"),
    "handover": ("hand-over", "hand-over"),
    "idle": ("nothing to do", "idle"),
}
"""Names of spans in the legend, and on the spans; `page.css` has a colour for each."""


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
        "kinds": [{"id": kind, "name": name, "short": short} for kind, (name, short) in KINDS.items()],
        "labels": [printable(label[:LONGEST_TEXT]) for label in labels],
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
    kinds = {kind: place for place, kind in enumerate(KINDS)}
    return {
        "name": printable(lane.name[:LONGEST_TEXT]),
        "start": [start - before for before, start in itertools.pairwise([0, *starts])],
        "duration": [round(span.duration * 1e6) for span in spans],
        "kind": [kinds[span.kind] for span in spans],
        "step": [span.step for span in spans],
        "label": [labels[span.label] for span in spans],
    }


def _short(values: Iterable[float]) -> list[float | None]:
    """Five digits are more than a screen shows; what was not measured is null."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]

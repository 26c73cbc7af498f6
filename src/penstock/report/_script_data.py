"""What the script of the HTML page draws: lanes, steps and charts as compact JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.errors import printable
from penstock.report._page import Chart, Lane, Page, StepTimes

LONGEST_TEXT = 1000
"""Characters of one text; more than anybody reads, but less than fills a page."""
KINDS = {
    "step": ("training step", "step"),
    "wait": ("waiting for a batch", "wait"),
    "start": ("starting", "start"),
    "sample": ("samples", "samples"),
    "read": ("reading", "read"),
    "collate": ("collate", "collate"),
    "handover": ("hand-over", "hand-over"),
    "pin": ("pinning", "pin"),
    "copy": ("copy to the device", "copy"),
    "idle": ("nothing to do", "idle"),
}
"""Names of spans in the legend, and on the spans; `page.css` has a colour for each."""


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
        "steps": None if steps is None else _steps_data(steps),
        "charts": [_chart_data(chart) for chart in page.charts],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _steps_data(times: StepTimes) -> dict[str, Any]:
    columns = {"wait": _short(times.wait), "step": _short(times.step)}
    return {"first": times.first, "per": times.steps_per_entry, **columns}


def _chart_data(chart: Chart) -> dict[str, Any]:
    return {"times": _short(chart.times), "lines": [_short(line.values) for line in chart.lines]}


def _lane_data(lane: Lane, labels: dict[str, int]) -> dict[str, Any]:
    """Columns instead of objects, and differences instead of starts: a third of the bytes."""
    spans = sorted(lane.spans, key=lambda span: span.start)
    starts = [round(span.start * 1e6) for span in spans]
    kinds = {kind: place for place, kind in enumerate(KINDS)}
    return {
        "name": printable(lane.name[:LONGEST_TEXT]),
        "start": [*_differences(starts)],
        "duration": [round(span.duration * 1e6) for span in spans],
        "kind": [kinds[span.kind] for span in spans],
        "step": [span.step for span in spans],
        "label": [labels[span.label] for span in spans],
    }


def _differences(values: Iterable[int]) -> Iterator[int]:
    last = 0
    for value in values:
        yield value - last
        last = value


def _short(values: Iterable[float]) -> list[float | None]:
    """Five digits are more than a screen shows; what was not measured is null."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]

"""A trace for ui.perfetto.dev and chrome://tracing: lanes as threads, charts as counters.

The format is Chrome's trace events, in JSON: times in microseconds, one object per span.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from penstock.report._page import Chart, Lane, Page

_LANES, _CHARTS = 1, 2


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

"""A page in the terminal and as a trace; what a page refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from penstock.report import Chart, FigureTable, Line, Page, Span, StepTimes, console, render_terminal, to_perfetto

from .pages import healthy_page, hostile_page, ill_page


def printed(page: Page, width: int = 120) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(render_terminal(page))
    return out.getvalue()


def test_the_terminal_tells_verdict_findings_arms_and_slowest_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    console.cache_clear()
    text = printed(ill_page())
    console.cache_clear()
    assert "makes it 1.46 × faster" in text
    assert "1. Prefetch is too small for how uneven the batches are  1.46 ± 0.09 × measured" in text
    assert "Change: DataLoader(..., prefetch_factor=24)  # train.py:24, +0.2 MB of memory" in text
    assert "at most 1.75 ×" in text
    assert "How: https://example.org/preparation" in text
    assert "──●──" in text
    assert "worker 0" in text
    assert "with a step of 10 ms        96.5   501 MB" in text
    assert "█" in text


@pytest.mark.parametrize("width", [80, 90, 100, 120])
def test_intervals_are_drawn_where_they_leave_room_for_the_names_of_settings(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    console.cache_clear()
    arms = tuple(dataclasses.replace(arm, cores=None) for arm in ill_page().arms)
    text = printed(dataclasses.replace(ill_page(), arms=arms), width)
    console.cache_clear()
    tried = text.partition("settings tried")[2].partition("slowest")[0]
    assert [arm.name for arm in arms if arm.name not in tried] == []
    assert ("●" in tried, "cores" in tried, "…" in tried) == (width >= 100, False, False)


def test_a_narrow_terminal_cuts_no_words() -> None:
    text = " ".join(printed(ill_page(), width=60).split())
    assert "prefetch_factor=24 makes it 1.46 × faster, measured on your job." in text
    assert "10 steps of head start are needed to ride over one such batch." in text


def test_a_healthy_page_shows_only_what_it_has() -> None:
    text = printed(healthy_page())
    assert "Not waiting for data" in text
    assert "settings tried" not in text
    assert "Change" not in text


def test_control_characters_of_strangers_do_not_reach_the_terminal() -> None:
    assert "\x1b[31m" not in printed(hostile_page())


def test_an_empty_page_is_its_verdict() -> None:
    assert printed(Page(title="t", verdict="Nothing was measured.")).split() == ["t", "Nothing", "was", "measured."]


def test_a_trace_has_every_span_of_every_lane_and_every_figure() -> None:
    page = ill_page()
    events = json.loads(to_perfetto(page))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(lane.spans) for lane in page.lanes)
    assert spans[0] | {"dur": 0} == {
        "ph": "X", "pid": 1, "tid": 1, "name": "wait", "cat": "wait", "ts": 0.0, "dur": 0, "args": {"step": 0},
    }  # fmt: skip
    assert spans[0]["dur"] == pytest.approx(200_000)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {place: lane.name for place, lane in enumerate(page.lanes, 1)}
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "Memory (GB)"]
    assert [len(event["args"]) for event in counters[:3]] == [2, 1, 1]  # what was not measured is left out
    assert not any(math.isnan(value) for event in counters for value in event["args"].values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Span(start=0, duration=1, kind="thinking"), "kind='thinking'; the choices are step, wait"),
        (lambda: StepTimes(wait=(1.0,), step=()), "1 waits for 0 steps"),
        (lambda: Chart(title="C", unit="", times=(0.0,), lines=(Line(name="a", values=()),)), "0 values of 'a' at 1"),
        (lambda: FigureTable(title="T", header=("a", "b"), rows=(("1",),)), "T: 1 cells under 2 names"),
    ],
)
def test_data_that_cannot_be_drawn_is_refused(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()

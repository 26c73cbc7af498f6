"""The page as a file, without a browser: size, safety, what is in it and what is not."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from penstock.report import Fact, Finding, Lane, Page, Span, StepTimes, render_html

from .pages import HOSTILE, healthy_page, hostile_page, ill_page


class Tags(HTMLParser):
    """Every tag with its attributes, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def test_words_and_tables_are_there_without_javascript() -> None:
    text = html.unescape(render_html(ill_page()).split('<script type="application/json"')[0])
    for words in ("prefetch_factor=24 makes it 1.46 × faster", "43 %", "1.46 ± 0.09 × measured", "at most 1.75 ×",
                  "DataLoader(..., prefetch_factor=24)", "train.py:24", "loader that costs nothing", "worker 0",
                  "Ways to run it", "544 MB", "Intel Xeon, 2 of 2 cores", "Intervals are 95 %."):  # fmt: skip
        assert words in text


def test_what_is_empty_is_not_shown() -> None:
    text = render_html(Page(title="a title", verdict="Nothing was measured."))
    for words in ("What to change", "Step by step", "Over time", "Settings tried", "Slowest samples", "The machine"):
        assert words not in text
    assert "Settings tried" not in render_html(healthy_page())


def test_columns_that_are_empty_are_not_shown() -> None:
    page = ill_page()
    assert '<th class="">cores</th>' in render_html(page)
    text = render_html(replace(page, arms=tuple(replace(arm, cores=None) for arm in page.arms)))
    assert '<th class="">cores</th>' not in text
    assert '<th class="drawn"></th>' in text


def test_texts_of_strangers_add_no_tag_no_script_and_no_link() -> None:
    tags = Tags(render_html(hostile_page())).found
    assert [tag for tag, _ in tags if tag in ("img", "a", "iframe", "object")] == []
    assert [attributes.get("type") for tag, attributes in tags if tag == "script"] == ["application/json", None]
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    data = data_of(render_html(hostile_page()))
    assert HOSTILE.replace("\x1b", "\\x1b") in data["labels"]  # whole, and as text


def test_nothing_is_loaded_from_anywhere_and_no_script_runs_but_its_own() -> None:
    text = render_html(ill_page())
    (policy,) = [attributes["content"] for _, attributes in Tags(text).found if "http-equiv" in attributes]
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-\S+'", policy
    )
    assert not any("src" in attributes for _, attributes in Tags(text).found)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("scheme", ["javascript:alert(1)", "data:text/html,x", "http://example.org", "https:evil"])
def test_only_https_becomes_a_link(scheme: str) -> None:
    page = replace(ill_page(), findings=(Finding(id="a", title="b", link=scheme),))
    assert "<a " not in render_html(page)


def test_a_page_of_the_docs_is_named_by_its_path() -> None:
    page = replace(ill_page(), findings=(Finding(id="a", title="b", link="docs/guide/ahead.md"),))
    assert '<span class="dim">how: docs/guide/ahead.md</span>' in render_html(page)


def test_a_million_steps_and_endless_names_stay_below_half_a_megabyte() -> None:
    page = ill_page(5000)
    times = StepTimes(wait=(0.1,) * 1_000_000, step=(0.2,) * 1_000_000)
    long = "x" * 100_000
    page = replace(page, steps=times, machine=(Fact(name=long, value=long),), findings=page.findings * 50)
    text = render_html(page)
    assert len(text.encode()) < 500_000
    data = data_of(text)
    assert (len(data["steps"]["wait"]), data["steps"]["per"]) == (2000, 500)
    assert re.search(r"The lanes show [\d.]+ s of the run; a Perfetto trace has all of it.", text)
    assert "150 more findings are not shown." in text


def test_the_lanes_of_a_long_run_are_those_of_the_steps_that_the_first_finding_points_at() -> None:
    page = ill_page(20_000)
    page = replace(page, findings=(Finding(id="a", title="b", steps=((15_000, 15_001),)),))
    steps = {step for lane in data_of(render_html(page))["lanes"] for step in lane["step"]}
    assert 15_000 in steps
    assert 0 not in steps


def test_spans_reach_the_script_in_order_and_to_the_microsecond() -> None:
    spans = (Span(start=0.5, duration=0.25, kind="wait", step=3), Span(start=0.1, duration=0.000002, kind="step"))
    (lane,) = data_of(render_html(Page(title="", verdict="", lanes=(Lane(name="a", spans=spans),))))["lanes"]
    assert lane["start"] == [100_000, 400_000]
    assert lane["duration"] == [2, 250_000]
    assert lane["step"] == [None, 3]

"""The page in a real browser: it draws, it answers to clicks, it is readable in the dark, on a phone and on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.report import Page, render_html

from .browser import Browser
from .pages import healthy_page, hostile_page, ill_page

_LIT = "document.querySelectorAll('{} path.lit').length"
_FADED = "document.querySelectorAll('{} path.faded').length"
_LABELS = "[...document.querySelectorAll('#lanes svg > text:not(.row):not(.on-span)')].map(t => t.textContent)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


def show(browser: Browser, folder: Path, page: Page, *, width: int = 1200, dark: bool = False) -> None:
    file = folder / "page.html"
    file.write_text(render_html(page), encoding="utf-8")
    browser.open(file, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.requests == [file.as_uri()]


def contrast(browser: Browser, selector: str) -> float:
    """Of an element's text and the page behind it, as WCAG counts it: 4.5 is readable, 21 is black on white."""
    script = """(selector => {
      const light = (css) => {
        const parts = css.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
          .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const text = light(getComputedStyle(document.querySelector(selector)).color);
      const back = light(getComputedStyle(document.body).backgroundColor);
      return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    })"""
    ratio: float = browser.evaluate(f"{script}({selector!r})")
    return ratio


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_verdict_bars_lanes_and_charts_are_drawn(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    show(browser, tmp_path, ill_page(), width=width, dark=dark)
    assert "1.46 × faster" in browser.evaluate("document.querySelector('h1').textContent")
    assert browser.evaluate("document.querySelector('.finding .bar').getBoundingClientRect().width") > 20
    assert browser.evaluate(_LIT.format("#lanes")) >= 6  # step, wait, samples, collate, hand-over, in their lanes
    assert browser.evaluate(_LIT.format("#steps")) == 2
    assert browser.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.curve').length)"
    ) == [1, 3, 2]
    assert browser.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(17, 21, 28)" if dark else "rgb(255, 255, 255)")
    for selector in ("h1", ".title", ".finding .amount", ".headlines .bad b", ".legend", "td", "footer"):
        assert contrast(browser, selector) > 4.5, selector


def test_a_click_on_a_finding_highlights_its_steps_and_another_click_clears_them(
    browser: Browser, tmp_path: Path
) -> None:
    show(browser, tmp_path, ill_page())
    assert browser.evaluate(_FADED.format("#steps")) == 0
    browser.click(".finding .head")
    assert browser.evaluate("document.querySelectorAll('.finding.marked').length") == 1
    assert browser.evaluate("document.querySelectorAll('#lanes .band').length") == 4  # steps 0, 16, 32, 48
    assert browser.evaluate(_FADED.format("#steps")) == browser.evaluate(_LIT.format("#steps")) == 2
    assert browser.evaluate(_FADED.format("#lanes")) > 0
    browser.click(".finding .head")
    assert browser.evaluate("document.querySelectorAll('.band, .faded, .marked').length") == 0
    assert browser.complaints == []


def test_a_finding_without_steps_does_not_answer_to_clicks(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, ill_page())
    browser.click(".finding:last-of-type h3")
    assert browser.evaluate("document.querySelectorAll('.marked, .faded').length") == 0


def test_lanes_zoom_move_and_return(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, ill_page())
    everything = browser.evaluate(_LABELS)
    browser.click("#zoom-in")
    browser.click("#zoom-in")
    closer = browser.evaluate(_LABELS)
    assert closer != everything
    browser.drag("#lanes", (0.7, 0.2), (0.4, 0.2))
    assert browser.evaluate(_LABELS) != closer
    assert browser.evaluate(_FADED.format("#lanes")) == 0  # moving is not clicking
    browser.click("#zoom-all")
    assert browser.evaluate(_LABELS) == everything


def test_a_click_on_a_span_follows_its_batch(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, ill_page())
    browser.click("#lanes", at=(0.13, 0.13))
    assert browser.evaluate("document.querySelector('#lanes-readout').textContent").startswith(
        "training: waiting for a batch, step 0, 200 ms, from 0 s"
    )
    assert browser.evaluate(_FADED.format("#steps")) == 2


def test_a_click_on_a_step_shows_it_in_the_lanes(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, ill_page(2000))
    before = browser.evaluate(_LABELS)
    browser.click("#steps", at=(0.5, 0.8))
    assert "waited" in browser.evaluate("document.querySelector('#steps-readout').textContent")
    assert browser.evaluate(_LABELS) != before


@pytest.mark.parametrize("width", [390, 1200])
def test_texts_of_strangers_stay_texts(browser: Browser, tmp_path: Path, width: int) -> None:
    show(browser, tmp_path, hostile_page(), width=width)
    assert browser.evaluate("document.title") != "owned"
    assert browser.evaluate("document.querySelectorAll('img, a, script:not(#data)').length") == 1
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    browser.click(".finding .head")
    assert browser.complaints == []


@pytest.mark.parametrize(
    "page", [healthy_page(), Page(title="t", verdict="Nothing was measured.")], ids=["healthy", "empty"]
)
def test_a_page_with_less_on_it_works_too(browser: Browser, tmp_path: Path, page: Page) -> None:
    show(browser, tmp_path, page)
    assert browser.evaluate("document.querySelector('h1').textContent") == page.verdict


def test_it_prints_light_and_in_a_few_sheets(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render_html(ill_page()), encoding="utf-8")
    browser.open(tmp_path / "page.html", dark=True, media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("getComputedStyle(document.querySelector('.zoom button')).display") == "none"
    assert 1 <= browser.print_pdf().count(b"/Type /Page\n") + browser.print_pdf().count(b"/Type /Page ") <= 5

"""What the site makes by itself when it is built is complete: the reference of names and of verbs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import penstock

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    """A script of `.ci`, which is no package."""
    found = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert found is not None and found.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name_once() -> None:
    names = re.findall(r"heading: penstock\.(\w+)$", load("site_pages").python_page(), re.MULTILINE)
    assert sorted(names) == sorted(set(penstock.__all__) - {"__version__"})


def test_the_reference_leaves_out_only_what_there_is() -> None:
    pages = load("site_pages")
    there = {name: set(dir(getattr(penstock, name))) for name in pages.INTERNAL}
    there["Dataset"] |= set(dir(penstock.from_arrays({"x": [1]})))
    transforms = set().union(*(there[name] for name in ("DecodeImage", "Tokenize")))
    for name, hidden in pages.INTERNAL.items():
        assert set(hidden.split()) <= (there[name] | transforms if hidden == pages._OF_TRANSFORMS else there[name])
    assert pages.members_of("masks") == penstock.masks.__all__
    assert {"PenstockError", "MissingExtra"} <= set(pages.members_of("errors"))
    assert not any(name.startswith("_") for name in pages.members_of("errors"))


def test_the_reference_has_what_frameworks_need() -> None:
    page = load("site_pages").python_page()
    doors = re.findall(
        r"^ {4}(\w+) {3,}(\w+)", str(importlib.import_module("penstock.integrations").__doc__), re.MULTILINE
    )
    assert len(doors) == 6
    for module, name in doors:
        assert f"::: penstock.integrations.{module}.{name}\n" in page


def test_the_reference_has_every_verb_with_its_help() -> None:
    page = load("site_pages").cli_page()
    overview = page.partition("## ")[0]
    verbs = re.findall(r"^  (\w+) {2,}\w", overview, re.MULTILINE)
    assert {"prepare", "doctor", "serve"} <= set(verbs)
    assert re.findall(r"^## penstock (\w+)$", page, re.MULTILINE) == verbs
    assert page.count("usage: penstock ") == len(verbs) + 1


def test_a_picture_is_part_of_the_page_and_takes_its_colours() -> None:
    html = '<p><img alt="A mask" src="../images/mask.svg" /></p>'
    drawn = load("site_pages").on_page_content(html, None, None, None)
    assert drawn.startswith('<p><span class="picture" role="img" aria-label="A mask"><svg')
    assert "<style>" not in drawn


def test_cells_of_wide_tables_name_their_column() -> None:
    row = "<tr><td>a</td><td>b</td><td>c</td></tr>"
    html = f"<table><thead><tr><th>x</th><th><code>y</code></th><th></th></tr></thead><tbody>{row}{row}</tbody></table>"
    shown = load("site_pages").on_page_content(html, None, None, None)
    assert shown.startswith('<table data-columns="3">')
    named = '<tr><td data-column="x">a</td><td data-column="y">b</td><td data-column="">c</td></tr>'
    assert shown.count(named) == 2
    two = "<table><th>x</th><th>y</th><td>a</td><td>b</td></table>"
    assert load("site_pages").on_page_content(two, None, None, None) == two


def test_code_in_tables_may_break_behind_punctuation_but_not_within_words_or_numbers() -> None:
    html = "<p><code>a.b</code></p><table><td><code>ds.split(seed=1, by_user=0.5)</code> a.b</td></table>"
    shown = load("site_pages").on_page_content(html, None, None, None)
    assert "<p><code>a.b</code></p>" in shown
    assert "<td><code>ds.<wbr>split(<wbr>seed=1, by_<wbr>user=0.5)</code> a.b</td>" in shown


def test_every_class_that_pictures_use_has_a_style_on_the_site_and_off_it() -> None:
    styled = set(re.findall(r"\.picture \.(\w+)", (ROOT / "docs/site.css").read_text()))
    for picture in (ROOT / "docs/images").glob("*.svg"):
        text = picture.read_text()
        used = {name for names in re.findall(r'class="([^"]+)"', text) for name in names.split()}
        assert used <= styled
        assert used <= set(re.findall(r"^ {4}\.(\w+)", text, re.MULTILINE))


def test_doctests_become_code_and_parameters_get_a_line_each() -> None:
    text = "Says x.\n\nArgs:\n    a, b: Both.\n    c: One.\n\n>>> f(\n...     1)\n[1]\n"
    shown = load("site_docstrings").rewritten(text)
    assert "    a: Both.\n    b: Both.\n    c: One.\n" in shown
    door = "Says x.\n\nMay import: `a`, `b`,\n`c`. Holds no state.\n"
    assert load("site_docstrings").rewritten(door).strip() == "Says x."
    assert "```pycon\n>>> f(\n...     1)\n[1]\n```" in shown


@pytest.mark.stress
def test_the_site_builds_without_a_warning_and_asks_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)
    pages = "\n".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?:[^"]+"', pages) == []

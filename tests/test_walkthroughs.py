"""Pages that readers follow from top to bottom work when they are followed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import s3lite
from given import GIVEN
from pages import blocks_of, follow, given_by

ROOT = Path(__file__).parent.parent
FOLDERS = ("start", "guide", "how-to")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / "docs" / folder).glob("*.md"))
PAGES.append(ROOT / "docs" / "index.md")


# What loads frameworks takes long, and they warn of their own affairs.
FRAMEWORKS = ("how-to/frameworks", "how-to/chat", "start/pictures")
OF_FRAMEWORKS = [pytest.mark.stress, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def named(page: Path) -> Any:
    name = f"{page.parent.name}/{page.stem}"
    return pytest.param(page, id=name, marks=OF_FRAMEWORKS if name in FRAMEWORKS else ())


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket of this name, on a server that the environment names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3lite.serve(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield


@pytest.mark.parametrize("page", [named(page) for page in PAGES])
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.parent.name != "start":
        request.getfixturevalue("inline")
    text = page.read_text()
    for name in given_by(text):
        request.getfixturevalue(name) if name == "bucket" else GIVEN[name]()
    follow(text)


def test_what_pages_install_is_there_to_be_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "\n".join(page.read_text() for page in [*PAGES, ROOT / "README.md"])
    asked = [name for each in re.findall(r"penstock-data\[([\w,]+)\]", text) for name in each.split(",")]
    assert asked
    assert set(asked) <= set(extras)


def test_blocks_are_read_as_a_reader_sees_them() -> None:
    fences = ["```python\na", "<!-- not run: it is late -->\n```sh\nb", '```toml title="x.toml"\nc', "```text\nd"]
    text = "\n\n".join(f"{fence}\n```" for fence in fences) + "\n"
    found = [(block.language, block.title, block.reason, block.is_run) for block in blocks_of(text)]
    assert found == [
        ("python", None, None, True),
        ("sh", None, "it is late", False),
        ("toml", "x.toml", None, True),
        ("text", None, None, False),
    ]

"""The table of licences says what is installed, and whatever is not installed is named with its extra."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROWS = re.findall(
    r"^\| (\S+) \| (always|`penstock-data\[\w+\]`) \| (\S+) \|",
    (ROOT / "docs/dependencies.md").read_text(),
    re.MULTILINE,
)
# What metadata may say where it does not give the expression itself.
OTHER_WORDS = {
    "BSD-2-Clause": ("BSD",),
    "BSD-3-Clause": ("BSD",),
    "Apache-2.0": ("Apache 2.0", "Apache Software License"),
    "MIT": ("MIT License",),
    "ISC": (),
    "LGPL-2.1-or-later": (),
    "MIT-CMU": (),
}


def declared() -> set[tuple[str, str]]:
    """Name of every dependency, and what it comes with."""
    groups = {f"`penstock-data[{extra}]`": each for extra, each in PROJECT["optional-dependencies"].items()}
    del groups["`penstock-data[all]`"], groups["`penstock-data[dev]`"]
    groups["always"] = PROJECT["dependencies"]
    return {(re.split("[>=]", requirement)[0], group) for group, each in groups.items() for requirement in each}


def test_the_table_of_licences_lists_every_dependency() -> None:
    assert {(name, group) for name, group, _ in ROWS} == declared()


def test_hashes_are_of_the_versions_that_are_pinned() -> None:
    pins = {line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")}
    hashed = re.findall(
        r"^(\S+==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", (ROOT / "hashes.txt").read_text(), re.M
    )
    assert pins - {pin for pin, _ in hashed} == {pin for pin in pins if pin.startswith("torch==")}
    assert {pin for pin, _ in hashed} <= pins


@pytest.mark.parametrize(("name", "licence"), [(name, licence) for name, _, licence in ROWS])
def test_a_dependency_has_the_licence_of_the_table(name: str, licence: str) -> None:
    fields = importlib.metadata.metadata(name)
    said = [fields.get("License-Expression") or "", fields.get("License") or "", *fields.get_all("Classifier", [])]
    text = "\n".join(line for line in said if not line.startswith(("Programming", "Topic", "Operating")))
    assert any(words in text for words in (licence, *OTHER_WORDS[licence]))
    if "LGPL" not in licence:
        assert not re.search(r"\bA?L?GPL", text)


USES = {
    ("torch", "torch"): "penstock.DataLoader",
    ("torch", "torch "): "import penstock.masks",
    ("text", "tokenizers"): 'penstock.Tokenize("tokenizer.json").open()',
    ("text", "jinja2"): 'penstock.Tokenize("bytes", chat_template="{{ x }}").open()',
    ("text", "tiktoken"): 'penstock.Tokenize("tiktoken:gpt2").open()',
    ("images", "PIL"): "penstock.DecodeImage(size=8).open()",
    ("ray", "ray"): 'penstock.prepare("a.jsonl", "data", transform=penstock.Tokenize("bytes"), engine="ray")',
    ("s3", "s3fs"): 'penstock.prepare("s3://bucket/a.jsonl", "data")',
    ("s3", "aiohttp"): 'penstock.prepare("http://127.0.0.1:9/a.jsonl", "data")',
}


@pytest.mark.parametrize(("extra", "module"), USES)
def test_what_is_not_installed_is_named_with_its_extra(extra: str, module: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    program = f"""
        import sys
        sys.modules[{module.strip()!r}] = None  # so that importing it fails
        import penstock
        from penstock.errors import MissingExtra
        try:
            {USES[extra, module]}
        except MissingExtra as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert f"penstock-data[{extra}" in done.stdout, done.stderr

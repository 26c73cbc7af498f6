"""The demo as `make demo` runs it, and the script that it shows to the doctor."""

from __future__ import annotations

import itertools
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from penstock import Tokenize, prepare

DEMO = Path(__file__).parent.parent / "examples" / "demo"


@pytest.fixture
def folder(tmp_path: Path, inline: None) -> Path:
    """What the demo leaves for the script: a tokenizer, and a dataset made with it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "word": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("word and another\n" * 400)
    prepare(tmp_path / "text.txt", tmp_path / "data", transform=Tokenize(tmp_path / "tokenizer.json"), workers=1)
    return tmp_path


def names_of(script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(DEMO))
    return runpy.run_path(str(DEMO / script))


@pytest.mark.parametrize("data", ["texts", "prepared"])
def test_the_doctors_script_takes_batches_of_one_shape_from_both_loaders(
    folder: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = names_of("examined.py", monkeypatch)
    for batch in itertools.islice(script["make_loader"](data, folder), 3):
        assert batch["input_ids"].shape == batch["labels"].shape == (script["BATCH"], script["ROW"])


def test_a_report_outlives_the_demo_even_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = names_of("demo.py", monkeypatch)["lasting_file"]()
    assert report.parent == tmp_path
    assert report.exists()


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_demo_resumes_learns_and_ends_with_the_path_of_the_doctors_report(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO / "demo.py"), "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = " ".join(done.stdout.split())
    assert ", as the plan says" in shown
    assert "Your training waits for data" in shown
    assert "Prepared once, and loaded by Penstock: " in shown
    assert done.stdout.splitlines()[-1] == str(tmp_path / "report.html")
    assert "Your training waits for data" in (tmp_path / "report.html").read_text()

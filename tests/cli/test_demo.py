"""The demo as `make demo` runs it, and the script that it shows to the doctor."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from penstock import Tokenize, prepare
from penstock.cli import _demo_script
from penstock.cli._demo_doctor import leave_report


@pytest.fixture
def folder(tmp_path: Path, inline: None) -> Path:
    """What the demo leaves for the script: a tokenizer, and a dataset made with it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "word": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("word and another\n" * 400)
    prepare(tmp_path / "text.txt", tmp_path / "data", transform=Tokenize(tmp_path / "tokenizer.json"), workers=1)
    return tmp_path


@pytest.mark.parametrize("data", ["texts", "prepared"])
def test_the_doctors_script_takes_batches_of_one_shape_from_both_loaders(folder: Path, data: str) -> None:
    for batch in itertools.islice(_demo_script.make_loader(data, folder), 3):
        assert batch["input_ids"].shape == batch["labels"].shape == (_demo_script.BATCH, _demo_script.ROW)


def test_a_report_outlives_the_demo_even_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = leave_report(None, "<html>")
    assert left.parent == tmp_path
    assert left.read_text() == "<html>"


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_demo_resumes_learns_and_ends_with_the_path_of_the_doctors_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "demo", "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = " ".join(done.stdout.split())
    assert ", as the plan says" in shown
    assert "Your training waits for data" in shown
    assert "Prepared once, and loaded by Penstock: " in shown
    assert done.stdout.splitlines()[-1] == str(tmp_path / "report.html")
    assert "Your training waits for data" in (tmp_path / "report.html").read_text()

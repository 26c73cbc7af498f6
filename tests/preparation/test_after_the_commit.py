"""Once the dataset is there, a run does not fail any more: what goes wrong afterwards is a note that says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Tokenize, prepare
from penstock.cli import main
from penstock.errors import StorageError
from penstock.filesystem import OpenFolder

from .corpora import make_corpus


def test_a_disk_that_is_full_when_the_run_is_recorded_is_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, real = make_corpus(tmp_path / "raw", 1, 10), os.replace

    def replace(source: Any, target: Any, **more: Any) -> None:
        if os.path.basename(target) == "run.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target, **more)

    monkeypatch.setattr(os, "replace", replace)
    command = ["prepare", str(tmp_path / "raw"), str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "1"]
    assert main(command) == 0
    assert "The dataset is complete, but the run could not be recorded" in capsys.readouterr().out
    assert len(penstock.open(tmp_path / "data")) == len(texts)


@pytest.mark.parametrize(("step", "name"), [("create", "run.json"), ("remove", ".preparing")])
def test_a_disk_that_fails_after_the_commit_gives_a_note(
    step: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, real = make_corpus(tmp_path / "raw", 1, 10), getattr(OpenFolder, step)

    def refuse(folder: OpenFolder, file: str, *more: Any) -> Any:
        if file == name and (tmp_path / "data" / "manifest.json").exists():
            raise StorageError(errno.ENOSPC, "run.json: No space left on device")
        return real(folder, file, *more)

    monkeypatch.setattr(OpenFolder, step, refuse)
    command = ["prepare", str(tmp_path / "raw"), str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "1"]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The dataset is complete, but the run could not be recorded or cleaned up after" in shown
    assert len(penstock.open(tmp_path / "data")) == len(texts)
    monkeypatch.undo()
    again = prepare(tmp_path / "raw", tmp_path / "data", transform=Tokenize("bytes"), workers=1)
    assert "Nothing to do: up to date." in again.notes
    assert not (tmp_path / "data" / ".preparing").exists()

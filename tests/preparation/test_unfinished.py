"""A preparation that was stopped says how far it is, and that it can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Tokenize, prepare
from penstock.cli import main
from penstock.preparation import Progress, find_unfinished, is_stale

from .corpora import make_corpus, write_jsonl


def stop_after_a_task(source: Path, destination: Path, **more: Any) -> None:
    """A run that ends as Ctrl-C would end it, with at least one task finished and at least one not."""

    def interrupt(progress: Progress) -> None:
        if progress.tasks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, destination, on_progress=interrupt, **more)


def run(source: Path, destination: Path, **more: Any) -> penstock.preparation.Prepared:
    return prepare(source, destination, transform=Tokenize("bytes"), workers=1, shard_bytes=20_000, **more)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "data: no dataset yet"),
        pytest.param({"shuffle": 1}, "the first pass of two", marks=pytest.mark.stress),
    ],
)
def test_inspect_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], words: str
) -> None:
    texts = make_corpus(tmp_path / "raw", num_rows=2000)  # a worker may finish dozens of tasks before the first is told
    stop_after_a_task(tmp_path / "raw", tmp_path / "data", **settings)
    found = find_unfinished(tmp_path / "data")
    assert found is not None
    assert 0 < found.tasks < found.total_tasks
    assert 0 < found.raw_bytes < found.total_bytes
    assert 0 < found.samples < len(texts)
    assert main(["inspect", str(tmp_path / "data")]) == 1
    shown = capsys.readouterr().err
    assert words in shown
    assert f"{found.tasks} of {found.total_tasks} tasks finished" in shown
    assert "the same `penstock prepare` command continues it" in shown
    assert run(tmp_path / "raw", tmp_path / "data", **settings).tasks_kept == found.tasks
    assert find_unfinished(tmp_path / "data") is None


def test_a_dataset_with_more_to_come_says_so(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw", num_files=1)
    run(tmp_path / "raw", tmp_path / "data")
    for number in (1, 2):
        write_jsonl(tmp_path / "raw" / f"part-{number:03d}.jsonl", 600, number)
    stop_after_a_task(tmp_path / "raw", tmp_path / "data")
    assert "a preparation can be continued (" in str(is_stale(tmp_path / "data"))
    run(tmp_path / "raw", tmp_path / "data")
    assert str(is_stale(tmp_path / "data")) == "up to date"


def test_records_of_rows_skipped_that_name_none_of_them_are_no_reason_to_fail(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw")
    for path in (tmp_path / "raw").iterdir():
        path.write_text("not JSON\n" + path.read_text(encoding="utf-8"), encoding="utf-8")

    def interrupt(progress: Progress) -> None:
        if progress.tasks == progress.total_tasks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "raw", tmp_path / "data", on_error="skip", on_progress=interrupt)
    for record in (tmp_path / "data").rglob("records/*.json"):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"examples": []}))
    prepared = run(tmp_path / "raw", tmp_path / "data", on_error="skip")
    assert prepared.skipped == {"bad_json": 6}
    assert prepared.tasks_kept

"""A run that made no sample leaves nothing behind, so that the corrected command can run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import FunctionTransform, Tokenize, prepare
from penstock.cli import main
from penstock.errors import DatasetExists, FormatError, PenstockError
from penstock.preparation import Progress

from .corpora import contents, make_corpus, write_jsonl


def write_other_fields(path: Path, num_rows: int = 50) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"body": f"row {row}", "size": row}) + "\n" for row in range(num_rows)))
    return path


def run(source: Path, data: Path, column: str = "text", **more: Any) -> int:
    return prepare(source, data, transform=Tokenize("bytes", column=column), workers=1, **more).num_samples


def write_nulls(path: Path) -> Path:
    path.write_text(json.dumps({"text": "", "body": "a"}) + "\n" + '{"text": null, "body": "b"}\n' * 40)
    return path


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("split", [None, {"val": 0.3}])
def test_the_corrected_command_runs_after_a_wrong_column(
    tmp_path: Path, on_error: str, split: dict[str, float] | None
) -> None:
    source = write_other_fields(tmp_path / "a.jsonl")
    with pytest.raises(PenstockError, match="'text'"):
        run(source, tmp_path / "data", on_error=on_error, split=split)
    assert not (tmp_path / "data").exists()
    assert run(source, tmp_path / "data", "body", split=split) == 50


@pytest.mark.parametrize("split", [None, {"val": 0.3}])
def test_tasks_that_skipped_every_row_are_not_protected(tmp_path: Path, split: dict[str, float] | None) -> None:
    (tmp_path / "a.jsonl").write_text("not JSON\n" * 20)
    with pytest.raises(FormatError, match="not one row is good"):
        run(tmp_path / "a.jsonl", tmp_path / "data", on_error="skip", split=split)
    assert not (tmp_path / "data").exists()
    write_other_fields(tmp_path / "a.jsonl")
    assert run(tmp_path / "a.jsonl", tmp_path / "data", "body", split=split) == 50


def test_what_a_killed_run_left_is_protected_only_if_it_made_samples(tmp_path: Path) -> None:
    texts = make_corpus(tmp_path / "raw")

    def interrupt(progress: Progress) -> None:
        if progress.tasks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "raw", tmp_path / "data", shard_bytes=20_000, on_progress=interrupt)
    with pytest.raises(DatasetExists, match="an unfinished preparation is there, with a different shard_bytes"):
        run(tmp_path / "raw", tmp_path / "data")
    for record in (tmp_path / "data" / ".preparing" / "records").iterdir():
        record.unlink()  # as if killed before the first task was finished
    assert run(tmp_path / "raw", tmp_path / "data") == len(texts)


def test_tasks_without_samples_for_one_part_are_kept_with_those_of_the_others(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw", 6, 1000)

    def interrupt(progress: Progress) -> None:
        if progress.tasks:
            raise KeyboardInterrupt

    rare = {"shard_bytes": 20_000, "split": {"val": 1e-9}}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "raw", tmp_path / "data", on_progress=interrupt, **rare)
    records = {part: sorted(contents(tmp_path / "data" / part / ".preparing" / "records")) for part in ("train", "val")}
    assert len(records["val"]) == len(records["train"]) >= 1


def test_a_run_interrupted_before_its_first_task_leaves_the_dataset_as_it_was(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 30, 1)
    run(tmp_path / "a.jsonl", tmp_path / "data")
    before = contents(tmp_path / "data")
    write_jsonl(tmp_path / "b.jsonl", 30, 2)

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b.jsonl", tmp_path / "data", append=True, on_progress=interrupt)
    assert contents(tmp_path / "data") == before


def test_skipping_is_not_advised_if_every_row_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("not JSON\n" * 20)
    with pytest.raises(FormatError, match=r"All 20 rows read so far are bad") as caught:
        run(tmp_path / "a.jsonl", tmp_path / "data")
    assert "--on-error" not in str(caught.value)
    with pytest.raises(FormatError, match="or skip bad rows: on_error='skip'"):
        run(write_nulls(tmp_path / "b.jsonl"), tmp_path / "data")


@pytest.mark.usefixtures("worker_processes")
def test_a_column_that_only_the_first_file_has_is_one_sentence_from_a_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_corpus(tmp_path / "raw", 1, 20)
    write_other_fields(tmp_path / "raw" / "z.jsonl")
    command = ["prepare", str(tmp_path / "raw"), str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "2"]
    assert main(command) == 1
    shown = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len(shown) == 1
    assert "z.jsonl" in shown[0]
    assert "'text'" in shown[0]
    assert "Traceback" not in shown[0]
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.usefixtures("worker_processes")
def test_a_task_that_fails_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 20, 1)
    transform = FunctionTransform("preparation.functions:loses_its_connection", types={"length": "int64"})
    with pytest.raises(PenstockError, match="the user's own network"):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", transform=transform, workers=2)
    assert not (tmp_path / "data").exists()

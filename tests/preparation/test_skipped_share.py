"""How many bad rows a run may skip: a tenth unless told otherwise, and never all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.errors import FormatError
from penstock.preparation import Prepared, prepare
from penstock.transforms import Tokenize


def write(path: Path, num_good: int, num_bad: int) -> Path:
    rows = [json.dumps({"text": f"row {number}"}) for number in range(num_good)]
    path.write_text("".join(f"{row}\n" for row in [*rows, *["{broken"] * num_bad]))
    return path


def run(source: Path, **settings: Any) -> Prepared:
    return prepare(source, source.parent / "data", transform=Tokenize("bytes"), workers=1, on_error="skip", **settings)


@pytest.mark.parametrize("max_skipped", [None, 1.0, 1000])
def test_a_run_without_a_good_row_is_an_error_whatever_the_limit(tmp_path: Path, max_skipped: Any) -> None:
    source = write(tmp_path / "a.jsonl", 0, 3)
    with pytest.raises(
        FormatError, match=r"3 rows \(3 bad_json\) skipped, 0 samples made: not one row is good\. The first"
    ):
        run(source, max_skipped=max_skipped)
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_tenth_of_the_rows_may_be_skipped_and_ten_in_any_case(tmp_path: Path) -> None:
    assert run(write(tmp_path / "a.jsonl", 1, 10)).skipped == {"bad_json": 10}
    (tmp_path / "more").mkdir()
    assert run(write(tmp_path / "more" / "a.jsonl", 180, 20)).num_samples == 180


def test_more_is_an_error_that_says_how_to_allow_it_and_loses_no_work(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", 50, 11)
    with pytest.raises(
        FormatError, match=r"11 rows .*50 samples made; by default at most 10% of the rows may .*max_skipped=0\.5"
    ):
        run(source)
    with pytest.raises(FormatError, match=r"at most 15% of the rows may be skipped\. "):
        run(source, max_skipped=0.15)
    done = run(source, max_skipped=0.2)
    assert (done.num_samples, done.tasks_kept) == (50, 1)


def test_a_dataset_that_is_continued_counts_all_of_its_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 300, 0)
    run(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", 10, 30)
    both = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    settings = {"transform": Tokenize("bytes"), "workers": 1, "on_error": "skip"}
    assert prepare(both, tmp_path / "data", **settings).num_samples == 310


@pytest.mark.parametrize(("flag", "code"), [("0.9", 0), ("90%", 0), ("20", 0), ("0.1", 1), ("19", 1)])
def test_the_flag_takes_rows_or_a_share(tmp_path: Path, flag: str, code: int) -> None:
    source = write(tmp_path / "a.jsonl", 5, 20)
    command = ["prepare", str(source), str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "1"]
    assert main([*command, "--on-error", "skip", "--max-skipped", flag]) == code


def test_the_flag_takes_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "a.jsonl", str(tmp_path), "--on-error", "skip", "--max-skipped", "a lot"])
    assert "'a lot' is not a number of rows, or a share such as 0.5 or 50%" in capsys.readouterr().err


@pytest.mark.parametrize("max_skipped", [-1, 1.5, -0.1, float("nan")])
def test_a_share_is_between_none_and_all(tmp_path: Path, max_skipped: float) -> None:
    with pytest.raises(ValueError, match=r"give a number of rows, or a share from 0\.0 to"):
        run(write(tmp_path / "a.jsonl", 1, 0), max_skipped=max_skipped)

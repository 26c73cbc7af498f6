"""A trial preparation makes the first samples of the sources, and says that it is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.cli import main
from penstock.errors import DatasetExists
from penstock.preparation import Prepared

from .corpora import contents, decoded, make_corpus, write_jsonl


def prepare(source: Any, folder: Path, **arguments: Any) -> Prepared:
    return penstock.prepare(source, folder, transform=penstock.Tokenize("bytes"), workers=1, **arguments)


def test_a_trial_holds_the_first_samples_of_the_sources(tmp_path: Path, inline: None) -> None:
    texts = make_corpus(tmp_path / "raw", num_files=3, num_rows=20)

    @settings(max_examples=6, deadline=None)
    @given(limit=st.integers(1, len(texts) + 20))
    def check(limit: int) -> None:
        prepared = prepare(tmp_path / "raw", tmp_path / "data", limit=limit, overwrite=True)
        assert decoded(tmp_path / "data") == texts[:limit]
        assert any("A trial" in note for note in prepared.notes)

    check()


def test_a_trial_reads_no_more_than_it_needs(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw")
    (tmp_path / "raw" / "z.jsonl").write_text("not json at all\n" * 100)
    assert prepare(tmp_path / "raw", tmp_path / "data", limit=50).num_samples == 50


def test_bad_rows_do_not_count(tmp_path: Path, inline: None) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 40, 0)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(["{bad\n", *lines]))
    prepare(tmp_path / "a.jsonl", tmp_path / "data", limit=30, on_error="skip")
    assert decoded(tmp_path / "data") == texts[:30]


def test_a_trial_is_split_and_shuffled_like_the_rest(tmp_path: Path, inline: None) -> None:
    texts = make_corpus(tmp_path / "raw", num_files=3, num_rows=20)
    prepare(tmp_path / "raw", tmp_path / "data", limit=50, split={"val": 0.3}, shuffle=1)
    parts = [decoded(tmp_path / "data" / name) for name in ("train", "val")]
    assert sorted(parts[0] + parts[1]) == sorted(texts[:50])


def test_a_trial_is_not_taken_for_the_whole_nor_the_other_way_round(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", num_files=2, num_rows=20)
    prepare(tmp_path / "raw", tmp_path / "data", limit=10)
    before = contents(tmp_path / "data")
    assert prepare(tmp_path / "raw", tmp_path / "data", limit=10).tasks_run == 0
    assert contents(tmp_path / "data") == before
    with pytest.raises(DatasetExists, match=r"a different limit \(was 10, is now null\)"):
        prepare(tmp_path / "raw", tmp_path / "data")
    write_jsonl(tmp_path / "raw" / "z.jsonl", 5, 3)
    with pytest.raises(DatasetExists, match="a trial of the first 10 samples, and its sources have changed"):
        prepare(tmp_path / "raw", tmp_path / "data", limit=10)
    prepare(tmp_path / "raw", tmp_path / "data", overwrite=True)
    assert len(penstock.open(tmp_path / "data")) == 65


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_is_a_number_of_samples(tmp_path: Path, limit: Any) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 0)
    with pytest.raises(ValueError, match="give a number of samples"):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", limit=limit)


def test_the_command_takes_a_limit(tmp_path: Path, inline: None, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", 20, 0)
    arguments = [str(tmp_path / "a.jsonl"), str(tmp_path / "data"), "--workers", "1"]
    assert main(["prepare", *arguments, "--limit", "7"]) == 0
    assert "7 samples" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "data")]) == 0
    assert "A trial: at most the first 7 samples of the sources." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["prepare", *arguments, "--limit", "none"])

"""Nothing is left out of a dataset without a word: columns, files, rows of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Tokenize, prepare
from penstock.cli import main
from penstock.errors import DatasetExists, FormatError, SchemaError

from .corpora import contents, decoded


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def later_column(tmp_path: Path) -> Path:
    write_rows(tmp_path / "raw" / "a.jsonl", {"x": 1})
    write_rows(tmp_path / "raw" / "b.jsonl", {"x": 2, "late": 3, "always_null": None})
    return tmp_path / "raw"


def test_a_column_that_turns_up_late_is_an_error(later_column: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"b\.jsonl: Column 'late' is not in the first rows; their columns are 'x'\."):
        prepare(later_column, tmp_path / "data", workers=1)


def test_columns_that_were_named_leave_others_out(later_column: Path, tmp_path: Path) -> None:
    prepare(later_column, tmp_path / "data", transform=penstock.KeepColumns(["x"]), workers=1)
    assert [sample["x"] for sample in penstock.open(tmp_path / "data")] == [1, 2]


def test_files_of_a_folder_whose_names_say_nothing_are_told(tmp_path: Path) -> None:
    write_rows(tmp_path / "raw" / "a.jsonl", {"text": "a"})
    for name in ("b.jsonl.xz", "deep/c.XZ", "d", "_SUCCESS", ".hidden", "README.md"):
        path = tmp_path / "raw" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    for _ in range(2):
        [*_, note] = prepare(tmp_path / "raw", tmp_path / "data", transform=Tokenize("bytes"), workers=1).notes
        assert "2 .xz, 1 no extension" in note
    assert note in json.loads((tmp_path / "data" / "run.json").read_text())["notes"]


def test_data_whose_name_begins_with_an_underscore_is_told(tmp_path: Path) -> None:
    for name in ("a.txt", "_b.txt", "deep/_c.txt", "_SUCCESS", "_README", "_noise_/deep/d.txt", "_noise_/README.txt"):
        path = tmp_path / "raw" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    done = prepare(tmp_path / "raw", tmp_path / "data", transform=Tokenize("bytes"), workers=1)
    assert done.num_samples == 1
    [note] = done.notes
    told = "Skipped files whose names, or whose folders' names, begin with an underscore: 3 .txt"
    assert note.startswith(f"{told} ({tmp_path}/raw/_b.txt, …).")
    assert prepare(f"{tmp_path}/raw/*.txt", tmp_path / "all", transform=Tokenize("bytes"), workers=1).num_samples == 2


def test_class_folders_that_begin_with_an_underscore_are_told_and_read_if_the_format_is_given(tmp_path: Path) -> None:
    for name in ("yes/a.wav", "_noise_/b.wav", "_noise_/.c.wav", ".git/d.wav"):
        path = tmp_path / "raw" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    done = prepare(tmp_path / "raw", tmp_path / "some", workers=1)
    assert done.num_samples == 1
    assert f"begin with an underscore: 1 .wav ({tmp_path}/raw/_noise_/b.wav)" in done.notes[0]
    prepare(tmp_path / "raw", tmp_path / "all", reading=penstock.SourceOptions(format="audio"), workers=1)
    assert penstock.open(tmp_path / "all").classes == ("_noise_", "yes")
    (tmp_path / "raw" / "yes" / "a.wav").unlink()
    with pytest.raises(FileNotFoundError, match=r"that begin with an underscore \(1 \.wav\)"):
        prepare(tmp_path / "raw", tmp_path / "none", workers=1)


def test_files_that_are_no_longer_given_are_told(tmp_path: Path) -> None:
    for name in ("day1", "day2"):
        source = write_rows(tmp_path / name / "a.jsonl", {"text": name})
        done = prepare(source, tmp_path / "data", transform=Tokenize("bytes"), workers=1, remove=True)
    assert done.num_samples == 1
    [note] = done.notes
    removed = "1 source file from the previous run was not given; its samples were removed"
    assert note.startswith(f"{removed} ({tmp_path}/day1/a.jsonl)")


class TestSamplesOfFilesThatAreNoLongerGiven:
    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        for name in ("day1", "day2"):
            write_rows(tmp_path / name / "a.jsonl", {"text": name}, {"text": f"{name} too"})
        prepare([tmp_path / "day1"], tmp_path / "data", transform=Tokenize("bytes"), workers=1)
        return tmp_path / "data"

    def run(self, data: Path, *names: str, **more: Any) -> penstock.preparation.Prepared:
        sources = [data.parent / name for name in names]
        return prepare(sources, data, transform=Tokenize("bytes"), workers=1, **more)

    def test_are_not_removed_by_other_sources(self, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = contents(data)
        message = (
            r"1 source file of 1 is no longer given \(.*day1/a\.jsonl\), and 2 samples would be removed\..*remove=True"
        )
        with pytest.raises(DatasetExists, match=message):
            self.run(data, "day2")
        command = ["prepare", str(data.parent / "day2"), str(data), "--tokenizer", "bytes", "--workers", "1"]
        assert main(command) == 1
        assert "--remove" in capsys.readouterr().err
        assert contents(data) == before
        assert main([*command, "--remove"]) == 0
        assert decoded(data) == ["day2", "day2 too"]

    def test_are_not_removed_because_one_of_many_files_is_missing(self, data: Path) -> None:
        self.run(data, "day1", "day2")
        before = contents(data)
        with pytest.raises(
            DatasetExists, match=r"1 source file of 2 is no longer given .* and 2 samples would be removed"
        ):
            self.run(data, "day1")
        assert contents(data) == before
        assert self.run(data, "day1", remove=True).num_samples == 2

    def test_are_not_removed_because_a_file_has_become_empty(self, data: Path) -> None:
        before = contents(data)
        (data.parent / "day1" / "a.jsonl").write_text("")
        with pytest.raises(DatasetExists, match=r"is no longer given, or empty now .* and 2 samples would be removed"):
            self.run(data, "day1")
        assert contents(data) == before
        prepared = self.run(data, "day1", "day2", remove=True)
        assert prepared.num_samples == 2
        assert any("was not given, or empty; its samples were removed" in note for note in prepared.notes)
        assert self.run(data, "day1", "day2").num_samples == 2

    def test_may_go_where_everything_may_be_replaced(self, data: Path) -> None:
        assert self.run(data, "day2", overwrite=True).num_samples == 2
        assert decoded(data) == ["day2", "day2 too"]

    def test_are_counted_among_many_small_files(self, tmp_path: Path) -> None:
        for number in range(5):
            (tmp_path / "raw").mkdir(exist_ok=True)
            (tmp_path / "raw" / f"{number}.txt").write_text(f"text {number}")
        self.run(tmp_path / "data", "raw")
        for number in range(3):
            (tmp_path / "raw" / f"{number}.txt").unlink()
        with pytest.raises(
            DatasetExists, match=r"3 source files of 5 are no longer given .* and 3 samples would be removed"
        ):
            self.run(tmp_path / "data", "raw")


class TestRowsThatAnEarlierRunSkipped:
    @pytest.fixture
    def rows(self, tmp_path: Path) -> Path:
        rows = write_rows(tmp_path / "rows.jsonl", {"text": "good"}, {"text": None}, {"text": "too"})
        self.run(rows, on_error="skip")
        return rows

    def run(self, rows: Path, **more: Any) -> penstock.preparation.Prepared:
        return prepare(rows, rows.parent / "data", transform=Tokenize("bytes"), workers=1, **more)

    def test_are_an_error_of_a_strict_run(self, rows: Path) -> None:
        with pytest.raises(FormatError, match=r"lacks 1 row \(1 null\).*rows\.jsonl: row 1: Column 'text' is null"):
            self.run(rows)

    def test_count_for_the_limit(self, rows: Path) -> None:
        with pytest.raises(FormatError, match="more than max_skipped=0 allows"):
            self.run(rows, on_error="skip", max_skipped=0)
        assert self.run(rows, on_error="skip", max_skipped=1).notes == ("Nothing to do: up to date.",)

    def test_are_forgotten_once_they_are_repaired(self, rows: Path) -> None:
        write_rows(rows, {"text": "good"}, {"text": "repaired"})
        assert self.run(rows).num_samples == 2


def test_many_bad_rows_can_be_traced_by_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ({"text": None} if row % 2 else {"text": "x"} for row in range(50_000))
    command = ["prepare", str(write_rows(tmp_path / "a.jsonl", *rows)), str(tmp_path / "data"), "--tokenizer", "bytes"]
    command += ["--on-error", "skip", "--max-skipped", "50%", "--workers", "1"]
    assert main(command) == 1
    assert "--origins column" in capsys.readouterr().err
    assert main([*command, "--origins", "column"]) == 0
    assert "row 20000" in penstock.open(tmp_path / "data").origin(10_000)

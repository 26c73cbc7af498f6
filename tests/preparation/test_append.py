"""Sources added to a dataset without those that it was made of, which may be gone by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import penstock
from penstock.cli import main
from penstock.errors import DatasetExists, FormatError
from penstock.preparation import Prepared

from .corpora import assert_holds, contents, decoded, write_jsonl

pytestmark = pytest.mark.usefixtures("inline")


def prepare(source: Any, folder: Path, **arguments: Any) -> Prepared:
    arguments = {"transform": penstock.Tokenize("bytes"), "workers": 1, "append": True, **arguments}
    return penstock.prepare(source, folder, **arguments)


@settings(max_examples=4, deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4), is_split=st.booleans())
def check_appending(folder: Path, sizes: list[int], is_split: bool) -> None:
    run = folder / f"run-{len(list(folder.iterdir()))}"
    run.mkdir()
    texts: list[str] = []
    for number, size in enumerate(sizes):
        path = run / f"{number}.jsonl"
        texts += write_jsonl(path, size, number)
        prepare(path, run / "data", split={"val": 0.3} if is_split else None)
        path.unlink()
        if is_split:
            parts = [text for name in ("train", "val") for text in decoded(run / "data" / name)]
            assert sorted(parts) == sorted(texts)
        else:
            assert decoded(run / "data") == texts


def test_appending_keeps_every_sample_though_its_sources_are_gone(tmp_path: Path) -> None:
    check_appending(tmp_path)


def test_appending_the_same_twice_changes_nothing(tmp_path: Path) -> None:
    texts = [*write_jsonl(tmp_path / "a.jsonl", 9, 0), *write_jsonl(tmp_path / "b.jsonl", 9, 1)]
    for name in ("a.jsonl", "b.jsonl"):
        prepare(tmp_path / name, tmp_path / "data")
    before = contents(tmp_path / "data")
    assert prepare(tmp_path / "b.jsonl", tmp_path / "data").tasks_run == 0
    assert contents(tmp_path / "data") == before
    assert_holds(tmp_path / "data", texts)


def test_a_dataset_that_was_appended_to_goes_on_as_if_all_had_been_given(tmp_path: Path) -> None:
    texts = [*write_jsonl(tmp_path / "a.jsonl", 9, 0), *write_jsonl(tmp_path / "b.jsonl", 9, 1)]
    for name in ("a.jsonl", "b.jsonl"):
        prepare(tmp_path / name, tmp_path / "data")
    assert not penstock.is_stale(tmp_path / "data")
    texts += write_jsonl(tmp_path / "c.jsonl", 9, 2)
    again = prepare(sorted(tmp_path.glob("*.jsonl")), tmp_path / "data", append=False)
    assert again.tasks_run == 1
    assert_holds(tmp_path / "data", texts)


def test_a_source_that_changed_is_prepared_again(tmp_path: Path) -> None:
    kept = write_jsonl(tmp_path / "a.jsonl", 9, 0)
    write_jsonl(tmp_path / "b.jsonl", 9, 1)
    for name in ("a.jsonl", "b.jsonl"):
        prepare(tmp_path / name, tmp_path / "data")
    texts = write_jsonl(tmp_path / "b.jsonl", 5, 8)
    prepare(tmp_path / "b.jsonl", tmp_path / "data")
    assert_holds(tmp_path / "data", [*kept, *texts])


def test_classes_stay_as_they_are(tmp_path: Path) -> None:
    for name, classes in (("one", "abc"), ("two", "ca")):
        for kind in classes:
            (tmp_path / name / kind).mkdir(parents=True)
            Image.fromarray(np.full((4, 4, 3), ord(kind), np.uint8)).save(tmp_path / name / kind / f"{name}.png")
        prepare(tmp_path / name, tmp_path / "data", transform=None)
    ds = penstock.open(tmp_path / "data")
    assert ds.classes == ("a", "b", "c")
    assert sorted(ds[:]["label"].tolist()) == [0, 0, 1, 2, 2]


def test_inferred_types_stay_as_they_are(tmp_path: Path) -> None:
    for name, rows in (("a", "1.5,x\n2,y\n"), ("b", "3,z\n")):
        (tmp_path / f"{name}.csv").write_text("score,name\n" + rows)
        reading = penstock.SourceOptions(types="infer", header=True)
        prepare(tmp_path / f"{name}.csv", tmp_path / "data", transform=None, reading=reading)
        (tmp_path / f"{name}.csv").unlink()
    ds = penstock.open(tmp_path / "data")
    assert ds[:]["score"].tolist() == [1.5, 2, 3]
    assert ds.schema["score"].spec == "float64"


def test_what_cannot_be_appended_to_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 9, 0)
    write_jsonl(tmp_path / "b.jsonl", 9, 1)
    prepare(tmp_path / "a.jsonl", tmp_path / "shuffled", shuffle=1)
    with pytest.raises(DatasetExists, match="is shuffled, with other source files"):
        prepare(tmp_path / "b.jsonl", tmp_path / "shuffled", shuffle=1)
    prepare(tmp_path / "a.jsonl", tmp_path / "data")
    with pytest.raises(DatasetExists, match=r"or pass append=True \(--append\) with only the new ones"):
        prepare(tmp_path / "b.jsonl", tmp_path / "data", append=False)
    with pytest.raises(DatasetExists, match="a different transform"):
        prepare(tmp_path / "b.jsonl", tmp_path / "data", transform=penstock.Tokenize("bytes", append_eos="<|eos|>"))
    with pytest.raises(ValueError, match="keeps every existing sample"):
        prepare(tmp_path / "b.jsonl", tmp_path / "data", overwrite=True)
    with penstock.DatasetWriter(tmp_path / "written", {"tokens": "uint8[*]"}) as writer:
        writer.write({"tokens": [1]})
    with pytest.raises((DatasetExists, FormatError), match="not made by `penstock prepare`"):
        prepare(tmp_path / "b.jsonl", tmp_path / "written")


def test_the_command_appends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", 5, ord(name))
        arguments = [str(tmp_path / f"{name}.jsonl"), str(tmp_path / "data"), "--tokenizer", "bytes"]
        assert main(["prepare", *arguments, "--append"]) == 0
    assert "10 samples" in capsys.readouterr().out
    assert main(["prepare", *arguments, "--append", "--remove"]) == 2

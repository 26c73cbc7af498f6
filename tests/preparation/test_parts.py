"""`prepare(split=...)` writes each part as a dataset, and a sample never changes its part."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.cli import main
from penstock.errors import DatasetExists, FormatError, IncompleteDataset, SchemaError
from penstock.preparation import Prepared
from penstock.shards import Workspace

from .corpora import contents, decoded, make_corpus, stray_files, write_jsonl

SPLIT = {"train": 0.8, "val": 0.2}


def prepare(source: Any, folder: Path, **arguments: Any) -> Prepared:
    arguments = {"split": SPLIT, "transform": penstock.Tokenize("bytes", column="text"), "workers": 1, **arguments}
    return penstock.prepare(source, folder, **arguments)


def parts_in(folder: Path) -> dict[str, list[str]]:
    return {name: decoded(folder / name) for name in SPLIT}


def test_parts_are_datasets_that_hold_what_splitting_the_whole_one_gives(tmp_path: Path, inline: None) -> None:
    texts = make_corpus(tmp_path / "raw", num_files=3, num_rows=60)
    prepared = prepare(tmp_path / "raw", tmp_path / "data", split_seed=7)
    penstock.prepare(tmp_path / "raw", tmp_path / "all", transform=penstock.Tokenize("bytes"), workers=1)
    expected = penstock.open(tmp_path / "all").split(SPLIT, seed=7)
    found = parts_in(tmp_path / "data")
    for name, part in expected.items():
        assert found[name] == [bytes(sample["tokens"].astype("uint8")).decode() for sample in part]
        assert prepared.parts[name].num_samples == len(found[name])
        assert stray_files(tmp_path / "data" / name) == set()
        assert penstock.verify(tmp_path / "data" / name).is_sound
    assert Counter(found["train"] + found["val"]) == Counter(texts)
    assert prepared.num_samples == len(texts)
    assert 0.1 < len(found["val"]) / len(texts) < 0.3


def test_a_part_is_not_split_again_by_the_seed_that_made_it(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 2, 40)
    for by in ("content", ["tokens"]):
        prepare(tmp_path / "raw", tmp_path / "data", split_by=by, overwrite=True)
        train = penstock.open(tmp_path / "data" / "train")
        with pytest.raises(ValueError, match="Use another seed"):
            train.split(SPLIT, seed=0)
        assert len(train.split(SPLIT, seed=1)["val"]) > 0


def test_all_parts_are_made_by_reading_the_sources_once(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw")
    prepared = prepare(tmp_path / "raw", tmp_path / "data")
    assert prepared.parts["train"].tasks_run == prepared.tasks_run > 0
    assert prepared.parts["val"].tasks_run == 0
    assert prepared.raw_bytes == sum(path.stat().st_size for path in (tmp_path / "raw").iterdir())


def test_what_fractions_leave_is_the_training_part(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 2, 40)
    prepare(tmp_path / "raw", tmp_path / "named")
    prepared = prepare(tmp_path / "raw", tmp_path / "rest", split={"val": 0.2})
    assert list(prepared.parts) == ["train", "val"]
    assert parts_in(tmp_path / "rest") == parts_in(tmp_path / "named")


edits = st.lists(
    st.tuples(st.sampled_from(["append", "remove", "reorder", "new file", "rename"]), st.integers(0, 1 << 16)),
    min_size=1,
    max_size=4,
)


def edit(folder: Path, what: str, number: int) -> None:
    """Change the sources as people do."""
    paths = sorted(folder.iterdir())
    path = paths[number % len(paths)]
    lines = path.read_text().splitlines(keepends=True)
    if what == "append":
        path.write_text("".join([*lines, json.dumps({"text": f"appended {number}"}) + "\n"]))
    elif what == "remove":
        path.write_text("".join(lines[: number % len(lines)] + lines[number % len(lines) + 1 :] or lines))
    elif what == "reorder":
        path.write_text("".join(np.random.default_rng(number).permutation(np.array(lines, dtype=object))))
    elif what == "new file":
        write_jsonl(folder / f"new-{number}.jsonl", 5, number)
    else:
        path.rename(folder / f"{number:05d}-{path.name}")


@settings(max_examples=5, deadline=None)
@given(changes=edits, shuffle=st.sampled_from([None, 5]), by=st.sampled_from(["content", ["tokens"]]))
def check_that_samples_stay(folder: Path, changes: list[tuple[str, int]], shuffle: int | None, by: Any) -> None:
    raw = folder / f"raw-{len(list(folder.iterdir()))}"
    data = raw.with_name(f"data-{raw.name}")
    make_corpus(raw, num_files=3, num_rows=8)
    home: dict[str, str] = {}
    for what, number in [("nothing", 0), *changes]:
        if what != "nothing":
            edit(raw, what, number)
        prepare(raw, data, shuffle=shuffle, split_by=by, remove=True, overwrite=shuffle is not None)
        found = parts_in(data)
        texts = [json.loads(line)["text"] for path in raw.iterdir() for line in path.read_text().splitlines()]
        assert Counter(found["train"] + found["val"]) == Counter(texts)
        for name, documents in found.items():
            for document in documents:
                assert home.setdefault(document, name) == name


def test_no_sample_ever_changes_its_part(tmp_path: Path, inline: None) -> None:
    check_that_samples_stay(tmp_path)


def test_a_rerun_reads_only_what_is_new_for_every_part(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw")
    prepare(tmp_path / "raw", tmp_path / "data")
    before = contents(tmp_path / "data")
    again = prepare(tmp_path / "raw", tmp_path / "data")
    assert again.tasks_run == 0
    assert contents(tmp_path / "data") == before
    write_jsonl(tmp_path / "raw" / "z.jsonl", 50, 99)
    grown = prepare(tmp_path / "raw", tmp_path / "data")
    assert grown.raw_bytes == (tmp_path / "raw" / "z.jsonl").stat().st_size
    assert grown.num_samples == again.num_samples + 50


def test_a_run_killed_between_two_commits_is_caught_up(tmp_path: Path, inline: None) -> None:
    texts = make_corpus(tmp_path / "raw", 3, 30)
    prepare(tmp_path / "raw", tmp_path / "data")
    texts += write_jsonl(tmp_path / "raw" / "z.jsonl", 40, 99)
    commit, commits = Workspace.commit, itertools.count()
    with pytest.MonkeyPatch.context() as patch:

        def commit_once(*given: Any, **more: Any) -> None:
            if next(commits):
                raise KeyboardInterrupt
            commit(*given, **more)

        patch.setattr(Workspace, "commit", commit_once)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "raw", tmp_path / "data")
    again = prepare(tmp_path / "raw", tmp_path / "data")
    assert again.tasks_run == 0
    found = parts_in(tmp_path / "data")
    assert Counter(found["train"] + found["val"]) == Counter(texts)


def test_a_lost_part_is_made_again_and_the_others_stay(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 3, 30)
    prepare(tmp_path / "raw", tmp_path / "data")
    before = contents(tmp_path / "data")
    for path in (tmp_path / "data" / "val").iterdir():
        path.unlink()
    prepare(tmp_path / "raw", tmp_path / "data")
    assert contents(tmp_path / "data") == before


def test_shuffled_parts_hold_the_same_samples(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 3, 50)
    prepare(tmp_path / "raw", tmp_path / "ordered")
    prepare(tmp_path / "raw", tmp_path / "shuffled", shuffle=3)
    ordered, shuffled = parts_in(tmp_path / "ordered"), parts_in(tmp_path / "shuffled")
    for name in SPLIT:
        assert ordered[name] != shuffled[name]
        assert sorted(ordered[name]) == sorted(shuffled[name])


def test_a_split_by_file_keeps_files_together(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 12, 4)
    prepare(tmp_path / "raw", tmp_path / "data", split={"train": 0.5, "val": 0.5}, split_by="file")
    files = {name: {text.split()[0] for text in texts} for name, texts in parts_in(tmp_path / "data").items()}
    assert files["train"]
    assert files["val"]
    assert not files["train"] & files["val"]


def test_rows_of_a_generator_are_read_once_for_all_parts(tmp_path: Path, inline: None) -> None:
    rows = ({"text": f"row {number}"} for number in range(100))
    prepare(rows, tmp_path / "data")
    found = parts_in(tmp_path / "data")
    assert sorted(found["train"] + found["val"]) == sorted(f"row {number}" for number in range(100))


def test_bad_rows_are_counted_once(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 2, 100)
    with (tmp_path / "raw" / "part-000.jsonl").open("a") as file:
        file.write("{not json\n" * 3)
    prepared = prepare(tmp_path / "raw", tmp_path / "data", on_error="skip")
    assert prepared.skipped == prepared.parts["train"].skipped == {"bad_json": 3}
    with pytest.raises(FormatError, match="lacks 3 rows"):
        prepare(tmp_path / "raw", tmp_path / "data")


def test_samples_of_parts_know_their_origin(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 2, 20)
    prepare(tmp_path / "raw", tmp_path / "data")
    val = penstock.open(tmp_path / "data" / "val")
    for index in range(len(val)):
        name, row, *_ = bytes(val[index]["tokens"].astype("uint8")).decode().split()
        origin = val.origin(index)
        assert origin is not None
        assert f"{name}.jsonl" in origin
        assert origin.endswith(f"row {row}")


def test_opening_the_folder_of_parts_names_them(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 1, 20)
    prepare(tmp_path / "raw", tmp_path / "data")
    with pytest.raises(IncompleteDataset, match=r"a folder of datasets \(train, val\)"):
        penstock.open(tmp_path / "data")


def test_another_split_is_refused(tmp_path: Path, inline: None) -> None:
    make_corpus(tmp_path / "raw", 1, 20)
    prepare(tmp_path / "raw", tmp_path / "data")
    with pytest.raises(DatasetExists, match=r"a different split \(parts was"):
        prepare(tmp_path / "raw", tmp_path / "data", split={"train": 0.7, "val": 0.3})
    with pytest.raises(DatasetExists, match="'val' there is part of another split"):
        prepare(tmp_path / "raw", tmp_path / "data", split={"train": 0.8, "test": 0.2})
    with pytest.raises(DatasetExists, match="other files are there"):
        prepare(tmp_path / "raw", tmp_path / "data", split=None)
    with pytest.raises(DatasetExists, match="a different split"):
        prepare(tmp_path / "raw", tmp_path / "data" / "val", split=None)
    prepare(tmp_path / "raw", tmp_path / "whole", split=None)
    with pytest.raises(DatasetExists, match="a dataset is there, but split= puts train, val into folders"):
        prepare(tmp_path / "raw", tmp_path / "whole")


def test_a_part_is_not_written_through_a_link(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 20, 1)
    for name in ("precious", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "val").symlink_to(tmp_path / "precious")
    for overwrite in (False, True):
        with pytest.raises(DatasetExists, match=r"data/val is a link\. Penstock does not write through it"):
            prepare(tmp_path / "a.jsonl", tmp_path / "data", overwrite=overwrite)
    assert list((tmp_path / "precious").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"split": {"train": 0.8, "val": 0.3}}, ValueError, "add up to 1"),
        ({"split": {"val": 1.5}}, ValueError, "add up to 1"),
        ({"split": {"val": -0.1, "train": 1.1}}, ValueError, "must be positive"),
        ({"split": {"train": 1.0}}, ValueError, "is one part"),
        ({"split": {"../up": 0.1}}, ValueError, "cannot name a folder"),
        ({"split": [0.9, 0.1]}, TypeError, "give names and shares"),
        ({"split_seed": 0.5}, TypeError, "give an integer"),
        ({"split_by": "index"}, ValueError, "would move samples"),
        ({"split_by": "user"}, SchemaError, r"split_by=\['user'\]: No column 'user'"),
    ],
)
def test_splits_that_make_no_sense_are_refused(
    tmp_path: Path, inline: None, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 0)
    with pytest.raises(error, match=message):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", **arguments)


def test_the_command_writes_both_parts_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_corpus(tmp_path / "raw", 2, 40)
    arguments = [str(tmp_path / "raw"), str(tmp_path / "data"), "--tokenizer", "bytes", "--split", "val=20%"]
    assert main(["prepare", *arguments, "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    for name in SPLIT:
        assert f"{tmp_path / 'data' / name}: {len(penstock.open(tmp_path / 'data' / name))} samples" in shown
    prepare(tmp_path / "raw", tmp_path / "same")
    assert parts_in(tmp_path / "data") == parts_in(tmp_path / "same")
    assert main(["inspect", str(tmp_path / "data" / "val")]) == 0
    assert "Part 'val' of a split by content with seed 0: train 80 %, val 20 %." in capsys.readouterr().out
    assert main(["prepare", *arguments[:4], "--split-by", "file"]) == 2
    assert "--split-by needs --split" in capsys.readouterr().err

"""A document of the validation part never reaches training, however the dataset is prepared again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.schema import HASH_COLUMN
from penstock.shards import read_manifest

from .corpora import decoded, make_corpus

FRACTIONS = {"train": 0.9, "val": 0.1}


def prepare(source: Any, folder: Path, **arguments: Any) -> Path:
    transform = penstock.Tokenize("bytes", column="text")
    penstock.prepare(source, folder, transform=transform, workers=1, **arguments)
    return folder


def parts_of(folder: Path, **arguments: Any) -> dict[str, set[str]]:
    """Documents of each part."""
    parts = penstock.open(folder).split(FRACTIONS, seed=3, **arguments)
    return {name: {bytes(sample["tokens"].astype("uint8")).decode() for sample in part} for name, part in parts.items()}


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def remove_a_row(corpus: Path) -> None:
    path = corpus / "part-000.jsonl"
    path.write_text("".join(lines_of(path)[1:]))


def add_rows_and_a_file(corpus: Path) -> None:
    path = corpus / "part-001.jsonl"
    path.write_text(json.dumps({"text": "first of all", "id": 0}) + "\n" + path.read_text())
    (corpus / "a-new-one.jsonl").write_text(json.dumps({"text": "another", "id": 0}) + "\n")


def rename_files(corpus: Path) -> None:
    for path in sorted(corpus.glob("part-*.jsonl")):
        path.rename(corpus / f"{9 - int(path.stem[-3:])}.jsonl")


def shuffle_rows(corpus: Path) -> None:
    for path in corpus.glob("*.jsonl"):
        lines = lines_of(path)
        random.Random(1).shuffle(lines)
        path.write_text("".join(lines))


def leave(corpus: Path) -> None:
    """The sources stay; the settings differ."""


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (remove_a_row, {}),
        (add_rows_and_a_file, {}),
        pytest.param(rename_files, {"remove": True}, marks=pytest.mark.stress),
        pytest.param(shuffle_rows, {}, marks=pytest.mark.stress),
        pytest.param(leave, {"shard_bytes": 5_000, "overwrite": True}, marks=pytest.mark.stress),
        (leave, {"shuffle": 5, "overwrite": True}),
        pytest.param(leave, {"origins": "column", "overwrite": True}, marks=pytest.mark.stress),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_no_validation_document_ever_reaches_training(
    tmp_path: Path, change: Callable[[Path], None], settings: dict[str, Any]
) -> None:
    make_corpus(tmp_path / "corpus", num_files=3, num_rows=60)
    before = parts_of(prepare(tmp_path / "corpus", tmp_path / "ds"))
    change(tmp_path / "corpus")
    after = parts_of(prepare(tmp_path / "corpus", tmp_path / "ds", **settings))
    assert len(before["val"]) > 10
    assert after["train"].isdisjoint(before["val"])
    assert after["val"].isdisjoint(before["train"])
    fresh = parts_of(prepare(tmp_path / "corpus", tmp_path / "fresh"))
    assert after == fresh


def test_a_dataset_is_split_as_the_same_documents_in_memory_are(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus", num_files=2, num_rows=60)
    prepare(tmp_path / "corpus", tmp_path / "ds", shuffle=1)
    stored, loaded = penstock.open(tmp_path / "ds"), penstock.open(tmp_path / "ds").in_memory()
    assert HASH_COLUMN in stored.storage.schema
    assert HASH_COLUMN not in loaded.storage.schema
    for name, part in stored.split(FRACTIONS, seed=3).items():
        other = loaded.split(FRACTIONS, seed=3)[name]
        assert part.read(range(len(part)))["tokens"].values.tolist() == other[:]["tokens"].values.tolist()


def test_hashes_are_no_column_that_people_see(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus", num_files=1, num_rows=20)
    ds = penstock.open(prepare(tmp_path / "corpus", tmp_path / "ds"))
    assert list(ds.schema) == list(ds[0]) == list(ds[:2]) == list(ds.shuffle(1).batch(4).read(0)) == ["tokens"]
    assert HASH_COLUMN not in repr(ds)
    assert penstock.open(tmp_path / "ds").fingerprint == ds.fingerprint


def test_copies_of_a_document_are_in_the_same_part(tmp_path: Path) -> None:
    rows = [{"text": f"document {number % 50}"} for number in range(500)]
    parts = parts_of(prepare(rows, tmp_path / "ds"))
    assert parts["train"].isdisjoint(parts["val"])
    assert len(parts["val"]) > 0


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.stress), {"shuffle": 2}, {"origins": "column"}], ids=str
)
def test_a_split_by_file_keeps_all_rows_of_a_file_together(tmp_path: Path, settings: dict[str, Any]) -> None:
    make_corpus(tmp_path / "corpus", num_files=12, num_rows=5)
    prepare(tmp_path / "corpus", tmp_path / "ds", **settings)
    parts = parts_of(tmp_path / "ds", by="file")
    files = {name: {text.split()[0] for text in part} for name, part in parts.items()}
    assert files["train"].isdisjoint(files["val"])
    assert len(files["train"] | files["val"]) == 12
    assert parts == parts_of(prepare(tmp_path / "corpus", tmp_path / "other", shard_bytes=999), by="file")


def test_a_split_by_file_tells_small_files_of_one_task_apart(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} here")
    (tmp_path / "texts" / "7.txt").write_bytes(b"\xff\xfe")  # a bad one: rows are then counted in runs
    prepare(tmp_path / "texts", tmp_path / "ds", on_error="skip")
    ds = penstock.open(tmp_path / "ds")
    found = ds.samples.keys.provenance
    numbers = found.files_of(np.arange(len(ds))).tolist()
    assert [Path(found.files[number]).stem for number in numbers] == [
        text.split()[0] for text in decoded(tmp_path / "ds")
    ]
    assert len(numbers) == 39


def test_a_dataset_made_before_there_were_hashes_goes_on_without_them(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus", num_files=2, num_rows=30)
    from penstock.preparation import _plan

    real = _plan.Specification
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "Specification", lambda **fields: real(**{**fields, "hashes": False}))
        prepare(tmp_path / "corpus", tmp_path / "ds")
    old = read_manifest(tmp_path / "ds")
    assert HASH_COLUMN not in old.schema
    assert "hashes" not in old.attributes["preparation"]["recipe"]
    before = parts_of(tmp_path / "ds")
    add_rows_and_a_file(tmp_path / "corpus")
    prepare(tmp_path / "corpus", tmp_path / "ds")
    now = read_manifest(tmp_path / "ds")
    assert HASH_COLUMN not in now.schema
    assert {shard.name for shard in old.shards} & {shard.name for shard in now.shards} or len(old.shards) == 1
    after = parts_of(tmp_path / "ds")
    assert after["train"].isdisjoint(before["val"])

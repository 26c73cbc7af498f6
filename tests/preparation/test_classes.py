"""Labels of class folders: the same number for a class in every dataset that is made for one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import penstock
from penstock.cli import main
from penstock.errors import DatasetExists, FormatError
from penstock.preparation import prepare
from penstock.shards import classes_of


def write_images(folder: Path, *classes: str) -> Path:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / name / "a.png")
    return folder


def make(source: Path, destination: Path, **more: Any) -> penstock.Dataset:
    prepare(source, destination, transform=penstock.DecodeImage(size=4), workers=1, **more)
    return penstock.open(destination)


def labels(dataset: penstock.Dataset) -> list[int]:
    return sorted(int(sample["label"]) for sample in dataset)


@pytest.fixture
def train(tmp_path: Path) -> penstock.Dataset:
    return make(write_images(tmp_path / "train", "a", "b", "c"), tmp_path / "data" / "train")


def test_a_dataset_knows_its_classes(train: penstock.Dataset, tmp_path: Path) -> None:
    assert train.classes == ("a", "b", "c")
    assert labels(train) == [0, 1, 2]
    rows = [{"x": 1}]
    prepare(rows, tmp_path / "rows", workers=1)
    assert penstock.open(tmp_path / "rows").classes == ()


@pytest.mark.parametrize(
    "kind", ["names", "dataset", *(pytest.param(kind, marks=pytest.mark.stress) for kind in ("lines", "json"))]
)
def test_a_class_keeps_its_label_in_a_split_that_lacks_others(
    train: penstock.Dataset, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    (tmp_path / "classes.json").write_text('["a", "b", "c"]')
    given = {
        "names": train.classes,
        "dataset": tmp_path / "data" / "train",
        "lines": str(tmp_path / "classes.txt"),
        "json": tmp_path / "classes.json",
    }
    source = write_images(tmp_path / "val", "a", "c")
    assert labels(make(source, tmp_path / "alone")) == [0, 1], "what happens without"
    val = make(source, tmp_path / "data" / "val", classes=given[kind])
    assert labels(val) == [0, 2]
    assert val.classes == train.classes


def test_an_unknown_class_is_an_error(train: penstock.Dataset, tmp_path: Path) -> None:
    source = write_images(tmp_path / "val", "a", "z")
    with pytest.raises(ValueError, match="The class 'z' is not one of"):
        make(source, tmp_path / "data" / "val", classes=train.classes)


def test_what_has_no_classes_is_refused(tmp_path: Path) -> None:
    source = write_images(tmp_path / "val", "a")
    prepare([{"x": 1}], tmp_path / "rows", workers=1)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "wrong.json").write_text('{"a": 0}')
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "half.json").write_text('["\\ud800"]')
    for wrong, message in (
        ("rows", "has no classes"),
        ("empty.txt", "names no class"),
        ("wrong.json", "not a list"),
        ("deep.json", "deep.json is not a list of classes: maximum recursion"),
        ("half.json", "half.json is not a list of classes: .*surrogates"),
    ):
        with pytest.raises(FormatError, match=message):
            make(source, tmp_path / "data", classes=tmp_path / wrong)
    with pytest.raises(FileNotFoundError, match="no such file or dataset"):
        make(source, tmp_path / "data", classes=tmp_path / "nowhere")
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(ValueError, match="no source is an image in a class folder"):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", classes=["a"], workers=1)


@pytest.mark.parametrize("classes", [[1, "a"], ["a", 1.5], [None, "a"]])
def test_a_class_that_is_no_string_is_refused(classes: list[Any], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"classes: \S+ is not a string; write '"):
        make(write_images(tmp_path / "images", "a"), tmp_path / "data", classes=classes)


def test_a_dataset_with_other_classes_is_not_continued(train: penstock.Dataset, tmp_path: Path) -> None:
    with pytest.raises(DatasetExists, match="classes was"):
        make(tmp_path / "train", tmp_path / "data" / "train", classes=["c", "b", "a"])


def test_the_command_takes_and_shows_classes(
    train: penstock.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_images(tmp_path / "val", "a", "c")
    command = ["prepare", str(source), str(tmp_path / "val.data"), "--image-size", "4", "--workers", "1"]
    assert main([*command, "--classes", str(tmp_path / "data" / "train")]) == 0
    assert "  classes: 0 a, 1 b, 2 c" in capsys.readouterr().out
    assert labels(penstock.open(tmp_path / "val.data")) == [0, 2]


def test_classes_of_datasets_from_before_are_found_where_they_were() -> None:
    old = {"preparation": {"recipe": {"reading": {"classes": ["x", "y"]}}}}
    assert classes_of(old) == ("x", "y")
    for forged in ({"classes": "ab"}, {"classes": [1]}, {"preparation": []}, {"preparation": {"recipe": 7}}):
        assert classes_of(json.loads(json.dumps(forged))) == ()

"""Class folders and sorted sources are stored mixed, unless somebody says otherwise or they were made otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import penstock
from penstock.cli import main
from penstock.errors import DatasetExists
from penstock.preparation import _first_rows, prepare
from penstock.schema import Schema
from penstock.shards import read_manifest

from .corpora import contents

CLASSES, IMAGES = 12, 30


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of small PNG and JPEG files."""
    folder: Path = tmp_path_factory.mktemp("images")
    for label in range(CLASSES):
        (folder / f"class-{label:02d}").mkdir()
        for number in range(IMAGES):
            kind = "png" if number % 2 else "jpg"
            image = Image.new("RGB", (6, 6), (label * 20, number * 8, 0))
            image.save(folder / f"class-{label:02d}" / f"{number:03d}.{kind}")
    return folder


def make(source: Any, destination: Path, **arguments: Any) -> penstock.Dataset:
    prepare(source, destination, transform=penstock.DecodeImage(size=6), workers=1, **arguments)
    return penstock.open(destination)


def labels(ds: penstock.Dataset) -> NDArray[np.int64]:
    return np.asarray(ds.read(np.arange(len(ds)))["label"], np.int64)


def chi_square(labels: NDArray[np.int64], size: int) -> float:
    """Of class counts in batches as they are stored, per degree of freedom; 1 when they are as if drawn at random."""
    batches = labels[: len(labels) // size * size].reshape(-1, size)
    counts = np.stack([np.bincount(batch, minlength=CLASSES) for batch in batches])
    expected = size / CLASSES
    return float(((counts - expected) ** 2 / expected).sum() / (len(batches) * (CLASSES - 1)))


def test_batches_of_class_folders_are_as_mixed_as_a_shuffle_makes_them(folders: Path, tmp_path: Path) -> None:
    mixed = labels(make(folders, tmp_path / "mixed"))
    kept = labels(make(folders, tmp_path / "kept", shuffle=None))
    drawn = [chi_square(np.random.default_rng(seed).permutation(mixed), 36) for seed in range(50)]
    assert sorted(mixed) == sorted(kept) == kept.tolist()
    assert 0.8 * min(drawn) < chi_square(mixed, 36) < 1.2 * max(drawn)
    assert chi_square(kept, 36) > 5 * max(drawn)


def test_each_image_keeps_its_label_and_its_origin(folders: Path, tmp_path: Path) -> None:
    ds = make(folders, tmp_path / "ds")
    for index in range(0, len(ds), 7):
        origin = ds.origin(index)
        assert origin is not None
        assert f"class-{ds[index]['label']:02d}/" in origin
    assert list(ds.schema) == ["image", "label"]


def test_the_order_does_not_depend_on_where_the_folders_are(folders: Path, tmp_path: Path) -> None:
    one = make(folders, tmp_path / "one")
    (tmp_path / "elsewhere").symlink_to(folders)
    other = make(tmp_path / "elsewhere", tmp_path / "other")
    assert one.fingerprint == other.fingerprint


def test_a_second_run_finds_nothing_to_do_and_keeps_the_order(folders: Path, tmp_path: Path) -> None:
    make(folders, tmp_path / "ds")
    before = contents(tmp_path / "ds")
    summary = prepare(folders, tmp_path / "ds", transform=penstock.DecodeImage(size=6), workers=1)
    assert (summary.tasks_run, contents(tmp_path / "ds")) == (0, before)
    with pytest.raises(DatasetExists, match='order of files \\(was "hash", is now null\\)'):
        make(folders, tmp_path / "ds", shuffle=None)


def test_a_dataset_stored_class_by_class_goes_on_as_it_was_made(tmp_path: Path) -> None:
    source = tmp_path / "images"
    for name in "abc":
        (source / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (4, 4), (number, ord(name), 0)).save(source / name / f"{number}.png")
    make(source, tmp_path / "ds", shuffle=None)
    recipe = read_manifest(tmp_path / "ds").attributes["preparation"]["recipe"]
    assert "file_order" not in recipe  # as in datasets from before there was a choice
    for number in range(4, 8):
        for name in "abc":
            Image.new("RGB", (4, 4), (number, ord(name), 0)).save(source / name / f"{number}.png")
    added = labels(make(source, tmp_path / "ds"))
    assert "file_order" not in read_manifest(tmp_path / "ds").attributes["preparation"]["recipe"]
    half = len(added) // 2
    runs = int((np.diff(added[:half]) != 0).sum()) + int((np.diff(added[half:]) != 0).sum())
    assert (len(added), runs) in ((24, 2), (24, 4))


def test_new_images_are_added_to_mixed_ones(folders: Path, tmp_path: Path) -> None:
    source = tmp_path / "some"
    for label in range(3):
        (source / f"class-{label:02d}").mkdir(parents=True)
        for path in sorted((folders / f"class-{label:02d}").iterdir())[:20]:
            (source / f"class-{label:02d}" / path.name).write_bytes(path.read_bytes())
    first = labels(make(source, tmp_path / "ds"))
    (source / "class-00" / "new.png").write_bytes((folders / "class-05" / "001.png").read_bytes())
    second = labels(make(source, tmp_path / "ds"))
    assert np.bincount(second).tolist() == [21, 20, 20]
    assert int((np.diff(first) != 0).sum()) > 20


def test_the_summary_says_so_and_the_command_can_be_told_otherwise(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(folders), str(tmp_path / "a"), "--image-size", "6", "--workers", "1"]) == 0
    assert (
        "Files of class folders are stored with their classes mixed: shuffle=None (--no-shuffle)"
        in capsys.readouterr().out
    )
    command = ["prepare", str(folders), str(tmp_path / "b"), "--image-size", "6", "--workers", "1", "--no-shuffle"]
    assert main(command) == 0
    assert "mixed" not in capsys.readouterr().out
    assert labels(penstock.open(tmp_path / "b")).tolist() == sorted(labels(penstock.open(tmp_path / "a")))


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of 40 rows, each of one label, that are taken for large ones."""
    monkeypatch.setattr(_first_rows, "_MIN_BYTES_FOR_RUNS", 1)
    for number in range(10):
        lines = [json.dumps({"x": number * 40 + row, "label": number // 2}) for row in range(40)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_large_sources_whose_labels_come_in_runs_are_permuted(rows: Path) -> None:
    summary = prepare(f"{rows}/*.jsonl", rows / "ds", workers=1)
    assert summary.notes == (
        "Samples are stored permuted because column 'label' comes in runs: shuffle=None (--no-shuffle) keeps the order "
        "of the sources.",
    )
    found = labels(penstock.open(rows / "ds"))
    assert int((np.diff(found) != 0).sum()) > 200
    kept = prepare(f"{rows}/*.jsonl", rows / "kept", workers=1, shuffle=None)
    assert kept.notes == ()
    assert labels(penstock.open(rows / "kept")).tolist() == sorted(found)


def test_a_shuffle_that_was_found_to_be_needed_stays_up_to_date(rows: Path) -> None:
    prepare(f"{rows}/*.jsonl", rows / "ds", workers=1)
    before = contents(rows / "ds")
    assert prepare(f"{rows}/*.jsonl", rows / "ds", workers=1).tasks_run == 0
    assert contents(rows / "ds") == before


def test_sources_that_are_mixed_small_or_without_labels_are_left_as_they_are(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        lines = [json.dumps({"x": row, "label": (row * 7 + number) % 5}) for row in range(40)]
        (rows / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    prepare(f"{rows}/*.jsonl", rows / "mixed", workers=1)
    assert penstock.open(rows / "mixed").schema == Schema.parse({"x": "int64", "label": "int64"})
    monkeypatch.setattr(_first_rows, "_MIN_BYTES_FOR_RUNS", 1 << 30)
    assert prepare(f"{rows}/*.jsonl", rows / "small", workers=1).notes == ()

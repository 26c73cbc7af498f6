"""Data that is no file: iterators that can be read once, data frames, and objects of which nobody knows the version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import penstock
from penstock.errors import DatasetExists, FormatError
from penstock.preparation import prepare
from penstock.sources import IterableSource, SourceOptions
from penstock.transforms import FunctionTransform, KeepColumns, Tokenize, Transform

from .corpora import contents, decoded

BYTES = Tokenize("bytes")


def numbered(count: int, word: str = "row") -> Iterator[dict[str, str]]:
    yield from ({"text": f"{word} {number}"} for number in range(count))


@pytest.mark.parametrize(
    "transform",
    [BYTES, KeepColumns(), FunctionTransform("preparation.functions:lengths")],
    ids=lambda t: type(t).__name__,
)
def test_an_iterator_is_looked_at_and_then_read_whole(tmp_path: Path, transform: Transform) -> None:
    prepare(numbered(40_000), tmp_path / "once", transform=transform, workers=1)
    prepare(list(numbered(40_000)), tmp_path / "list", transform=transform, workers=1)
    assert contents(tmp_path / "once") == contents(tmp_path / "list")


def test_an_iterator_can_be_shuffled(tmp_path: Path) -> None:
    prepare(numbered(50), tmp_path / "data", transform=BYTES, shuffle=3)
    assert sorted(decoded(tmp_path / "data")) == sorted(row["text"] for row in numbered(50))


def test_other_rows_of_the_same_shape_are_not_taken_for_the_old_ones(tmp_path: Path) -> None:
    for word in ("old", "new"):
        prepare(list(numbered(3, word)), tmp_path / "data", transform=BYTES)
        assert decoded(tmp_path / "data") == [row["text"] for row in numbered(3, word)]
    with pytest.raises(DatasetExists, match="overwrite"):
        prepare(pa.table({"text": ["a"]}), tmp_path / "data", transform=BYTES, shuffle=1)


def test_rows_with_an_identity_are_prepared_once(tmp_path: Path) -> None:
    for identity, is_new in (("v1", True), ("v1", False), ("v2", True)):
        source = IterableSource(records=lambda identity=identity: numbered(3, identity), identity=identity)
        done = prepare(source, tmp_path / "data", transform=BYTES)
        assert bool(done.tasks_run) == is_new
        assert decoded(tmp_path / "data") == [row["text"] for row in numbered(3, identity)]


def test_a_data_frame_is_a_table(tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": ["a", "b", "c"], "name": [1, 2, 3]})[1:]
    done = prepare(frame, tmp_path / "data")
    assert [(sample["text"], int(sample["name"])) for sample in penstock.open(tmp_path / "data")] == [
        (b"b", 2),
        (b"c", 3),
    ]
    assert done.notes == ()


def test_a_data_frames_nan_can_be_kept_and_is_otherwise_an_error_that_says_how(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1.5, float("nan")], "y": [1, 2]})
    with pytest.raises(FormatError, match=r"row 1: Column 'x' is null.*missing='nan' \(--missing nan\)"):
        prepare(frame, tmp_path / "data")
    prepare(frame, tmp_path / "data", reading=SourceOptions(missing="nan"))
    np.testing.assert_array_equal(penstock.open(tmp_path / "data")[:]["x"], [1.5, np.nan])


def test_an_empty_list_among_arrays_says_nothing_about_their_type(tmp_path: Path) -> None:
    rows = [{"labels": []}, {"labels": np.array([1, 2])}, {"labels": np.array([3])}]
    prepare(rows, tmp_path / "data", workers=1)
    labels = penstock.open(tmp_path / "data")[:]["labels"]
    assert labels.values.dtype == np.int64
    assert [each.tolist() for each in labels] == [[], [1, 2], [3]]

"""Windows of time series are those of numpy, stay inside their series, and are split by series."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

import penstock
from penstock.errors import SchemaError
from penstock.schema import Ragged
from plan.examples import assert_same


def series(lengths: list[int], channels: int | None) -> list[Any]:
    rng = np.random.default_rng(len(lengths))
    return [rng.random((length, channels) if channels else length, np.float32) for length in lengths]


def windows(values: Any, length: int, stride: int) -> Any:
    if len(values) < length:
        return np.empty((0, length, *values.shape[1:]), values.dtype)
    return np.moveaxis(sliding_window_view(values, length, axis=0), -1, 1)[::stride]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    length=st.integers(1, 5),
    stride=st.integers(1, 4),
    channels=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_windows_of_series_are_those_of_numpy(
    lengths: list[int], length: int, stride: int, channels: int | None, data: st.DataObject
) -> None:
    values = series(lengths, channels)
    shape = (0, channels) if channels else (0,)
    columns = {
        "x": Ragged.from_lengths(np.concatenate([np.empty(shape, np.float32), *values]), lengths),
        "id": np.arange(len(lengths)),
        "name": [b"%d" % number for number in range(len(lengths))],
    }
    found = penstock.from_arrays(columns).unfold(length, stride)
    expected = [(number, window) for number, each in enumerate(values) for window in windows(each, length, stride)]
    assert len(found) == len(expected)
    if expected:
        chosen = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=8))
        batch = found.read(chosen)
        assert [int(number) for number in batch["id"]] == [expected[index][0] for index in chosen]
        assert list(batch["name"]) == [b"%d" % expected[index][0] for index in chosen]
        for row, index in enumerate(chosen):
            assert np.array_equal(batch["x"][row], expected[index][1])
            assert np.array_equal(found[index]["x"], expected[index][1])


@settings(max_examples=20, deadline=None)
@given(num_steps=st.integers(0, 20), length=st.integers(1, 5), stride=st.integers(1, 4))
def test_windows_of_steps_are_those_of_numpy(num_steps: int, length: int, stride: int) -> None:
    values = np.arange(num_steps * 2.0).reshape(num_steps, 2)
    found = penstock.from_arrays({"x": values, "t": np.arange(num_steps)}).unfold(length, stride)
    expected = windows(values, length, stride)
    assert len(found) == len(expected)
    assert np.array_equal(found[:]["x"], expected)
    if len(expected):
        assert found[-1]["t"].tolist() == windows(np.arange(num_steps), length, stride)[-1].tolist()


def write_series(folder: Path) -> penstock.Dataset:
    lengths = [5, 0, 17, 30, 8]
    with penstock.DatasetWriter(folder, {"x": "float32[*]", "id": "int64"}, shard_bytes=100) as writer:
        writer.write_batch({"x": series(lengths, None), "id": np.arange(5)})
    return penstock.open(folder)


def test_plans_over_windows_shuffle_resume_and_go_into_files_as_any_other(tmp_path: Path) -> None:
    ds = write_series(tmp_path / "a").unfold(4, stride=3)
    plan = ds.shuffle(seed=1).batch(5)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    again = penstock.load_plan(tmp_path / "plan.toml")
    held = ds.in_memory().shuffle(seed=1).batch(5)
    for step in range(plan.num_batches()):
        assert_same(plan.read(step), again.read(step))
        assert_same(plan.read(step), held.read(step))
    assert pickle.loads(pickle.dumps(ds)).fingerprint == ds.fingerprint
    assert ds.fingerprint != write_series(tmp_path / "b").unfold(4, stride=2).fingerprint
    with penstock.DataLoader(plan, num_workers=2, workers="process") as loader:
        assert [batch["x"].tolist() for batch in loader] == [
            plan.read(k)["x"].tolist() for k in range(plan.num_batches())
        ]


def test_a_split_keeps_the_windows_of_a_series_together(tmp_path: Path) -> None:
    ds = write_series(tmp_path / "a")
    parts = ds.unfold(4).split({"train": 0.5, "val": 0.5}, seed=3)
    whole = ds.split({"train": 0.5, "val": 0.5}, seed=3)
    for name, part in parts.items():
        assert set(part[:]["id"].tolist()) <= set(whole[name][:]["id"].tolist())
    assert sum(map(len, parts.values())) == len(ds.unfold(4))
    steps = penstock.from_arrays({"x": np.arange(9.0)}).unfold(3)
    with pytest.raises(ValueError, match="overlapping windows into different parts"):
        steps.split({"train": 0.5, "val": 0.5}, seed=3)


def test_nonsense_is_refused() -> None:
    ds = penstock.from_arrays({"x": [np.zeros(3), np.zeros(2)], "y": [np.zeros(2), np.zeros(3)]})
    with pytest.raises(SchemaError, match="'x' and 'y' differ in length"):
        ds.unfold(2)
    with pytest.raises(SchemaError, match="byte strings have no steps"):
        penstock.from_arrays({"x": np.zeros(3), "name": [b"a", b"b", b"c"]}).unfold(2)
    for arguments in ((0, 1), (2, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            ds.select_columns(["x"]).unfold(*arguments)

"""Samples by weight and by class, as stages of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import SchemaError, StageError
from penstock.plan import Dataset, Plan
from plan.examples import read_epoch, tokens_dataset


def labelled(count: int = 60) -> Dataset:
    """Classes of a half, a third and a sixth of the samples."""
    labels = np.array([0, 0, 0, 1, 1, 2])[np.arange(count) % 6]
    return penstock.from_arrays({"x": np.arange(count), "label": labels, "weight": 1.0 + labels})


def epoch_of(plan: Plan, key: str, epoch: int = 0) -> np.ndarray:
    return np.concatenate([batch[key] for batch in read_epoch(plan.batch(7, tail="short"), epoch)])


def test_a_balanced_epoch_has_every_class_equally_often_in_any_stretch() -> None:
    plan = labelled().balance("label").shuffle(seed=3)
    for epoch in range(3):
        labels = epoch_of(plan, "label", epoch)
        assert (np.sort(labels.reshape(-1, 3), axis=1) == [0, 1, 2]).all()
        assert len(set(epoch_of(plan, "x", epoch)[labels == 2].tolist())) == 10  # all of the smallest class


def test_without_replacement_a_balanced_epoch_ends_with_the_smallest_class() -> None:
    plan = labelled().balance("label", replacement=False).shuffle(seed=3)
    assert plan.num_rows == 30
    seen = [epoch_of(plan, "x", epoch).tolist() for epoch in range(6)]
    assert all(len(set(epoch)) == 30 for epoch in seen)
    assert len({sample for epoch in seen for sample in epoch}) == 60  # the large classes come in turn
    assert plan.ledger().drawn.num_absent == 30


def test_without_a_shuffle_no_sample_of_a_large_class_is_left_out_for_good() -> None:
    sizes = penstock.from_arrays({"x": np.arange(13), "label": np.array([0] * 3 + [1] * 10)})
    plan = sizes.balance("label", replacement=False)
    seen = [epoch_of(plan, "x", epoch).tolist() for epoch in range(4)]
    assert all(len(set(epoch)) == 6 for epoch in seen)
    assert {sample for epoch in seen for sample in epoch} == set(range(13))


def test_without_a_shuffle_classes_come_in_turn_as_stored() -> None:
    assert epoch_of(labelled(12).balance("label", rows=6).as_plan(), "x").tolist() == [0, 3, 5, 1, 4, 11]


def test_weights_come_from_a_column_or_an_array() -> None:
    data = labelled()
    weights = data[:]["weight"]
    by_column, by_array = data.sample("weight").shuffle(seed=1), data.sample(weights).shuffle(seed=1)
    for epoch in range(3):
        drawn = epoch_of(by_column, "x", epoch)
        assert drawn.tolist() == epoch_of(by_array, "x", epoch).tolist()
        counts = np.bincount(drawn, minlength=60)
        assert (np.abs(counts - 60 * weights / weights.sum()) < 1).all()
    assert by_column.order_fingerprint != by_array.order_fingerprint
    assert by_array.order_fingerprint != data.sample(weights + 1).shuffle(seed=1).order_fingerprint


def test_the_ledger_says_how_often_samples_come() -> None:
    drawn = labelled().sample([5.0] + [1.0] * 59, rows=64).as_plan().ledger().drawn
    assert (drawn.num_samples, drawn.num_absent, drawn.most) == (60, 0, 5)
    assert labelled().shuffle(seed=1).ledger().drawn is None


def test_a_plan_file_keeps_the_name_of_a_column_and_refuses_an_array(tmp_path: Path) -> None:
    with penstock.DatasetWriter(tmp_path / "data", {"x": "int64", "label": "int64"}) as writer:
        for number in range(9):
            writer.write({"x": number, "label": number % 2})
    data = penstock.open(tmp_path / "data")
    for plan in (
        data.sample("label", rows=4).shuffle(seed=1).batch(2),
        data.balance("label", replacement=False).batch(2),
    ):
        (tmp_path / "plan.toml").write_text(plan.to_toml())
        assert penstock.load_plan(tmp_path / "plan.toml") == plan
    with pytest.raises(ValueError, match="make them a column first"):
        data.sample(np.ones(9)).batch(2).to_toml()


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda ds: ds.sample([1.0]), ValueError, "60 samples, and weights of shape"),
        (lambda ds: ds.sample(-ds[:]["weight"]), ValueError, r"sample\(\): the weight of sample 0 is -1.0"),
        (lambda ds: ds.sample("weights"), SchemaError, "weights"),
        (lambda ds: ds.sample("weight", rows=0), ValueError, "at least 1"),
        (lambda ds: ds.sample("weight", rows=61, replacement=False), ValueError, "60 samples have a weight above 0"),
        (lambda ds: ds.balance("label", rows=31, replacement=False), ValueError, "an epoch has 30 rows at most"),
        (lambda ds: ds.shuffle(1).balance("label"), StageError, r"balance\(\) cannot follow shuffle\(\)"),
        (lambda ds: ds.balance("label").sample("weight"), StageError, r"sample\(\) cannot follow balance\(\)"),
        (lambda ds: tokens_dataset([3]).sample([1]).pack(8), StageError, r"Use pad\(\), or .* penstock.mix\(\)"),
        (lambda ds: tokens_dataset([3]).balance("tokens"), SchemaError, "one number per sample is needed"),
    ],
)
def test_nonsense_is_refused_at_once(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(labelled())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=30).filter(any), st.integers(1, 60), st.integers(0, 99))
def test_over_epochs_a_sample_comes_as_often_as_its_shares_add_up_to_within_a_bound(
    weights: list[int], rows: int, seed: int
) -> None:
    data = penstock.from_arrays({"x": np.arange(len(weights)), "w": np.array(weights)})
    plan = data.sample("w", rows=rows).shuffle(seed=seed).batch(rows)
    counts = np.zeros(len(weights))
    for epoch in range(100):
        counts += np.bincount(plan.read(0, epoch)["x"], minlength=len(weights))
        expected = (epoch + 1) * rows * np.array(weights) / sum(weights)
        assert np.abs(counts - expected).max() < (2 if epoch < 10 else 3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 99), st.integers(1, 30), st.booleans())
def test_consecutive_rows_hold_classes_alike_and_rounds_from_the_start_hold_each_once(
    labels: list[int], seed: int, rows: int, replacement: bool
) -> None:
    data = penstock.from_arrays({"label": np.array(labels)})
    classes = np.unique(labels)
    most = len(classes) * int(np.bincount(labels)[classes].min())
    plan = data.balance("label", rows=rows if replacement else min(rows, most), replacement=replacement)
    run = plan.shuffle(seed=seed).batch(200).read_at(0)["label"]
    length = len(run) if replacement else plan.num_rows  # without replacement, an epoch begins with a round
    for begin in range(0, length - len(classes) + 1, len(classes)):
        assert sorted(run[begin : begin + len(classes)]) == classes.tolist()
    is_class = run[:length, None] == classes
    before = np.concatenate([np.zeros((1, len(classes)), int), np.cumsum(is_class, axis=0)])
    for size in range(1, length + 1):
        counts = before[size:] - before[:-size]
        assert np.abs(counts - size / len(classes)).max() < 2


INTEGERS = ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float32"]


@given(st.sampled_from(INTEGERS), st.data())
def test_classes_are_dealt_alike_whatever_numbers_they_are(dtype: str, data: st.DataObject) -> None:
    extremes = [False, True] if dtype == "bool" else [0, 1] if dtype[0] == "f" else [*_limits(dtype), 0, 1]
    values = data.draw(st.lists(st.sampled_from(extremes), min_size=1, max_size=30))
    ranks = np.unique(values, return_inverse=True)[1] if dtype != "uint64" else _ranks(values)
    plans = [
        penstock.from_arrays({"x": np.arange(len(values)), "label": labels}).balance("label").shuffle(3).batch(50)
        for labels in (np.array(values, dtype), ranks.astype(np.float64))
    ]
    assert plans[0].read(0)["x"].tolist() == plans[1].read(0)["x"].tolist()


def _limits(dtype: str) -> list[int]:
    return [int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]


def _ranks(values: list[int]) -> np.ndarray:
    return np.array([sorted(set(values)).index(value) for value in values])


@pytest.mark.parametrize("verb", ["sample", "balance"])
def test_a_column_of_weights_or_classes_is_read_once_however_many_stages_follow(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = penstock.from_arrays({"x": np.arange(100), "w": np.arange(100) % 3 + 1})
    read, seen = data.storage.read_fixed, []
    monkeypatch.setattr(
        data.storage, "read_fixed", lambda column, *rest: seen.append(column.name) or read(column, *rest)
    )
    getattr(data, verb)("w").shuffle(seed=1).batch(4)
    getattr(data, verb)("w").shuffle(seed=2).batch(4)
    assert seen == ["w"]
    getattr(data, verb)("w", rows=12).batch(4)
    assert seen == ["w", "w"]

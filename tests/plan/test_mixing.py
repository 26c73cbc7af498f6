"""How far a windowed shuffle is from a full one: measured on the data, and said where it is far."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import StateError
from penstock.plan import Dataset
from plan.examples import ragged

NUM_CLASSES = 40


def images(order: str, num_samples: int = 2000, wide: int = 64 << 10) -> Dataset:
    """Images of 64 KiB that take no memory, and their labels: sorted, or in no order."""
    labels = np.arange(num_samples) * NUM_CLASSES // num_samples
    if order == "mixed":
        labels = np.random.default_rng(1).permutation(labels)
    pixels = np.zeros((num_samples, wide), np.uint8)
    return penstock.from_arrays({"image": pixels, "label": labels})


def class_counts(plan: penstock.Plan, size: int) -> np.ndarray[Any, Any]:
    steps = range(plan.num_rows // size)
    return np.stack([np.bincount(plan.read(step)["label"], minlength=NUM_CLASSES) for step in steps])


def variance(plan: penstock.Plan, size: int) -> float:
    """Of class counts per batch, over that of a full shuffle: the definition, counted over a whole epoch."""
    counts, share = class_counts(plan, size), 1 / NUM_CLASSES
    return float(((counts - size * share) ** 2).mean(axis=0).sum() / (NUM_CLASSES * size * share * (1 - share)))


def test_labels_stored_in_runs_are_found_and_their_spread_measured() -> None:
    (found,) = images("sorted").shuffle(1, group=2).batch(64).mixing()
    assert found.what == "column 'label'"
    assert found.is_far
    assert found.num_classes < 10


def test_what_is_measured_is_what_an_epoch_shows() -> None:
    whole = images("sorted").shuffle(1, group=4).batch(256)
    (found,) = whole.mixing()
    assert 0.6 < found.variance / variance(whole, 256) < 1.6


@pytest.mark.parametrize("arguments", [{"group": 2}, {"group": 4}, {}], ids=str)
def test_data_in_no_order_is_as_mixed_as_under_a_full_shuffle(arguments: dict[str, Any]) -> None:
    plan = images("mixed").shuffle(1, **arguments).batch(100)
    assert plan.mixing() == []
    assert variance(plan, 100) < 1.3


@pytest.mark.parametrize("arguments", [{"mode": "full"}, {"group": 1000}, {}], ids=str)
def test_a_shuffle_that_reaches_everything_is_a_full_one(arguments: dict[str, Any]) -> None:
    plan = images("sorted").shuffle(1, **arguments).batch(100)
    assert plan.mixing() == []
    assert variance(plan, 100) < 1.3


def test_packed_documents_token_windows_and_mixtures_are_measured_too() -> None:
    num_documents = 4000
    documents = penstock.from_arrays(
        {
            "tokens": ragged([np.zeros(4096, np.uint16)] * num_documents, "uint16"),
            "domain": [b"web" if place < num_documents // 2 else b"code" for place in range(num_documents)],
        }
    )
    windowed = documents.shuffle(1, group=1).window(512)
    (found,) = windowed.mixing()
    assert (found.what, round(found.num_classes)) == ("column 'domain'", 1)
    mixed = penstock.mix({"one": (windowed, 1), "two": (windowed, 1)}, seed=1, rows=100)
    assert mixed.mixing() == [found, found]
    assert documents.shuffle(1).pack(512).mixing() == []  # fewer windows than a group


def test_sources_of_different_names_are_told_apart_and_numbered_parts_of_one_are_not(
    tmp_path: Path, inline: None
) -> None:
    def prepare(names: list[str]) -> Dataset:
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            (folder / f"{name}.jsonl").write_text(f'{{"text": "{"x" * 70_000}"}}\n' * 200)
        penstock.prepare(folder, tmp_path / f"{names[0]}-data", workers=1)
        return penstock.open(tmp_path / f"{names[0]}-data")

    (found,) = prepare(["web", "code", "wiki"]).shuffle(1, group=1).mixing()
    assert found.what == "what is in one source file"
    assert prepare(["part-1", "part-2", "part-3"]).shuffle(1, group=1).mixing() == []


def test_a_loader_says_so_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from penstock.pytorch import _warnings

    _warnings._said.clear()
    plan = images("sorted").shuffle(1, group=2).batch(64)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            penstock.DataLoader(plan, workers="inline").close()
    (record,) = caplog.records
    message = record.getMessage()
    assert "column 'label' comes in runs" in message
    assert "times as much as under a full shuffle" in message
    assert "shuffle=0 (--shuffle 0)" in message
    caplog.clear()
    _warnings._said.clear()
    penstock.DataLoader(images("mixed").shuffle(1, group=2).batch(64), workers="inline").close()
    penstock.DataLoader(plan, workers="inline", rank=1, world_size=2).close()
    assert not caplog.records


def test_a_dataset_in_place_of_torchs_is_permuted_fully_where_random_reads_are_cheap() -> None:
    ds = images("sorted")
    loader = penstock.DataLoader(ds, batch_size=100, shuffle=True, workers="inline")
    counts = np.stack([np.bincount(batch["label"], minlength=NUM_CLASSES) for batch in loader])
    share = 1 / NUM_CLASSES
    assert ((counts - 100 * share) ** 2).mean() / (100 * share * (1 - share)) < 1.3
    assert "mode='full'" in loader.state_dict()["facts"]["shuffle"]


def test_small_samples_that_no_memory_holds_are_read_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.plan import _sample_rows

    monkeypatch.setattr(_sample_rows, "_SMALL_BYTES", 1000)
    ds = penstock.from_arrays({"x": np.arange(1000)})
    loader = penstock.DataLoader(ds, batch_size=10, shuffle=True, workers="inline")
    assert "mode='windows', group=256" in loader.state_dict()["facts"]["shuffle"]
    assert images("sorted", 100).is_cheap_at_random


@pytest.mark.parametrize("cut", [lambda plan: plan, lambda plan: plan.window(8)], ids=["samples", "windows"])
def test_a_state_of_the_old_default_is_refused_and_resumes_with_the_group_it_names(cut: Any) -> None:
    documents = penstock.from_arrays({"tokens": ragged([np.arange(64)] * 50, "int64")})
    then = penstock.DataLoader(cut(documents.shuffle(7, group=16)).batch(4), workers="inline")
    next(iter(then))
    state = then.state_dict()
    with pytest.raises(StateError, match=r"group=16, is .*group=256"):
        penstock.DataLoader(cut(documents.shuffle(7)).batch(4), workers="inline").load_state_dict(state)
    now = penstock.DataLoader(cut(documents.shuffle(7, group=16)).batch(4), workers="inline")
    now.load_state_dict(state)
    assert now.state_dict()["row"] == state["row"]


@pytest.mark.parametrize("arguments", [{"mode": "full"}, {}], ids=str)
def test_full_and_packed_orders_are_those_of_the_old_default(arguments: dict[str, Any]) -> None:
    documents = penstock.from_arrays({"tokens": ragged([np.arange(64)] * 50, "int64")})
    old, new = documents.shuffle(7, group=16, **arguments).pack(96), documents.shuffle(7, **arguments).pack(96)
    assert (old.order_fingerprint, old.fingerprint) == (new.order_fingerprint, new.fingerprint)
    assert documents.shuffle(7, "full").order_fingerprint == documents.shuffle(7, "full", 16).order_fingerprint


def test_a_plan_file_without_a_group_means_the_default_of_its_time(tmp_path: Path) -> None:
    with penstock.DatasetWriter(tmp_path / "ds", {"x": "int64"}) as writer:
        writer.write_batch({"x": np.arange(50)})
    plan = penstock.open(tmp_path / "ds").shuffle(7).batch(4)
    text = plan.to_toml()
    assert "group = 256" in text
    (tmp_path / "now.toml").write_text(text)
    (tmp_path / "then.toml").write_text(text.replace("group = 256\n", ""))
    assert penstock.load_plan(tmp_path / "now.toml").fingerprint == plan.fingerprint
    then = penstock.load_plan(tmp_path / "then.toml")
    assert then.order_fingerprint == penstock.open(tmp_path / "ds").shuffle(7, group=16).order_fingerprint

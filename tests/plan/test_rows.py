"""Rows that are samples: columns, casts, and buffers to fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import SchemaError
from penstock.plan import Dataset, Plan
from plan.examples import assert_same, make_documents, ragged, tokens_dataset

COUNT = 11


def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    return penstock.from_arrays(
        {
            "x": np.arange(COUNT, dtype=np.uint16),
            "image": rng.integers(0, 256, (COUNT, 2, 3), np.uint8),
            "weight": rng.random(COUNT).astype(np.float32),
            "tokens": ragged(make_documents([length % 4 for length in range(COUNT)])),
            "name": [f"sample {index}".encode() * (index % 3) for index in range(COUNT)],
        }
    )


def test_keys_and_dtypes_are_the_columns_and_rows_the_samples() -> None:
    data, plan = dataset(), dataset().shuffle(1).batch(4)
    batch = plan.read(1)
    assert list(batch) == list(data.schema)
    for place, index in enumerate(batch["x"].tolist()):
        for name, value in data[index].items():
            np.testing.assert_array_equal(np.asarray(batch[name][place]), np.asarray(value))
    assert [batch[name].dtype for name in ("x", "image", "weight")] == [np.uint16, np.uint8, np.float32]
    assert isinstance(batch["tokens"], penstock.Ragged)


def test_a_cast_widens_in_the_gather_and_the_last_one_counts() -> None:
    plan = dataset().select_columns(["x", "image"]).cast(x="int32", image="float32").cast(x="int64").batch(COUNT)
    batch = plan.read(0)
    assert batch["x"].dtype == np.int64
    assert batch["image"].dtype == np.float32
    np.testing.assert_array_equal(batch["image"], dataset().read(np.arange(COUNT))["image"])


def test_offered_buffers_are_filled_and_returned() -> None:
    plan = dataset().cast(x="int64").shuffle(1).batch(4)
    out = {"x": np.full(4, -1), "image": np.zeros((4, 2, 3), np.uint8)}
    batch = plan.read(1, out=out)
    assert batch["x"] is out["x"]
    assert batch["image"] is out["image"]
    assert_same(batch, plan.read(1))


@pytest.mark.parametrize(
    "out",
    [
        {"x": np.zeros(5, np.int64)},
        {"x": np.zeros(4, np.uint16)},  # the plan casts: a narrower array would undo it silently
        {"x": np.zeros(8, np.int64)[::2]},
        {"image": np.zeros((4, 3, 2), np.uint8)},
        {"image": np.zeros((4, 2, 3), np.int8)},
        {"image": np.broadcast_to(np.zeros(1, np.uint8), (4, 2, 3))},
        {"tokens": np.zeros(4, np.uint32)},
    ],
)
def test_wrong_buffers_are_refused_by_name(out: dict[str, Any]) -> None:
    plan = dataset().cast(x="int64").shuffle(1).batch(4)
    with pytest.raises((ValueError, SchemaError), match=next(iter(out))):
        plan.read(0, out=out)


PLANS: dict[str, Callable[[], Plan]] = {
    "samples": lambda: dataset().cast(x="int64").shuffle(1),
    "window": lambda: tokens_dataset([9, 30, 4]).shuffle(1).window(4),
    "pack": lambda: tokens_dataset([9, 30, 4]).shuffle(1).pack(4),
    "mix": lambda: penstock.mix({"a": (dataset(), 1), "b": (dataset(), 2)}, seed=1, rows=20),
    "mixed windows": lambda: penstock.mix({"a": (tokens_dataset([90]).window(4), 1)}, seed=1, rows=20),
    "mixed packs": lambda: penstock.mix(
        {"a": (tokens_dataset([90]).pack(4), 1), "b": (tokens_dataset([3, 2]).shuffle(1).pack(4), 1)}, seed=1, rows=20
    ),
}


@pytest.mark.parametrize("kind", PLANS)
def test_the_arrays_that_a_plan_says_it_fills_are_all_filled_in_place(kind: str) -> None:
    plan = PLANS[kind]().batch(4)
    out = {key: np.zeros(shape, dtype) for key, (shape, dtype) in plan.output_arrays(2).items()}
    batch = plan.read(1, rank=1, world_size=2, out=out)
    fixed = [key for key, value in batch.items() if isinstance(value, np.ndarray) and key != "cu_seqlens"]
    assert sorted(out) == sorted(fixed)
    for key, array in out.items():
        assert batch[key] is array
    assert_same(batch, plan.read(1, rank=1, world_size=2))


@pytest.mark.parametrize("kind", PLANS)
def test_announcing_rows_changes_nothing_that_is_read(kind: str) -> None:
    plan = PLANS[kind]().batch(4)
    expected = plan.read(1)
    for row in (0, 1, plan.num_rows, 5 * plan.num_rows + 1):
        plan.will_need(row)
    assert_same(plan.read(1), expected)


def test_a_column_called_labels_is_data_and_left_alone_by_padding() -> None:
    data = penstock.from_arrays({"labels": np.arange(5, dtype=np.uint8)})
    batch = data.batch(4, tail="pad").read(1)
    assert batch["labels"].tolist() == [4, 0, 1, 2]
    assert batch["is_repeated"].tolist() == [False, True, True, True]


def test_a_rank_without_rows_gets_empty_columns() -> None:
    batch = dataset().batch(12, tail="short").read(0, rank=11, world_size=12)
    assert {key: len(value) for key, value in batch.items()} == dict.fromkeys(dataset().schema, 0)


def test_sample_order_does_not_depend_on_how_the_data_was_cut_into_shards(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.plan._epochs.STORAGE_WINDOW_BYTES", 64)
    orders = []
    for shard_bytes in (100, 300, 1 << 20):
        path = tmp_path / str(shard_bytes)
        with penstock.DatasetWriter(path, {"x": "int64", "tokens": "uint16[*]"}, shard_bytes=shard_bytes) as writer:
            for index in range(60):
                writer.write({"x": index, "tokens": range(index % 7)})
        for data in (penstock.open(path), penstock.open(path, io="pread"), penstock.open(path).in_memory()):
            plan = data.shuffle(3, group=2).batch(60)
            orders.append(plan.read(0)["x"].tolist())
            assert orders[-1] == data.select_columns(["x"]).shuffle(3, group=2).batch(60).read(0)["x"].tolist()
    assert all(order == orders[0] for order in orders)
    assert orders[0] != sorted(orders[0])

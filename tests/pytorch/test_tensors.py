"""Columns as tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import penstock

INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64", "complex64"]
EXTENDED = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": getattr(torch, "float8_e8m0fnu", None),
}


def load(columns: dict[str, Any], workers: Any) -> dict[str, Any]:
    with penstock.DataLoader(
        penstock.from_arrays(columns).batch(3), workers=workers, num_workers=1, start_method="fork"
    ) as loader:
        return next(iter(loader))


@pytest.mark.parametrize("workers", ["inline", "thread", "process"])
def test_every_dtype_of_numpy_becomes_torchs(workers: str) -> None:
    columns = {name: np.array([[0, 1], [1, 1], [1, 0]]).astype(name) for name in DTYPES}
    batch = load(columns, workers)
    for name in DTYPES:
        assert batch[name].dtype == getattr(torch, name)
        assert batch[name].shape == (3, 2)
        np.testing.assert_array_equal(batch[name].numpy(), columns[name])


@pytest.mark.parametrize("workers", ["inline", "thread", "process"])
def test_small_floats_arrive_bit_for_bit(workers: str) -> None:
    columns = {name: np.array([0.5, 1, 2]).astype(getattr(ml_dtypes, name)) for name in EXTENDED}
    batch = load(columns, workers)
    for name, dtype in EXTENDED.items():
        assert batch[name].dtype == dtype
        assert batch[name].to(torch.float32).tolist() == [0.5, 1, 2]


@pytest.mark.parametrize("workers", ["inline", "thread", "process"])
def test_ragged_columns_and_byte_strings(workers: str) -> None:
    ragged = penstock.Ragged(np.arange(6, dtype=np.int32), np.array([0, 2, 2, 6]))
    text = penstock.Ragged(np.frombuffer(b"abcdef", np.uint8), np.array([0, 1, 1, 6]), True)
    batch = load({"tokens": ragged, "text": text}, workers)
    assert batch["text"] == [b"a", b"", b"bcdef"]
    assert isinstance(batch["tokens"].values, torch.Tensor)
    assert [row.tolist() for row in batch["tokens"]] == [[0, 1], [], [2, 3, 4, 5]]


def test_what_no_tensor_holds_stays_what_it_is() -> None:
    plan = penstock.from_arrays({"x": np.arange(3)}).map(_add_names, batched=True).batch(3)
    with penstock.DataLoader(plan, workers="process", num_workers=1, start_method="fork") as loader:
        batch = next(iter(loader))
    assert batch["names"].tolist() == ["row 0", "row 1", "row 2"]
    assert batch["note"] == "text"
    assert batch["x"].tolist() == [0, 1, 2]


def _add_names(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return batch | {"names": np.array([f"row {x}" for x in batch["x"]]), "note": "text"}

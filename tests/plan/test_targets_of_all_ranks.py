"""`num_targets_global` is of all ranks, and a rank does not count rows again for each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.packing import _ledger
from penstock.plan import Plan, _packed_rows
from penstock.plan._packed_rows import PackedRows

from .examples import tokens_dataset

LENGTHS = np.random.default_rng(0).integers(1, 30, 20_000).tolist()
WORLD, SHARE = 256, 4


def padded(seed: int = 1) -> Plan:
    return tokens_dataset(LENGTHS).shuffle(seed=seed).pad()


def packed(seed: int = 1) -> Plan:
    return tokens_dataset(LENGTHS).shuffle(seed=seed).pack(64)


def packed_full() -> Plan:
    return tokens_dataset(LENGTHS).shuffle(seed=1, mode="full").pack(64)


def mixed() -> Plan:
    return penstock.mix({"a": (packed(1), 0.7), "b": (packed(2), 0.3)}, seed=3, epoch="a")


def taken() -> Plan:
    return packed().take(rows=3000)


@pytest.mark.parametrize("build", [padded, packed, packed_full, mixed, taken])
def test_every_row_is_counted_once_not_once_for_each_batch(
    build: Callable[[], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build().batch(WORLD * SHARE)
    counted: list[int] = []
    source: Any = plan.row_source
    count_targets = type(source).count_targets
    monkeypatch.setattr(
        type(source), "count_targets", lambda self, rows: counted.append(len(rows)) or count_targets(self, rows)
    )
    monkeypatch.setattr(plan.row_source, "read", counting_reads(source.read, counted_rows := []))
    for step in range(plan.num_batches() - 1):
        for rank in (0, 7):
            plan.read(step, 0, rank, WORLD)
    assert sum(n for n in counted if n > SHARE) <= plan.num_rows * 2  # mixtures ask their sources, too
    assert set(counted_rows) == {SHARE}


def test_with_a_full_shuffle_windows_are_packed_for_own_rows_once_the_targets_of_all_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 16)
    monkeypatch.setattr(_packed_rows, "_KEPT_BYTES", 0)
    plan = packed_full().batch(WORLD * SHARE)
    packings: list[int] = []
    one_packing = PackedRows.packing
    monkeypatch.setattr(
        PackedRows, "packing", lambda self, epoch, number: packings.append(number) or one_packing(self, epoch, number)
    )
    for step in range(plan.num_batches()):
        plan.read(step, 0, 5, WORLD)
    assert set(packings) == set(range(max(packings) + 1))
    for step in range(plan.num_batches(1) - 1):
        packings.clear()
        plan.read(step, 1, 5, WORLD)
        assert len(packings) <= SHARE


def counting_reads(read: Callable[..., Any], sizes: list[int]) -> Callable[..., Any]:
    def reading(rows: Any, out: Any) -> Any:
        sizes.append(len(rows))
        return read(rows, out)

    return reading


@pytest.mark.parametrize("tail", ["carry", "short", "pad", "even", "drop"])
@pytest.mark.parametrize("build", [padded, packed, packed_full, mixed, taken])
def test_it_is_the_sum_of_what_the_ranks_count(build: Callable[[], Plan], tail: Any) -> None:
    plan = build().batch(300, tail=tail)
    for step, epoch in ((0, 0), (plan.num_batches(1) - 1, 1)):
        parts = [plan.read(step, epoch, rank, 100) for rank in range(100)]
        assert {part["num_targets_global"] for part in parts} == {sum(part["num_targets"] for part in parts)}


def test_with_a_loss_mask_it_is_what_the_masks_of_the_whole_batch_say() -> None:
    rng = np.random.default_rng(1)
    masks = [rng.integers(0, 2, size).astype(np.uint8) for size in LENGTHS[:3000]]
    tokens = [np.arange(size, dtype=np.uint16) for size in LENGTHS[:3000]]
    plan = penstock.from_arrays({"tokens": tokens, "loss_mask": masks}).shuffle(seed=1).pack(64).batch(600)
    parts = [plan.read(0, 0, rank, 100) for rank in range(100)]
    assert {part["num_targets_global"] for part in parts} == {sum(part["num_targets"] for part in parts)}

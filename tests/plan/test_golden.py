"""The order of plans, pinned: a change here moves rows of running jobs, and needs another ORDER_VERSION."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numpy as np

import penstock
from penstock.order import ORDER_VERSION
from penstock.packing import PACKING_VERSION
from penstock.plan import Dataset, Plan

from .examples import assert_same, make_documents, ragged

GOLDEN_SAMPLES = [
    [1405492, 2890467, 1504882, 1519384, 1461244, 1190289, 1558668, 1090700],
    [2557007, 2165048, 1548135, 1129440, 2261460, 1478821, 1214608, 2270002],
]
GOLDEN_PACKED = [
    [61, 47, 48, 49, 50, 51, 52, 53],
    [45, 46, 39, 40, 41, 42, 43, 44],
    [15, 16, 17, 18, 19, 20, 21, 22],
    [6, 7, 8, 9, 10, 11, 12, 13],
]
GOLDEN_WINDOWED = [[1, 2, 3, 4], [53, 54, 55, 56], [49, 50, 51, 52], [13, 14, 15, 16]]
GOLDEN_MIXED = [45, 6, 31, 1, 15, 61, 31, 6]
GOLDEN_DRAWS = [188, 30, 673, 594]
GOLDEN_DIGESTS = {
    "packed": "56d77dec41359669",
    "packed, no shuffle": "8ec9e84797a3766f",
    "windowed": "5b08ec3797ea7dd7",
    "mixed": "dc208e64de9bcfe2",
    "order": "d9ca94b8e28b0bbae750a161955767f4",
}


def data() -> Dataset:
    return penstock.from_arrays({"tokens": ragged(make_documents([5, 9, 0, 30, 2, 7, 7, 1]), "uint32")})


def digest(plan: Plan, epochs: int = 2) -> str:
    """Of everything in every batch of some epochs."""
    found = hashlib.blake2b(digest_size=8)
    for epoch in range(epochs):
        for step in range(plan.num_batches(epoch)):
            for key, value in plan.read(step, epoch).items():
                found.update(key.encode() + np.asarray(value, np.int64).tobytes())
    return found.hexdigest()


def mixed() -> Plan:
    parts: dict[str, Any] = {"a": (data().shuffle(7).pack(8), 0.7), "b": (data().shuffle(8, "full").pack(8), 0.3)}
    return penstock.mix(parts, seed=5, rows=40).batch(8)


def large() -> Plan:
    """Several storage windows of 4 MiB, as real data has."""
    return penstock.from_arrays({"x": np.arange(3_000_000)}).shuffle(7, group=2).batch(8)


def test_the_versions_are_those_that_the_golden_values_belong_to() -> None:
    assert (ORDER_VERSION, PACKING_VERSION) == (1, 1)


def test_samples_come_in_the_order_they_always_came_in() -> None:
    assert large().read(0)["x"].tolist() == GOLDEN_SAMPLES[0]
    assert large().read(5, epoch=3)["x"].tolist() == GOLDEN_SAMPLES[1]


def test_a_packed_plan_gives_the_rows_it_always_gave() -> None:
    plan = data().shuffle(7).pack(8).batch(4)
    assert plan.read(0)["input_ids"].tolist() == GOLDEN_PACKED
    assert digest(plan) == GOLDEN_DIGESTS["packed"]
    assert digest(data().pack(8).batch(4)) == GOLDEN_DIGESTS["packed, no shuffle"]


def test_a_windowed_plan_gives_the_rows_it_always_gave() -> None:
    plan = data().shuffle(7).window(4).batch(4)
    assert plan.read(0)["input_ids"].tolist() == GOLDEN_WINDOWED
    assert digest(plan) == GOLDEN_DIGESTS["windowed"]


def test_a_mixed_plan_gives_the_rows_it_always_gave() -> None:
    assert mixed().read(0)["input_ids"][:, 0].tolist() == GOLDEN_MIXED
    assert digest(mixed()) == GOLDEN_DIGESTS["mixed"]


def test_a_mapped_plan_draws_the_numbers_it_always_drew() -> None:
    def draw(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"draw": rng.integers(0, 1000)}

    plan = penstock.from_arrays({"x": np.arange(9)}).shuffle(7).map(draw).batch(4)
    assert plan.read(0)["draw"].tolist() == GOLDEN_DRAWS


def test_fingerprints_of_orders_are_what_they_always_were() -> None:
    assert data().shuffle(7).pack(8).order_fingerprint == GOLDEN_DIGESTS["order"]


def test_pickled_plans_give_the_same() -> None:
    for plan in (mixed(), large(), data().window(4).batch(4)):
        again = pickle.loads(pickle.dumps(plan))
        assert again == plan
        assert_same(again.read_at(11), plan.read_at(11))
    assert len(pickle.dumps(data().as_plan())) < 2000

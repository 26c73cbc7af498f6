"""A mapped function that keeps what it was given, or hands it on in its own way, never sees it overwritten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import penstock
from penstock.loader import LoaderStatistics, Pipeline, PlanWork, make_engine, plan_items
from penstock.plan import Plan

KINDS = ["inline", "thread"]
kept: list[Any] = []


@penstock.pure
def keep(batch: dict[str, Any]) -> dict[str, Any]:
    kept.append(batch["x"])
    return batch


@penstock.pure
def keep_slice_in_tensor(batch: dict[str, Any]) -> dict[str, Any]:
    kept.append(torch.from_numpy(batch["x"][1:]))
    return {"x": batch["x"] + 0}


@penstock.pure
def keep_row(row: dict[str, Any]) -> dict[str, Any]:
    kept.append(row["pair"])
    return row


@penstock.pure
def nest(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"], "nested": [batch["x"][::2]]}


@penstock.pure
def add_one(batch: dict[str, Any]) -> dict[str, Any]:
    batch["x"] += 1
    return batch


def make_pipeline(plan: Plan, kind: Any) -> Pipeline:
    work = PlanWork(plan)
    engine = make_engine(work, kind=kind, num_workers=2, start_method="fork")
    pipeline = Pipeline(engine, work, LoaderStatistics(), convert=lambda batch: batch, prefetch=4, in_order=True)
    pipeline.start(plan_items(plan, 0, None, rank=0, world_size=1, num_parts=1))
    return pipeline


def numbers() -> penstock.Dataset:
    x = np.arange(4000)
    return penstock.from_arrays({"x": x, "pair": np.stack([x, -x], 1)})


def as_sets(arrays: list[Any]) -> list[list[int]]:
    return sorted(np.asarray(array).tolist() for array in arrays)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("function", "first"), [(keep, 0), (keep_slice_in_tensor, 1)])
def test_arrays_that_a_function_keeps_stay_as_they_were(kind: str, function: Any, first: int) -> None:
    kept.clear()
    pipeline = make_pipeline(numbers().map(function, batched=True).batch(4), kind)
    for _ in range(200):
        pipeline.next()
    pipeline.close()
    assert as_sets(kept)[:200] == [list(range(row + first, row + 4)) for row in range(0, 800, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_a_function_keeps_stay_as_they_were(kind: str) -> None:
    kept.clear()
    pipeline = make_pipeline(numbers().map(keep_row).batch(4), kind)
    for _ in range(200):
        pipeline.next()
    pipeline.close()
    assert as_sets(kept)[:800] == [[row, -row] for row in range(800)]


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_in_a_container_of_the_users_stay_as_they_were(kind: str) -> None:
    pipeline = make_pipeline(numbers().map(nest, batched=True).batch(4), kind)
    held: list[NDArray[Any]] = []
    for _ in range(200):
        found = pipeline.next()
        assert found is not None
        held += found[1]["nested"]
    pipeline.close()
    assert [array.tolist() for array in held] == [[row, row + 2] for row in range(0, 800, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_still_recycled_when_a_function_keeps_nothing(kind: str) -> None:
    pipeline = make_pipeline(numbers().map(add_one, batched=True).batch(4), kind)
    places = set()
    for _ in range(200):
        found = pipeline.next()
        assert found is not None
        places.add(found[1]["x"].ctypes.data)
        del found
    pipeline.close()
    assert len(places) < 12

"""Small batches are computed several at a time; nobody can tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.loader import (
    Bundle,
    Item,
    LoaderStatistics,
    Pipeline,
    PlanWork,
    SlotPool,
    make_engine,
    place_arrays,
    plan_items,
    private_slot,
    steps_per_bundle,
)
from penstock.loader._memory import PrivateSlot
from penstock.plan import Plan
from penstock.schema import Ragged


def numbers(count: int, size: int, tail: Any = "carry") -> Plan:
    columns = {"x": np.arange(count), "y": np.arange(3 * count, dtype=np.uint8).reshape(count, 3)}
    return penstock.from_arrays(columns).shuffle(seed=1).batch(size, tail=tail)


def run(plan: Plan, items: Any, kind: Any = "thread", batches_per_item: int = 1) -> list[tuple[Item, Any]]:
    work = PlanWork(plan)
    engine = make_engine(work, kind=kind, num_workers=1, start_method="fork")
    pipeline = Pipeline(engine, work, LoaderStatistics(), convert=lambda batch: batch, prefetch=8, in_order=True)
    pipeline.start(items, batches_per_item)
    found = list(iter(pipeline.next, None))
    pipeline.close()
    return found


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 60),
    size=st.sampled_from([2, 4, 8, 12]),
    tail=st.sampled_from(["carry", "short", "drop"]),
    first=st.integers(0, 3),
    length=st.integers(0, 150),
    world_size=st.sampled_from([1, 2]),
    num_parts=st.sampled_from([1, 2]),
    num_steps=st.integers(2, 8),
    num_growing=st.integers(0, 3),
)
def test_bundles_hold_the_items_that_would_have_been_there_without_them(
    count: int,
    size: int,
    tail: str,
    first: int,
    length: int,
    world_size: int,
    num_parts: int,
    num_steps: int,
    num_growing: int,
) -> None:
    plan = numbers(count, size, tail)
    row = plan.steps.skip_tail(first * size if tail == "carry" else first * count)
    options: Any = {"rank": 0, "world_size": world_size, "num_parts": num_parts}
    single = list(plan_items(plan, row, row + length, **options))
    joined = list(plan_items(plan, row, row + length, **options, num_steps=num_steps, num_growing=num_growing))
    assert [piece for item in joined for piece in (item.items() if isinstance(item, Bundle) else [item])] == single


def test_bundles_grow_so_that_the_first_batches_of_a_loop_wait_for_few_others() -> None:
    items = plan_items(numbers(100, 4), 0, 100, rank=0, world_size=1, num_parts=1, num_steps=8, num_growing=2)
    assert [getattr(item, "num_steps", 1) for item in items] == [1, 1, 2, 2, 4, 4, 8, 3]


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_batches_of_a_bundle_are_the_plans(kind: str, num_parts: int) -> None:
    plan = numbers(50, 8, "short")
    items = plan_items(plan, 0, 100, rank=1, world_size=2, num_parts=num_parts, num_steps=3)
    found = run(plan, items, kind, 3 * num_parts)
    assert len(found) == 14 * num_parts - 2 * (num_parts - 1)  # the last of each epoch has rows for one part
    for item, batch in found:
        expected = plan.read_at(item.row, 1, 2, part=item.part, num_parts=item.num_parts)
        assert batch.keys() == expected.keys()
        assert all(np.array_equal(batch[key], expected[key]) for key in expected)


def test_only_batches_that_are_nothing_but_rows_are_joined() -> None:
    tokens = penstock.from_arrays({"tokens": Ragged(np.arange(100, dtype=np.uint16), np.arange(0, 101, 5))})
    assert steps_per_bundle(numbers(50, 8), 1) > 1
    assert steps_per_bundle(tokens.window(4).batch(2), 1) > 1
    assert steps_per_bundle(tokens.pack(8).batch(2), 1) == 1
    assert steps_per_bundle(tokens.batch(2), 1) == 1
    assert steps_per_bundle(numbers(50, 8, "pad"), 1) == 1
    large = penstock.from_arrays({"x": np.zeros((4, 4 << 20), np.uint8)}).batch(4)
    assert steps_per_bundle(large, 1) == 1
    assert steps_per_bundle(large, 4) == 2


class Fragile(PlanWork):
    """Fails on the batch at row 24, alone or in company."""

    def compute(self, item: Any, arena: Any) -> Any:
        rows = [single.row for single in (item.items() if isinstance(item, Bundle) else [item])]
        if 24 in rows:
            raise KeyError("row 24")
        return super().compute(item, arena)


def test_an_error_comes_in_place_of_its_own_batch_and_not_of_its_bundle() -> None:
    plan = numbers(100, 8)
    work = Fragile(plan)
    engine = make_engine(work, kind="thread", num_workers=1, start_method="fork")
    pipeline = Pipeline(engine, work, LoaderStatistics(), convert=lambda batch: batch, prefetch=16, in_order=True)
    pipeline.start(plan_items(plan, 0, 96, rank=0, world_size=1, num_parts=1, num_steps=4), 4)
    rows = [pipeline.next()[0].row for _ in range(3)]  # type: ignore[index]
    assert rows == [0, 8, 16]
    with pytest.raises(KeyError, match="row 24"):
        pipeline.next()
    assert pipeline.next()[0].row == 32  # type: ignore[index]
    pipeline.close()


def test_one_batch_of_a_bundle_keeps_the_buffer_of_all() -> None:
    pool = SlotPool(private_slot)
    slot = pool.take()
    layout = place_arrays({"x": ((6,), "int64")}, num_pieces=3)
    arrays = slot.arrays(layout)
    arrays["x"][:] = range(6)
    pieces = pool.hand_over(slot, slot.lay_out(arrays))
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    held = pieces[1]["x"][1:]
    del pieces
    assert pool.num_held == 1
    assert pool.take() is not slot
    del held
    assert pool.take() is slot


def test_a_layout_has_the_same_arrays_each_time_and_shares_the_slot_with_others() -> None:
    slot = PrivateSlot()
    layout = place_arrays({"x": ((4,), "int64"), "y": ((2,), "uint8")})
    first = slot.arrays(layout)
    slot.begin()
    again = slot.arrays(layout)
    assert all(first[key] is again[key] for key in first)
    extra = slot.array((3,), np.dtype(np.float32))
    assert slot.lay_out(again) is layout
    other = slot.lay_out({**again, "extra": extra, "copied": np.ones(2)})
    assert other is not layout
    extra[:] = 7
    again["x"][:] = 5
    found = other.view(slot.memory(other.end))
    assert found["x"].tolist() == [5] * 4
    assert found["extra"].tolist() == [7] * 3
    assert found["copied"].tolist() == [1, 1]

"""Nothing that the user holds is ever overwritten, and what is let go of is used again."""

from __future__ import annotations

import gc
import resource
import threading
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from pytorch.examples import children, numbers, open_descriptors, resident_bytes
from waiting import wait_until

KINDS: list[Any] = [
    {"workers": "inline"},
    {"workers": "thread", "num_workers": 2},
    {"workers": "process", "num_workers": 2, "start_method": "fork"},
    {"workers": "process", "num_workers": 2, "start_method": "forkserver"},
]
IDS = ["inline", "thread", "fork", "forkserver"]
WIDTH = 500


def wide_plan(num_rows: int = 997) -> penstock.Plan:
    values = np.arange(num_rows * WIDTH, dtype=np.int64).reshape(num_rows, WIDTH)
    return penstock.from_arrays({"x": np.arange(num_rows), "wide": values}).shuffle(seed=1).batch(8)


HOLDS: dict[str, Any] = {
    "the tensor": lambda t: t,
    "a slice": lambda t: t[1:],
    "a slice of a slice": lambda t: t[1:][2:, 3:],
    "numpy": lambda t: t.numpy()[1:],
    "asarray": lambda t: np.asarray(t)[1:],
    "dlpack to numpy": lambda t: np.from_dlpack(t)[1:],
    "dlpack to torch": lambda t: torch.from_dlpack(t)[1:],
    "memoryview": lambda t: memoryview(t.numpy())[1:],
    "detached": lambda t: t.detach()[1:],
    "a view as bytes": lambda t: t.view(torch.uint8)[1:],
    "its storage": lambda t: torch.tensor([], dtype=t.dtype).set_(t.untyped_storage(), 0, t.shape)[1:],
    "by rows": lambda t: list(t.unbind(0))[1],
    "an iterator": lambda t: t.numpy().flat,
    "an autograd graph": lambda t: torch.ones(t.shape, dtype=torch.float64, requires_grad=True) * t,
}


def frozen(held: Any) -> list[Any]:
    if isinstance(held, torch.Tensor):
        return held.detach().clone().tolist()
    return np.array(held.copy() if isinstance(held, np.flatiter) else held).tolist()


@pytest.mark.parametrize("options", KINDS, ids=IDS)
def test_whatever_is_held_of_a_batch_stays_as_it_was(options: Any) -> None:
    with penstock.DataLoader(wide_plan(), epochs=None, **options) as loader:
        kept: list[tuple[str, Any, list[Any]]] = []
        batches = iter(loader)
        for _ in range(2):
            for name, hold in HOLDS.items():
                held = hold(next(batches)["wide"])
                kept.append((name, held, frozen(held)))
        for _ in range(100):
            next(batches)
        for name, held, before in kept:
            assert frozen(held) == before, name
    for name, held, before in kept:  # the workers are gone, what is held is not
        assert frozen(held) == before, name


@pytest.mark.parametrize("options", KINDS[1:3], ids=IDS[1:3])
def test_a_slice_taken_before_from_numpy_and_one_column_keep_the_whole_batch(options: Any) -> None:
    from penstock.loader import LoaderStatistics, Pipeline, PlanWork, make_engine, plan_items

    plan = wide_plan()
    work = PlanWork(plan)
    engine = make_engine(work, kind=options["workers"], num_workers=2, start_method="fork")
    pipeline = Pipeline(engine, work, LoaderStatistics(), convert=lambda batch: batch, prefetch=4, in_order=True)
    pipeline.start(plan_items(plan, 0, None, rank=0, world_size=1, num_parts=1))
    kept = []
    for step in range(20):
        found = pipeline.next()
        assert found is not None
        held = torch.from_numpy(found[1]["wide"][1:, ::2]) if step % 2 else torch.from_numpy(found[1]["x"][2:])
        kept.append((held, held.clone()))
    del found
    for _ in range(100):
        pipeline.next()
    assert all(torch.equal(held, before) for held, before in kept)
    pipeline.close()


@pytest.mark.parametrize("options", KINDS, ids=IDS)
def test_a_thousand_held_batches_grow_the_pool_and_it_shrinks_when_they_die(options: Any) -> None:
    plan = numbers(997).shuffle(seed=1).batch(8)
    with penstock.DataLoader(plan, epochs=None, **options) as loader:
        batches = iter(loader)
        before = resident_bytes()
        held = [next(batches) for _ in range(1000)]
        assert resident_bytes() - before < 100 << 20  # 2 KB each: a huge page for each would be 2 GB
        stats = loader.stats()
        limit = min(1000 // 16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 32)  # up to 16 share one
        assert stats.num_buffers_in_use >= limit
        for step, batch in enumerate(held):
            expected = plan.read_at(step * 8)
            assert batch["x"].tolist() == expected["x"].tolist()
            assert torch.equal(batch["wide"][:, 0].long(), batch["x"])
        del held, batch
        gc.collect()
        for _ in range(20):
            next(batches)
        assert loader.stats().num_buffers <= 24
        assert loader.stats().num_buffers_in_use <= 12


def run_steps(options: Any, num_steps: int) -> tuple[int, int, int, int]:
    """(growth in bytes, descriptors, threads, processes) between a tenth of the steps and all of them."""
    plan = numbers(997).shuffle(seed=1).batch(8)
    with penstock.DataLoader(plan, epochs=None, **options) as loader:
        batches = iter(loader)
        for _ in range(num_steps // 10):
            next(batches)
        gc.collect()
        before = resident_bytes(), open_descriptors(), threading.active_count(), len(children())
        for _ in range(num_steps - num_steps // 10):
            next(batches)
        gc.collect()
        after = resident_bytes(), open_descriptors(), threading.active_count(), len(children())
    growth, descriptors, threads, processes = (b - a for a, b in zip(before, after, strict=True))
    return growth, descriptors, threads, processes


@pytest.mark.parametrize("options", KINDS[:3], ids=IDS[:3])
def test_a_thousand_steps_leave_no_descriptors_or_threads(options: Any) -> None:
    growth, descriptors, threads, processes = run_steps(options, 1000)
    assert growth < 8 << 20
    assert abs(descriptors) <= 8  # as many slots as happened to be in flight
    assert (threads, processes) == (0, 0)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("options", "num_steps"), [(KINDS[1], 10_000), (KINDS[2], 3000), (KINDS[3], 3000)])
def test_ten_thousand_steps_leave_nothing(options: Any, num_steps: int) -> None:
    growth, descriptors, threads, processes = run_steps(options, num_steps)
    assert growth < 8 << 20
    assert abs(descriptors) <= 8
    assert (threads, processes) == (0, 0)


def test_loaders_that_come_and_go_leave_nothing() -> None:
    gc.collect()
    before, threads, descriptors = children(), threading.active_count(), open_descriptors()
    for round_number in range(30):
        options = KINDS[round_number % 3]
        loader = penstock.DataLoader(numbers().batch(4), **options)
        held = next(iter(loader))
        if round_number % 2:
            loader.close()
        del loader, held
    gc.collect()
    assert wait_until(lambda: children() <= before)
    assert wait_until(lambda: threading.active_count() == threads)
    assert open_descriptors() == descriptors


def test_a_forgotten_loader_ends_without_the_help_of_the_collector() -> None:
    before, threads = children(), threading.active_count()
    gc.collect()
    gc.disable()
    try:
        for options in KINDS[1:3]:
            loader = penstock.DataLoader(numbers().batch(4), **options)
            for _ in loader:
                break
            del loader
            assert wait_until(lambda: children() <= before)
            assert wait_until(lambda: threading.active_count() == threads)
    finally:
        gc.enable()

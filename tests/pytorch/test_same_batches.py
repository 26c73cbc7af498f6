"""Whatever runs a plan, its batches are those of `plan.read`."""

from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from pytorch.examples import documents, expected, numbers, plans, received, rows_of, workers
from pytorch.functions import (
    draw_from_globals,
    draw_from_rng,
    marked,
    one_argument,
    scale,
    sleep_in_the_first_batch,
)

pytestmark = pytest.mark.usefixtures("lasting_fork_servers")

RUNNERS = [
    ("inline", 0, "fork"),
    ("thread", 0, "fork"),
    ("thread", 1, "fork"),
    ("thread", 2, "fork"),
    ("thread", 5, "fork"),
    ("process", 1, "forkserver"),
    ("process", 2, "forkserver"),
    ("process", 5, "forkserver"),
    ("process", 2, "spawn"),
    ("process", 5, "fork"),
    ("process", 2, "fork"),
]
LONG = [("process", 1, "forkserver"), ("process", 5, "forkserver")]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_threads_and_forks_of_any_number_give_the_batches_of_the_plan(data: st.DataObject) -> None:
    name, plan = data.draw(st.sampled_from(sorted(plans().items(), key=lambda item: item[0])))
    kind, num_workers, method = data.draw(st.sampled_from([runner for runner in RUNNERS if runner[2] == "fork"]))
    prefetch = data.draw(st.integers(1, 8))
    world_size = data.draw(st.sampled_from([1, 2, 4]))
    rank = data.draw(st.integers(0, world_size - 1))
    with penstock.DataLoader(
        plan,
        workers=kind,
        num_workers=num_workers,
        prefetch=prefetch,
        start_method=method,
        rank=rank,
        world_size=world_size,
    ) as loader:
        assert len(loader) == plan.num_batches(0), name
        for epoch in (0, 1):
            assert received(loader) == expected(plan, epoch, rank, world_size), name


@pytest.mark.parametrize(
    "runner",
    [pytest.param(each, marks=pytest.mark.stress) if each in LONG else each for each in RUNNERS],
    ids=lambda runner: "-".join(map(str, runner)),
)
def test_every_kind_and_number_of_workers_gives_the_batches_of_the_plan(runner: tuple[str, int, str]) -> None:
    """One loader for all prefetches, so that processes start once."""
    kind, num_workers, method = runner
    plan = documents().shuffle(seed=7).pack(32).map(scale, batched=True).batch(4)
    with penstock.DataLoader(plan, workers=kind, num_workers=num_workers, start_method=method, prefetch=1) as loader:
        for epoch in range(8):
            loader.set_prefetch(epoch + 1)
            assert received(loader) == expected(plan, epoch), (runner, epoch)


@pytest.mark.parametrize("name", sorted(plans()))
def test_process_workers_run_every_sort_of_plan(name: str) -> None:
    plan = plans()[name]
    with penstock.DataLoader(plan, workers="process", num_workers=2, start_method="fork") as loader:
        assert received(loader) == expected(plan)


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_out_of_order_gives_the_same_batches_in_any_order_and_no_state(kind: str) -> None:
    plan = numbers().shuffle(seed=7).batch(4, tail="short")
    with penstock.DataLoader(plan, workers=kind, num_workers=2, start_method="fork", in_order=False) as loader:
        for epoch in range(3):
            got = [tuple(batch["x"].tolist()) for batch in loader]
            assert Counter(got) == Counter(tuple(batch["x"]) for batch in expected(plan, epoch))
        with pytest.raises(penstock.errors.StateError, match="in_order=False"):
            loader.state_dict()


def test_out_of_order_hands_over_what_is_there_while_a_slow_batch_is_computed() -> None:
    plan = numbers().map(sleep_in_the_first_batch).batch(4)
    with penstock.DataLoader(plan, workers="thread", num_workers=2, prefetch=6, in_order=False) as loader:
        order = [batch["x"].tolist()[0] for batch in loader]
    assert order[0] != 0
    assert sorted(order) == list(range(0, 44, 4))


@pytest.mark.parametrize(
    ("function", "kinds"),
    [(draw_from_rng, ["inline", "thread", "process"]), (draw_from_globals, ["inline", "process"])],
)
def test_random_samples_are_the_same_in_every_kind_of_worker(function: object, kinds: list[str]) -> None:
    plan = numbers().shuffle(seed=5).map(function).batch(4)  # type: ignore[arg-type]
    seen = []
    for kind in kinds:
        with penstock.DataLoader(plan, workers=kind, num_workers=2, start_method="fork") as loader:
            seen.append(received(loader))
    assert all(other == seen[0] for other in seen)
    noise = np.concatenate([batch["noise"] for batch in seen[0]])
    assert all(len(set(column)) == len(noise) for column in noise.T.tolist())


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_the_trainers_own_random_streams_are_not_touched(kind: str) -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(()).item()]

    def run(loader: penstock.DataLoader | None) -> list[float]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        drawn = draw()
        for _ in loader or ():
            drawn += draw()
        return drawn + draw() if loader is None else drawn

    plan = numbers().map(draw_from_rng if kind == "thread" else draw_from_globals).batch(4)
    with penstock.DataLoader(plan, workers=kind, num_workers=2, start_method="fork") as loader:
        with_loader = run(loader)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert with_loader == [value for _ in range(1 + plan.num_batches()) for value in draw()]


def test_auto_takes_threads_for_penstocks_own_work_and_processes_for_other_code() -> None:
    for plan, kind in [
        (numbers().batch(4), "thread"),
        (numbers().map(marked).batch(4), "thread"),
        (numbers().map(one_argument).batch(4), "process"),
        (numbers().map(draw_from_rng).batch(4), "process"),
    ]:
        assert penstock.DataLoader(plan).kind == kind
        assert penstock.DataLoader(plan, num_workers=0).kind == "inline"


def test_threads_refuse_a_function_that_may_use_global_generators() -> None:
    with pytest.raises(ValueError, match=r"global generators, which threads share.*workers='process'.*@penstock\.pure"):
        penstock.DataLoader(numbers().map(one_argument).batch(4), workers="thread")
    with penstock.DataLoader(numbers().map(marked).batch(4), workers="thread") as loader:
        assert rows_of(loader)[:3] == [1, 2, 3]


def test_a_lambda_is_refused_with_what_to_do_and_works_with_fork() -> None:
    plan = numbers().map(lambda row: {"x": row["x"] * 2}).batch(4)
    with pytest.raises(TypeError, match=r"cannot be sent to them.*of a module.*num_workers=0"):
        next(iter(penstock.DataLoader(plan, workers="process", num_workers=1)))
    with penstock.DataLoader(plan, workers="process", num_workers=1, start_method="fork") as loader:
        assert rows_of(loader)[:3] == [0, 2, 4]


def test_changing_workers_and_prefetch_while_it_runs_changes_no_batch() -> None:
    plan = numbers().shuffle(seed=1).batch(4)
    for kind in ("thread", "process"):
        with penstock.DataLoader(plan, workers=kind, num_workers=1, start_method="fork", epochs=12) as loader:
            got = []
            for step, batch in enumerate(loader):
                got += batch["x"].tolist()
                if step % 5 == 0:
                    loader.set_workers(1 + step % 4)
                if step % 7 == 0:
                    loader.set_prefetch(1 + step % 6)
        assert got[: 12 * 43] == [x for epoch in range(12) for x in _epoch_of_rows(plan, epoch)]


def test_set_workers_changes_how_many_there_are_and_how_many_batches_are_ahead() -> None:
    plan = numbers(400).batch(4)
    others = set(workers())
    with penstock.DataLoader(plan, workers="process", num_workers=1, start_method="fork") as loader:
        batches = iter(loader)
        next(batches)
        assert len(set(workers()) - others) == 1
        loader.set_workers(3)
        next(batches)
        assert len(set(workers()) - others) == 3
        stats = loader.stats()
        assert (stats.num_workers, stats.prefetch) == (3, 2 * 3 * 16)  # a worker has 16 small batches at a time
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="at least 1"):
            loader.set_workers(wrong)
        with pytest.raises(ValueError, match="at least 1"):
            loader.set_prefetch(wrong)
    with pytest.raises(ValueError, match="no workers to change"):
        penstock.DataLoader(plan, num_workers=0).set_workers(2)


def _epoch_of_rows(plan: penstock.Plan, epoch: int) -> list[int]:
    rows = [x for step in range(200) for x in plan.read_at(step * 4)["x"].tolist()]
    return rows[epoch * plan.num_rows : (epoch + 1) * plan.num_rows]


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
@pytest.mark.parametrize("in_order", [True, False])
def test_what_a_broken_off_loop_had_ahead_is_neither_seen_again_nor_kept(kind: str, in_order: bool) -> None:
    plan = numbers(40).batch(4, tail="short")
    with penstock.DataLoader(
        plan, workers=kind, num_workers=2, start_method="fork", prefetch=6, in_order=in_order
    ) as loader:
        for epoch in range(30):
            loader.set_epoch(2 * epoch)
            for _ in loader:
                break
            loader.set_epoch(2 * epoch + 1)
            assert sorted(rows_of(loader)) == list(range(40))
        assert loader.stats().num_buffers_in_use <= 8
        assert loader.stats().num_buffers <= 24


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_loops_that_are_begun_and_left_at_once_cost_no_memory(kind: str) -> None:
    with penstock.DataLoader(numbers(40).batch(4), workers=kind, num_workers=2, start_method="fork") as loader:
        for _ in range(300):
            iter(loader)
            time.sleep(0.001)
        assert rows_of(loader) == list(range(40))
        assert loader.stats().num_buffers <= 24

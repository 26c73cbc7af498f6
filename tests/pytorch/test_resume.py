"""Resuming equals not stopping: at every step, with other workers, batch sizes and ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as torch_processes
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from pytorch.examples import documents, numbers, plain_batch, plans, rows_of
from pytorch.functions import only_x


def rows_from(loader: penstock.DataLoader, num_rows: int) -> list[int]:
    """The next rows of an endless loader."""
    rows: list[int] = []
    for batch in loader:
        rows += batch["x"].tolist()
        if len(rows) >= num_rows:
            break
    return rows


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_resuming_at_every_step_equals_not_stopping(kind: str) -> None:
    plan = documents().shuffle(seed=7).pack(32).batch(4)
    options: Any = {"workers": kind, "num_workers": 2, "start_method": "fork", "epochs": 2}
    whole, states = [], []
    with penstock.DataLoader(plan, **options) as loader:
        states.append(loader.state_dict())
        for batch in loader:
            whole.append(plain_batch(batch))
            states.append(loader.state_dict())
    with penstock.DataLoader(plan, **(options | {"epochs": None})) as resumed:
        for step in range(len(whole) - 3):
            resumed.load_state_dict(states[step])
            batches = iter(resumed)
            assert [plain_batch(next(batches)) for _ in range(3)] == whole[step : step + 3]
            assert resumed.state_dict() == states[step + 3]


@pytest.mark.parametrize(
    "name",
    [
        "padded",
        "balanced",
        "sampled",
        "skipping",
        "stretched",
        "scheduled",
        "kept",
        "unfolded",
        "dealt",
        "by tokens",
        "left out",
    ],
)
def test_every_kind_of_order_resumes_at_every_step(name: str) -> None:
    plan = plans()[name]
    whole, states = [], []
    with penstock.DataLoader(plan, workers="inline", epochs=2) as loader:
        for batch in loader:
            states.append(loader.state_dict())
            whole.append(plain_batch(batch))
    with penstock.DataLoader(plan, workers="inline", epochs=None) as resumed:
        for step in range(len(whole) - 1):
            resumed.load_state_dict(states[step])
            assert plain_batch(next(iter(resumed))) == whole[step + 1]


@given(
    sizes=st.lists(st.sampled_from([1, 2, 4, 6, 12]), min_size=2, max_size=5),
    steps=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    kinds=st.lists(st.sampled_from(["inline", "thread"]), min_size=5, max_size=5),
)
@settings(max_examples=20, deadline=None)
def test_any_number_of_resumes_with_other_batch_sizes_and_workers(
    sizes: list[int], steps: list[int], kinds: list[Any]
) -> None:
    source = numbers().shuffle(seed=3)
    rows: list[int] = []
    state = None
    for size, num_steps, kind in zip(sizes, steps, kinds, strict=False):
        with penstock.DataLoader(source.batch(size), workers=kind, num_workers=2, epochs=None) as loader:
            if state is not None:
                loader.load_state_dict(state)
            rows += rows_from(loader, size * num_steps)
            state = loader.state_dict()
    with penstock.DataLoader(source.batch(1), num_workers=0, epochs=None) as loader:
        assert rows == rows_from(loader, len(rows))


def test_a_resume_across_worker_kinds_and_maps() -> None:
    source = numbers().shuffle(seed=3)
    state, rows = None, []
    for kind, method in [("process", "forkserver"), ("thread", "fork"), ("process", "fork"), ("inline", "fork")]:
        plan: Any = source if kind == "thread" else source.map(only_x)
        with penstock.DataLoader(plan.batch(4), workers=kind, num_workers=2, start_method=method) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for _, batch in zip(range(2), loader, strict=False):
                rows += batch["x"].tolist()
                state = loader.state_dict()
    with penstock.DataLoader(source.batch(4), num_workers=0) as loader:
        assert rows == rows_of(loader)[:32]


def test_a_resume_needs_no_replay() -> None:
    plan = numbers(10**6).shuffle(seed=1, mode="full").map(_refuse_all_but_the_last).batch(2)
    with penstock.DataLoader(plan, num_workers=0) as loader:
        loader.load_state_dict(loader.state_dict() | {"epoch": 5, "row": 10**6 - 2})
        last = next(iter(loader))["x"].tolist()
    assert last == numbers(10**6).shuffle(seed=1, mode="full").batch(2).read_at(6 * 10**6 - 2)["x"].tolist()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),  # a batch script that runs Python without srun
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, (1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, (0, 4)),
        ({"WORLD_SIZE": "4"}, (0, 1)),
    ],
)
def test_rank_and_world_size_are_found_when_a_loop_begins(
    environment: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = numbers(16).batch(8)
    loader = penstock.DataLoader(plan, num_workers=0)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    rank, world_size = expected
    batches = iter(loader)
    for name in environment:
        monkeypatch.delenv(name)
    assert next(batches)["x"].tolist() == list(range(8))[rank::world_size]
    given_rank = penstock.DataLoader(plan, num_workers=0, rank=3, world_size=4)
    assert next(iter(given_rank))["x"].tolist() == [3, 7]


@pytest.mark.parametrize(("rank", "world_size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "0")])
def test_variables_that_name_no_rank_are_told_and_not_taken_for_a_single_process(
    rank: str, world_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = penstock.DataLoader(numbers(16).batch(8), num_workers=0)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=f"RANK='{rank}', WORLD_SIZE='{world_size}' in the environment"):
        iter(loader)


@pytest.mark.parametrize(("rank", "world_size"), [("0", "1"), (2, 2), (-1, 2), (0, 0), (True, 2)])
def test_a_rank_that_cannot_be_is_refused_when_the_loader_is_made(rank: Any, world_size: Any) -> None:
    with pytest.raises(ValueError, match="a rank from 0 to world_size - 1"):
        penstock.DataLoader(numbers(16).batch(8), rank=rank, world_size=world_size)


def test_ranks_that_cannot_share_a_batch_are_told() -> None:
    with pytest.raises(ValueError, match="cannot be shared evenly by 3 ranks"):
        next(iter(penstock.DataLoader(numbers().batch(8), num_workers=0, rank=0, world_size=3)))


def test_two_ranks_resumed_as_four_over_gloo_see_every_row_once(tmp_path: Path) -> None:
    """Real processes: two of them save after three steps, four go on with another batch size."""
    _run_ranks(2, tmp_path, "first")
    _run_ranks(4, tmp_path, "second")
    rows = []
    for name, world_size, size in (("first", 2, 8), ("second", 4, 12)):
        parts = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(world_size)]
        for step in range(3):
            batch = [0] * size
            for rank, part in enumerate(parts):
                batch[rank::world_size] = part["rows"][step]
            rows += batch
    with penstock.DataLoader(_plan(4), num_workers=0, epochs=None, rank=0, world_size=1) as loader:
        assert rows == rows_from(loader, len(rows))[: len(rows)]


def _plan(size: int) -> penstock.Plan:
    return numbers().shuffle(seed=11).batch(size)


def _run_ranks(world_size: int, folder: Path, name: str) -> None:
    rendezvous = folder / f"rendezvous-{name}"
    torch_processes.start_processes(
        _train, (world_size, str(rendezvous), str(folder), name), nprocs=world_size, start_method="fork"
    )


def _train(rank: int, world_size: int, rendezvous: str, folder: str, name: str) -> None:
    os.environ.pop("RANK", None)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    loader = penstock.DataLoader(_plan(8 if name == "first" else 12), workers="thread", num_workers=1, epochs=None)
    if name == "second":
        loader.load_state_dict(torch.load(f"{folder}/first-{rank % 2}.pt")["state"])
    rows = [batch["x"].tolist() for _, batch in zip(range(3), loader, strict=False)]
    torch.save({"rows": rows, "state": loader.state_dict()}, f"{folder}/{name}-{rank}.pt")
    loader.close()
    distributed.barrier()  # a rank that leaves while another still connects is an error there
    distributed.destroy_process_group()


def _refuse_all_but_the_last(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    _calls.append(int(row["x"]))
    assert len(_calls) <= 2
    return {"x": row["x"]}


_calls: list[int] = []

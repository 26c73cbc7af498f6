"""Errors of users' functions, killed workers, and using a loader after them."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import CorruptionError, WorkerDied
from pytorch.examples import NUM_ROWS, children, numbers, open_descriptors, rows_of, workers
from pytorch.functions import be_slow, die_at_20, fail_at_20, stop_at_20
from waiting import wait_until

WORKERS: list[Any] = [
    {"workers": "inline"},
    {"workers": "thread", "num_workers": 2},
    {"workers": "process", "num_workers": 2},
    {"workers": "process", "num_workers": 2, "start_method": "fork"},
]
IDS = ["inline", "thread", "forkserver", "fork"]


@pytest.mark.parametrize("options", WORKERS, ids=IDS)
def test_an_error_arrives_with_type_line_row_and_worker_and_the_loader_lives_on(options: Any) -> None:
    plan = numbers().map(fail_at_20).batch(4)
    with penstock.DataLoader(plan, prefetch=4, **options) as loader:
        got = []
        with pytest.raises(LookupError, match="row twenty is odd") as caught:  # noqa: PT012
            for batch in loader:
                got += batch["x"].tolist()
        assert got == list(range(20))  # all that came before it, whatever was computed ahead
        notes = "\n".join(caught.value.__notes__)
        assert "the batch at row 20 (rank 0 of 1)" in notes
        assert "in map(fail_at_20), at row 20 (sample 20)" in notes
        where = str(caught.value.__cause__) if options["workers"] == "process" else _traceback(caught.value)
        assert "the line that a traceback must show" in where
        if options["workers"] != "inline":
            assert options["workers"] in notes  # a thread of the loader, or the one that waits and helps
        state = loader.state_dict()
        assert state["row"] == 20
        loader.load_state_dict(state | {"row": 24})  # past the row that fails
        assert rows_of(loader)[:19] == list(range(24, NUM_ROWS))


def _traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("options", [*WORKERS[:2], WORKERS[3]], ids=[*IDS[:2], IDS[3]])
def test_a_damaged_block_comes_after_every_batch_before_it_and_the_state_stands_there(
    options: Any, tmp_path: Path
) -> None:
    with penstock.DatasetWriter(tmp_path / "data", {"x": "int64"}) as writer:
        writer.write_batch({"x": np.arange(200_000)})
    (shard,) = (tmp_path / "data").glob("*.safetensors")
    contents = bytearray(shard.read_bytes())
    contents[len(contents) // 2] ^= 1  # of 200,000 rows in blocks of 65,536: in the second block
    shard.write_bytes(contents)
    with penstock.DataLoader(penstock.open(tmp_path / "data").as_plan().batch(1000), **options) as loader:
        got = []
        with pytest.raises(CorruptionError, match="block 1 of tensor 'x'"):  # noqa: PT012
            for batch in loader:
                got += batch["x"].tolist()
        assert loader.state_dict()["row"] == 65_000
    assert got == list(range(65_000))


@pytest.mark.parametrize("options", WORKERS[:2], ids=IDS[:2])
def test_a_stop_iteration_of_the_users_does_not_end_the_epoch_quietly(options: Any) -> None:
    with penstock.DataLoader(numbers().map(stop_at_20).batch(4), **options) as loader, pytest.raises(RuntimeError):
        list(loader)


def test_a_batch_that_always_kills_its_worker_is_named_after_what_came_before_it() -> None:
    plan = numbers().map(die_at_20).batch(4)
    with penstock.DataLoader(plan, workers="process", num_workers=2, prefetch=4) as loader:
        got = []
        with pytest.raises(WorkerDied, match=r"SIGKILL while computing the batch at row 20 .*memory\?.*% used"):  # noqa: PT012
            for batch in loader:
                got += batch["x"].tolist()
        assert got == list(range(20))
        loader.load_state_dict(loader.state_dict() | {"row": 24})
        assert rows_of(loader)[:19] == list(range(24, NUM_ROWS))


def kill_workers_at_random(num_kills: int, start_method: Any, seconds_between: float) -> None:
    """Lose and repeat nothing while workers die, whenever they die."""
    rng = random.Random(num_kills)
    plan = numbers(400).shuffle(seed=1).map(be_slow).batch(4)
    with penstock.DataLoader(
        plan, workers="process", num_workers=3, start_method=start_method, epochs=None, prefetch=8
    ) as loader:
        kills = 0
        next_kill = time.monotonic() + 1.0
        rows: list[int] = []
        for batch in loader:
            rows += batch["x"].tolist()
            if kills < num_kills and time.monotonic() > next_kill and (found := workers()):
                os.kill(rng.choice(found), signal.SIGKILL)
                kills += 1
                next_kill = time.monotonic() + rng.uniform(0, seconds_between)
            if kills == num_kills and time.monotonic() > next_kill + 0.3:
                break
    reference = [x for step in range(-(-len(rows) // 4)) for x in plan_rows(plan, step)]
    assert rows == reference


def plan_rows(plan: penstock.Plan, step: int) -> list[int]:
    bare = penstock.Plan(plan.source, tuple(stage for stage in plan.stages if stage.verb != "map"))
    return [int(x) for x in bare.read_at(step * 4)["x"]]


@pytest.mark.parametrize("start_method", [pytest.param("forkserver", marks=pytest.mark.stress), "fork"])
def test_random_kills_of_workers_lose_and_repeat_no_batch(start_method: str) -> None:
    before = children()
    kill_workers_at_random(6, start_method, 0.2)
    assert wait_until(lambda: children() <= before)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_hundred_random_kills(start_method: str) -> None:
    kill_workers_at_random(100, start_method, 0.3)


def test_four_loaders_at_once_on_one_dataset_do_not_disturb_each_other() -> None:
    plan = numbers(200).shuffle(seed=2)
    failures: list[BaseException] = []
    options: list[Any] = [
        {"workers": "thread", "num_workers": 2},
        {"workers": "process", "num_workers": 1},
        {"workers": "process", "num_workers": 2, "start_method": "fork"},
        {"workers": "process", "num_workers": 1, "start_method": "spawn"},
    ]
    expected = rows_of(penstock.DataLoader(plan.batch(4), num_workers=0, epochs=5))

    def run(chosen: Any) -> None:
        try:
            with penstock.DataLoader(plan.batch(4), epochs=5, **chosen) as loader:
                assert rows_of(loader) == expected
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(chosen,)) for chosen in options]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert wait_until(lambda: not workers())


@pytest.mark.parametrize("options", WORKERS[1:], ids=IDS[1:])
def test_a_fork_while_a_loop_runs_is_refused_there_and_a_new_loop_works(options: Any) -> None:
    plan = numbers(40).batch(4, tail="short")
    with penstock.DataLoader(plan, **options) as loader:
        batches = iter(loader)
        rows = next(batches)["x"].tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os._exit(_in_child(loader, batches))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert rows + rows_of(batches) == list(range(40))  # the parent's loop was not disturbed


def _in_child(loader: penstock.DataLoader, batches: Any) -> int:
    try:
        try:
            next(batches)
        except RuntimeError as error:
            if "before a fork" not in str(error):
                return 2
        else:
            return 3
        loader.set_epoch(3)
        if rows_of(loader) != list(range(40)):
            return 4
        loader.close()
    except BaseException:
        import traceback

        traceback.print_exc()
        return 5
    return 0


def test_errors_and_kills_leave_no_descriptors_threads_or_processes() -> None:
    gc.collect()
    before, threads, descriptors = children(), threading.active_count(), open_descriptors()
    for options in WORKERS:
        for function in (fail_at_20, die_at_20) if options.get("start_method") == "fork" else (fail_at_20,):
            loader = penstock.DataLoader(numbers().map(function).batch(4), **options)
            with pytest.raises((LookupError, WorkerDied)):
                list(loader)
            loader.close()
            del loader
    gc.collect()
    assert wait_until(lambda: children() <= before)
    assert threading.active_count() == threads
    assert open_descriptors() <= descriptors  # what an earlier test left may go meanwhile

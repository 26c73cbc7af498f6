"""Workers that are stopped or stuck: the log says which, at what, and a timeout ends the wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

import penstock
from penstock.loader import Bundle
from penstock.workers import _failures
from pytorch.examples import NUM_ROWS, children, numbers
from pytorch.functions import close_all_at_8, stop_at_8, time_out
from waiting import wait_until

LOG = "penstock.loader._engine"


_is_open = threading.Event()


@penstock.pure
def wait_for_ever(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"] == 8:
        _is_open.wait()
    return {"x": row["x"]}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Says what is waited for after a moment."""
    monkeypatch.setattr(_failures, "FIRST_REPORT_SECONDS", 1.0)
    with caplog.at_level(logging.WARNING, LOG):
        yield
    _is_open.clear()


def stopped() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() == psutil.STATUS_STOPPED]


@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.usefixtures("soon")
def test_a_stopped_worker_is_named_with_its_batch_and_how_to_let_it_go_on(
    method: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def let_go_on_when_told() -> None:
        assert wait_until(lambda: "it is stopped" in caplog.text)
        for child in stopped():
            child.resume()

    helper = threading.Thread(target=let_go_on_when_told)
    plan = numbers().map(stop_at_8).batch(4)
    with penstock.DataLoader(plan, workers="process", num_workers=1, start_method=method) as loader:
        batches = iter(loader)
        first = next(batches)  # workers have started
        helper.start()
        assert [batch["x"][0].item() for batch in (first, *batches)] == list(range(0, NUM_ROWS, 4))
    helper.join()
    told = caplog.messages[-1]
    assert "No batch for" in told
    assert "worker 0 (pid" in told
    assert "computing the batch at row 8 (rank 0 of 1)" in told
    assert "it is stopped; `kill -CONT" in told


@pytest.mark.usefixtures("soon")
def test_a_stuck_thread_is_named_with_its_batch_and_line(caplog: pytest.LogCaptureFixture) -> None:
    def let_go_on_when_told() -> None:
        assert wait_until(lambda: "row 8" in caplog.text)
        _is_open.set()

    helper = threading.Thread(target=let_go_on_when_told)
    helper.start()
    with penstock.DataLoader(numbers().map(wait_for_ever).batch(4), workers="thread", num_workers=1) as loader:
        list(loader)
    helper.join()
    told = caplog.messages[-1]
    assert "worker thread 0 has been computing the batch at row 8 (rank 0 of 1), now at " in told


def test_the_timeout_of_a_plan_names_the_worker_and_its_batch() -> None:
    plan = numbers().map(stop_at_8).batch(4)
    with penstock.DataLoader(plan, workers="process", num_workers=1, start_method="fork", timeout=8) as loader:
        batches = iter(loader)
        assert next(batches)["x"].tolist() == [0, 1, 2, 3]
        assert next(batches)["x"].tolist() == [4, 5, 6, 7]
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 8 seconds: worker 0 .*row 8.*stopped"):
            next(batches)


def test_the_timeout_of_a_plan_in_threads_ends_a_wait_for_bundles() -> None:
    plan = penstock.from_arrays({"x": np.arange(64)}).batch(4)
    is_open = threading.Event()
    with penstock.DataLoader(plan, workers="thread", num_workers=1, timeout=1) as loader:
        work = loader._run._workers.start(1)._work
        compute = work.compute
        work.compute = lambda item, arena: (isinstance(item, Bundle) and is_open.wait(), compute(item, arena))[1]
        batches = iter(loader)
        next(batches)  # a single step: no loop's first batch waits for a bundle
        with pytest.raises(RuntimeError, match=r"timed out after 1 seconds: worker thread 0 .* batches from row 4"):
            next(batches)
        is_open.set()


def test_a_timeout_of_the_users_own_is_no_timeout_of_the_loader() -> None:
    plan = numbers().map(time_out).batch(4)
    with penstock.DataLoader(plan, workers="process", num_workers=1, start_method="fork", timeout=60) as loader:
        for _ in range(2):
            with pytest.raises(TimeoutError, match="the user's own network"):
                next(iter(loader))
            loader.load_state_dict(loader.state_dict())


def test_a_timeout_needs_workers_that_can_be_waited_for() -> None:
    with pytest.raises(ValueError, match="timeout=3: without workers"):
        penstock.DataLoader(numbers().batch(4), timeout=3, num_workers=0)


@pytest.mark.parametrize("method", [pytest.param("forkserver", marks=pytest.mark.stress), "fork"])
def test_a_function_that_closes_every_descriptor_leaves_no_orphan_and_no_hanging_loop(method: Any) -> None:
    before = children()
    with penstock.DataLoader(
        numbers().map(close_all_at_8).batch(4), workers="process", num_workers=1, start_method=method
    ) as loader:
        batches = iter(loader)
        assert next(batches)["x"].tolist() == [0, 1, 2, 3]
        assert next(batches)["x"].tolist() == [4, 5, 6, 7]
        with pytest.raises(penstock.errors.WorkerDied, match=r"SIGKILL while computing the batch at row 8"):
            next(batches)
    assert wait_until(lambda: children() <= before)

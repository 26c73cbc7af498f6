"""Items that belong to a worker: what stateful work, such as a user's iterator, needs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from loader.works import BadBeginning, Counting
from penstock.errors import WorkerDied
from penstock.loader import Engine, make_engine

pytestmark = pytest.mark.usefixtures("lasting_fork_servers")


def make(start_method: Any, work: Any = None) -> Engine:
    return make_engine(work or Counting(), kind="process", num_workers=2, start_method=start_method, is_assigned=True)


@pytest.fixture(params=["fork", "forkserver", "spawn"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make(request.param)
    yield made
    made.close()


def test_each_item_is_computed_by_its_worker_in_the_order_of_submission(engine: Engine) -> None:
    turns = [0, 1, 1, 1, 0, 1, 0, 0]
    for ticket, worker in enumerate(turns):
        engine.submit(ticket, ticket, worker)
    batches = [engine.wait(ticket).batch for ticket in range(len(turns))]
    assert [batch["place"] for batch in batches] == [(worker, 2) for worker in turns]
    assert [batch["count"] for batch in batches] == [1, 1, 2, 3, 2, 4, 3, 4]
    assert len({batch["pid"] for batch in batches}) == 2
    assert [engine.submit(8, 8, 1), engine.wait(8).worker][1] == 1


def test_a_dead_worker_is_the_end_of_its_items_and_of_no_others(engine: Engine) -> None:
    for ticket in range(4):
        engine.submit(ticket, ticket, ticket % 2)
    pid = engine.wait(1).batch["pid"]
    engine.wait(3)
    os.kill(pid, signal.SIGKILL)
    engine.submit(4, "five", 1)
    with pytest.raises(WorkerDied, match=r"Worker 1.* was killed by SIGKILL while computing five \(out of memory\?\)"):
        engine.wait(4)
    engine.submit(5, "six", 1)
    with pytest.raises(WorkerDied, match="Worker 1"):
        engine.wait(5)
    assert engine.wait(0).batch["count"] == 1
    engine.submit(6, 6, 0)
    assert engine.wait(6).batch["place"] == (0, 2)


def test_what_goes_wrong_before_the_first_item_reaches_the_caller() -> None:
    engine = make("fork", BadBeginning())
    engine.submit(0, 0, 0)
    with pytest.raises(LookupError, match="no shoes") as caught:
        engine.wait(0)
    assert "was being set up" in caught.value.__notes__[0]
    engine.close()


def test_waiting_has_a_limit_and_the_batch_still_comes_afterwards() -> None:
    engine = make("fork")
    engine.submit(0, ("sleep", 1.0), 0)
    with pytest.raises(TimeoutError, match=r"worker 0 \(pid \d+\) has been (starting, to compute|computing)"):
        engine.wait(0, seconds=0.05)
    with pytest.raises(TimeoutError):
        engine.wait_any(seconds=0.05)
    assert engine.wait(0).batch["count"] == 1
    engine.close()


def test_their_number_is_fixed() -> None:
    engine = make("fork")
    with pytest.raises(ValueError, match="cannot change"):
        engine.set_workers(3)
    engine.close()

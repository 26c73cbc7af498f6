"""The contract that every engine keeps, and what happens when work goes wrong."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

import penstock
from loader.torch_functions import say_who_imported_torch
from loader.works import Awkward, Returned, Square, WarmedUp, a_lambda, odd_arrays
from penstock.errors import WorkerDied
from penstock.loader import Engine, Item, PlanWork, make_engine
from penstock.workers import Channel
from waiting import wait_until

KINDS = [("inline", "fork"), ("thread", "fork"), ("process", "forkserver"), ("process", "spawn"), ("process", "fork")]
PROCESSES = [kind for kind in KINDS if kind[0] == "process"]
IDS = ["-".join(kind) if kind[0] == "process" else kind[0] for kind in KINDS]


def make(kind: tuple[str, str], work: Any = None, num_workers: int = 2) -> Engine:
    return make_engine(work or Square(), kind=kind[0], num_workers=num_workers, start_method=kind[1])  # type: ignore[arg-type]


@pytest.fixture(params=KINDS, ids=IDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make(request.param)
    yield made
    made.close()


@pytest.fixture(params=[("process", "forkserver"), ("process", "fork")], ids=["forkserver", "fork"])
def processes(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make(request.param)
    yield made
    made.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_every_engine_answers_tickets_in_any_order_forgets_and_reports_errors(engine: Engine) -> None:
    for ticket in range(10):
        engine.submit(ticket, ticket)
    for ticket in (3, 0, 9, 1):
        assert engine.wait(ticket).batch["square"].tolist() == [ticket**2] * 4
    rest = [engine.wait_any() for _ in range(6)]
    assert sorted(ticket for ticket, _ in rest) == [2, 4, 5, 6, 7, 8]
    assert all(result.batch["number"] == ticket for ticket, result in rest)
    del rest
    # forgotten items never come, also those that fail or are being computed
    for ticket in range(10, 20):
        engine.submit(ticket, ("sleep", 0.1) if ticket < 12 else ("raise", ticket))
    time.sleep(0.03)  # the first two are being computed
    engine.forget()
    engine.submit(20, 5)
    ticket, result = engine.wait_any()
    assert (ticket, result.batch["number"]) == (20, 5)
    # an error is that of its ticket, and the next ticket is not touched by it
    engine.submit(21, ("raise", "bread"))
    engine.submit(22, 6)
    assert engine.wait(22).batch["number"] == 6
    with pytest.raises(KeyError, match="no bread") as caught:
        engine.wait(21)
    notes = " ".join(caught.value.__notes__)
    assert "while computing ('raise', 'bread')" in notes
    engine.submit(23, 7)
    assert engine.wait(23).batch["number"] == 7
    del caught, result
    gc.collect()
    engine.submit(24, 1)
    engine.wait(24)
    # a worker that was late may still answer for what was forgotten
    assert wait_until(lambda: engine.is_done(99) or engine.num_buffers()[1] <= 1)
    total, _ = engine.num_buffers()
    assert total <= 8


def test_arrays_that_no_slot_holds_travel_as_they_are() -> None:
    made = make(("process", "fork"), Returned(), 1)
    expected = odd_arrays()
    made.submit(0, odd_arrays)
    batch = made.wait(0).batch
    assert list(batch) == list(expected)
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            assert batch[key].shape == value.shape
            assert batch[key].tolist() == value.tolist(), key
        else:
            assert batch[key] == value
    made.submit(1, a_lambda)
    with pytest.raises(Exception, match="pickle"):
        made.wait(1)
    made.close()


def test_errors_arrive_with_type_message_and_the_line_that_raised(processes: Engine) -> None:
    for ticket, (kind, expected, match) in enumerate(
        [
            ("awkward", Awkward, "1 and 2"),
            ("unpicklable", Exception, "held"),
            ("local", RuntimeError, "Local: from here"),
            ("connection", ConnectionResetError, "own network"),
            ("huge", ValueError, "xxxx"),
        ]
    ):
        processes.submit(ticket, (kind,))
        with pytest.raises(expected, match=match) as caught:
            processes.wait(ticket)
        assert "works.py" in str(caught.value.__cause__)
        assert "in trouble" in str(caught.value.__cause__)
        assert any(f"while computing ('{kind}',)" in note for note in caught.value.__notes__)
        if kind == "unpicklable":
            assert type(caught.value).__name__ == "Unpicklable"
    assert len(children()) >= 2  # no worker died of any of it


def test_a_dead_worker_costs_nothing_but_time(processes: Engine, tmp_path: Path) -> None:
    for ticket in range(8):
        processes.submit(ticket, ("kill once", str(tmp_path / "killed")) if ticket == 2 else ticket)
    values = [processes.wait(ticket).batch["number"] for ticket in range(8)]
    assert values == [0, 1, 3, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("kind", "said", "advice"),
    [
        ("kill", "was killed by SIGKILL", "Lower num_workers"),
        ("crash", "was killed by SIGSEGV", "Compiled code crashed"),
        ("exit", "exited with code 7", "See what computes this batch"),
    ],
)
def test_an_item_that_always_kills_its_worker_is_named_and_hurts_no_other(
    processes: Engine, kind: str, said: str, advice: str
) -> None:
    for ticket in range(12):
        processes.submit(ticket, (kind, ticket) if ticket == 5 else ticket)
    for ticket in range(12):
        if ticket == 5:
            with pytest.raises(WorkerDied, match=rf"\(pid \d+\) {said} while computing \('{kind}', 5\).*{advice}"):
                processes.wait(ticket)
        else:
            assert processes.wait(ticket).batch["number"] == ticket


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_how_a_worker_died_is_known_also_when_another_is_started_before_it_is_missed(
    method: str, tmp_path: Path
) -> None:
    before = children()
    engine = make(("process", method), num_workers=1)
    codes: list[int | None] = []
    ask = engine._crew._starter.exit_code  # type: ignore[attr-defined]
    engine._crew._starter.exit_code = lambda started: codes.append(ask(started))  # type: ignore[attr-defined]
    engine.submit(0, ("kill once", str(tmp_path / "killed")))
    (worker,) = (psutil.Process(pid) for pid in children() - before)
    assert wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
    engine.set_workers(2)
    engine.submit(1, 1)
    assert [engine.wait(ticket).batch["number"] for ticket in range(2)] == [3, 1]
    assert codes == [-signal.SIGKILL]
    engine.close()


def test_a_killed_fork_server_is_replaced() -> None:
    before = children()
    engine = make(("process", "forkserver"))
    engine.submit(0, 1)
    engine.wait(0)
    for pid in children() - before:
        os.kill(pid, signal.SIGKILL)
    for ticket in range(1, 6):
        engine.submit(ticket, ticket)
    assert [engine.wait(ticket).batch["number"] for ticket in range(1, 6)] == [1, 2, 3, 4, 5]
    engine.close()


def test_thousands_of_items_at_once_do_not_block() -> None:
    """Neither side may sleep in a full socket while the other does: 5,000 questions, nobody reads the answers."""
    engine = make(("process", "fork"), num_workers=1)
    for ticket in range(5000):
        engine.submit(ticket, ticket)
    assert [engine.wait(ticket).batch["number"] for ticket in range(5000)] == list(range(5000))
    engine.close()


def test_work_and_items_larger_than_a_packet_arrive() -> None:
    engine = make(("process", "forkserver"), Square(padding=b"y" * 3_000_000), 1)
    engine.submit(0, 2)
    assert engine.wait(0).batch["number"] == 2
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for ticket in range(1, 40):
        engine.submit(ticket, ("sleep", 0.0, b"z" * 200_000)[:2] if ticket % 2 else ticket)
        engine.wait(ticket)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    engine.close()


def test_descriptors_beyond_1024_are_no_problem() -> None:
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        engine = make(("process", "forkserver"), num_workers=1)
        engine.submit(0, 4)
        assert engine.wait(0).batch["number"] == 4
        engine.close()
    finally:
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_close_ends_everything_at_once_also_while_workers_compute(kind: tuple[str, str]) -> None:
    gc.collect()
    before, threads = children(), threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    engine = make(kind)
    engine.submit(0, 1)
    engine.wait(0)
    for ticket in range(1, 5):
        engine.submit(ticket, ("sleep", 0.2 if kind[0] == "thread" else 60))
    time.sleep(0.05)
    begin = time.monotonic()
    engine.close()
    engine.close()
    assert time.monotonic() - begin < 30
    assert wait_until(lambda: children() <= before)
    assert threading.active_count() == threads
    del engine
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("kind", PROCESSES, ids=IDS[2:])
def test_a_worker_inside_c_code_that_keeps_the_gil_ends_too(kind: tuple[str, str]) -> None:
    before = children()
    engine = make(kind, num_workers=1)
    engine.submit(0, 1)
    engine.wait(0)
    engine.submit(1, ("spin", 10**10))
    time.sleep(0.2)
    engine.close()
    assert wait_until(lambda: children() <= before)


def test_a_child_of_the_users_function_does_not_hide_its_workers_death() -> None:
    engine = make(("process", "fork"), num_workers=1)
    engine.submit(0, ("fork", 20))
    engine.wait(0)
    engine.submit(1, ("exit",))
    begin = time.monotonic()
    with pytest.raises(WorkerDied):
        engine.wait(1)
    assert time.monotonic() - begin < 10
    engine.close()


@pytest.mark.parametrize(
    "kind",
    [("process", "forkserver"), pytest.param(("process", "fork"), marks=pytest.mark.stress)],
    ids=["forkserver", "fork"],
)
def test_workers_that_leave_finish_what_they_have_and_are_reaped(kind: tuple[str, str]) -> None:
    before = children()
    processes = make(kind)
    for ticket in range(20):
        processes.submit(ticket, ticket)
    processes.set_workers(1)
    assert [processes.wait(ticket).batch["number"] for ticket in range(20)] == list(range(20))
    numbers = itertools.count(20)

    def compute_with(num_workers: int) -> None:
        number = next(numbers)
        processes.set_workers(num_workers)
        processes.submit(number, number)
        assert processes.wait(number).batch["number"] == number

    for step in range(240):
        compute_with(1 + step % 3)
    compute_with(1)
    time.sleep(0.3)
    compute_with(2)  # starting one is when the dead are removed
    assert wait_until(lambda: len(children() - before) <= 3)  # a server and two workers
    processes.close()


@pytest.mark.parametrize("path", [None, "<stdin>"])
def test_a_script_that_is_no_file_is_said_before_a_worker_looks_for_it(
    path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    if path is not None:
        main.__file__ = path
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match=r"interactive session.*do without worker processes"):
        make(("process", "spawn"), Square(padding=b"__main__"))


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_whoever_forks_workers_warms_up_once_for_all_of_them(start_method: str) -> None:
    engine = make(("process", start_method), WarmedUp())
    for ticket in range(8):
        engine.submit(ticket, ticket)
    found = [engine.wait(ticket).batch for ticket in range(8)]
    engine.close()
    (before,) = {tuple(batch["before"]) for batch in found}
    assert len(before) == 1
    assert before[0] not in {batch["worker"] for batch in found}
    assert (before[0] == os.getpid()) == (start_method == "fork")


def test_functions_whose_module_imports_torch_find_it_imported_by_the_fork_server() -> None:
    plan = penstock.from_arrays({"x": np.arange(8)}).map(say_who_imported_torch).batch(2)
    work = PlanWork(plan)
    assert work.warm_up.imports_torch
    engine = make(("process", "forkserver"), work)
    for ticket in range(4):
        engine.submit(ticket, Item(2 * ticket, next_row=2 * ticket + 2))
    assert not any(engine.wait(ticket).batch["is_own"].any() for ticket in range(4))
    engine.close()


def test_threads_asked_to_leave_and_come_back_are_as_many_as_asked_for() -> None:
    engine = make(("thread", "fork"), num_workers=4)
    for step in range(300):
        engine.set_workers(1 + step % 4)
        engine.submit(step, step)
        assert engine.wait(step).batch["number"] == step
    engine.set_workers(4)
    together = threading.Barrier(4)
    for ticket in range(300, 304):
        engine.submit(ticket, ("meet", together))
    for ticket in range(300, 304):
        engine.wait(ticket)
    engine.close()


def test_with_few_descriptors_held_batches_become_copies() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        for kind in (("thread", "fork"), ("process", "fork")):
            engine = make(kind, num_workers=1)
            held = []
            for ticket in range(500):
                engine.submit(ticket, ticket)
                held.append(engine.wait(ticket).batch["square"])
            assert [array[0] for array in held] == [ticket**2 for ticket in range(500)]
            engine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_workers_share_few_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
    try:
        engine = make(("process", "forkserver"), num_workers=4)
        held = []
        for ticket in range(8):
            engine.submit(ticket, ticket)
        for ticket in range(200):
            held.append(engine.wait(ticket).batch["square"])
            engine.submit(ticket + 8, ticket + 8)
        assert [array[0] for array in held] == [ticket**2 for ticket in range(200)]
        engine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_ctrl_c_while_an_item_is_being_sent_leaves_nothing_behind(
    is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(("process", "fork"), num_workers=1)
    engine.submit(0, 0)
    engine.wait(0)
    send = Channel.send

    def be_interrupted(channel: Channel, *arguments: Any, **options: Any) -> None:
        if is_sent:
            send(channel, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "send", be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.submit(1, 1)
    monkeypatch.setattr(Channel, "send", send)
    engine.forget()
    for ticket in range(2, 50):
        engine.submit(ticket, ticket)
        assert engine.wait(ticket).batch["number"] == ticket
    assert engine.num_buffers()[1] <= 1
    engine.close()


def test_a_forgotten_engine_takes_its_workers_along() -> None:
    before, threads = children(), threading.active_count()
    for kind in (("thread", "fork"), ("process", "fork"), ("process", "forkserver")):
        engine = make(kind)
        engine.submit(0, 1)
        engine.wait(0)
        del engine
        gc.collect()
        assert wait_until(lambda: children() <= before)
        assert wait_until(lambda: threading.active_count() == threads)

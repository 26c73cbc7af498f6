"""Servers die, hang and come back: every batch arrives once, in order, and equal to what the plan reads."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import ServiceError

from .processes import ServeProcess, serving, written_plan

PATIENCE = 5
"""Seconds: long enough for a server that has only half of a processor, and waited for by tests without servers."""


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_plan(tmp_path_factory.mktemp("plan"))


def assert_is_next(batch: dict[str, torch.Tensor], plan: penstock.Plan, count: int) -> None:
    """Whether a batch is the one that comes after `count` others."""
    epoch, step = divmod(count, plan.num_batches())
    assert torch.equal(batch["x"], torch.from_numpy(plan.read(step, epoch)["x"])), count


class Chaos(threading.Thread):
    """Kills servers and starts them again, and stops them for a while: one at a time, in a random order."""

    def __init__(self, servers: list[ServeProcess], num_each: int) -> None:
        super().__init__(daemon=True)
        self._servers = servers
        self._random = random.Random(7)
        self._events = [self._crash, self._hang] * num_each
        self._random.shuffle(self._events)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for event in self._events:
                time.sleep(self._random.uniform(0.05, 0.5))
                event(self._random.choice(self._servers))
        except BaseException as error:
            self.error = error

    def _crash(self, server: ServeProcess) -> None:
        server.kill()
        time.sleep(self._random.uniform(0, 0.5))
        server.start()

    def _hang(self, server: ServeProcess) -> None:
        server.send(signal.SIGSTOP)
        time.sleep(self._random.uniform(0.2, 2))
        server.send(signal.SIGCONT)


@contextlib.contextmanager
def disturbed(servers: list[ServeProcess], num_each: int) -> Iterator[Chaos]:
    chaos = Chaos(servers, num_each)
    chaos.start()
    try:
        yield chaos
    finally:
        chaos.join()
    if chaos.error is not None:
        raise chaos.error


@pytest.mark.stress
@pytest.mark.parametrize("num_each", [1, pytest.param(50, marks=pytest.mark.timeout(1800))])
def test_servers_that_are_killed_and_stopped_cost_no_batch(num_each: int, plan_file: Path) -> None:
    plan = penstock.load_plan(plan_file)
    longest = 0.0
    step = 0
    with serving(plan_file, 2) as servers:
        remote = penstock.Remote(servers=[server.address for server in servers])
        with (
            penstock.DataLoader(plan, remote=remote, prefetch=16, epochs=None) as loader,
            disturbed(servers, num_each) as chaos,
        ):
            batches = iter(loader)
            after = 200
            while chaos.is_alive() or after:
                after -= not chaos.is_alive()
                begin = time.monotonic()
                batch = next(batches)
                longest = max(longest, time.monotonic() - begin)
                assert_is_next(batch, plan, step)
                step += 1
    print(f"{num_each} kills, {num_each} stops, {step:,} batches; the longest wait was {longest:.2f} s")


def test_when_all_are_gone_each_is_named_and_the_state_goes_on_when_one_is_back(plan_file: Path) -> None:
    plan = penstock.load_plan(plan_file)
    with serving(plan_file, 2) as servers:
        remote = penstock.Remote(servers=[server.address for server in servers], timeout_seconds=PATIENCE)
        with penstock.DataLoader(plan, remote=remote, prefetch=2, epochs=None) as loader:
            batches = iter(loader)
            first = list(itertools.islice(batches, 5))
            for server in servers:
                server.kill()
            names = "(?s)" + ".*".join(f"{server.address}: nothing listens there" for server in servers)
            counted = itertools.count(len(first))
            with pytest.raises(ServiceError, match=names):
                deque(zip(batches, counted, strict=False), maxlen=0)
            count = next(counted)
            state = loader.state_dict()
            servers[1].start()
            loader.load_state_dict(state)
            for batch in itertools.islice(loader, 10):
                assert_is_next(batch, plan, count)
                count += 1


def test_servers_that_hang_are_named_with_what_they_owe(plan_file: Path) -> None:
    plan = penstock.load_plan(plan_file)
    with serving(plan_file, 2) as servers:
        remote = penstock.Remote(servers=[server.address for server in servers], timeout_seconds=PATIENCE)
        with penstock.DataLoader(plan, remote=remote, prefetch=2, epochs=None) as loader:
            batches = iter(loader)
            next(batches)
            for server in servers:
                server.send(signal.SIGSTOP)
            owed = "(is connected and owes answers to . requests|does not answer)"
            with pytest.raises(ServiceError, match="(?s)" + ".*".join(f"{s.address}: {owed}" for s in servers)):
                deque(batches, maxlen=0)


def test_a_server_that_is_back_takes_over_from_one_that_hangs(plan_file: Path) -> None:
    plan = penstock.load_plan(plan_file)
    with serving(plan_file, 2) as servers:
        remote = penstock.Remote(servers=[server.address for server in servers], timeout_seconds=10)
        with penstock.DataLoader(plan, remote=remote, prefetch=2, epochs=None) as loader:
            batches = iter(loader)
            servers[0].kill()
            count = 0
            until = time.monotonic() + 3  # so that it is asked rarely whether it is back
            while time.monotonic() < until:
                assert_is_next(next(batches), plan, count)
                count += 1
            servers[0].start()
            servers[1].send(signal.SIGSTOP)
            for batch in itertools.islice(batches, 20):
                assert_is_next(batch, plan, count)
                count += 1

"""Who is asked when a server is slow, hangs or cannot compute something."""

from __future__ import annotations

import itertools
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.loader import BatchLayout, Item, LoaderStatistics, private_slot
from penstock.service import serve
from penstock.service._answers import Arrived
from penstock.service._requests import Job, Requests
from penstock.service._servers import ServerState
from penstock.service._settings import Address

A, B, C = (Address("127.0.0.1", port, "localhost") for port in (1, 2, 3))


class Asking:
    """Servers that were met and answer when a test says so, by a clock that stands still meanwhile."""

    def __init__(self, *addresses: Address) -> None:
        self.now, self.statistics, self.num_asked = 0.0, LoaderStatistics(), 0
        self._tickets = itertools.count()
        self.requests = Requests(self.statistics, clock=lambda: self.now)
        self.servers, _ = self.requests.replace_servers(addresses)
        for server in self.servers:
            self.requests.met(server, num_workers=1, step_bytes=1, step_seconds=0.0)

    def add(self, count: int = 1) -> None:
        for ticket in itertools.islice(self._tickets, count):
            self.requests.add(ticket, Item(ticket))

    def take(self, server: ServerState) -> Job | None:
        job = self.requests.take(server, waits=False)
        self.num_asked += job is not None
        return job

    def at(self, now: float) -> None:
        self.now = now
        self.requests.hedge_and_give_up()

    def answer(self, server: ServerState, job: Job) -> None:
        seconds = self.now - job.asked.get(server.address, self.now)
        self.requests.answered(server, job, Arrived(private_slot(1), BatchLayout({}), "one", 1, seconds))


def test_what_a_second_server_does_not_answer_either_is_asked_of_a_third() -> None:
    asking = Asking(A, B, C)
    asking.add()
    for place, server in enumerate(asking.servers):
        assert asking.take(server)
        asking.at(10.0 * place + 5)
    assert asking.requests.take_back() is None  # all were asked


def test_nobody_is_hedged_against_who_has_no_other_to_go_to() -> None:
    asking = Asking(A, B)
    first, second = asking.servers
    asking.requests.not_met(second, ConnectionRefusedError())
    asking.add()
    assert asking.take(first)
    asking.at(100)
    assert asking.requests.take_back() is None
    assert (asking.statistics.num_hedged, first.state) == (0, "up")


def test_a_server_that_hangs_is_suspect_and_all_it_holds_is_asked_elsewhere_without_hedging_more() -> None:
    asking = Asking(A, B)
    first, second = asking.servers
    asking.add(10)
    assert [asking.take(first).ticket for _ in range(10)] == list(range(10))
    asking.at(0.5)
    assert asking.take(second)
    asking.at(0.7)  # one, and a twentieth of the requests
    assert asking.take(second) is None
    asking.at(2.0)
    assert first.state == "suspect"
    assert [asking.take(second).ticket for _ in range(9)] == list(range(1, 10))
    assert asking.statistics.num_hedged == 1


@given(st.data())
def test_no_more_than_one_request_in_twenty_is_hedged_however_slow_servers_are(data: st.DataObject) -> None:
    asking = Asking(A, B, C)
    held: list[tuple[ServerState, Job]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        asking.now += data.draw(st.floats(0, 3))
        asking.add()
        server = data.draw(st.sampled_from(asking.servers))
        if job := asking.take(server):
            held.append((server, job))
        if held and data.draw(st.booleans()):
            asking.answer(*held.pop(data.draw(st.integers(0, len(held) - 1))))
        asking.at(asking.now)
        assert asking.statistics.num_hedged <= 1 + 0.05 * asking.num_asked + 1e-9
        assert any(server.state == "up" for server in asking.servers)


def test_a_trainer_that_pauses_longer_than_the_timeout_finds_its_servers_again() -> None:
    plan = penstock.from_arrays({"x": np.zeros((64, 1 << 20), np.uint8)}).batch(2)
    with serve(plan, "127.0.0.1:0", num_workers=1) as server:
        remote = penstock.Remote(servers=server.address, timeout_seconds=3)
        with penstock.DataLoader(plan, remote=remote, prefetch=1) as loader:
            batches = iter(loader)
            next(batches)
            time.sleep(3.5)
            assert len(list(itertools.islice(batches, 4))) == 4


def test_a_new_loop_asks_a_server_that_was_down_at_once() -> None:
    asking = Asking(A)
    (server,) = asking.servers
    for _ in range(10):
        asking.requests.not_met(server, ConnectionRefusedError())
    assert server.asks_again_at > asking.now
    asking.requests.forget()
    assert asking.requests.wait_for_outage(server)

"""Who is asked when a server is slow, hangs or cannot compute something."""

from __future__ import annotations

import itertools
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.loader import LoaderStatistics
from penstock.service import serve
from penstock.service._addresses import Address
from penstock.service._health import Health
from penstock.service._jobs import Job, Jobs
from penstock.service._requests import Requests

A, B, C = (Address("127.0.0.1", port, "localhost") for port in (1, 2, 3))


def test_what_a_second_server_does_not_answer_either_is_asked_of_a_third() -> None:
    jobs, healths = Jobs(), {server: Health() for server in (A, B, C)}
    jobs.add(0, "item")
    for place, server in enumerate((A, B, C)):
        assert jobs.take(server, now=10.0 * place)
        assert jobs.hedge(healths, now=10.0 * place + 5) == (server is not C)


def test_nobody_is_hedged_against_who_has_no_other_to_go_to() -> None:
    jobs, healths = Jobs(), {A: Health(), B: Health(state="down")}
    jobs.add(0, "item")
    jobs.take(A, now=0)
    assert not jobs.hedge(healths, now=100)
    assert jobs.num_hedged == 0


def test_a_server_that_hangs_is_suspect_and_all_it_holds_is_asked_elsewhere_without_hedging_more() -> None:
    jobs, healths = Jobs(), {A: Health(), B: Health()}
    for ticket in range(10):
        jobs.add(ticket, "item")
        assert jobs.take(A, now=0)
    assert jobs.hedge(healths, now=0.5)
    assert jobs.take(B, now=0.5)
    assert not jobs.hedge(healths, now=0.7)  # one, and a twentieth of the requests
    assert jobs.take(B, now=0.7) is None
    assert jobs.hedge(healths, now=2.0)
    assert healths[A].state == "suspect"
    assert [jobs.take(B, now=2.0).ticket for _ in range(9)] == list(range(1, 10))
    assert jobs.num_hedged == 1


@given(st.data())
def test_no_more_than_one_request_in_twenty_is_hedged_however_slow_servers_are(data: st.DataObject) -> None:
    jobs, healths = Jobs(), {server: Health() for server in (A, B, C)}
    now, tickets = 0.0, itertools.count()
    held: list[tuple[Address, Job]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.floats(0, 3))
        jobs.add(next(tickets), "item")
        server = data.draw(st.sampled_from([A, B, C]))
        if healths[server].state == "up" and (job := jobs.take(server, now)):
            held.append((server, job))
        if held and data.draw(st.booleans()):
            server, job = held.pop(data.draw(st.integers(0, len(held) - 1)))
            healths[server].answered(now - job.asked.pop(server, now))
            jobs.finish(job)
        jobs.hedge(healths, now)
        assert jobs.num_hedged <= 1 + 0.05 * jobs.num_requests + 1e-9
        assert any(health.state == "up" for health in healths.values())


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
    requests = Requests(LoaderStatistics())
    (link,), _ = requests.replace_links([A])
    for _ in range(10):
        requests.not_met(link, ConnectionRefusedError())
    assert link.health.asks_again_at > time.monotonic()
    requests.forget()
    assert requests.wait_for_outage(link)

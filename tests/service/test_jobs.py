"""Who is asked when a server is slow, hangs or cannot compute something."""

from __future__ import annotations

import itertools
import time

import numpy as np

import penstock
from penstock.service import serve
from penstock.service._addresses import Address
from penstock.service._health import Health
from penstock.service._jobs import Jobs

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


def test_a_server_that_hangs_holds_nothing_back_whatever_the_share_of_hedged_requests() -> None:
    jobs, healths = Jobs(), {A: Health(), B: Health()}
    for ticket in range(10):
        jobs.add(ticket, "item")
        assert jobs.take(A, now=0)
    assert jobs.hedge(healths, now=0.5)
    assert jobs.take(B, now=0.5)
    assert jobs.hedge(healths, now=0.6)  # one, and a twentieth of the requests
    assert jobs.take(B, now=0.6)
    assert not jobs.hedge(healths, now=0.7)
    assert jobs.hedge(healths, now=2.0)


def test_a_trainer_that_pauses_longer_than_the_timeout_finds_its_servers_again() -> None:
    plan = penstock.from_arrays({"x": np.zeros((64, 1 << 20), np.uint8)}).batch(2)
    with serve(plan, "127.0.0.1:0", num_workers=1) as server:
        remote = penstock.Remote(servers=server.address, timeout_seconds=3)
        with penstock.DataLoader(plan, remote=remote, prefetch=1) as loader:
            batches = iter(loader)
            next(batches)
            time.sleep(3.5)
            assert len(list(itertools.islice(batches, 4))) == 4

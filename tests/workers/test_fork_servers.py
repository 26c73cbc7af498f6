"""Fork servers: shared by crews that want the same, ended with the last of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from penstock.workers import Crew, ServerLease
from waiting import wait_until
from workers.programs import Echo, nothing
from workers.test_crew import ask, make

EMPTY: dict[str, str] = {}


def servers() -> set[int]:
    """The children of this process: workers of a fork server are children of that."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def before() -> set[int]:
    return servers()


@pytest.fixture
def crews() -> Iterator[list[Crew]]:
    made: list[Crew] = []
    yield made
    for crew in made:
        crew.close()


def test_crews_share_a_server_and_the_last_one_ends_it(before: set[int], crews: list[Crew]) -> None:
    crews += [make("forkserver"), make("forkserver", Echo("other"))]
    first, second = (crew.start() for crew in crews)
    pids = [ask(crews[0], first, 1)[2], ask(crews[1], second, 1)[2]]
    (server,) = servers() - before
    assert {psutil.Process(pid).ppid() for pid in pids} == {server}
    crews[0].close()
    assert not psutil.pid_exists(pids[0]), "closing waits for the worker, though the server goes on"
    assert ask(crews[1], second, 2) == ("other", 2, pids[1])
    crews[1].close()
    assert wait_until(lambda: servers() <= before)


def test_a_worker_of_one_crew_ends_alone_and_both_crews_learn_how_theirs_ended(crews: list[Crew]) -> None:
    crews += [make("forkserver"), make("forkserver")]
    first, second = (crew.start() for crew in crews)
    assert first.number == second.number
    for crew, worker, message, code in ((crews[0], first, "exit", 7), (crews[1], second, "kill", -signal.SIGKILL)):
        pid = ask(crew, worker, 0)[2]
        with pytest.raises(EOFError):
            ask(crew, worker, message)
        assert crew.remove_dead(worker) == code
        assert worker.pid == pid


@pytest.mark.parametrize("change", ["environment", "path", "folder", "processors"])
def test_whoever_changes_what_workers_inherit_gets_another_server(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object, before: set[int], crews: list[Crew]
) -> None:
    crews.append(make("forkserver"))
    ask(crews[0], crews[0].start(), 1)
    if change == "environment":
        monkeypatch.setenv("PENSTOCK_TEST", "new")
    elif change == "path":
        monkeypatch.syspath_prepend(str(tmp_path))
    elif change == "folder":
        monkeypatch.chdir(str(tmp_path))
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    crews.append(make("forkserver"))
    environment = ask(crews[1], crews[1].start(), "environment")[1]
    assert len(servers() - before) == 2
    assert environment.get("PENSTOCK_TEST") == ("new" if change == "environment" else None)


def test_a_killed_server_is_replaced_for_all_who_shared_it(before: set[int], crews: list[Crew]) -> None:
    crews += [make("forkserver"), make("forkserver")]
    old = [crew.start() for crew in crews]
    answers = [ask(crew, worker, 0) for crew, worker in zip(crews, old, strict=True)]
    (server,) = servers() - before
    os.kill(server, signal.SIGKILL)
    assert wait_until(lambda: psutil.Process(answers[0][2]).ppid() != server)
    new = [crew.start() for crew in crews]
    assert [ask(crew, worker, 1)[1] for crew, worker in zip(crews, new, strict=True)] == [1, 1]
    assert len(servers() - before - {server}) == 1
    assert ask(crews[0], old[0], 2)[1] == 2, "its workers live on"


def test_a_lease_has_the_server_running_before_a_crew_asks_for_it(before: set[int], crews: list[Crew]) -> None:
    lease = ServerLease(EMPTY, nothing)
    (server,) = servers() - before
    crews.append(make("forkserver"))
    assert psutil.Process(ask(crews[0], crews[0].start(), 1)[2]).ppid() == server
    crews[0].close()
    assert server in servers()
    lease.close()
    lease.close()
    assert server not in servers()


def test_a_forked_child_lets_go_of_the_server_and_has_another(before: set[int]) -> None:
    lease = ServerLease(EMPTY, nothing)
    (server,) = servers() - before
    pid = os.fork()
    if pid == 0:
        try:
            lease.close()
            own = ServerLease(EMPTY, nothing)
            os._exit(0 if server not in servers() and len(servers()) == 1 and own.server is not lease.server else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert server in servers()
    del lease
    assert wait_until(lambda: server not in servers())

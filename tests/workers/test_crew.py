"""Worker processes of any kind: started, listened to, missed, ended."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.workers import Crew, WorkerProcess
from waiting import wait_until
from workers.programs import Echo, Faulty, Holding, Unloadable, nothing

METHODS = ["forkserver", "spawn", "fork"]


def make(method: Any, program: Any = None, **environment: str) -> Crew:
    return Crew(program or Echo(), method, environment=environment, warm_up=nothing, otherwise="do without.")


@pytest.fixture(params=METHODS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    made = make(request.param)
    yield made
    made.close()


def ask(crew: Crew, worker: WorkerProcess, message: Any) -> Any:
    worker.send(message)
    assert crew.wait(30) == [worker]
    return worker.receive()


def test_each_worker_runs_the_program_and_has_a_number_of_its_own(crew: Crew) -> None:
    first, second = crew.start(), crew.start()
    assert (first.number, second.number) == (0, 1)
    answers = [ask(crew, first, 1), ask(crew, second, "two")]
    assert [answer[:2] for answer in answers] == [("echo", 1), ("echo", "two")]
    assert len({answer[2] for answer in answers} | {os.getpid()}) == 3


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Forks inherit what is frozen, as all modules are in tests."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_workers_collect_garbage_but_not_among_what_they_share_with_their_server() -> None:
    for method in METHODS:
        crew = make(method)
        assert ask(crew, crew.start(), "garbage")[1] == (True, method == "forkserver")
        crew.close()


@pytest.mark.parametrize(("message", "code"), [("kill", -signal.SIGKILL), ("exit", 7)])
def test_a_death_is_an_end_of_file_and_its_exit_code_is_known(crew: Crew, message: str, code: int) -> None:
    worker, other = crew.start(), crew.start()
    pid = ask(crew, worker, 0)[2]
    with pytest.raises(EOFError):
        ask(crew, worker, message)
    assert crew.remove_dead(worker) == code
    assert worker.pid == pid
    assert ask(crew, other, 1)[:2] == ("echo", 1)


def test_a_worker_that_closed_its_channel_and_goes_on_is_killed(crew: Crew) -> None:
    worker, other = crew.start(), crew.start()
    pid = ask(crew, worker, 0)[2]
    with pytest.raises(EOFError):
        ask(crew, worker, "close all")
    assert crew.remove_dead(worker) == -signal.SIGKILL
    assert not psutil.pid_exists(pid)
    assert ask(crew, other, 1)[:2] == ("echo", 1)


def test_workers_leave_signals_to_their_owner_and_are_in_another_process_group(crew: Crew) -> None:
    worker = crew.start()
    assert ask(crew, worker, "signals")[1] == "signals"
    assert ask(crew, worker, "group")[1] != os.getpgid(0)


@pytest.mark.parametrize("method", METHODS)
def test_closing_ends_every_process_whatever_it_is_doing(method: str) -> None:
    gc.collect()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    descriptors = len(os.listdir("/proc/self/fd"))
    crew = make(method)
    workers = [crew.start() for _ in range(2)]
    ask(crew, workers[0], 0)
    for worker in workers:
        worker.send("sleep")
    begin = time.monotonic()
    crew.close()
    crew.close()
    assert time.monotonic() - begin < 30
    assert crew.is_closed
    assert wait_until(lambda: {child.pid for child in psutil.Process().children(recursive=True)} <= before, seconds=10)
    del worker, workers
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_forks_that_hold_no_lock_need_not_finish_what_they_are_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers._crew._FINISH_SECONDS", 55.0)
    lock, one_of_many = multiprocessing.Lock(), multiprocessing.BoundedSemaphore(3)
    crew = make("fork")
    workers = [crew.start() for _ in range(2)]
    pids = [ask(crew, worker, 0)[2] for worker in workers]
    for worker in workers:
        worker.send("sleep")
    begin = time.monotonic()
    with lock:  # held by this process, which goes on
        crew.close()
    assert time.monotonic() - begin < 50
    assert not any(map(psutil.pid_exists, pids))
    assert one_of_many.acquire(timeout=1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_fork_that_holds_a_lock_is_let_finish(count: int) -> None:
    lock = multiprocessing.BoundedSemaphore(count)
    crew = make("fork", Holding(lock))
    worker = crew.start()
    ask(crew, worker, "begin")
    worker.send(0.5)
    assert wait_until(lambda: lock.get_value() == count - 1)  # type: ignore[attr-defined]
    crew.close()
    assert lock.get_value() == count, "it was given back"  # type: ignore[attr-defined]


class Owner:
    """Closes its crew when it is forgotten; part of a cycle, so that only the garbage collector forgets it."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.itself = crew, self

    def __del__(self) -> None:
        self.crew.close()


def test_a_crew_in_a_garbage_cycle_may_be_closed_after_its_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector calls `__del__` in no order that one can rely on, here that of the channels first."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    lock = multiprocessing.Lock()
    crew = make("fork", Holding(lock))
    worker = crew.start()
    ask(crew, worker, "begin")
    worker.send(60)
    assert wait_until(lambda: lock._semlock._is_zero())  # type: ignore[attr-defined]
    pid, _ = worker.pid, crew.start()  # another, so that the crew listens anew
    Owner(crew)
    del crew, worker
    gc.collect()
    assert raised == []
    assert wait_until(lambda: not psutil.pid_exists(pid), seconds=10)


def test_a_released_worker_ends_and_the_rest_of_the_crew_does_not(crew: Crew) -> None:
    worker, other = crew.start(), crew.start()
    pid = ask(crew, worker, 0)[2]
    crew.release(worker)
    assert wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, seconds=10
    )
    assert ask(crew, other, 1)[:2] == ("echo", 1)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_get_the_environment_they_are_given(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_KEPT", "yes")
    crew = make(method, PENSTOCK_TEST_GIVEN="5")
    _, environment, _ = ask(crew, crew.start(), "environment")
    assert (environment["PENSTOCK_TEST_KEPT"], environment["PENSTOCK_TEST_GIVEN"]) == ("yes", "5")
    crew.close()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_program_that_cannot_be_loaded_is_an_error_of_the_owner(method: str) -> None:
    crew = make(method, Unloadable())
    worker = crew.start()
    assert crew.wait(30) == [worker]
    with pytest.raises(LookupError, match="no shoes") as caught:
        worker.receive()
    assert "was being set up" in caught.value.__notes__[0]
    assert "in refuse" in str(caught.value.__cause__)
    crew.close()


def test_a_program_that_cannot_be_sent_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"cannot be sent to them: .*at the top of a module, or do without\."):
        make("spawn", Echo(lambda: None))  # type: ignore[arg-type]


def test_a_mistake_in_the_program_is_seen_as_a_death_and_printed(capfd: pytest.CaptureFixture[str]) -> None:
    crew = make("spawn", Faulty())
    worker = crew.start()
    assert crew.wait(30) == [worker]
    with pytest.raises(EOFError):
        worker.receive()
    assert crew.remove_dead(worker) == 1
    crew.close()
    assert "a mistake of the program's" in capfd.readouterr().err


OWNER = """
import os, sys, time
sys.path.insert(0, {tests!r})
from workers.programs import Echo, nothing
from penstock.workers import Crew

class Mine(Echo):
    pass

def main():
    crew = Crew(Mine("mine"), {method!r}, environment={{}}, warm_up=nothing, otherwise="do without.")
    worker = crew.start()
    worker.send(0)
    crew.wait(30)
    print(*worker.receive(), flush=True)
    worker.send({last!r})
    time.sleep(1)
    os.kill(os.getpid(), 9)

{begin}
"""


def run_owner(folder: Path, method: str, begin: str, last: str = "sleep") -> subprocess.CompletedProcess[str]:
    script = folder / "owner.py"
    script.write_text(OWNER.format(tests=str(Path(__file__).parents[1]), method=method, begin=begin, last=last))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("last", [pytest.param("sleep", marks=pytest.mark.stress), "close all"])
def test_the_program_may_be_of_the_owners_script_and_workers_end_when_it_is_killed(
    method: str, last: str, tmp_path: Path
) -> None:
    done = run_owner(tmp_path, method, "if __name__ == '__main__': main()", last)
    assert done.returncode == -signal.SIGKILL, done.stderr
    word, _, pid = done.stdout.split()
    assert word == "mine"
    assert wait_until(lambda: not psutil.pid_exists(int(pid)), seconds=10)


def test_a_script_that_starts_workers_while_a_worker_imports_it_is_told_to_guard_itself(tmp_path: Path) -> None:
    done = run_owner(tmp_path, "spawn", "if sys.argv: main()")
    assert "while a worker imports it" in done.stderr
    assert "under `if __name__ == '__main__':`" in done.stderr


BLOCKS = {
    "main()": True,
    "for _ in range(1):\n    with open('/dev/null'):\n        main()": True,
    "try:\n    main()\nfinally:\n    pass": True,
    "if __name__ == '__main__':\n    main()": False,
    "match __name__:\n    case '__main__':\n        main()": False,
    "while True:\n    if len(sys.argv) == 1:\n        main()\n    break": False,
    "try:\n    raise KeyError\nexcept KeyError:\n    main()": False,
}


@pytest.mark.parametrize(("block", "is_refused"), BLOCKS.items())
def test_a_script_that_would_start_workers_again_is_refused_at_once_and_only_where_that_is_certain(
    block: str, is_refused: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nfrom penstock.workers import _script\n\n"
        f"def main():\n    _script.find_script('do without')\n\n{block}\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ("ScriptError: script.py, line" in done.stderr) == is_refused, done.stderr
    assert done.returncode == is_refused


FINDER = """
import multiprocessing, sys
from workers.programs import Echo, nothing
from penstock.workers import Crew

class Mine(Echo):
    pass

def own(method):
    crew = Crew(Mine("mine"), method, environment={}, warm_up=nothing, otherwise="do without.")
    worker = crew.start()
    worker.send(0)
    crew.wait(100)
    print(*worker.receive()[:2], flush=True)
    crew.close()

if __name__ == "__main__":
    how, method = sys.argv[1:]
    if how == "spawned":
        process = multiprocessing.get_context("spawn").Process(target=own, args=(method,))
        process.start()
        process.join()
    else:
        own(method)
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("own.py", ["own.py", "itself"]),
        ("own.py", ["own.py", "spawned"]),
        ("package/own.py", ["-m", "package.own", "itself"]),
        ("package/own.py", ["-m", "package.own", "spawned"]),
        ("package/__main__.py", ["-m", "package", "itself"]),
        ("folder/__main__.py", ["folder", "itself"]),
    ],
    ids=["script", "script, spawned", "module", "module, spawned", "package", "folder"],
)
def test_the_program_may_be_of_what_runs_as_main(path: str, command: list[str], method: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(FINDER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), *sys.path))}
    done = subprocess.run(
        [sys.executable, *command, method],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "mine 0\n", done.stderr

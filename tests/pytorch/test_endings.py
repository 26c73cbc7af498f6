"""However a training script ends, nothing of it stays: each test runs a script and looks at what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from waiting import wait_until

PREAMBLE = """
import os, sys, time, signal
import numpy as np
import penstock

def slow(row, rng):
    time.sleep(0.001)
    return row

def wait_to_go_on():
    while not os.path.exists("go-on"):
        time.sleep(0.01)

plan = penstock.from_arrays({"x": np.arange(4000)}).shuffle(seed=1)
"""
LOADERS = """
loaders = [  # fork comes first: it must not take along what a thread is in the middle of
    *[
        penstock.DataLoader(plan.batch(4), workers="process", num_workers=2, start_method=method, epochs=None)
        for method in ("fork", "spawn", "forkserver")
    ],
    penstock.DataLoader(plan.batch(4), workers="thread", num_workers=2, epochs=None),
]
"""
FAMILY = {"forkserver": 3, "spawn": 2, "fork": 2}  # with the fork server itself


class Script:
    """A training script in a process group and folder of its own."""

    def __init__(self, folder: Path, body: str) -> None:
        path = folder / "train.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        self.shared: set[str] = set()
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        self.family: dict[int, float] = {}
        self._folder = folder
        running.append(self)

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        read = self.process.stdout.readline().strip()
        if read != line:
            self.process.kill()
            raise AssertionError(f"{read!r}; stderr: {self.process.communicate()[1]}")
        self.remember()

    def remember(self) -> None:
        """Note every process that belongs to the script now, and what any of them has in /dev/shm."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.family[child.pid] = child.create_time()
        for pid in (self.process.pid, *self.family):
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
                self.shared |= {line.split()[-1] for line in maps if " /dev/shm/" in line}

    def wait_for_family(self, size: int) -> None:
        """Until so many processes belong to it; some may still be starting."""

        def is_complete() -> bool:
            self.remember()
            return len(self.family) >= size

        assert wait_until(is_complete), self.family
        assert len(self.family) == size

    def let_go_on(self) -> None:
        """End its `wait_to_go_on()`."""
        (self._folder / "go-on").touch()

    def left(self) -> list[int]:
        return [pid for pid, created in self.family.items() if _is_running(pid, created)]

    def finish(self) -> tuple[int, str, str]:
        """(exit code, output, errors) when it has ended."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def assert_nothing_left(self, seconds: float = 3.0) -> None:
        wait_until(lambda: not self.left(), seconds)
        assert self.left() == []
        assert self.shared == set()


running: list[Script] = []


def _is_running(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ENDINGS = {
    "break": ("break", 0),
    "exception": ("raise SystemExit(3)", 3),
    "forgotten": ("loaders.clear(); del loaders; break", 0),
}


@pytest.fixture(autouse=True)
def end_scripts() -> Iterator[None]:
    """What a failed test left running."""
    yield
    while running:
        script = running.pop()
        script.process.kill()
        script.process.communicate()


@pytest.mark.parametrize(
    "ending", ["exception", *(pytest.param(ending, marks=pytest.mark.stress) for ending in ("break", "forgotten"))]
)
def test_a_script_that_ends_without_close_ends_at_once_and_quietly(tmp_path: Path, ending: str) -> None:
    """Threads and processes of each kind run in one script."""
    statement, expected_code = ENDINGS[ending]
    script = Script(
        tmp_path,
        f"""
        {textwrap.indent(LOADERS, " " * 8).strip()}
        for step, batches in enumerate(zip(*loaders)):
            if step == 3:
                print("running", flush=True)
                wait_to_go_on()
                {statement}
        """,
    )
    script.wait_for("running")
    script.wait_for_family(sum(FAMILY.values()))
    script.let_go_on()
    begin = time.monotonic()
    assert script.finish() == (expected_code, "", "")
    assert time.monotonic() - begin < 30
    script.assert_nothing_left()


def test_ctrl_c_ends_everything_with_nothing_but_the_traceback(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        f"""
        {textwrap.indent(LOADERS, " " * 8).strip()}
        for step, batches in enumerate(zip(*loaders)):
            if step == 3:
                print("running", flush=True)
        """,
    )
    script.wait_for("running")
    script.wait_for_family(sum(FAMILY.values()))
    os.killpg(script.process.pid, signal.SIGINT)
    code, _, err = script.finish()
    assert code == -signal.SIGINT
    assert err.count("Traceback (most recent call last)") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    script.assert_nothing_left()


STARTING = """
loaders = [
    penstock.DataLoader(plan.batch(4), workers="process", num_workers=2, start_method=method, epochs=None)
    for method in ("spawn", "forkserver")
]
print("starting", flush=True)
for batches in zip(*loaders):
    pass
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(
    "delay", [0.3, *(pytest.param(delay, marks=pytest.mark.stress) for delay in (0.0, 0.03, 0.1, 0.6, 1.0, 1.5))]
)
def test_a_script_stopped_while_its_workers_start_leaves_none(
    tmp_path: Path, delay: float, stop: signal.Signals
) -> None:
    script = Script(tmp_path, STARTING)
    script.wait_for("starting")
    assert wait_until(lambda: script.remember() or script.family)
    time.sleep(delay)
    script.remember()
    os.killpg(script.process.pid, stop)
    script.process.wait(10)
    script.assert_nothing_left()
    code, _, err = script.finish()
    assert code == -stop
    assert ("KeyboardInterrupt" in err) == (stop == signal.SIGINT)


@pytest.mark.stress  # on a loaded machine an alarm may also ring outside the `try`
def test_a_caught_ctrl_c_leaves_a_loader_that_works(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        if __name__ == "__main__":
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            whole = [x for step in range(100) for x in plan.batch(40).read(step)["x"].tolist()]
            for options in ({"workers": "thread"}, {"workers": "process", "start_method": "fork"}):
                loader = penstock.DataLoader(plan.map(slow).batch(40), num_workers=2, **options)
                got, interrupts = [], 0
                while len(got) < 4000:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0.2)
                        for batch in loader:
                            got += batch["x"].tolist()
                    except KeyboardInterrupt:
                        interrupts += 1
                        loader.load_state_dict(loader.state_dict())
                signal.setitimer(signal.ITIMER_REAL, 0)
                print(got == whole and interrupts > 2, flush=True)
                loader.close()
        """,
    )
    assert script.finish() == (0, "True\nTrue\n", "")


def test_a_sigkill_of_the_trainer_takes_every_worker_along(tmp_path: Path) -> None:
    """Also one that is inside a C function and keeps the GIL."""
    script = Script(
        tmp_path,
        """
        def spin(row, rng):
            if row["x"] % 100 == 7:
                sum(range(10**10))
            return row

        if __name__ == "__main__":
            loaders = [
                penstock.DataLoader(plan.map(spin).batch(4), workers="process", num_workers=2, start_method=method)
                for method in ("fork", "spawn", "forkserver")
            ]
            for batches in zip(*loaders):
                print("running", flush=True)
        """,
    )
    script.wait_for("running")
    script.wait_for_family(sum(FAMILY.values()))
    time.sleep(0.5)  # until workers of each kind spin
    script.process.kill()
    script.process.wait()
    script.assert_nothing_left()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["train.py"]
    script.finish()


@pytest.mark.stress
def test_a_grandchild_that_inherits_nothing_keeps_nothing_alive(tmp_path: Path) -> None:
    """A program that the user's script starts holds no life-line, so workers end though it lives on."""
    script = Script(
        tmp_path,
        """
        import subprocess
        loader = penstock.DataLoader(plan.batch(4), workers="process", num_workers=2, epochs=None)
        batches = iter(loader)
        next(batches)
        print("running", flush=True)
        wait_to_go_on()
        other = subprocess.Popen(["sleep", "20"], close_fds=False, start_new_session=True, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        pid = os.fork()
        if pid == 0:
            os.close(1); os.close(2)
            time.sleep(20)
        time.sleep(20)
        """,
    )
    script.wait_for("running")
    script.wait_for_family(FAMILY["forkserver"])
    script.let_go_on()
    trainer = psutil.Process(script.process.pid)
    assert wait_until(lambda: len(trainer.children(recursive=True)) == len(script.family) + 2)
    family = trainer.children(recursive=True)
    script.process.kill()
    script.process.wait()
    try:
        script.assert_nothing_left()
    finally:
        for process in family:
            if process.is_running():
                process.kill()
    script.finish()


def test_functions_of_the_script_itself_run_in_processes(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        class MyError(Exception):
            pass

        def double(row, rng):
            if row["x"] == 30:
                raise MyError("thirty")
            return {"x": row["x"] * 2}

        if __name__ == "__main__":
            plain = penstock.from_arrays({"x": np.arange(40)}).map(double).batch(8)
            for method in ("forkserver", "spawn"):
                loader = penstock.DataLoader(plain, workers="process", num_workers=1, start_method=method)
                try:
                    for batch in loader:
                        print(batch["x"].tolist()[0])
                except MyError as error:
                    print(type(error).__name__, error)
                loader.close()
        """,
    )
    code, out, err = script.finish()
    assert (code, err) == (0, "")
    assert out.split("\n") == ["0", "16", "32", "MyError thirty"] * 2 + [""]


@pytest.mark.stress
def test_a_script_run_as_a_module_works_too(tmp_path: Path) -> None:
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("SIZE = 4\n")
    (package / "train.py").write_text(
        PREAMBLE
        + textwrap.dedent("""
        from .sizes import SIZE

        def double(row, rng):
            return {"x": row["x"] * 2}

        if __name__ == "__main__":
            plan = penstock.from_arrays({"x": np.arange(8)}).map(double).batch(SIZE)
            with penstock.DataLoader(plan, workers="process", num_workers=1) as loader:
                print([batch["x"].tolist() for batch in loader])
        """)
    )
    done = subprocess.run([sys.executable, "-m", "job.train"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[[0, 2, 4, 6], [8, 10, 12, 14]]\n", "")


@pytest.mark.stress
def test_the_script_is_not_imported_when_no_function_lives_in_it(tmp_path: Path) -> None:
    """It has no `if __name__ == "__main__"`, and writes down every time it runs."""
    script = Script(
        tmp_path,
        """
        with open("runs.txt", "a") as file:
            file.write("ran\\n")
        loader = penstock.DataLoader(plan.batch(80), workers="process", num_workers=2)
        print(sum(1 for _ in loader))
        """,
    )
    assert script.finish() == (0, "50\n", "")
    assert (tmp_path / "runs.txt").read_text() == "ran\n"


def test_a_script_without_a_main_guard_is_told_and_starts_no_cascade(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        loader = penstock.DataLoader(plan.map(slow).batch(100), workers="process", num_workers=1)
        print(sum(1 for _ in loader))
        """,
    )
    code, out, err = script.finish()
    assert code == 1
    assert out == ""
    assert "Put what the script does under `if __name__ == '__main__':`" in err
    assert len(err.splitlines()) < 12


@pytest.mark.stress
def test_a_function_of_an_interactive_session_is_refused_with_the_reason() -> None:
    body = PREAMBLE + "next(iter(penstock.DataLoader(plan.map(slow).batch(4), workers='process', num_workers=1)))"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60)
    assert "is defined in a notebook or an interactive session" in done.stderr
    assert len(done.stderr.splitlines()) < 12
    assert done.returncode == 1


@pytest.mark.stress
def test_what_a_worker_prints_arrives(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        def talk(row, rng):
            print("row", row["x"])
            return row

        if __name__ == "__main__":
            print("first")
            for method in ("forkserver", "fork"):
                data = penstock.from_arrays({"x": np.arange(3)}).map(talk).batch(3)
                loader = penstock.DataLoader(data, workers="process", num_workers=1, start_method=method)
                list(loader)
                loader.close()
        """,
    )
    code, out, err = script.finish()
    assert (code, err) == (0, "")
    assert sorted(out.split("\n")) == sorted(["first", *["row 0", "row 1", "row 2"] * 2, ""])


def test_a_sigterm_to_the_group_lets_the_trainer_save_and_go_on(tmp_path: Path) -> None:
    """As a cluster sends it to every process of a job: the trainer's handler decides."""
    script = Script(
        tmp_path,
        """
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        loader = penstock.DataLoader(plan.batch(4), workers="process", num_workers=2, epochs=None)
        rows = []
        for step, batch in enumerate(loader):
            rows += batch["x"].tolist()
            if step == 2:
                print("running", flush=True)
            if told and not os.path.exists("stop"):
                open("stop", "w").close()
                last = step + 200
            if told and step >= last:
                break
        print(rows[:4000] == [x for k in range(1000) for x in plan.batch(4).read(k)["x"].tolist()][:len(rows)])
        """,
    )
    script.wait_for("running")
    for pid in (*script.family, script.process.pid):
        os.kill(pid, signal.SIGTERM)
    code, out, err = script.finish()
    assert (code, out, err) == (0, "True\n", "")
    script.assert_nothing_left()


@pytest.mark.stress
def test_a_loader_that_was_made_and_not_used_leaves_no_fork_server(tmp_path: Path) -> None:
    """It has one started when it is made; whoever closes, forgets or never uses the loader ends it."""
    script = Script(
        tmp_path,
        """
        import psutil
        def servers():
            return len(psutil.Process().children())
        make = lambda: penstock.DataLoader(plan.batch(4), workers="process", num_workers=1)
        closed, forgotten = make(), make()
        counts = [servers()]
        closed.close()
        counts.append(servers())
        del forgotten
        counts.append(servers())
        used = make()
        next(iter(used))
        counts.append(servers())
        used.close()
        counts.append(servers())
        never = make()
        print(*counts, flush=True)
        """,
    )
    script.wait_for("1 1 0 1 0")
    assert script.finish()[0] == 0
    script.assert_nothing_left()

"""Scripts that crash, end early, have no steps, read input, or are interrupted: a clear sentence, nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.doctor import DoctorSettings, environment, recording_folder, run_script

from .scripts import ENVIRONMENT, diagnose, doctor
from .test_scripts_of_others import HEAD

pytest.importorskip("torch")


def write(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def test_a_script_that_fails_keeps_its_exit_code_and_its_traceback(tmp_path: Path) -> None:
    text = HEAD + "for number, batch in enumerate(DataLoader(Slow(), batch_size=8)):\n    assert number < 5, 'mine'\n"
    found = diagnose(write(tmp_path, text), cwd=tmp_path)
    assert found["exit_code"] == 1
    assert "AssertionError: mine" in found["stderr"]
    assert "penstock" not in found["stderr"]
    assert any("ended with exit code 1" in note for note in found["notes"])
    assert found["verdict"].endswith(" % of the time, in 6 steps: let it run longer, to know more."), found


def test_a_script_that_exits_keeps_its_code(tmp_path: Path) -> None:
    found = diagnose(write(tmp_path, "import sys; sys.exit(7)"), cwd=tmp_path)
    assert found["exit_code"] == 7
    assert "exit code 7 before it made a DataLoader" in found["verdict"]


def test_a_script_without_a_loader_is_told_so(tmp_path: Path) -> None:
    done = doctor(write(tmp_path, "print('hello')"), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("hello\n")
    assert "made no DataLoader" in done.stdout


def test_a_loader_that_nobody_iterates_over_has_no_steps(tmp_path: Path) -> None:
    found = diagnose(write(tmp_path, HEAD + "iter(DataLoader(Slow()))\n"), cwd=tmp_path)
    assert "never took a batch" in found["verdict"]


def test_a_loader_made_in_a_folder_that_is_gone_is_named_by_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    leave = "import os\nos.chdir('gone')\nos.rmdir(os.getcwd())\n"
    script = tmp_path / write(tmp_path, HEAD + leave + "for batch in DataLoader(range(8)):\n    pass\n")
    assert diagnose(str(script), cwd=tmp_path)["loader"] == f"{script}:18"


def test_a_script_reads_its_own_input(tmp_path: Path) -> None:
    done = doctor(write(tmp_path, "print('read', input())"), cwd=tmp_path, input="a line\n")
    assert "read a line" in done.stdout


def test_a_script_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    done = doctor("nowhere.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "There is no script 'nowhere.py'" in done.stderr


def test_a_program_for_another_machine_is_wrong_usage_and_no_finding(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(b"\x7fELF\0")
    (tmp_path / "train").chmod(0o755)
    done = doctor("./train", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Exec format error" in done.stderr


@pytest.mark.stress
def test_what_runs_on_the_way_out_saves_no_checkpoint(tmp_path: Path) -> None:
    text = HEAD + (
        "torch.save(1, 'model.pt')\n"
        "try:\n"
        "    for batch in DataLoader(Slow(), batch_size=8):\n"
        "        step(batch)\n"
        "finally:\n"
        "    torch.save(2, 'model.pt')\n"
        "    open('log.txt', 'w').write('closed')\n"
    )
    found = diagnose(write(tmp_path, text), options=("--seconds", "3"), cwd=tmp_path)
    import torch

    assert torch.load(tmp_path / "model.pt") == 1
    assert (tmp_path / "log.txt").read_text() == "closed"
    assert any("model.pt" in note for note in found["notes"])


KILLED = """
print("pid", __import__("os").getpid(), flush=True)
for batch in DataLoader(Slow(), batch_size=8, num_workers=1):
    step(batch)
"""


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([sys.executable], id="itself"),
        pytest.param(["sh", "-c", '"$0" "$@"; true', sys.executable], id="through a shell", marks=pytest.mark.stress),
    ],
)
def test_a_script_does_not_outlive_a_doctor_that_is_killed(launcher: list[str], tmp_path: Path) -> None:
    script = write(tmp_path, HEAD + KILLED)
    command = [sys.executable, "-m", "penstock.cli", "doctor", "--", *launcher, script]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        process.kill()
    wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} lives on")


FORKS = """
import os
child = os.fork()
if child == 0:
    for number, batch in enumerate(DataLoader(Slow(), batch_size=8)):
        if number == 5:
            os._exit(3)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for batch in DataLoader(Slow(), batch_size=8):
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    step(batch)
"""


@pytest.mark.stress
def test_a_script_that_forks_is_seen(tmp_path: Path) -> None:
    found = diagnose(write(tmp_path, HEAD + FORKS), options=("--seconds", "3"), cwd=tmp_path)
    assert "child 3" in found["stderr"]
    assert "Traceback" not in found["stderr"]
    assert found["ceiling"] is not None
    assert found["script_exit_code"] == 0


REFUSED = """
import builtins, os

def refusing(call):
    def refuse(path, *arguments, **options):
        if str(path).startswith("/proc/") and {pattern!r} in str(path):
            raise PermissionError(13, "Permission denied", path)
        return call(path, *arguments, **options)
    return refuse

os.open, os.listdir, builtins.open = refusing(os.open), refusing(os.listdir), refusing(builtins.open)
"""


@pytest.mark.stress
@pytest.mark.parametrize("pattern", ["schedstat", "/proc/"])
def test_what_the_kernel_does_not_tell_is_left_out(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSED.format(pattern=pattern))
    script = write(tmp_path, HEAD + "for batch in DataLoader(Slow(), batch_size=8, num_workers=1):\n    step(batch)\n")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    found = diagnose(script, options=("--seconds", "10", "--html", "r.html"), cwd=tmp_path, env=environment)
    assert "Traceback" not in found["stderr"], found["stderr"]
    assert found["ceiling"] is not None
    assert (tmp_path / "r.html").stat().st_size < 500_000


@pytest.mark.stress
def test_with_full_the_script_runs_to_its_end(tmp_path: Path) -> None:
    text = HEAD + "for batch in DataLoader(Slow(), batch_size=4):\n    step(batch)\nprint('the end')\n"
    found = diagnose(write(tmp_path, text), options=("--full", "--seconds", "10"), cwd=tmp_path)
    assert "the end" in found["stderr"]
    assert found["ceiling"]["ratio"] > 1.15


def test_an_interrupt_still_gives_the_report(tmp_path: Path) -> None:
    text = HEAD + "for number, batch in enumerate(DataLoader(Slow(), batch_size=8)):\n    step(batch)\n"
    text += "    if number == 60:\n        print('now', flush=True)\n"
    command = [sys.executable, "-m", "penstock.cli", "doctor", "--", write(tmp_path, text)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, process_group=0,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while "now" not in process.stdout.readline():
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == 130
    assert "Interrupted: this is what was seen until then." in output


@pytest.mark.parametrize("given", [{"seconds": 0}, {"seconds": float("nan")}, {"steps": 0}])
def test_a_time_that_never_ends_and_no_time_at_all_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))}={next(iter(given.values()))}; expected"):
        DoctorSettings(**given)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_doctor_ends_the_script_and_leaves_a_report_but_no_folder(
    number: int, tmp_path: Path
) -> None:
    script = write(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "doctor", "--", script],
        cwd=tmp_path,
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        output = process.stdout.read()
    assert process.returncode == 128 + number
    assert "Interrupted: this is what was seen until then." in output
    assert list((tmp_path / "tmp").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_scripts_own_sitecustomize_and_path_are_as_without_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'mine'\n")
    script = write(tmp_path, "import sys; print(mine, [p for p in sys.path if '_injected' in p])")
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "doctor", "--", script],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("mine []\n"), done.stderr


def test_a_program_that_asks_the_doctor_does_not_go_on_adopting_orphans(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    with recording_folder() as folder:
        run_script([str(tmp_path / "train.py")], DoctorSettings(), folder=folder)
    orphan = "subprocess.Popen([sys.executable, '-c', 'open(0).read()'], stdin=0, stdout=2)"
    reader, writer = os.pipe()
    code = f"import subprocess, sys; print({orphan}.pid)"
    done = subprocess.run([sys.executable, "-c", code], stdin=reader, stdout=subprocess.PIPE, check=True)
    adopted_by = int(Path(f"/proc/{int(done.stdout)}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.close(writer)
    os.close(reader)
    assert adopted_by != os.getpid()


OUTLIVES = """
print("ready", flush=True)
input()
from torch.utils.data import DataLoader
for num_workers in (0, 1):
    assert sum(map(len, DataLoader(range(8), batch_size=2, num_workers=num_workers))) == 8
print("went on")
"""


@pytest.mark.stress
def test_a_process_that_outlives_the_doctor_goes_on_as_if_there_had_been_none(tmp_path: Path) -> None:
    """Its folder is gone, before torch is imported there."""
    folder = tmp_path / "gone"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", OUTLIVES],
        env=environment(os.environ, folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    folder.rmdir()
    said, errors = process.communicate("\n", timeout=100)
    assert said == "went on\n", errors

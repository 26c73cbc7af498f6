"""Running a script under the doctor: what to run, its environment, the processes it leaves.

What follows `penstock doctor --` is a program, or a Python script, which needs no `python` before it. People also give
what is neither: a plan, a notebook, a folder, a shell script. Python would take any of them for its own source and fail
with a traceback about that, so the user is told what to type instead.

The script inherits the terminal: its input, output and signals are its own. The doctor samples the process tree from
outside, waits, and ends what the script left behind of its loaders.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.doctor._recording import (
    FACTS,
    FOLDER_VARIABLE,
    SETTINGS,
    Recorder,
    Recording,
    RunSettings,
    name_process,
    read_recording,
)
from penstock.filesystem import similar_path
from penstock.machine import MachineFacts, Sampler, UsageHistory, describe_machine, read_process

_INJECTED = Path(__file__).parent / "_injected"
_GRACE_SECONDS = 15.0
"""How long a script may take to end after it was stopped."""
_INTERRUPTS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER, _SET_PARENT_DEATH_SIGNAL = 36, 37, 1
_MOST_STALLED = 2
"""A script is not repeated after so many runs in a row that were too short for a turn."""
_TURNS = 60
"""About how many turns a run of `seconds` has time for; it hardly ever needs them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """How long to look."""

    seconds: float = 120.0
    """Stop the experiment after this time, counted from its first turn."""
    steps: int | None = None
    """Stop it after this many steps of the training loop."""
    full: bool = False
    """Let the script run on to its own end."""
    observe: bool = False
    """Only measure the script as it is; try nothing."""
    repeat: bool = False
    """Run the script again, and go on, whenever it ends before the experiment does. Its outputs are written again."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds:g}; expected more than 0.")
        if self.steps is not None and self.steps <= 0:
            raise ValueError(f"steps={self.steps}; expected at least 1.")

    @property
    def turn_seconds(self) -> float:
        """How long a turn should take."""
        return min(1.5, max(0.3, self.seconds / _TURNS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What was seen from outside, over the whole run; 0 where nothing could be read."""

    machine: MachineFacts
    history: UsageHistory | None
    job_cores: float
    """How many cores the script and its workers used, on average."""
    other_cores: float
    """How many everything else on the machine used."""

    def cores(self) -> dict[str, float]:
        """Both numbers, for a recording."""
        return {"job_cores": self.job_cores, "other_cores": self.other_cores}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """A script that ran under the doctor."""

    command: tuple[str, ...]
    exit_code: int
    """The script's own; 128 + n when signal n ended it."""
    was_stopped: bool
    """By the doctor, after it had seen enough."""
    interrupted_by: int | None
    """The signal with which the user, or a cluster, ended the run."""
    is_observed: bool
    """Whether nothing was to be tried."""
    seconds: float
    recording: Recording
    usage: Usage


def run_script(
    words: Sequence[str], settings: DoctorSettings, *, folder: Path, output_to_stderr: bool = False
) -> ScriptRun:
    """Run a command under the doctor, and read what was recorded in `folder`.

    Raises:
        FileNotFoundError: there is no such program or script.
        ValueError: it is there, but cannot be run.
    """
    command = command_of(words)
    begin, num_turns, num_stalled = time.perf_counter(), 0, 0
    with _adopt_orphans(), _note_interrupts() as interrupts:
        while True:
            left = settings.seconds - (time.perf_counter() - begin)
            code, usage = _run_once(command, replace(settings, seconds=left), folder, interrupts, output_to_stderr)
            recording = read_recording(folder, usage.cores())
            has_ended = code != 0 or interrupts or recording.has("stopped") or recording.has("done")
            num_stalled = num_stalled + 1 if len(recording.turns) <= num_turns else 0
            has_stalled = recording.leader is None or num_stalled > _MOST_STALLED
            if not settings.repeat or has_ended or has_stalled or time.perf_counter() - begin > settings.seconds:
                break
            num_turns = len(recording.turns)
            _prepare_another_run(folder)
    return ScriptRun(
        command=command,
        exit_code=128 - code if code < 0 else code,
        was_stopped=recording.has("stopped"),
        interrupted_by=interrupts[0] if interrupts else None,
        is_observed=settings.observe,
        seconds=time.perf_counter() - begin,
        recording=recording,
        usage=usage,
    )


def _run_once(
    command: Sequence[str], settings: DoctorSettings, folder: Path, interrupts: Sequence[int], output_to_stderr: bool
) -> tuple[int, Usage]:
    """Run a command until it ends; returns its exit code."""
    for_script: RunSettings = {
        "seconds": settings.seconds,
        "steps": settings.steps,
        "full": settings.full,
        "observe": settings.observe,
        "turn_seconds": settings.turn_seconds,
        "doctor": name_process(os.getpid()),
    }
    (folder / SETTINGS).write_text(json.dumps(for_script))
    process = subprocess.Popen(  # noqa: S603 - what the user asked to run
        command,
        env=environment(os.environ, folder),
        stdout=sys.stderr if output_to_stderr else None,
        preexec_fn=functools.partial(_end_with_doctor, ctypes.CDLL(None)),
    )
    with Sampler(process.pid, interval_seconds=0.25) as sampler:
        _wait(process, folder, interrupts)
    _end_leftovers(folder)
    return process.returncode, _summarise_usage(sampler)


def _prepare_another_run(folder: Path) -> None:
    """The experiment goes on from its recording; notices on the boards are of steps that have passed."""
    for board in folder.glob("board*"):
        board.unlink()
    Recorder(folder).note("again")


def environment(current: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment that carries the doctor into every Python process of the script."""
    path = current.get("PYTHONPATH")
    return {
        **current,
        FOLDER_VARIABLE: str(folder),
        "PYTHONPATH": f"{_INJECTED}{os.pathsep}{path}" if path else str(_INJECTED),
    }


@contextlib.contextmanager
def recording_folder() -> Iterator[Path]:
    """A folder for one run, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as name:
        yield Path(name)


def _wait(process: subprocess.Popen[Any], folder: Path, interrupts: Sequence[int]) -> None:
    """Wait for the script; terminate it if it has not ended some seconds after it was stopped."""
    facts, stopped_at, is_told = folder / FACTS, None, False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.25)
            return
        if not is_told and (number := next((each for each in interrupts if each != signal.SIGINT), None)) is not None:
            process.send_signal(number)
            is_told, stopped_at = True, time.monotonic()
        if stopped_at is None and facts.exists() and b'"stopped"' in facts.read_bytes():
            stopped_at = time.monotonic()
        if stopped_at is not None and time.monotonic() - stopped_at > _GRACE_SECONDS:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
                return
            process.kill()


def _summarise_usage(sampler: Sampler) -> Usage:
    history = sampler.history()
    root, children, others, _ = (float(column[0]) if len(column) else 0.0 for column in history.rates(overall=True))
    return Usage(
        machine=describe_machine(),
        history=history,
        job_cores=root + children,
        other_cores=others if math.isfinite(others) else 0.0,
    )


@contextlib.contextmanager
def _note_interrupts() -> Iterator[list[int]]:
    """The signals by which the run is to end: the doctor notes them, sees the script end, and reports what it has.

    Ctrl-C reaches the script too, which shares the terminal; the others are passed on to it.
    """
    seen: list[int] = []
    numbers = [each for each in _INTERRUPTS if signal.getsignal(each) is not signal.SIG_IGN]  # as under nohup
    try:
        previous = {each: signal.signal(each, lambda number, frame: seen.append(number)) for each in numbers}
    except ValueError:  # not in the main thread, where signals never arrive
        yield seen
        return
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _adopt_orphans() -> Iterator[None]:
    """Have processes that lost their parent become children of this one, so that they can be found."""
    library, previous = ctypes.CDLL(None), ctypes.c_int(0)
    try:
        library.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(previous), 0, 0, 0)
        library.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except AttributeError:  # not on Linux
        yield
        return
    try:
        yield
    finally:
        library.prctl(_SET_CHILD_SUBREAPER, previous.value, 0, 0, 0)


def _end_with_doctor(c_library: ctypes.CDLL) -> None:
    """Have the kernel end the script, or its launcher, when the doctor is killed. Ranks notice by themselves."""
    with contextlib.suppress(AttributeError):
        c_library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _end_leftovers(folder: Path) -> None:
    """End workers that outlived their trainer. Other processes that the script started and left are its own."""
    workers = {int(path.name.split("-")[0]) for path in folder.glob("*.events")}
    found = {pid: read_process(pid) for pid in workers}
    children = {pid for pid, usage in found.items() if usage is not None and usage.parent == os.getpid()}
    for pid in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + 3
    while children and time.monotonic() < end:
        children = {pid for pid in children if not _is_reaped(pid)}
        time.sleep(0.02)
    for pid in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """The program to run with its arguments; this interpreter, for a Python script.

    Raises:
        FileNotFoundError: there is no such program or script.
        ValueError: it is there, but is neither.
    """
    first, path = words[0], Path(words[0])
    is_python = path.suffix == ".py"
    if path.is_dir() and (len(words) == 1 or first.endswith("/")):  # even if there is a program of that name
        raise ValueError(_about_folder(path))
    if not is_python and shutil.which(first) is not None:
        return tuple(words)
    if path.is_dir():
        raise ValueError(_about_folder(path))
    if not path.is_file():
        what = "script" if is_python else "program or script"
        raise FileNotFoundError(f"There is no {what} {first!r}.{similar_path(path)}")
    if not is_python and os.access(path, os.X_OK):
        return (os.path.abspath(first), *words[1:])
    advice = "" if is_python else _advice_for(path)
    if advice:
        raise ValueError(advice)
    return (sys.executable, *words)


def _about_folder(path: Path) -> str:
    if (path / "__main__.py").exists():
        return f"{path} is a folder. To run the package in it: penstock doctor -- python {shlex.quote(str(path))}"
    scripts = sorted(each.name for each in path.glob("*.py"))
    likely = "train.py" if "train.py" in scripts or not scripts else scripts[0]
    return f"{path} is a folder. Name the script to run: penstock doctor -- {shlex.quote(str(path / likely))}"


def _advice_for(path: Path) -> str:
    """What to do with a file that is not a Python script; nothing if it seems to be one."""
    quoted = shlex.quote(str(path))
    interpreter = _interpreter(path)
    if path.suffix == ".toml":
        return f"{path} is not a script. If it is a plan, `penstock bench {quoted}` measures how fast its batches come."
    if path.suffix == ".ipynb":
        script = shlex.quote(str(path.with_suffix(".py")))
        return (
            f"{path} is a notebook. Turn it into a script first: "
            f"jupyter nbconvert --to script {quoted} && penstock doctor -- {script}"
        )
    if interpreter and "python" not in interpreter:
        return f"{path} is a script for {interpreter}: penstock doctor -- {interpreter} {quoted}"
    if interpreter or not path.suffix:
        return ""
    return f"{path} does not look like a Python script. If it is one: penstock doctor -- python {quoted}"


def _interpreter(path: Path) -> str:
    """What the first line names, or a shell by the name of the file; nothing if neither does."""
    with path.open("rb") as file:
        line = file.readline(200).decode(errors="replace").strip()
    if line.startswith("#!"):
        words = [word for word in line[2:].split() if word not in ("/usr/bin/env", "-S")]
        return os.path.basename(words[0]) if words else ""
    return path.suffix[1:] if path.suffix in (".sh", ".bash", ".zsh") else ""

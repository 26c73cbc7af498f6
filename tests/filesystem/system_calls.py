"""Faults at system calls, in a process and in all it starts: what Python's `os` does, and what threads and workers do.

    Faults      memory shared with the preloaded `system_calls.c`: which call is hit, how, and all calls made
    Victims     a process with that library, which runs one function after another in forks of its own

Calls count if they change files under `root`. With several processes at work their order differs from run to run, so
the k-th call is a moment and not always the same call.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import pytest

from filesystem.children import Killed, run_in_child

_TESTS = Path(__file__).parents[1]
_SOURCE = Path(__file__).with_suffix(".c")
_NUM_RECORDS = 8192
_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h

Action = Literal["nothing", "refuse", "shorten", "kill before", "kill halfway", "kill after"]
_ACTIONS: tuple[Action, ...] = ("nothing", "refuse", "shorten", "kill before", "kill halfway", "kill after")


class Fault(NamedTuple):
    """What happens at a call, and whether at all after it."""

    action: Action
    error: int = 0
    is_lasting: bool = False

    @property
    def kills(self) -> bool:
        """Whether the process that made the call is killed."""
        return self.action.startswith("kill")


NO_FAULT = Fault("nothing")
FAULTS = {
    "killed before": Fault("kill before"),
    "killed after": Fault("kill after"),
    "killed halfway": Fault("kill halfway"),
    "all killed": Fault("kill before", is_lasting=True),
    "EIO once": Fault("refuse", errno.EIO),
    "EIO from then on": Fault("refuse", errno.EIO, is_lasting=True),
    "ENOSPC once": Fault("refuse", errno.ENOSPC),
    "ENOSPC from then on": Fault("refuse", errno.ENOSPC, is_lasting=True),
    "short write": Fault("shorten"),
    "short writes from then on": Fault("shorten", is_lasting=True),
}


class Call(NamedTuple):
    """One system call that was counted."""

    name: str
    pid: int
    is_direct: bool
    """Whether its descriptor goes past the page cache."""


class _Record(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 16), ("pid", ctypes.c_int32), ("is_direct", ctypes.c_int32)]


class _Control(ctypes.Structure):
    _fields_ = [
        ("root", ctypes.c_char * 4096),
        ("at", ctypes.c_int64),
        ("action", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("is_lasting", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("num_calls", ctypes.c_int64),
        ("num_hits", ctypes.c_int64),
        ("records", _Record * _NUM_RECORDS),
    ]


class Faults:
    """The library, built in `folder`, and what it is told."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._library, path = build(folder), folder / "faults"
        with open(path, "w+b") as file:
            file.truncate(ctypes.sizeof(_Control))
            self._control = _Control.from_buffer(mmap.mmap(file.fileno(), 0))
        self._control.root = os.fsencode(root.resolve())
        self.environment = {"LD_PRELOAD": str(self._library), "PENSTOCK_TEST_FAULTS": str(path)}

    def arm(self, fault: Fault, at: int) -> None:
        """Count from here, and let `fault` happen at call number `at`; the first is 1."""
        self.disarm()
        self._control.action = _ACTIONS.index(fault.action)
        self._control.error, self._control.is_lasting = fault.error, fault.is_lasting
        ctypes.memset(self._control.records, 0, ctypes.sizeof(self._control.records))
        self._control.num_calls = self._control.num_hits = 0
        self._control.at = at

    def disarm(self) -> None:
        """Let everything pass."""
        self._control.at = 0

    @property
    def has_hit(self) -> bool:
        """Whether the fault has happened."""
        return bool(self._control.num_hits)

    @property
    def calls(self) -> list[Call]:
        """Calls since `arm`."""
        records = self._control.records[: self._control.num_calls]
        return [Call(record.name.decode(), record.pid, bool(record.is_direct)) for record in records]


def build(folder: Path) -> Path:
    """Compile the library; skip the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("faults at system calls need Linux and a C compiler (cc or gcc), and there is none")
    library = folder / "system_calls.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a victim ended."""

    is_killed: bool
    error: str = ""
    """Name of the class of what it raised."""
    message: str = ""

    @property
    def is_done(self) -> bool:
        """Whether it got through."""
        return not self.is_killed and not self.error


class Victims:
    """Runs functions of test modules in processes with the library; a context manager.

    The process behind it has imported and compiled what they need, so each costs a fork.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._process = subprocess.Popen(
            [sys.executable, "-m", "filesystem.system_calls"],
            cwd=_TESTS,
            env=os.environ | faults.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def warm_up(self, function: str, *arguments: Any) -> None:
        """Run a function once in the process that will be forked."""
        self.faults.disarm()
        outcome = self._ask("here", function, arguments)
        assert outcome.is_done, outcome

    def run(self, function: str, *arguments: Any) -> Outcome:
        """Run `package.module:function`, in a fork, without a fault."""
        return self.strike(NO_FAULT, 0, function, *arguments)

    def strike(self, fault: Fault, at: int, function: str, *arguments: Any) -> Outcome:
        """Run it with a fault at call number `at`; returns when all processes that it started have ended."""
        self.faults.arm(fault, at)
        try:
            return self._ask("fork", function, arguments)
        finally:
            self.faults.disarm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, how: str, function: str, arguments: tuple[Any, ...]) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([how, function, arguments]) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


@contextmanager
def victims_in(folder: Path) -> Iterator[Victims]:
    """Victims whose calls count under `folder / "disk"`, a new folder."""
    (folder / "disk").mkdir()
    with Victims(Faults(folder, folder / "disk")) as victims:
        yield victims


def _serve() -> None:
    """The process behind `Victims`. Orphans of a victim become its children, so that it can wait for them."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what victims print is no answer
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in sys.stdin:
        how, name, arguments = json.loads(line)
        module, _, attribute = name.partition(":")
        function = getattr(importlib.import_module(module), attribute)
        outcome = {"is_killed": False}
        try:
            run_in_child(partial(_report, function, arguments)) if how == "fork" else function(*arguments)
        except Killed:
            outcome = {"is_killed": True}
        except _Failed as failed:
            outcome |= {"error": failed.args[0], "message": failed.args[1]}
        with suppress(ChildProcessError):
            while True:
                os.wait()
        print(json.dumps(outcome), file=answers, flush=True)


class _Failed(Exception):
    """Class and message of what a victim raised; the error itself might not survive a pickle."""


def _report(function: Any, arguments: list[Any]) -> None:
    try:
        function(*arguments)
    except Exception as error:
        raise _Failed(type(error).__name__, str(error)) from None


if __name__ == "__main__":
    importlib.import_module("filesystem.system_calls")._serve()

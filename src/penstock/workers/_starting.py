"""Start worker processes, as new interpreters or as forks of the owner, and learn how they ended.

All but forks run `_entry.py` first. Each is, or is started by, the leader of its own process group:
Ctrl-C in a terminal goes to the owner alone, even while they are starting.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from penstock.machine import use_one_thread_each
from penstock.workers import _entry
from penstock.workers._channel import Channel
from penstock.workers._entry import hold_life_line
from penstock.workers._program import SentProgram
from penstock.workers._worker import Program, SetupFailed, flush_printed, run_program

StartMethod = Literal["forkserver", "spawn", "fork"]
Interpreter = subprocess.Popen[bytes]

END_SECONDS = 3.0
"""How long to wait for processes whose life-line is cut."""
EXIT_SECONDS = 1.0
"""How long to wait for a process that closed its channel."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A worker process and its owner's end of the channel."""

    number: int
    """Among all that its owner ever started."""
    channel: Channel
    pid: int | None = None
    """With a fork server, known only after its death."""

    def send(self, message: Any, descriptors: tuple[int, ...] = (), *, is_patient: bool = True) -> bool:
        """Send a message; False if its inbox is full. If it is dead, its channel will report the end of file."""
        try:
            self.channel.send(message, descriptors, is_patient=is_patient)
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the process is dead.
            Exception: its program could not be loaded or set up, for this reason.
        """
        message, _ = self.channel.receive()
        if type(message) is SetupFailed:
            raise message.error.rebuild(f"while worker process {self.number} was being set up")
        return message


class Starter(Protocol):
    """One way to start workers; nothing runs until the first is asked for."""

    def start(self, number: int) -> WorkerProcess:
        """Begin to start a worker; it may take a while to answer."""
        ...

    def find_pid(self, worker: WorkerProcess) -> int | None:
        """The process id of a worker that is still in the crew; None while it is being started."""
        ...

    def exit_code(self, worker: WorkerProcess) -> int | None:
        """How a worker ended (minus the signal's number), waiting a moment; None if unknown.

        If it closed its channel but is still running, it is killed.
        """
        ...

    def close(self) -> None:
        """Wait for every process to be gone, after the life-line was cut."""
        ...


def occupy_standard_descriptors() -> None:
    """In a program started without standard streams, make sure nothing opened later gets their descriptors.

    Otherwise a channel could get one, and workers would print into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def start_interpreter(
    life_line: int, environment: Mapping[str, str], program: SentProgram
) -> tuple[Channel, Interpreter]:
    """Start an interpreter that runs a program; return the owner's end of its channel, and the process."""
    ours, theirs = Channel.pair()
    descriptors = (theirs.fileno(), life_line)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, _entry.__file__, *map(str, descriptors), json.dumps(sys.path)]
    process = subprocess.Popen(  # noqa: S603 - our own code
        command,
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,
        env={**os.environ, **environment},
    )
    theirs.close()
    program.send(ours)
    return ours, process


def wait_for(process: Interpreter, seconds: float) -> int | None:
    """How a process ended; it is killed if it takes longer."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class SpawnStarter:
    """A new interpreter for each worker: slower to start, but they share nothing."""

    def __init__(self, life_line: int, environment: Mapping[str, str], program: SentProgram) -> None:
        self._life_line, self._environment, self._program = life_line, environment, program
        self._processes: dict[int, Interpreter] = {}

    def start(self, number: int) -> WorkerProcess:
        for process in self._processes.values():
            process.poll()  # reap zombies; their exit code can still be asked for
        channel, process = start_interpreter(self._life_line, self._environment, self._program)
        self._processes[number] = process
        return WorkerProcess(number, channel, process.pid)

    def find_pid(self, worker: WorkerProcess) -> int | None:
        return worker.pid

    def exit_code(self, worker: WorkerProcess) -> int | None:
        return wait_for(self._processes.pop(worker.number), EXIT_SECONDS)

    def close(self) -> None:
        for process in list(self._processes.values()):  # at exit, another thread may just be replacing a dead worker
            wait_for(process, END_SECONDS)
        self._program.close()


class ForkStarter:
    """Forks of the owner: they inherit any function, and everything else too. Only on request."""

    def __init__(self, life_line: int, environment: Mapping[str, str], program: Program) -> None:
        self._life_line, self._environment, self._program = life_line, environment, program
        self._running: set[int] = set()
        self._codes: dict[int, int] = {}

    def start(self, number: int) -> WorkerProcess:
        for pid in list(self._running):
            self._reap(pid)
        ours, theirs = Channel.pair()
        flush_printed()  # otherwise it is printed twice
        pid = os.fork()
        if pid == 0:  # the hook in `_channel.py` closed the owner's other descriptors, including the life-line's
            ours.close()
            _run_forked(theirs, self._life_line, self._environment, self._program)
        theirs.close()
        self._running.add(pid)
        return WorkerProcess(number, ours, pid)

    def find_pid(self, worker: WorkerProcess) -> int | None:
        return worker.pid

    def exit_code(self, worker: WorkerProcess) -> int | None:
        assert worker.pid is not None
        self._wait(worker.pid, time.monotonic() + EXIT_SECONDS)
        return self._codes.pop(worker.pid, None)

    def close(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for pid in list(self._running):
            self._wait(pid, deadline)

    def _wait(self, pid: int, deadline: float) -> None:
        self._reap(pid)
        has_killed = False
        while pid in self._running:
            if not has_killed and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                has_killed = True
            time.sleep(0.01)
            self._reap(pid)

    def _reap(self, pid: int) -> None:
        if pid not in self._running:  # the pid may belong to another child by now
            return
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # somebody else in this program waits for all children
            self._running.discard(pid)
            return
        if found:
            self._running.discard(pid)
            self._codes[pid] = os.waitstatus_to_exitcode(status)


def _run_forked(channel: Channel, life_line: int, environment: Mapping[str, str], program: Program) -> None:
    try:
        os.setpgid(0, 0)
        held = hold_life_line(life_line)
        if sys.__stdin__ is not None:  # otherwise descriptor 0 may be one of the user's files
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody can answer a worker's prompt
        use_one_thread_each(environment)
        run_program(channel, held, program)
    finally:
        os._exit(1)

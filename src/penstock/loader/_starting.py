"""Starting worker processes, and learning how they ended.

All but forked ones run `_life_line.py` first, in a process group of their own: Ctrl-C in a terminal goes
to the trainer alone, also while they are starting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Protocol

from penstock.loader import _life_line
from penstock.loader._channel import Channel
from penstock.loader._life_line import hold_life_line
from penstock.loader._work import Work
from penstock.loader._worker import flush_printed, run_worker

_END_SECONDS = 3.0
_EXIT_SECONDS = 1.0


@dataclass(slots=True)
class Started:
    """A worker process and the trainer's end of its channel."""

    number: int
    channel: Channel
    pid: int | None = None


class Starter(Protocol):
    """Starts workers one way or another; nothing runs before the first is asked for."""

    def start(self, number: int) -> Started:
        """Begin to start a worker; it may take a while until it answers."""
        ...

    def exit_code(self, started: Started) -> int | None:
        """How a worker ended (minus the signal's number), waiting a moment; None when it cannot be told."""
        ...

    def close(self) -> None:
        """Wait for everything to be gone; the life-line was cut before."""
        ...


def occupy_standard_descriptors() -> None:
    """In a program that was started without standard streams, leave their numbers to nothing that is opened later.

    Else a channel or a slot gets one, and is taken for what workers read from and print to.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


class ForkServerStarter:
    """By a server that is a fresh interpreter with everything imported."""

    def __init__(self, life_line: int) -> None:
        self._life_line = life_line
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: Channel
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def start(self, number: int) -> Started:
        """Ask the server for a fork; a server that was killed is replaced."""
        ours, theirs = Channel.pair()
        self._read_news()
        try:
            self._ask(number, theirs)
        except ConnectionError:
            self.close()
            self._server = None
            self._ask(number, theirs)
        theirs.close()
        return Started(number, ours)

    def exit_code(self, started: Started) -> int | None:
        """What the server saw."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while started.number not in self._codes and time.monotonic() < deadline:
            if not self._read_news(0.05):
                break
        started.pid = self._pids.pop(started.number, None)
        return self._codes.pop(started.number, None)

    def close(self) -> None:
        """Wait for the server, which holds the life-line too."""
        if self._server is not None:
            self._channel.close()
            _wait(self._server)

    def _ask(self, number: int, theirs: Channel) -> None:
        if self._server is None:
            self._channel, its_end = Channel.pair()
            self._server = _run_python("serve", its_end, self._life_line)
            its_end.close()
        self._channel.send((number,), (theirs.fileno(),))

    def _read_news(self, seconds: float = 0.0) -> bool:
        """Read what the server says, waiting at most so long for the first word; False when it is gone."""
        while self._server is not None and self._channel.has_news(seconds):
            try:
                (kind, number, value), _ = self._channel.receive()
            except EOFError:
                return False
            (self._pids if kind == "started" else self._codes)[number] = value
            seconds = 0.0
        return True


class SpawnStarter:
    """By an interpreter for each worker: slower, and nothing is shared with any other."""

    def __init__(self, life_line: int) -> None:
        self._life_line = life_line
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> Started:
        """Start an interpreter."""
        for process in self._processes.values():
            process.poll()  # no zombie stays; how it ended may still be asked
        ours, theirs = Channel.pair()
        process = self._processes[number] = _run_python("spawned", theirs, self._life_line)
        theirs.close()
        return Started(number, ours, process.pid)

    def exit_code(self, started: Started) -> int | None:
        """What the operating system says."""
        return _wait(self._processes.pop(started.number), _EXIT_SECONDS)

    def close(self) -> None:
        """Wait for all of them."""
        for process in self._processes.values():
            _wait(process)


class ForkStarter:
    """By forking the trainer: takes any function along, and everything else too. Only on request."""

    def __init__(self, life_line: int, work: Work) -> None:
        self._life_line, self._work = life_line, work
        self._running: set[int] = set()
        self._codes: dict[int, int] = {}

    def start(self, number: int) -> Started:
        """Fork."""
        for pid in list(self._running):
            self._reap(pid)
        ours, theirs = Channel.pair()
        flush_printed()  # else it is printed twice
        pid = os.fork()
        if pid == 0:  # the engine's fork hook closed what else is the trainer's, the life-line's other end first
            ours.close()
            _run_forked(theirs, self._life_line, self._work)
        theirs.close()
        self._running.add(pid)
        return Started(number, ours, pid)

    def exit_code(self, started: Started) -> int | None:
        """What the operating system says."""
        assert started.pid is not None
        self._wait(started.pid, time.monotonic() + _EXIT_SECONDS)
        return self._codes.pop(started.pid, None)

    def close(self) -> None:
        """Wait for all of them."""
        deadline = time.monotonic() + _END_SECONDS
        for pid in list(self._running):
            self._wait(pid, deadline)

    def _wait(self, pid: int, deadline: float) -> None:
        self._reap(pid)
        while pid in self._running and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap(pid)

    def _reap(self, pid: int) -> None:
        if pid not in self._running:  # the number may be another child's by now
            return
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # somebody else in this program waits for all children
            self._running.discard(pid)
            return
        if found:
            self._running.discard(pid)
            self._codes[pid] = os.waitstatus_to_exitcode(status)


def _run_forked(channel: Channel, life_line: int, work: Work) -> None:
    try:
        os.setpgid(0, 0)
        held = hold_life_line(life_line)
        if sys.__stdin__ is not None:  # else 0 may be a file of the user's
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody can answer a question that a worker asks
        run_worker(channel, held, work)
    finally:
        os._exit(1)


def _run_python(entry: str, channel: Channel, life_line: int) -> subprocess.Popen[bytes]:
    descriptors = (channel.fileno(), life_line)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, _life_line.__file__, entry, *map(str, descriptors), json.dumps(sys.path)]
    # Workers are many; each with as many threads as there are processors would be too many.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.Popen(  # noqa: S603 - our own code
        command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0, env=environment
    )


def _wait(process: subprocess.Popen[bytes], seconds: float = _END_SECONDS) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()

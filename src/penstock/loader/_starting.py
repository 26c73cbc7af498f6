"""Starting worker processes, and learning how they ended."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Protocol

from penstock.loader._channel import Channel
from penstock.loader._work import Work
from penstock.loader._worker import run_worker

_END_SECONDS = 3.0


@dataclass(slots=True)
class Started:
    """A worker process and the trainer's end of its channel."""

    number: int
    channel: Channel
    pid: int | None = None


class Starter(Protocol):
    """Starts workers one way or another."""

    def start(self, number: int) -> Started:
        """Begin to start a worker; it may take a while until it answers."""
        ...

    def exit_code(self, started: Started) -> int | None:
        """How a worker ended (minus the signal's number), waiting a moment; None when it cannot be told."""
        ...

    def close(self) -> None:
        """Wait for everything to be gone; the life-line was cut before."""
        ...


class ForkServerStarter:
    """By a server that is a fresh interpreter with everything imported."""

    def __init__(self, life_line: int) -> None:
        self._channel, theirs = Channel.pair()
        self._server = _run_python("main", theirs, life_line)
        theirs.close()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def start(self, number: int) -> Started:
        """Ask the server for a fork."""
        ours, theirs = Channel.pair()
        self._channel.send((number,), (theirs.fileno(),))
        theirs.close()
        return Started(number, ours)

    def exit_code(self, started: Started) -> int | None:
        """What the server saw."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            self._read_news()
            pid = self._pids.get(started.number)
            if pid in self._codes:
                return self._codes[pid]
            select.select([self._channel.fileno()], [], [], 0.05)
        return None

    def close(self) -> None:
        """Wait for the server, which holds the life-line too."""
        self._channel.close()
        _wait(self._server)

    def _read_news(self) -> None:
        while select.select([self._channel.fileno()], [], [], 0)[0]:
            try:
                (kind, key, value), _ = self._channel.receive()
            except EOFError:
                return
            if kind == "started":
                self._pids[key] = value
            else:
                self._codes[key] = value


class SpawnStarter:
    """By an interpreter for each worker: slower, and nothing is shared with any other."""

    def __init__(self, life_line: int) -> None:
        self._life_line = life_line
        self._processes: dict[Channel, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> Started:
        """Start an interpreter."""
        ours, theirs = Channel.pair()
        self._processes[ours] = _run_python("spawned", theirs, self._life_line)
        theirs.close()
        return Started(number, ours, self._processes[ours].pid)

    def exit_code(self, started: Started) -> int | None:
        """What the operating system says."""
        return _wait(self._processes[started.channel], 1.0)

    def close(self) -> None:
        """Wait for all of them."""
        for process in self._processes.values():
            _wait(process)


class ForkStarter:
    """By forking the trainer: takes any function along, and everything else too. Only on request."""

    def __init__(self, life_line: int, work: Work) -> None:
        self._life_line, self._work = life_line, work
        self._pids: dict[int, int | None] = {}

    def start(self, number: int) -> Started:
        """Fork."""
        ours, theirs = Channel.pair()
        pid = os.fork()
        if pid == 0:  # the engine's fork hook closed what belongs to the trainer, the life-line's other end first
            ours.close()
            run_worker(theirs, self._life_line, self._work)
        theirs.close()
        self._pids[pid] = None
        return Started(number, ours, pid)

    def exit_code(self, started: Started) -> int | None:
        """What the operating system says."""
        assert started.pid is not None
        deadline = time.monotonic() + 1.0
        while self._pids.get(started.pid) is None and time.monotonic() < deadline:
            self._reap(started.pid)
            time.sleep(0.01)
        return self._pids.get(started.pid)

    def close(self) -> None:
        """Wait for all of them."""
        deadline = time.monotonic() + _END_SECONDS
        for pid in self._pids:
            while self._pids[pid] is None and time.monotonic() < deadline:
                self._reap(pid)
                time.sleep(0.01)

    def _reap(self, pid: int) -> None:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            self._pids[pid] = 0
            return
        if found:
            self._pids[pid] = os.waitstatus_to_exitcode(status)


def _run_python(entry: str, channel: Channel, life_line: int) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.loader._server import {entry}; {entry}()"
    descriptors = (channel.fileno(), life_line)
    command = [sys.executable, "-c", code, *map(str, descriptors)]
    return subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)  # noqa: S603 - our own code


def _wait(process: subprocess.Popen[bytes], seconds: float = _END_SECONDS) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()

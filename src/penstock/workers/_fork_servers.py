"""The fork servers of this process: each imports what workers need once, then forks a worker in milliseconds.

A server starts as a fresh interpreter, so it has none of the owner's threads, locks or open files, and does not import
the user's script. It is itself a worker: its program (`ForkServer`) is to fork others, and to report how they ended.

Before a server can fork, it spends 0.23 s of CPU time: 0.04 on the interpreter and its library, 0.08 on numpy, 0.11 on
what workers run. So crews that are open at the same time share a server,
which ends with its last user, and a caller that will need one soon can have it started early. What workers inherit from
their server is part of its kind: a program that changes its environment, its import path or the processors it may use
gets another server for its next worker.

    ForkServer           runs in the server
    RunningServer        the owner's end of one server
    ServerLease          the use of one, for as long as somebody needs it
    ForkServerStarter    starts the workers of a crew through a leased server, and learns from it how they ended
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.workers._channel import Channel, abandon_in_forks
from penstock.workers._entry import hold_life_line
from penstock.workers._program import SentProgram
from penstock.workers._script import is_importing_script
from penstock.workers._starting import (
    END_SECONDS,
    EXIT_SECONDS,
    WorkerProcess,
    occupy_standard_descriptors,
    start_interpreter,
    wait_for,
)
from penstock.workers._worker import hold_signals, leave_signals_to_owner, run_program

_REAP_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a server does before it forks. Those that do the same are equal, so that their crews share a server."""

    prepare: Callable[[], None]
    """A function in a module: imports, and compiles or loads, what every worker would otherwise do by itself."""
    imports_torch: bool = False
    """Whether workers will: it takes two seconds of CPU time, and starts no threads."""

    def __call__(self) -> None:
        self.prepare()
        if self.imports_torch:
            import torch  # noqa: F401 - for workers


class ServerNews(NamedTuple):
    """From the server: the worker with this number has started, with this process id; or ended, with this exit code."""

    kind: Literal["started", "ended"]
    number: int
    value: int


@dataclass(frozen=True, slots=True)
class ForkServer:
    """The server's program."""

    warm_up: Callable[[], None]
    """A function in a module, or a `WarmUp`."""

    def run(self, channel: Channel, life_line: int) -> None:
        """Fork when asked, reap workers that have ended, and report both to the owner."""
        gc.disable()
        self.warm_up()
        gc.freeze()  # else collecting garbage in a worker would copy the pages it shares
        numbers: dict[int, int] = {}
        news: deque[ServerNews] = deque()
        while True:
            if channel.has_news(_REAP_SECONDS):
                number, descriptors = channel.receive()
                if descriptors:
                    news.append(_fork(number, descriptors, life_line, numbers))
                else:
                    _kill(number, numbers)
            news.extend(_reap(numbers))
            _send_news(channel, news)


def _fork(number: int, descriptors: tuple[int, ...], own_life_line: int, numbers: dict[int, int]) -> ServerNews:
    """Fork a worker with these descriptors: its channel and its crew's life-line."""
    channel, life_line = descriptors
    hold_signals()  # until the child has its own handlers: the hook in `_channel.py` removes the server's
    pid = os.fork()
    if pid == 0:
        os.close(own_life_line)
        run_program(Channel.of_descriptor(channel), hold_life_line(life_line), None)
    leave_signals_to_owner()
    os.close(channel)
    os.close(life_line)
    numbers[pid] = number
    return ServerNews("started", number, pid)


def _kill(number: int, numbers: Mapping[int, int]) -> None:
    """End a worker that has closed its channel; it is not reaped yet, so its pid cannot belong to another process."""
    for pid, each in numbers.items():
        if each == number:
            os.kill(pid, signal.SIGKILL)


def _reap(numbers: dict[int, int]) -> Iterator[ServerNews]:
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield ServerNews("ended", numbers.pop(pid), os.waitstatus_to_exitcode(status))


def _send_news(channel: Channel, news: deque[ServerNews]) -> None:
    """Send as much news as the owner has room for; it reads only when it starts a worker, or misses one."""
    with contextlib.suppress(BlockingIOError):
        while news:
            channel.send(news[0], is_patient=False)
            news.popleft()


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a server is like; crews that need the same kind share one."""

    warm_up: Callable[[], None]
    environment: tuple[tuple[str, str], ...]
    inherited: tuple[object, ...]
    """What else its forks inherit."""

    @classmethod
    def now(cls, environment: Mapping[str, str], warm_up: Callable[[], None]) -> _Kind:
        """A server like this process at this moment."""
        files: tuple[str | int, ...] = (".", 1, 2)
        inherited = (
            tuple(sys.path),
            *map(_describe_file, files),
            tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None,
            *map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)),
        )
        return cls(warm_up, tuple(sorted({**os.environ, **environment}.items())), inherited)


def _describe_file(file: str | int) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class RunningServer:
    """The owner's end of a server. Any thread may use it, and so may a finaliser in the middle of anything."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.num_leases = 0
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._is_closed = False
        occupy_standard_descriptors()
        program = SentProgram(ForkServer(kind.warm_up), otherwise="use a function from one.")
        reader, self._life_line = os.pipe()
        self._channel, self._process = start_interpreter(reader, dict(kind.environment), program)
        os.close(reader)
        program.close()

    @property
    def is_shared(self) -> bool:
        """Whether it goes on after one of its leases ends."""
        return self.num_leases > 1

    def fork(self, channel: Channel, life_line: int) -> int:
        """Ask for a worker with this channel and this life-line; return its number on the server.

        Raises:
            ConnectionError: the server is dead.
        """
        with self._lock:
            self._read_news()
            number = next(self._numbers)
            self._channel.send(number, (channel.fileno(), life_line))
        return number

    def find_pid(self, number: int) -> int | None:
        with self._lock:
            self._read_news()
            return self._pids.get(number)

    def wait_for_end(self, number: int, seconds: float) -> bool:
        """Whether the server has seen a worker end, waiting at most this long."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while number not in self._codes and time.monotonic() < deadline:
                if not self._read_news(0.05):
                    break
            return number in self._codes

    def kill(self, number: int) -> None:
        """Have a worker killed; does nothing if the server is dead."""
        with self._lock, contextlib.suppress(ConnectionError):
            if not self._is_closed:
                self._channel.send(number)  # without a channel

    def forget(self, number: int) -> tuple[int | None, int | None]:
        """(process id, exit code) of a worker that nobody will ask about again, as far as they are known."""
        with self._lock:
            return self._pids.pop(number, None), self._codes.pop(number, None)

    def close(self) -> None:
        """End it, and wait for it."""
        if self._let_go():
            wait_for(self._process, END_SECONDS)

    def abandon(self) -> None:
        self._let_go()

    def _let_go(self) -> bool:
        """Close the channel and the life-line; False if that was done before."""
        if self._is_closed:
            return False
        self._is_closed = True
        os.close(self._life_line)
        self._channel.close()
        return True

    def _read_news(self, seconds: float = 0.0) -> bool:
        """Read what the server reports, waiting at most this long for the first message; False if it is gone."""
        while not self._is_closed and self._channel.has_news(seconds):
            try:
                (kind, number, value), _ = self._channel.receive()
            except (EOFError, ConnectionError):
                return False
            (self._pids if kind == "started" else self._codes)[number] = value
            seconds = 0.0
        return not self._is_closed


class _RunningServers:
    """All fork servers of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._servers: dict[_Kind, RunningServer] = {}
        abandon_in_forks(self)

    def lend(self, kind: _Kind) -> RunningServer:
        """A server of this kind, started if none is running."""
        with self._lock:
            server = self._servers.get(kind)
            if server is None:
                server = self._servers[kind] = RunningServer(kind)
            server.num_leases += 1
            return server

    def take_back(self, server: RunningServer) -> None:
        """End one lease; the server ends with the last."""
        with self._lock:
            server.num_leases -= 1
            if server.num_leases > 0:
                return
            self.drop(server)
        server.close()

    def drop(self, server: RunningServer) -> None:
        """Do not lend this one again: it is dead, or about to end."""
        with self._lock:
            if self._servers.get(server.kind) is server:
                del self._servers[server.kind]

    def abandon(self) -> None:
        """In a forked child, where another thread may hold the lock for ever."""
        for server in self._servers.values():
            server.abandon()
        self._lock, self._servers = threading.RLock(), {}


_running_servers = _RunningServers()


class ServerLease:
    """The use of a fork server: it runs at least until this is closed or forgotten.

    Args:
        environment: Variables that the server's workers get in addition to those of this process.
        warm_up: What the server does before it forks: a function in a module.
    """

    def __init__(self, environment: Mapping[str, str], warm_up: Callable[[], None]) -> None:
        self.server = _running_servers.lend(_Kind.now(environment, warm_up))
        self.close = weakref.finalize(self, _running_servers.take_back, self.server)
        """Give it back; idempotent."""

    def report_dead(self) -> None:
        """Make the next lease get another server."""
        _running_servers.drop(self.server)


def lease_early(environment: Mapping[str, str], warm_up: Callable[[], None]) -> ServerLease | None:
    """Start a server that will be needed soon; None in a spawned process that is only importing the user's script."""
    is_importing = is_importing_script() or getattr(multiprocessing.current_process(), "_inheriting", False)
    return None if is_importing else ServerLease(environment, warm_up)


class ForkServerStarter:
    """Workers come from a fork server, which is leased with the first of them."""

    def __init__(
        self, life_line: int, environment: Mapping[str, str], program: SentProgram, warm_up: Callable[[], None]
    ) -> None:
        self._life_line, self._environment, self._program = life_line, environment, program
        self._warm_up = warm_up
        self._lease: ServerLease | None = None
        self._forked: dict[int, tuple[RunningServer, int]] = {}
        """Which server forked each worker, and its number there."""

    def start(self, number: int) -> WorkerProcess:
        """Ask the server for a fork; if the server was killed, start another."""
        ours, theirs = Channel.pair()
        try:
            self._forked[number] = self._fork(theirs)
        except ConnectionError:
            assert self._lease is not None
            self._lease.report_dead()
            self._lease.close()
            self._lease = None
            self._forked[number] = self._fork(theirs)
        theirs.close()
        self._program.send(ours)
        return WorkerProcess(number, ours)

    def find_pid(self, worker: WorkerProcess) -> int | None:
        server, number = self._forked[worker.number]
        return server.find_pid(number)

    def exit_code(self, worker: WorkerProcess) -> int | None:
        server, number = self._forked.pop(worker.number)
        if not server.wait_for_end(number, EXIT_SECONDS):
            server.kill(number)
            server.wait_for_end(number, EXIT_SECONDS)
        worker.pid, code = server.forget(number)
        return code

    def close(self) -> None:
        """Wait for the workers if others still use the server, otherwise for the server, which ends after them."""
        deadline = time.monotonic() + END_SECONDS
        for server, number in self._forked.values():
            if server.is_shared:
                server.wait_for_end(number, deadline - time.monotonic())
            server.forget(number)
        self._forked.clear()
        if self._lease is not None:
            self._lease.close()
        self._program.close()

    def _fork(self, channel: Channel) -> tuple[RunningServer, int]:
        if self._lease is None:
            self._lease = ServerLease(self._environment, self._warm_up)
        server = self._lease.server
        return server, server.fork(channel, self._life_line)

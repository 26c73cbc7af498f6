"""The fork server, both ends of it: imports what workers need once, then forks one in milliseconds whenever asked.

It starts as a fresh interpreter, so it has no threads, locks or open files of the owner, and does not import the
user's script. It tells the owner how each of its workers ended. It is itself a worker: its program is to fork others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.workers._channel import Channel
from penstock.workers._entry import hold_life_line
from penstock.workers._parcel import Parcel
from penstock.workers._starting import (
    END_SECONDS,
    EXIT_SECONDS,
    Interpreter,
    WorkerProcess,
    start_interpreter,
    wait_for,
)
from penstock.workers._worker import hold_signals, leave_signals_to_owner, run_program

_REAP_SECONDS = 0.05


class _News(NamedTuple):
    """Server: a worker of this number has started, with this process id; or has ended, with this exit code."""

    kind: Literal["started", "ended"]
    number: int
    value: int


@dataclass(frozen=True, slots=True)
class ForkServer:
    """The server's program."""

    warm_up: Callable[[], None]
    """A function of a module: imports, and compiles or loads, what every worker would otherwise on its own."""

    def run(self, channel: Channel, life_line: int) -> None:
        """Fork when asked, reap what has ended, and tell the owner of both."""
        self.warm_up()
        numbers: dict[int, int] = {}
        news: deque[_News] = deque()
        while True:
            if channel.has_news(_REAP_SECONDS):
                number, descriptors = channel.receive()
                if descriptors:
                    news.append(_fork(number, descriptors[0], life_line, numbers))
                else:
                    _kill(number, numbers)
            news.extend(_reap(numbers))
            _tell(channel, news)


def _fork(number: int, descriptor: int, life_line: int, numbers: dict[int, int]) -> _News:
    hold_signals()  # until the child has handlers of its own again: the hook in `_forks.py` takes the server's away
    pid = os.fork()
    if pid == 0:
        run_program(Channel.of_descriptor(descriptor), hold_life_line(life_line), None)
    leave_signals_to_owner()
    os.close(descriptor)
    numbers[pid] = number
    return _News("started", number, pid)


def _kill(number: int, numbers: Mapping[int, int]) -> None:
    """End a worker that has closed its channel; it is this process's child, so its pid cannot be another's yet."""
    for pid, each in numbers.items():
        if each == number:
            os.kill(pid, signal.SIGKILL)


def _reap(numbers: dict[int, int]) -> Iterator[_News]:
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield _News("ended", numbers.pop(pid), os.waitstatus_to_exitcode(status))


def _tell(channel: Channel, news: deque[_News]) -> None:
    """Say what the owner has room for; it reads only when it starts a worker, or misses one."""
    with contextlib.suppress(BlockingIOError):
        while news:
            channel.send(news[0], is_patient=False)
            news.popleft()


class ForkServerStarter:
    """The owner's end: workers come from a server, which is started with the first of them."""

    def __init__(
        self, life_line: int, environment: Mapping[str, str], program: Parcel, warm_up: Callable[[], None]
    ) -> None:
        self._life_line, self._environment, self._program = life_line, environment, program
        self._server_program = Parcel(ForkServer(warm_up), otherwise="use a function of one.")
        self._server: tuple[Channel, Interpreter] | None = None
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def start(self, number: int) -> WorkerProcess:
        """Ask the server for a fork; a server that was killed is replaced."""
        ours, theirs = Channel.pair()
        self._read_news()
        try:
            self._ask(number, theirs)
        except ConnectionError:
            self._close_server()
            self._ask(number, theirs)
        theirs.close()
        self._program.send(ours)
        return WorkerProcess(number, ours)

    def find_pid(self, worker: WorkerProcess) -> int | None:
        """What the server said."""
        self._read_news()
        return self._pids.get(worker.number)

    def exit_code(self, worker: WorkerProcess) -> int | None:
        """What the server saw."""
        if not self._wait_for_code(worker.number) and self._server is not None:
            with contextlib.suppress(ConnectionError):
                self._server[0].send(worker.number)  # without a channel: to be killed
                self._wait_for_code(worker.number)
        worker.pid = self._pids.pop(worker.number, None)
        return self._codes.pop(worker.number, None)

    def close(self) -> None:
        """Wait for the server, which holds the life-line too."""
        self._close_server()
        self._program.close()
        self._server_program.close()

    def _close_server(self) -> None:
        if self._server is not None:
            channel, process = self._server
            self._server = None
            channel.close()
            wait_for(process, END_SECONDS)

    def _ask(self, number: int, theirs: Channel) -> None:
        if self._server is None:
            self._server = start_interpreter(self._life_line, self._environment, self._server_program)
        self._server[0].send(number, (theirs.fileno(),))

    def _wait_for_code(self, number: int) -> bool:
        """Whether a worker's exit code is known, waiting a moment for it."""
        deadline = time.monotonic() + EXIT_SECONDS
        while number not in self._codes and time.monotonic() < deadline:
            if not self._read_news(0.05):
                break
        return number in self._codes

    def _read_news(self, seconds: float = 0.0) -> bool:
        """Read what the server says, waiting at most so long for the first word; False when it is gone."""
        while self._server is not None and self._server[0].has_news(seconds):
            try:
                (kind, number, value), _ = self._server[0].receive()
            except EOFError:
                return False
            (self._pids if kind == "started" else self._codes)[number] = value
            seconds = 0.0
        return True

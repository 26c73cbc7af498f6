"""The fork server: imports what workers need once, then forks a worker in milliseconds whenever asked.

It starts as a fresh interpreter, so it has none of the owner's threads, locks or open files, and does not import the
user's script. It reports to the owner how each of its workers ended. It is itself a worker: its program is to fork
others. The owner's end is `_running_servers.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.workers._channel import Channel
from penstock.workers._entry import hold_life_line
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
    hold_signals()  # until the child has its own handlers: the hook in `_forks.py` removes the server's
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

"""Processes that a test may kill: forked from the test itself, so that each costs a few milliseconds."""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class Killed(Exception):
    """The child ended by a signal."""


class Child:
    """Runs `body` in a forked process; leaving the block kills it if it still runs."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns when threads run; these children use none of what they might hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run(body, writer)
        os.close(writer)
        self._is_done = False

    def kill(self) -> None:
        """End it by SIGKILL, at once."""
        os.kill(self.pid, signal.SIGKILL)

    def result(self) -> Any:
        """Wait for its end: what `body` returned, or raised; `Killed` when a signal ended it."""
        with os.fdopen(self._reader, "rb") as file:
            report = file.read()
        _, status = os.waitpid(self.pid, 0)
        self._is_done = True
        if os.WIFSIGNALED(status):
            raise Killed(signal.Signals(os.WTERMSIG(status)).name)
        value, error = pickle.loads(report)
        if error is not None:
            raise error
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_done:
            self.kill()
            os.waitpid(self.pid, 0)
            os.close(self._reader)


def run_in_child(body: Callable[[], Any]) -> Any:
    """What `body` returns or raises in a process of its own."""
    with Child(body) as child:
        return child.result()


def addresses_in_use() -> int:
    """Bytes of this process that a limit on addresses (`ulimit -v`) counts."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def is_killed(body: Callable[[], Any]) -> bool:
    """Run `body` in a process of its own; whether it was killed."""
    try:
        run_in_child(body)
    except Killed:
        return True
    return False


def _run(body: Callable[[], Any], writer: int) -> None:
    code = 1
    try:
        try:
            report: tuple[Any, BaseException | None] = (body(), None)
        except BaseException as error:
            report = (None, error)
        with os.fdopen(writer, "wb") as file:
            file.write(pickle.dumps(report))
        code = 0
    finally:
        os._exit(code)

"""Every call by which the library changes the file system, interceptable one by one.

A hook stands in for the calls of `os` and `fcntl` that the writer makes, counts them, and at the k-th
kills the process, refuses, or writes down what was done. Running k = 1, 2, 3, ... until the work gets
through visits every instant at which a crash can leave something new on the disk.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

CALLS = {
    os: ("open", "write", "pwrite", "ftruncate", "fsync", "close", "replace", "unlink", "mkdir", "rmdir"),
    fcntl: ("flock",),
}

Hook = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
When = Literal["before", "halfway", "after"]


@contextmanager
def intercepted(hook: Hook) -> Iterator[None]:
    """Send every call through `hook(name, real, args, kwargs)`."""
    real = {(module, name): getattr(module, name) for module, names in CALLS.items() for name in names}
    for (module, name), function in real.items():
        setattr(module, name, _through(hook, name, function))
    try:
        yield
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)


def _through(hook: Hook, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # A reader of an earlier round may be collected now; closing its file is no work of the writer.
        if sys._getframe(1).f_code.co_name == "__del__":
            return real(*args, **kwargs)
        return hook(name, real, args, kwargs)

    return call


class Counter:
    """A hook that only counts."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(name)
        return real(*args, **kwargs)


class KillAt:
    """A hook that kills the process at the k-th call: before it, after it, or with half of the bytes written."""

    def __init__(self, k: int, when: When) -> None:
        self._left = k
        self._when = when

    def __call__(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._left -= 1
        if self._left:
            return real(*args, **kwargs)
        if self._when == "after":
            with suppress(OSError):  # some calls ask whether a file is there
                real(*args, **kwargs)
        if self._when == "halfway" and name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("alive after SIGKILL")


class RefuseAt:
    """A hook that refuses the k-th call, once or from then on."""

    def __init__(self, k: int, number: int, *, forever: bool) -> None:
        self._left = k
        self._number = number
        self._forever = forever
        self.refused: list[str] = []

    def __call__(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._left -= 1
        if self._left > 0 or (self._left < 0 and not self._forever):
            return real(*args, **kwargs)
        self.refused.append(name)
        if name == "close":  # Linux closes the descriptor and then says what went wrong before
            real(*args, **kwargs)
        raise OSError(self._number, os.strerror(self._number))

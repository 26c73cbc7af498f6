"""What a stranger's file must not make a program do: ask the network, take much memory, go on for ever, touch files."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, printable

_MEMORY_BYTES = 1 << 30
_PROCESSOR_SECONDS = (
    20.0  # of the processor, so a busy machine is no failure; waiting for ever ends by pytest's timeout
)

_asked: list[str] | None = None
"""Network calls of this process while it is guarded; an audit hook stays for good, so it looks here."""

_others: frozenset[int] = frozenset()
"""Threads that ran before the block: what they ask has nothing to do with the file."""


class TookTooLong(BaseException):
    """Not an `Exception`, so that nobody takes it for a bad file."""


def _note_network(event: str, arguments: tuple[Any, ...]) -> None:
    if _asked is None or not event.startswith("socket.") or threading.get_ident() in _others:
        return
    is_local = event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], str | bytes)  # a Unix socket
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname") and not is_local:
        _asked.append(f"{event}{arguments[-2:]!r} in {threading.current_thread().name}")
        raise ConnectionRefusedError(f"{event} while reading a stranger's file")


sys.addaudithook(_note_network)


@contextlib.contextmanager
def guarded(*folders: Path) -> Iterator[None]:
    """Run a block within limits; afterwards nothing asked the network, and `folders` hold what they held.

    Raises:
        MemoryError: in the block, when it takes more than 1 GiB.
        TookTooLong: in the block, when it computes for more than 20 s.
    """
    global _asked, _others
    before = [snapshot(folder) for folder in folders]
    _others = frozenset(sys._current_frames()) - {threading.get_ident()}
    _asked = asked = []
    try:
        with _memory_limit(), _time_limit():
            yield
    finally:
        _asked = None
    assert asked == [], asked
    for folder, held in zip(folders, before, strict=True):
        assert snapshot(folder) == held


def use_or_refuse(use: Callable[[], object]) -> None:
    """Use what a stranger made; an error must be Penstock's, and safe to print."""
    try:
        use()
    except PenstockError as error:
        message = str(error)
        assert printable(message, keep="\n\t") == message


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Have errors say which example it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything in a folder: mode, time of change and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
    return found


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """Address of a server that nobody may ask, by whichever process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
        assert not select.select([server], [], [], 0)[0], "a server that a stranger's file names was asked"


@contextlib.contextmanager
def _memory_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TookTooLong

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _PROCESSOR_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)

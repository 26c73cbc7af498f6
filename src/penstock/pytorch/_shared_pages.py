"""Memory that a dataset has in common with its copies in worker processes.

A loader copies its dataset into workers, so what they are to tell each other must not be part of the copy. This is
memory without a name, and not in /dev/shm. Forked workers inherit it; a worker that is given a pickle opens it
through /proc, if the process that pickled it is one of its parents. Any other process that unpickles it
has memory of its own from then on; so has every one that is not forked where no file may be that large
(`ulimit -f`). Pages cost nothing before they are written to.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

_TOKEN_BYTES = 16
_NO_FILE = -1


class SharedPages:
    """Zeros at first, in all processes that share them."""

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        self.is_new = descriptor is None
        """Whether nobody else had this memory when it was made here."""
        self._descriptor = _open_memory(num_bytes + _TOKEN_BYTES) if descriptor is None else descriptor
        memory = memoryview(mmap.mmap(self._descriptor, num_bytes + _TOKEN_BYTES))
        self._token, self.view = memory[:_TOKEN_BYTES], memory[_TOKEN_BYTES:]
        if self.is_new:
            self._token[:] = secrets.token_bytes(_TOKEN_BYTES)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", _NO_FILE)
        if descriptor != _NO_FILE:
            os.close(descriptor)

    def __reduce__(self) -> tuple[Callable[..., SharedPages], tuple[int, int, int, bytes]]:
        return _restore, (self.view.nbytes, os.getpid(), self._descriptor, bytes(self._token))


def _open_memory(num_bytes: int) -> int:
    """A file in memory; none where it may not have this size, for a map without one is shared by forks, too."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("penstock-stream")
    else:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        return _NO_FILE
    return descriptor


def _restore(num_bytes: int, owner: int, descriptor: int, token: bytes) -> SharedPages:
    """The same memory in a worker of the process that pickled it, else new."""
    if _is_parent(owner):
        try:
            pages = SharedPages(num_bytes, os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        except (OSError, ValueError):  # it has closed it, or is another user's
            pages = None
        if pages is not None and pages._token == token:
            return pages
    return SharedPages(num_bytes)


def _is_parent(process: int) -> bool:
    """Whether a process started this one, or one that did."""
    parent = os.getppid()
    while parent > 1 and parent != process:
        try:
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return parent == process

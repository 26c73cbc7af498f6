"""The epoch that each worker of a dataset begins next, known to all processes that share it.

A loader copies its dataset into workers, so an epoch set in the training process would not reach workers that
live on, and one counted in workers would be lost with them. This is a page of memory without a name, and not in
/dev/shm. Forked workers inherit it; a worker that is given a pickle opens it through /proc, if the process that
pickled it is one of its parents. Any other process that unpickles it has numbers of its own from then on.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

_NUM_BYTES = 16 << 10
_USER, _HAS_SPOKEN, _TOKEN, _FIRST_WORKER = range(4)


class SharedEpochs:
    """One number per worker, and who used them last."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = _open_page() if descriptor is None else descriptor
        self._numbers = memoryview(mmap.mmap(self._descriptor, _NUM_BYTES)).cast("q")
        if descriptor is None:
            self._numbers[_TOKEN] = secrets.randbits(62)

    def next_epoch(self, worker: int) -> int:
        """The epoch that this worker begins next."""
        return self._numbers[_FIRST_WORKER + worker]

    def begin(self, worker: int, epoch: int) -> None:
        """This worker, in this process, begins an epoch; the one after it is next."""
        self._numbers[_FIRST_WORKER + worker] = epoch + 1
        self._numbers[_USER] = os.getpid()

    def set_next(self, epoch: int, worker: int | None = None) -> None:
        """This worker, or every one, begins this epoch next."""
        workers = range(len(self._numbers) - _FIRST_WORKER) if worker is None else (worker,)
        for each in workers:
            self._numbers[_FIRST_WORKER + each] = epoch

    @property
    def is_used_elsewhere(self) -> bool:
        """Whether the last process that began an epoch is another one."""
        return self._numbers[_USER] not in (0, os.getpid())

    def speaks_first(self) -> bool:
        """True once, in all processes together."""
        has_spoken, self._numbers[_HAS_SPOKEN] = self._numbers[_HAS_SPOKEN], 1
        return not has_spoken

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def __reduce__(self) -> tuple[Callable[..., SharedEpochs], tuple[int, int, int, int]]:
        return _restore, (os.getpid(), self._descriptor, self._numbers[_TOKEN], self.next_epoch(0))


def _open_page() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("penstock-epochs")
    else:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(descriptor, _NUM_BYTES)
    return descriptor


def _restore(owner: int, descriptor: int, token: int, epoch: int) -> SharedEpochs:
    """The same numbers in a worker of the process that pickled them, else new ones."""
    if _is_parent(owner):
        try:
            shared = SharedEpochs(os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        except (OSError, ValueError):  # it has closed them, or is another user's
            shared = None
        if shared is not None and shared._numbers[_TOKEN] == token:
            return shared
    copy = SharedEpochs()
    copy.set_next(epoch)
    return copy


def _is_parent(process: int) -> bool:
    """Whether a process started this one, or one that did."""
    parent = os.getppid()
    while parent > 1 and parent != process:
        try:
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return parent == process

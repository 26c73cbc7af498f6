"""The epoch that each worker of a dataset begins next, in memory that all copies of the dataset share.

A loader copies its dataset into workers: an epoch set in the training process would not reach workers that live
on, and one counted in workers would be lost with them. The numbers are in an anonymous memory file, so nothing is
in /dev/shm. Forked workers inherit it. A worker that unpickles its dataset opens it through /proc, provided that
the process that pickled it is one of its ancestors; any other copy counts on its own. Without /proc, so does every
copy that is not forked, and a warning says so.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable

from penstock.machine import read_process
from penstock.pytorch._warnings import warn_of_separate_epochs
from penstock.workers import create_shared_memory

_MOST_WORKERS = 2048
_USER, _HAS_WARNED, _FIRST_WORKER = range(3)
_NUM_BYTES = 8 * (_FIRST_WORKER + _MOST_WORKERS)
_NO_FILE = -1  # where memory has no descriptor: forks share an anonymous map all the same


class SharedEpochs:
    """For each worker the epoch that is next, and which process began one last."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = _create() if descriptor is None else descriptor
        self._numbers = memoryview(mmap.mmap(self._descriptor, _NUM_BYTES)).cast("q")

    def __del__(self) -> None:
        if getattr(self, "_descriptor", _NO_FILE) != _NO_FILE:
            os.close(self._descriptor)

    def next_epoch(self, worker: int) -> int:
        """The epoch that this worker begins next."""
        return self._numbers[_FIRST_WORKER + worker]

    def begin(self, worker: int, epoch: int) -> None:
        """This worker, in this process, begins an epoch; the one after it is next."""
        self.set_next(epoch + 1, worker)
        self._numbers[_USER] = os.getpid()

    def set_next(self, epoch: int, worker: int | None = None) -> None:
        """This worker, or every one, begins this epoch next."""
        for each in range(_MOST_WORKERS) if worker is None else (worker,):
            self._numbers[_FIRST_WORKER + each] = epoch

    @property
    def is_used_elsewhere(self) -> bool:
        """Whether the last process that began an epoch is another one."""
        return self._numbers[_USER] not in (0, os.getpid())

    def may_warn(self) -> bool:
        """True once, in all processes together."""
        has_warned, self._numbers[_HAS_WARNED] = self._numbers[_HAS_WARNED], 1
        return not has_warned

    def __reduce__(self) -> tuple[Callable[..., SharedEpochs], tuple[int, int, str, int]]:
        try:
            name = os.readlink(f"/proc/self/fd/{self._descriptor}")
        except OSError:
            name = ""
            warn_of_separate_epochs()
        return _restore, (os.getpid(), self._descriptor, name, self.next_epoch(0))


def _create() -> int:
    try:
        return create_shared_memory(f"penstock-epochs-{secrets.token_hex(8)}", _NUM_BYTES)
    except OSError:
        return _NO_FILE


def _restore(owner: int, descriptor: int, name: str, epoch: int) -> SharedEpochs:
    """The same numbers in a descendant of the process that pickled them, else a copy."""
    path = f"/proc/{owner}/fd/{descriptor}"
    try:
        if name and _is_ancestor(owner) and os.readlink(path) == name:
            return SharedEpochs(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:  # the owner closed it, or belongs to another user
        pass
    epochs = SharedEpochs()
    epochs.set_next(epoch)
    return epochs


def _is_ancestor(process: int) -> bool:
    parent = os.getppid()
    while parent > 1 and parent != process:
        usage = read_process(parent)
        if usage is None:
            return False
        parent = usage.parent
    return parent == process

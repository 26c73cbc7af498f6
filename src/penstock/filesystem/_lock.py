"""One writer at a time, by a lock that dies with its holder.

`flock` on a file in the directory: the kernel releases it when the holder ends, however it ends, so
a lock is never stale and never needs breaking. The file says who holds it, for the error message.
It is unlinked on release, while still held; anyone who opened it in the meantime finds that the name no
longer leads to the file they locked, and tries again.

A forked child would share the lock and keep it when its parent is killed, so it drops its share.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import weakref
from pathlib import Path
from typing import Self

from penstock.errors import StorageError, WriterBusy
from penstock.filesystem._durable import LOCKED, NEW_FILE_MODE, explain_os_error, storage_errors
from penstock.filesystem._readers import open_regular

LOCK_NAME = ".lock"
_MAX_SIGNATURE_BYTES = 4096

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """Exclusive right to change a directory, held from `acquire()` to `release()`.

    Raises:
        WriterBusy: at once, when another process or thread holds it.
        StorageError: the file system has no locks to give; no file is left behind.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK_NAME
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock; a forked copy of it never does."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock, or fail at once."""
        while self._descriptor is None:
            descriptor, is_new = self._open()
            try:
                if self._is_won(descriptor):
                    self._descriptor = descriptor
            except StorageError:
                if is_new:  # otherwise it may be somebody else's lock
                    self._unlink()
                raise
            finally:
                if self._descriptor is None:
                    _close(descriptor)
        _held.add(self)
        try:
            self._sign()
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back; do nothing if it is not held."""
        if self._descriptor is not None:
            self._unlink()
            self.drop()

    def drop(self) -> None:
        """Close the file but leave it in place: the lock ends once every process has closed it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _close(descriptor)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.drop()

    def _open(self) -> tuple[int, bool]:
        """The file's descriptor, and whether the file is new."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with storage_errors(self.path, doing="opened to lock the folder"):
            try:
                return os.open(self.path, flags | os.O_EXCL, NEW_FILE_MODE), True
            except FileExistsError:
                return os.open(self.path, flags, NEW_FILE_MODE), False

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):  # a leftover file does not hold a lock
            os.unlink(self.path)

    def _is_won(self, descriptor: int) -> bool:
        """Lock the open file; False if the name no longer leads to it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except BlockingIOError:
            raise self._busy() from None
        except FileNotFoundError:
            return False
        except OSError as error:
            raise explain_os_error(error, self.path, doing=LOCKED) from error

    def _busy(self) -> WriterBusy:
        holder = lock_holder(self.path.parent) or "another process"
        return WriterBusy(f"{self.path.parent}: {holder} is writing here. Wait for it, or write to another path.")

    def _sign(self) -> None:
        assert self._descriptor is not None
        command = " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])[:200]
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": command}
        with storage_errors(self.path, doing="signed"):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)


def lock_holder(directory: Path) -> str | None:
    """Who signed the lock of a directory, in words; None if nobody did."""
    try:
        with os.fdopen(open_regular(directory / LOCK_NAME), "rb") as file:
            holder = json.loads(file.read(_MAX_SIGNATURE_BYTES))
        return f"process {holder['pid']} on {holder['host']} ({holder['command']})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # it is closed anyway, and nothing in the file can be lost
        os.close(descriptor)


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)

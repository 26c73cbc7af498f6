"""One writer at a time, by a lock that dies with its holder.

`flock` on a file in the directory: the kernel releases it when the holder ends, however it ends, so
a lock is never stale and never needs breaking. The file says who holds it, for the error message.
It is unlinked on release, while still held; whoever opened it meanwhile finds that the name no
longer leads to the file it locked, and tries again.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.errors import WriterBusy
from penstock.filesystem._durable import explain_os_error, remove_if_present

LOCK_NAME = ".lock"


class DirectoryLock:
    """Exclusive right to change a directory, held from `acquire()` to `release()`.

    Raises:
        WriterBusy: at once, when another process or thread holds it.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK_NAME
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or fail at once."""
        while self._descriptor is None:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise self._busy() from None
            if self._is_current(descriptor):
                self._descriptor = descriptor
                self._sign(descriptor)
            else:
                os.close(descriptor)

    def release(self) -> None:
        """Give the lock back; nothing happens when it is not held."""
        if self._descriptor is not None:
            remove_if_present(self.path)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise explain_os_error(error, self.path, doing="opened to lock the dataset") from error

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _busy(self) -> WriterBusy:
        holder = lock_holder(self.path.parent) or "another process"
        return WriterBusy(f"{self.path.parent}: {holder} is writing here. Wait for it, or write to another path.")

    @staticmethod
    def _sign(descriptor: int) -> None:
        command = " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])[:200]
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": command}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def lock_holder(directory: Path) -> str | None:
    """Who signed the lock of a directory, in words; None when nobody did."""
    try:
        holder = json.loads((directory / LOCK_NAME).read_text()[:4096])
        return f"process {holder['pid']} on {holder['host']} ({holder['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return None

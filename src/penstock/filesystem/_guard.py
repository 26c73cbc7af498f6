"""One writer at a time, and no links below a folder that we write to.

    DirectoryLock(folder): a lock that dies with its holder
    OpenFolder(path, "work", "attempts") -> create, read, move, remove, sync: by name, in that very folder
    check_trusted(folder, source): a cache that nobody else can have written to

The lock is `flock` on a file in the directory: the kernel releases it when the holder ends, however it ends, so
a lock is never stale and never needs breaking. The file says who holds it, for the error message.
It is unlinked on release, while still held; anyone who opened it in the meantime finds that the name no
longer leads to the file they locked, and tries again. A forked child would share the lock and keep it when its parent
is killed, so it drops its share.

The path that a user gives may lead through links. What is below it may have been unpacked from a stranger's archive: a
link in place of a folder would let us write files into, or clean up, whatever it points to. So each step down from the
path is taken with `O_NOFOLLOW`, and names are looked up relative to the descriptor, which stays with its folder
whatever happens to the path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from penstock.errors import FormatError, StorageError, WriterBusy
from penstock.filesystem._durable import (
    LOCKED,
    NEW_FILE_MODE,
    create_file,
    explain_os_error,
    storage_errors,
    sync_descriptor,
)
from penstock.filesystem._readers import open_regular

LOCK_NAME = ".lock"
_MAX_SIGNATURE_BYTES = 4096

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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


_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class OpenFolder:
    """The folder at `path`, or below it at `names`, none of which may be a link.

    Raises:
        FileNotFoundError: it does not exist.
        FormatError: one of `names` is a link, or not a folder.
        StorageError: the file system refused.
    """

    def __init__(self, path: Path, *names: str) -> None:
        self.path = path
        self.descriptor = -1
        try:
            self._step(path, None)
            for name in names:
                self.path = self.path / name
                self._step(name, self.descriptor)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # nothing was written through it, and the kernel closes it anyway
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def names(self) -> list[str]:
        with storage_errors(self.path, doing="listed"):
            return os.listdir(self.descriptor)

    def make(self, name: str) -> bool:
        """Make a folder in this one, durably, unless the name is taken; return whether it was made."""
        with storage_errors(self.path / name, doing="creating the folder"):
            try:
                os.mkdir(name, dir_fd=self.descriptor)
            except FileExistsError:
                return False
        try:
            self.sync()
        except StorageError:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=self.descriptor)
            raise
        return True

    def create(self, name: str, chunks: Iterable[memoryview | bytes]) -> int:
        """Write a new file and sync it, as `create_file` does; return its size."""
        return create_file(self.path / name, chunks, within=self.descriptor)

    def open(self, name: str) -> int:
        """Descriptor of a regular file, as from `open_regular`."""
        return open_regular(self.path / name, within=self.descriptor)

    def size(self, name: str) -> int | None:
        """Size of a regular file in bytes; None if there is none."""
        try:
            status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def move(self, name: str, to: OpenFolder, new_name: str) -> None:
        """Give a synced file another name, here or in another folder; `sync` makes that durable."""
        with storage_errors(to.path / new_name, doing="renamed into place"):
            os.replace(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, a link, or a folder with everything in it, if it exists."""
        with storage_errors(self.path / name, doing="removed"), contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self.descriptor)  # follows no links either
            else:
                os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        with storage_errors(self.path, doing="synced"):
            sync_descriptor(self.descriptor)

    def _step(self, name: str | Path, within: int | None) -> None:
        try:
            descriptor = os.open(name, _FLAGS if within is None else _FLAGS | os.O_NOFOLLOW, dir_fd=within)
        except FileNotFoundError:
            raise
        except OSError as error:
            if within is not None and error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise FormatError(
                    f"{self.path} is a link, or not a folder. Penstock does not follow links here; remove it."
                ) from None
            raise explain_os_error(error, self.path, doing="opened") from error
        self.close()
        self.descriptor = descriptor


def check_trusted(folder: Path, source: Path) -> None:
    """Refuse a folder that someone who cannot change `source` could change or replace. It need not exist yet.

    Raises:
        PermissionError: names who could.
    """
    module = source.parent.stat()
    owners = {os.geteuid(), 0, source.stat().st_uid}
    for path in (folder, *folder.parents):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        writers = found.st_mode & _BY_OTHERS
        is_shared_anyway = found.st_gid == module.st_gid and not writers & ~module.st_mode
        is_sticky = path != folder and found.st_mode & stat.S_ISVTX  # only an entry's owner can replace it
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            raise PermissionError(f"{path} belongs to user {found.st_uid}.")
        if writers and not is_sticky and not is_shared_anyway:
            raise PermissionError(f"Others can write to {path}.")
        # In a container with a user namespace, root's folders appear to belong to the owner of `/`: a nameless user.
        owners.add(os.stat("/").st_uid)


def user_cache(name: str) -> Path | None:
    """The folder of this user for what can be computed again; None for a user without a home. It need not exist yet.

    By hand: platformdirs took 3 to 7 ms to import, more than all else that opens a packed plan.
    """
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    base = next(filter(os.path.isabs, (given, home)), None)  # XDG says to ignore relative paths
    return None if base is None else Path(base, "penstock", name)

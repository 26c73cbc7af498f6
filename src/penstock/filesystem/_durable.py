"""Writing so that a crash at any instant leaves the old file or the new one, never a part.

    create_file -> rename -> sync_directory, each with the file or the directory synced before the next

A failed fsync is final: the kernel may have dropped the dirty pages, so the file is written again
from the start or not at all, never synced again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.errors import StorageError

# One write(2) transfers at most 2 GiB - 4 KiB; smaller pieces also let a signal in between.
_WRITE_BYTES = 64 << 20
# The umask says who else may read and write: a group that shares a folder sets its own.
NEW_FILE_MODE = 0o666
LOCKED = "locked"


def create_file(path: Path, chunks: Iterable[memoryview | bytes], *, within: int | None = None) -> int:
    """Write `chunks` to the new file `path`, sync it, and return its size.

    With `within`, a descriptor of a folder, the file is made in that folder, wherever `path` leads.

    Raises:
        StorageError: the file system refused, and nothing new is left; or `path` existed, and was left alone.
    """
    pieces = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    needed = sum(len(piece) for piece in pieces)
    written = 0
    name = name_within(path, within)
    with storage_errors(path, doing="created"):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE_MODE, dir_fd=within)
    try:
        try:
            for piece in pieces:
                while piece:
                    count = os.write(descriptor, piece[:_WRITE_BYTES])
                    written, piece = written + count, piece[count:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=within)
        raise explain_os_error(error, path, doing=f"wrote {written:,} of {needed:,} bytes") from error
    return written


def rename(working: Path, final: Path) -> None:
    """Give a synced file its final name; `sync_directory` makes that durable."""
    with storage_errors(final, doing="renamed into place"):
        os.replace(working, final)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with storage_errors(path, doing="synced"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_descriptor(descriptor)
        finally:
            os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Make the names in an open directory durable."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for directories; their renames are durable by themselves.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def name_within(path: Path, within: int | None) -> str:
    """How to refer to the file at `path`: by its name alone if a descriptor says where it is."""
    return os.fspath(path) if within is None else path.name


def make_directory(path: Path) -> bool:
    """Make a directory, durably, unless there is one; return whether it was made."""
    with storage_errors(path, doing="made as a folder"):
        try:
            os.mkdir(path)
        except FileExistsError:
            if path.is_dir():
                return False
            raise
    try:
        sync_directory(path.parent)
    except StorageError:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise
    return True


def remove_if_present(path: Path) -> None:
    """Unlink `path`, if it exists."""
    with storage_errors(path, doing="removed"), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it."""
    with storage_errors(path, doing="removed"):
        shutil.rmtree(path)


@contextlib.contextmanager
def storage_errors(path: Path, *, doing: str) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `StorageError` that names `path`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise explain_os_error(error, path, doing=doing) from error


def explain_os_error(error: OSError, path: Path, *, doing: str) -> StorageError:
    """The error to raise instead of `error`: path, progress, free space, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"{_free_bytes(path):,} bytes are free there; make room or write elsewhere, then run again."
    elif error.errno == errno.EFBIG:
        advice = "A limit on file size is set (`ulimit -f`); raise it or use a smaller shard_bytes."
    elif error.errno in (errno.ENOLCK, errno.EOPNOTSUPP) and doing == LOCKED:
        advice = (
            "This file system does not support locks, or has none left. On NFS, start the lock service, or mount with "
            "`local_lock=flock` if only one machine writes; or write to a local disk and copy the folder."
        )
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "Close some, or raise the limit (`ulimit -n`)."
    elif error.errno == errno.ESTALE:
        advice = "The server replaced or removed the file; open the dataset again, or mount the share again."
    else:
        advice = "Check the path and the disk, then run again."
    return StorageError(error.errno, f"{path}: {reason} ({doing}). {advice}")


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return 0

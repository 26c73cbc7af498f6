"""Writing so that a crash at any instant leaves the old file or the new one, never a part.

    create_file: write under a working name -> fsync the file
    publish:     rename -> fsync the directories

A failed fsync is final: the kernel may have dropped the dirty pages, so the file is written again
from the start or not at all, never synced again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import StorageError

# One write(2) transfers at most 2 GiB - 4 KiB; smaller pieces also let a signal in between.
_WRITE_BYTES = 64 << 20


def create_file(path: Path, chunks: Iterable[memoryview | bytes]) -> int:
    """Write `chunks` to the new file `path`, sync it, and return its size.

    Raises:
        StorageError: the file system refused; nothing is left at `path`.
    """
    written = 0
    pieces = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    needed = sum(len(piece) for piece in pieces)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for piece in pieces:
                for begin in range(0, len(piece), _WRITE_BYTES):
                    written += _write_all(descriptor, piece[begin : begin + _WRITE_BYTES])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        remove_if_present(path)
        raise explain_os_error(error, path, doing=f"wrote {written:,} of {needed:,} bytes") from error
    return written


def _write_all(descriptor: int, piece: memoryview) -> int:
    done = 0
    while done < len(piece):
        done += os.write(descriptor, piece[done:])
    return done


def publish(working: Path, final: Path) -> None:
    """Rename a synced file to its final name, durably."""
    try:
        os.replace(working, final)
        sync_directory(final.parent)
        if working.parent != final.parent:
            sync_directory(working.parent)
    except OSError as error:
        raise explain_os_error(error, final, doing="renamed into place") from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for directories; their renames are durable by themselves.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def remove_if_present(path: Path) -> None:
    """Unlink `path`; nothing happens when it is not there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def explain_os_error(error: OSError, path: Path, *, doing: str) -> StorageError:
    """The error to raise in place of `error`: path, progress, what is free, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        advice = f"{free:,} bytes are free there; make room or write elsewhere, then run again."
    elif error.errno == errno.EFBIG:
        advice = "A limit on file size is set (`ulimit -f`); raise it or use a smaller shard_bytes."
    else:
        advice = "The previous dataset, if there was one, is untouched."
    return StorageError(error.errno, f"{path}: {reason} ({doing}). {advice}")

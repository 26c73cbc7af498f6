"""Memory that processes share through a descriptor: it has no name, and is gone with the last process that has it.

It is a memory file (`memfd_create`). Some containers forbid that call; there it is an unnamed file (`O_TMPFILE`) in
/dev/shm, or in the temporary folder if /dev/shm is missing or small. No process can leave one behind, even if it is
killed half-way, as could happen with a file that is created and then unlinked. Pythons built for old systems, such as
uv's and conda's, lack `os.memfd_create`: the C library is called instead.

A file system can be full, and writing to mapped memory that it has no room for kills the process (SIGBUS). So room is
reserved when memory is created or grows, and a lack of it is an error then.
"""

from __future__ import annotations

import ctypes
import errno
import os

_FOLDER = "/dev/shm"  # noqa: S108 - unnamed files: nobody can get there first
_ENOUGH_BYTES = 1 << 30
"""With this much room, /dev/shm is better than a disk; containers often have 64 MB there."""
_FORBIDDEN = (errno.ENOSYS, errno.EPERM, errno.EACCES)
_MFD_CLOEXEC = 1  # from linux/memfd.h
_O_TMPFILE = getattr(os, "O_TMPFILE", 0o20000000 | os.O_DIRECTORY)  # missing from Pythons built for old systems


def create_shared_memory(name: str, num_bytes: int) -> int:
    """The descriptor of new memory; programs that are started do not inherit it. The name is only for debugging.

    Raises:
        OSError: it cannot be made here, there is no room, or no descriptor is free.
    """
    try:
        descriptor = _create_memory_file(name)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        descriptor = _create_unnamed_file(error)
    try:
        grow_shared_memory(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def grow_shared_memory(descriptor: int, num_bytes: int) -> None:
    """Make memory at least this large.

    Raises:
        OSError: its file system has no room left.
    """
    file_system = os.fstatvfs(descriptor)
    if not file_system.f_blocks:  # a memory file: only this machine's memory, or the job's, is the limit
        os.ftruncate(descriptor, num_bytes)
        return
    try:
        os.posix_fallocate(descriptor, 0, max(1, num_bytes))
    except OSError as error:
        free = file_system.f_bavail * file_system.f_frsize
        error.add_note(
            f"Memory files (memfd_create) are forbidden here, so batches are shared through unnamed files, and only "
            f"{free:,} bytes are free for those. Give the container a larger {_FOLDER} (docker run --shm-size=8g), set "
            "TMPDIR to a folder with room, or use threads (workers='thread') or fewer workers."
        )
        raise


def _create_memory_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    descriptor = -1 if create is None else int(create(name.encode(), _MFD_CLOEXEC))
    if descriptor < 0:
        number = errno.ENOSYS if create is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def _create_unnamed_file(forbidden: OSError) -> int:
    failures = []
    for folder in sorted((_FOLDER, os.environ.get("TMPDIR", "/tmp")), key=_is_small):  # noqa: S108 - as above
        try:
            return os.open(folder, _O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
    forbidden.add_note(
        "Processes cannot share memory here: memory files (memfd_create) are forbidden, and unnamed files (O_TMPFILE) "
        f"cannot be made either ({'; '.join(failures)}). Do without worker processes (num_workers=0; for plans also "
        "workers='thread'), or allow memfd_create in the container's seccomp profile."
    )
    raise forbidden


def _is_small(folder: str) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return True
    return found.f_bavail * found.f_frsize < _ENOUGH_BYTES

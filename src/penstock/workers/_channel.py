"""What a worker process shares with its owner: messages, memory, and nothing that a fork of either could keep.

**Messages** are packets with a small pickle or a few bytes, and file descriptors. A Unix packet socket keeps messages
whole, passes descriptors, and reports an end of file as soon as the other side dies. Several threads may send. The two
ends trust each other: one started the other.

**Memory** is shared through a descriptor: it has no name, and is gone with the last process that has it. It is a memory
file (`memfd_create`). Some containers forbid that call; there it is an unnamed file (`O_TMPFILE`) in /dev/shm, or in
the temporary folder if /dev/shm is missing or small. No process can leave one behind, even if it is killed half-way, as
could happen with a file that is created and then unlinked. Pythons built for old systems, such as uv's and conda's,
lack `os.memfd_create`: the C library is called instead. A file system can be full, and writing to mapped memory that it
has no room for kills the process (SIGBUS). So room is reserved when memory is created or grows, and a lack of it is an
error then.

**Forks.** A forked child has copies of the parent's channels, life-lines and queues. If it kept them, nobody would see
the parent's workers die, and workers would outlive their owner. So one hook has every child let go of them.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import pickle
import select
import socket
import weakref
from typing import Any, Protocol

_FOLDER = "/dev/shm"  # noqa: S108 - unnamed files: nobody can get there first
_ENOUGH_BYTES = 1 << 30
"""With this much room, /dev/shm is better than a disk; containers often have 64 MB there."""
_FORBIDDEN = (errno.ENOSYS, errno.EPERM, errno.EACCES)
_MFD_CLOEXEC = 1  # from linux/memfd.h
_O_TMPFILE = getattr(os, "O_TMPFILE", 0o20000000 | os.O_DIRECTORY)  # missing from Pythons built for old systems
MAX_DESCRIPTORS = 250
"""Per message; the kernel takes 253, and a large message is a descriptor itself."""
_MAX_BYTES = 1 << 14  # a buffer of this size is allocated for every message, so it should fit the heap
_CTRUNC, _CLOEXEC = int(socket.MSG_CTRUNC), int(socket.MSG_CMSG_CLOEXEC)  # `&` of enums takes microseconds
_DONTWAIT = int(socket.MSG_DONTWAIT)
_RIGHTS_BYTES = socket.CMSG_SPACE(253 * array.array("i").itemsize)


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


class _Socket(socket.socket):
    """A socket that is closed silently when it is collected, which may be late: an error can keep it alive."""

    def __del__(self) -> None:
        self.close()


class Channel:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends; programs that are started inherit neither."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = (_Socket(fileno=end.detach()) for end in ends)
        return cls(ours), cls(theirs)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        """The end that was inherited as a descriptor."""
        return cls(_Socket(fileno=descriptor))

    def fileno(self) -> int:
        """The descriptor, for `poll` and for passing it on."""
        return self._socket.fileno()

    def send(self, message: Any, descriptors: tuple[int, ...] = (), *, is_patient: bool = True) -> None:
        """Send a message.

        Raises:
            ConnectionError: the other side is gone.
            BlockingIOError: there is no room until the other side reads, and the sender is not patient.
        """
        self.send_pickled(pickle.dumps(message), descriptors, is_patient=is_patient)

    def send_pickled(self, data: bytes, descriptors: tuple[int, ...] = (), *, is_patient: bool = True) -> None:
        """Send a message that is already pickled; one too large for a packet goes as a descriptor of memory."""
        flags = 0 if is_patient else _DONTWAIT
        if len(data) <= _MAX_BYTES:
            self._send_packet(b"p" + data, descriptors, flags)
            return
        memory = create_shared_memory("penstock-message", len(data))
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(data)
            self._send_packet(b"m", (memory, *descriptors), flags)
        finally:
            os.close(memory)

    def send_bytes(self, data: bytes) -> None:
        """Send a few bytes as they are."""
        self._socket.send(b"b" + data)

    def receive(self) -> tuple[Any, tuple[int, ...]]:
        """The next message and its descriptors; `EOFError` if the other side is gone.

        Raises:
            OSError: this process has too few free descriptors to receive them.
        """
        data, descriptors, flags = self._receive_packet()
        if flags & _CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError("Too many open files to receive another descriptor; raise `ulimit -n`.")
        kind = data[:1]
        if kind == b"b":
            return data[1:], ()
        if kind == b"p":
            return pickle.loads(data[1:]), tuple(descriptors)  # noqa: S301 - see the module's docstring
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            return pickle.loads(file.read()), tuple(descriptors[1:])  # noqa: S301

    def has_news(self, seconds: float) -> bool:
        """Whether a message or the end of file is there, waiting at most this long."""
        poller = select.poll()  # `select` refuses descriptors above 1,023
        poller.register(self.fileno(), select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def finish(self) -> None:
        """Stop sending: the other side sees an end of file, and may still answer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def has_ended(self) -> bool:
        """Whether the other side is gone; if it is not, its next message is thrown away."""
        try:
            _, descriptors, _ = self._receive_packet()
        except (EOFError, OSError):
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def close(self) -> None:
        """Close this end; the other sees an end of file."""
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):  # else a copy that failed half-way
            self._socket.close()  # no ResourceWarning for an owner that was merely forgotten

    # `socket.send_fds` and `recv_fds` would do, but ignore their flags (CPython 3.11).
    def _send_packet(self, data: bytes, descriptors: tuple[int, ...], flags: int) -> None:
        if not descriptors:
            self._socket.send(data, flags)
            return
        rights = array.array("i", descriptors)
        self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], flags)

    def _receive_packet(self) -> tuple[bytes, list[int], int]:
        while True:
            try:
                data, beside, flags, _ = self._socket.recvmsg(_MAX_BYTES + 1, _RIGHTS_BYTES, _CLOEXEC)
            except ConnectionResetError:
                continue  # raised once, before its last messages, if the other side died with messages unread
            if not data:
                raise EOFError
            if not beside:
                return data, [], flags
            rights = array.array("i")
            for _, _, content in beside:
                rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
            return data, rights.tolist(), flags


class Abandonable(Protocol):
    """Something that belongs to the process that made it."""

    def abandon(self) -> None:
        """In a forked child: let go of it without ending it in the parent."""
        ...


_owned: weakref.WeakSet[Abandonable] = weakref.WeakSet()


def abandon_in_forks(owned: Abandonable) -> None:
    """Call `owned.abandon()` in every child that this process forks while `owned` lives."""
    _owned.add(owned)


def _abandon_all() -> None:
    for owned in list(_owned):
        owned.abandon()


os.register_at_fork(after_in_child=_abandon_all)

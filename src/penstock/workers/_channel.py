"""Messages between a worker process and its owner: packets with a small pickle or a few bytes, and file descriptors.

A Unix packet socket keeps messages whole, passes descriptors, and reports an end of file as soon as the other side
dies. Several threads may send. The two ends trust each other: one started the other.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import select
import socket
from typing import Any

from penstock.workers._shared_memory import create_shared_memory

MAX_DESCRIPTORS = 250
"""Per message; the kernel takes 253, and a large message is a descriptor itself."""
_MAX_BYTES = 1 << 14  # a buffer of this size is allocated for every message, so it should fit the heap
_CTRUNC, _CLOEXEC = int(socket.MSG_CTRUNC), int(socket.MSG_CMSG_CLOEXEC)  # `&` of enums takes microseconds
_DONTWAIT = int(socket.MSG_DONTWAIT)
_RIGHTS_BYTES = socket.CMSG_SPACE(253 * array.array("i").itemsize)


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

"""Messages between a trainer and its workers: small pickles in packets, descriptors beside them.

A Unix socket of packets keeps messages whole, passes descriptors, and answers at once with an end of
file when the other side dies. The two ends trust each other: one started the other.
"""

from __future__ import annotations

import os
import pickle
import socket
from typing import Any

_MAX_DESCRIPTORS = 4
_MAX_BYTES = 1 << 17


class Channel:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends; neither is inherited by programs that are started."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ends[0]), cls(ends[1])

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        """The end that was inherited as a descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """The descriptor, for `select` and for passing it on."""
        return self._socket.fileno()

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message; `ConnectionError` when the other side is gone.

        What does not fit a packet travels as a descriptor of anonymous memory.
        """
        data = pickle.dumps(message)
        if len(data) <= _MAX_BYTES:
            socket.send_fds(self._socket, [b"p" + data], list(descriptors))
            return
        memory = os.memfd_create("penstock-message", os.MFD_CLOEXEC)
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(data)
            socket.send_fds(self._socket, [b"m"], [memory, *descriptors])
        finally:
            os.close(memory)

    def receive(self) -> tuple[Any, tuple[int, ...]]:
        """The next message and the descriptors beside it; `EOFError` when the other side is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _MAX_BYTES + 1, _MAX_DESCRIPTORS)
        except ConnectionResetError:
            raise EOFError from None
        if not data:
            raise EOFError
        if data[:1] == b"p":
            return pickle.loads(data[1:]), tuple(descriptors)  # noqa: S301 - see the module's docstring
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            return pickle.loads(file.read()), tuple(descriptors[1:])  # noqa: S301

    def close(self) -> None:
        """Close this end; the other sees an end of file."""
        self._socket.close()

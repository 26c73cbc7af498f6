"""One connection to one server: whatever ends it, its socket is closed, and no token leaves but through TLS."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import CorruptionError
from penstock.service import make_certificates
from penstock.service._addresses import Address
from penstock.service._fetch import Connection, Refused
from waiting import wait_until

TLS_HANDSHAKE = 0x16


class Peer:
    """Sends `answer` to whoever asks, closes the connection, and keeps the first byte that each one sent."""

    def __init__(self, listener: socket.socket, answer: bytes, tls: ssl.SSLContext | None) -> None:
        self.first_bytes: list[int] = []
        self._listener, self._answer, self._tls = listener, answer, tls

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with contextlib.suppress(OSError), connection:
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        self.first_bytes += connection.recv(1, socket.MSG_PEEK)
        speaking = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
        with speaking:
            speaking.recv(65536)
            speaking.sendall(self._answer)


@contextlib.contextmanager
def answering(answer: bytes, tls: ssl.SSLContext | None = None) -> Iterator[tuple[Address, Peer]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = Peer(listener, answer, tls)
        thread = threading.Thread(target=peer.run, daemon=True)
        thread.start()
        yield Address(host="127.0.0.1", port=listener.getsockname()[1], name="127.0.0.1"), peer
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def num_sockets() -> int:
    paths = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(path).startswith("socket:") for path in paths if os.path.islink(path))


ENDING_WITH_THE_CONNECTION = {
    "a body of no length": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100,
    "a body that breaks off": b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\nConnection: close\r\n\r\n" + b"x" * 100,
    "a refusal of no length": b"HTTP/1.1 403 Forbidden\r\n\r\n" + b"x" * 100,
    "a body with a wrong checksum": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nxxx",
}


@pytest.mark.parametrize("answer", ENDING_WITH_THE_CONNECTION.values(), ids=ENDING_WITH_THE_CONNECTION)
def test_an_answer_that_ends_with_its_connection_leaves_no_open_socket(answer: bytes) -> None:
    with answering(answer) as (address, _):
        before = num_sockets()
        connection = Connection(address, tls=None, token=None, seconds=5.0)
        with pytest.raises((OSError, Refused, CorruptionError)) as raised:  # kept: it keeps all that its frames knew
            connection.get_body("/v1/batch", lambda size: mmap.mmap(-1, size))
        connection.close()
        assert wait_until(lambda: num_sockets() <= before, 5.0), raised.value  # the peer closes one of its own


def test_after_a_server_closed_a_connection_the_token_goes_through_tls_again(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, ["127.0.0.1"])
    there = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    there.load_cert_chain(*files.server)
    here = ssl.create_default_context(cafile=files.authority)
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}", there) as (address, peer):
        connection = Connection(address, tls=here, token="secret", seconds=5.0)
        assert [connection.get_json("/v1/plan") for _ in range(3)] == [{}] * 3
        connection.close()
    assert peer.first_bytes == [TLS_HANDSHAKE] * 3

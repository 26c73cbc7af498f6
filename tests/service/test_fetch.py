"""One connection to one server: whatever ends it, its socket is closed, and no token leaves but through TLS.

Headers are understood whether they look as our own servers send them or not.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, printable
from penstock.service import make_certificates
from penstock.service._connection import Connection, Refused
from penstock.service._settings import Address
from penstock.shards import checksum
from waiting import wait_until

TLS_HANDSHAKE = 0x16


class Peer:
    """Sends `answer` to whoever asks, closes the connection, and keeps the first byte that each one sent."""

    def __init__(
        self,
        listener: socket.socket,
        answer: bytes,
        tls: ssl.SSLContext | None,
        num_first: int | None,
        num_answers: int,
    ) -> None:
        self.first_bytes: list[int] = []
        self._listener, self._answer, self._tls, self._num_first = listener, answer, tls, num_first
        self._num_answers = num_answers

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
            for _ in range(self._num_answers):
                if speaking.recv(65536) and self._num_first is not None:
                    speaking.sendall(self._answer[: self._num_first])
                    time.sleep(0.05)
                speaking.sendall(self._answer[self._num_first or 0 :])


@contextlib.contextmanager
def answering(
    answer: bytes, tls: ssl.SSLContext | None = None, num_first: int | None = None, num_answers: int = 1
) -> Iterator[tuple[Address, Peer]]:
    """A peer that answers; the first bytes come a little earlier than the rest."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = Peer(listener, answer, tls, num_first, num_answers)
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
        connection.ask("/v1/batch")
        with pytest.raises((OSError, Refused, CorruptionError)) as raised:  # kept: it keeps all that its frames knew
            connection.read_body(lambda size: mmap.mmap(-1, size))
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


def header(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in ("HTTP/1.1 200 OK", *lines, "")).encode()


CHECKED = f"Penstock-Checksum: {checksum(b'12345678'):08x}"
USUAL = (CHECKED, "Content-Type: application/octet-stream", "Content-Length: 8", "Date: today", "Server: Python")
HEADERS = {
    "as our servers send it": header(*USUAL),
    "in another order": header(*reversed(USUAL)),
    "in small letters": header(*map(str.lower, USUAL)),
    "with one line more": header(*USUAL, "Via: a proxy"),
    "of a proxy that closes": header(*USUAL, "Connection: close"),
    "with a long line": header(*USUAL, "X: " + 1000 * "x"),
}


@pytest.mark.parametrize("sent", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("in_halves", [False, True])
def test_a_header_is_understood_however_it_looks_and_arrives(sent: bytes, in_halves: bool) -> None:
    with answering(sent + b"12345678", num_first=40 if in_halves else None) as (address, _):
        connection = Connection(address, tls=None, token=None, seconds=5.0)
        memory = mmap.mmap(-1, 8)
        for _ in range(2):  # the second on a connection that was closed meanwhile
            memory[:] = bytes(8)
            connection.ask("/v1/batch")
            assert connection.read_body(lambda _: memory) == 8
            assert memory[:] == b"12345678"
        connection.close()


LIES = {
    "a header without an end": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
    "a line without an end": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 500_000,
    "a status of many digits": b"HTTP/1.1 " + b"2" * 5000 + b" OK\r\nContent-Length: 8\r\n\r\n12345678",
    "a status of other digits": b"HTTP/1.1 \xb2\xb0\xb0 OK\r\nContent-Length: 8\r\n\r\n12345678",
    "no version": b"200 OK\r\nContent-Length: 8\r\n\r\n12345678",
    "nothing but an end": b"\r\n\r\n12345678",
    "zeros": bytes(1 << 20),
    "less than nothing": header(CHECKED, "Content-Length: -8") + b"12345678",
    "two lengths": header(CHECKED, "Content-Length: 8, 8") + b"12345678",
    "a length of thousands of digits": header(CHECKED, "Content-Length: " + "8" * 5000) + b"12345678",
    "a length of other digits": header(CHECKED, "Content-Length: \xb2") + b"12345678",
    "more than was announced": header(CHECKED, "Content-Length: 4") + b"12345678",
    "less than was announced": header(CHECKED, "Content-Length: 9", "Connection: close") + b"12345678",
    "chunks": header(CHECKED, "Transfer-Encoding: chunked") + b"8\r\n12345678\r\n0\r\n\r\n",
    "a wrong checksum": header("Penstock-Checksum: 00000000", "Content-Length: 8") + b"12345678",
    "a checksum of letters": header("Penstock-Checksum: \xff\x00", "Content-Length: 8") + b"12345678",
}


@pytest.mark.parametrize("sent", LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused_at_once_and_told_in_a_few_words(sent: bytes) -> None:
    with answering(sent) as (address, _):
        connection, begin = Connection(address, tls=None, token=None, seconds=5.0), time.monotonic()
        connection.ask("/v1/batch")
        with pytest.raises((OSError, Refused, CorruptionError)) as raised:
            connection.read_body(lambda size: mmap.mmap(-1, size))
        assert printable(str(raised.value)) == str(raised.value)
        assert len(str(raised.value)) < 100
        assert time.monotonic() - begin < 4
        connection.close()


@pytest.mark.parametrize("num_held_back", [1, 1000, (1 << 20) + 1])
@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 700])
def test_a_large_body_arrives_when_its_last_byte_does(size: int, num_held_back: int) -> None:
    """On a connection that stays open: a read that waited for more than there is would wait until the time limit."""
    body = os.urandom(size)
    usual = (f"Penstock-Checksum: {checksum(body):08x}", USUAL[1], f"Content-Length: {size}", *USUAL[3:])
    answer = header(*usual) + body
    with answering(answer, num_first=max(0, len(answer) - num_held_back), num_answers=3) as (address, _):
        connection = Connection(address, tls=None, token=None, seconds=20.0)
        memory, begin = mmap.mmap(-1, size), time.monotonic()
        for _ in range(2):
            memory[:] = bytes(size)
            connection.ask("/v1/batch")
            assert connection.read_body(lambda _: memory) == size
            assert memory[:] == body
        connection.close()
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_a_connection_closed_by_another_thread_while_it_reads_a_header_was_closed(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(host="127.0.0.1", port=listener.getsockname()[1], name="127.0.0.1")
        connection = Connection(address, tls=None, token=None, seconds=20)
        closer = threading.Timer(0.2, connection.close)
        closer.start()
        connection.ask("/")
        with listener.accept()[0] as peer:
            peer.sendall(sent)
            with pytest.raises(ConnectionError, match="was closed"):
                connection.read_body(lambda size: mmap.mmap(-1, size))
        closer.join()

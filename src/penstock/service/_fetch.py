"""One connection to one server: asks for a body, and reads it straight into memory that becomes the batch.

`http.client` reads the headers. The body is received piece by piece into the slot, and each piece is added to the
checksum while it is in the processor's cache. A connection stays open from request to request, and is opened again
after anything went wrong. No wait outlasts the time limit, and `close` ends one in another thread. A token is
sent over TLS, or to this machine, and nowhere else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from penstock.errors import CorruptionError, RemoteFailed, printable
from penstock.service._addresses import Address
from penstock.service._security import is_loopback
from penstock.service._wire import CHECKSUM_HEADER
from penstock.shards import checksum

_CONNECT_SECONDS = 3.0
_MAX_BODY_BYTES = 4 << 30
_MAX_PAGE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
"""Of a body, read and checked while it is in the processor's cache."""
_MAX_REASON, _MAX_TRACE = 500, 20_000
"""Characters of a server's reason and of its traceback that are shown."""


class Refused(Exception):
    """The server is there and will not serve us."""


class Damaged(CorruptionError):
    """The body is not the one that the server sent."""


class _PatientSocket(socket.socket):
    """A socket that waits in the kernel, in one call for any number of bytes.

    Python's own time limits ask the kernel twice, to wait and to read; every call lets go of the interpreter and has to
    win it back from the training thread, which costs more than the call. Takes over another socket's descriptor.
    """

    def __init__(self, raw: socket.socket, seconds: float) -> None:
        super().__init__(fileno=raw.detach())
        self.settimeout(None)
        patience = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.setsockopt(socket.SOL_SOCKET, option, patience)

    def recv_into(self, *arguments: Any) -> int:
        """Read, within the time limit."""
        try:
            return super().recv_into(*arguments)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def sendall(self, *arguments: Any) -> None:
        """Write, within the time limit."""
        try:
            super().sendall(*arguments)
        except BlockingIOError:
            raise TimeoutError("timed out") from None


class Connection:
    """Kept open from request to request; opened again after anything went wrong."""

    def __init__(self, address: Address, *, tls: ssl.SSLContext | None, token: str | None, seconds: float) -> None:
        self._address, self._tls, self._seconds = address, tls, seconds
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http: http.client.HTTPConnection | None = None
        self._sock: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._is_closed = False

    def get_json(self, path: str) -> dict[str, Any]:
        """A small page, as JSON."""
        page = _parse(self._read_page(self._get(path)))
        if page is None:
            raise Refused(f"answers {path} with something other than a JSON object")
        return page

    def get_text(self, path: str) -> str:
        """A small page, as text."""
        return self._read_page(self._get(path)).decode("utf-8", "replace")

    def get_body(self, path: str, memory: Callable[[int], mmap.mmap]) -> int:
        """Read a body into the memory that `memory(size)` gives; return its size.

        Raises:
            OSError: the server cannot be reached, or broke off.
            Refused: it will not serve us.
            RemoteFailed: it could not compute what was asked for.
            Damaged: the checksum is not that of the bytes.
        """
        response = self._get(path)
        size = response.length
        if size is None or size > _MAX_BODY_BYTES:
            self._drop()
            raise Refused("does not say how much it sends" if size is None else f"wants to send {size:,} bytes")
        with memoryview(memory(max(size, 1))) as whole, whole[:size] as body:
            if response.headers.get(CHECKSUM_HEADER) != f"{self._read(response, body):08x}":
                raise Damaged(f"{size:,} bytes arrived damaged")
        return size

    def close(self) -> None:
        """Close the socket for good; any thread may call this, also to end a read in another."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        """Close the socket; the next request opens another.

        An answer that ends with its connection holds the socket alone: `http.client` has forgotten both by then.
        """
        sock, connection, response = self._sock, self._http, self._response
        self._sock = self._http = self._response = None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # first: a thread that reads holds what closing waits for
            sock.close()
        for one in (connection, response):
            if one is not None:
                one.close()

    def _get(self, path: str) -> http.client.HTTPResponse:
        """Ask; a connection that the server closed while it was idle is opened once more."""
        was_open = self._http is not None
        try:
            response = self._ask(path)
        except ConnectionError:
            if not was_open or self._is_closed:
                raise
            response = self._ask(path)
        if response.status != 200:
            self._raise_refusal(response)
        return response

    def _ask(self, path: str) -> http.client.HTTPResponse:
        connection = self._http = self._http or self._open()
        with self._dropped_on_error():
            if self._is_closed:
                raise ConnectionError("the connection was closed")
            connection.request("GET", path, headers=self._headers)
            response = self._response = connection.getresponse()
        if response.will_close:
            self._http = None
        return response

    def _open(self) -> http.client.HTTPConnection:
        self._drop()  # what an answer that ended with its connection left
        if self._headers and self._tls is None and not is_loopback(self._address.host):
            raise Refused("would get the token unencrypted; give authority=, so that it is sent over TLS")
        raw = socket.create_connection((self._address.host, self._address.port), timeout=_CONNECT_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock: socket.socket
            if self._tls:
                sock = self._tls.wrap_socket(raw, server_hostname=self._address.name)
                sock.settimeout(self._seconds)
            else:
                sock = _PatientSocket(raw, self._seconds)
        except BaseException:
            raw.close()
            raise
        connection = http.client.HTTPConnection(self._address.host, self._address.port)
        connection.sock = self._sock = sock
        connection.auto_open = 0  # it would open a connection without TLS, and send the token unencrypted
        return connection

    def _read(self, response: http.client.HTTPResponse, body: memoryview) -> int:
        """Fill a body; returns its checksum, computed piece by piece while the bytes are in the cache."""
        with self._dropped_on_error():
            done = response.readinto(body[: len(response.peek())])  # what came with the header
            found = checksum(body[:done])
            sock = self._sock
            while done < len(body):
                piece = body[done : done + _PIECE_BYTES]
                if isinstance(sock, _PatientSocket):
                    count = sock.recv_into(piece, len(piece), socket.MSG_WAITALL)
                else:
                    count = response.readinto(piece)
                if not count:
                    raise ConnectionError(f"broke off after {done:,} of {len(body):,} bytes")
                found = checksum(piece[:count], found)
                done += count
            response.length = 0
            response.read()  # the end of the message, so that the connection can be used again
        return found

    def _read_page(self, response: http.client.HTTPResponse) -> bytes:
        with self._dropped_on_error():
            return response.read(_MAX_PAGE_BYTES)

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """Close the socket when something breaks; malformed HTTP counts as a broken connection."""
        try:
            yield
        except BaseException as error:
            self._drop()
            if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
                raise ConnectionError(f"answers with something other than HTTP: {type(error).__name__}") from error
            raise

    def _raise_refusal(self, response: http.client.HTTPResponse) -> NoReturn:
        page = _parse(self._read_page(response)) or {}
        reason = printable(str(page.get("error", "no reason given"))[:_MAX_REASON], keep="\n\t")
        self._drop()
        if response.status == 500:
            trace = str(page.get("traceback", ""))[:_MAX_TRACE]
            raise RemoteFailed(f"Computing on {self._address} failed: {reason}\n\nOn the server:\n{trace}")
        if response.status == 503:
            raise ConnectionError(reason)
        raise Refused(f"{response.status}: {reason}")


def _parse(text: bytes) -> dict[str, Any] | None:
    """A JSON object, if it is one."""
    try:
        page = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return page if isinstance(page, dict) else None

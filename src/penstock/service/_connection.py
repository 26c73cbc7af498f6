"""One connection to one server: asks for a body, and reads it straight into memory that becomes the batch.

The body is received piece by piece into the slot, and each piece is added to the checksum while it is in the
processor's cache. `http.client` reads the headers, except those that look exactly as our own servers send them: with
it, a body of 8 MiB took 3.2 ms of processor time instead of 2.5, its code being cold by then. A connection stays open
from request to request, and is opened again after anything went wrong. No wait outlasts the time limit, and `close`
ends one in another thread. A token is sent over TLS, or to this machine, and nowhere else.
"""

import contextlib
import http.client
import json
import mmap
import re
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from penstock.errors import CorruptionError, RemoteFailed, printable
from penstock.service._settings import Address, is_loopback
from penstock.service._wire import CHECKSUM_HEADER
from penstock.shards import checksum

_CONNECT_SECONDS = 3.0
_MAX_BODY_BYTES = 4 << 30
_MAX_PAGE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
"""Of a body, read and checked while it is in the processor's cache."""
_USUAL_HEADER = re.compile(
    rb"HTTP/1\.1 200 OK\r\n"
    rb"Penstock-Checksum: ([0-9a-f]{8})\r\n"
    rb"Content-Type: application/octet-stream\r\n"
    rb"Content-Length: ([0-9]{1,9})\r\n"
    rb"Date: [^\r\n]*\r\n"
    rb"Server: [^\r\n]*\r\n\r\n"
)
"""Of a body, as our servers send it."""
_USUAL_HEADER_BYTES = 512
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
        self._wakes_at = 1
        patience = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.setsockopt(socket.SOL_SOCKET, option, patience)

    def wake_at(self, num_bytes: int) -> None:
        """Have a read that waits woken when this many bytes are there, and let the server send as many at once.

        Woken for each packet, it takes a fifth more processor time. At least that many must come after what is read.
        """
        if num_bytes != self._wakes_at:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes

    def recv_into(self, *arguments: Any) -> int:
        try:
            return super().recv_into(*arguments)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def sendall(self, *arguments: Any) -> None:
        try:
            super().sendall(*arguments)
        except BlockingIOError:
            raise TimeoutError("timed out") from None


class Connection:
    """Kept open from request to request; opened again after anything went wrong."""

    def __init__(self, address: Address, *, tls: ssl.SSLContext | None, token: str | None, seconds: float) -> None:
        self._address, self._tls, self._seconds = address, tls, seconds
        self._has_token = token is not None
        self._headers = f"Host: {address}\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        self._sock: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        """The last answer that `http.client` read."""
        self._is_closed = False
        self._path, self._may_reopen = "", False

    def get_json(self, path: str) -> dict[str, Any]:
        """A small page, as JSON."""
        self.ask(path)
        page = _parse(self._read_page(self._answer()))
        if page is None:
            raise Refused(f"answers {path} with something other than a JSON object")
        return page

    def get_text(self, path: str) -> str:
        """A small page, as text."""
        self.ask(path)
        return self._read_page(self._answer()).decode("utf-8", "replace")

    def ask(self, path: str) -> None:
        """Ask for a body, which `read_body` reads: one thread asks through several connections before it reads.

        Raises:
            OSError: the server cannot be reached.
            Refused: it would get the token unencrypted.
        """
        if self._response is not None and self._response.will_close:
            self.drop()
        self._path, self._may_reopen = path, self._sock is not None
        try:
            self._send()
        except ConnectionError:
            if not self._may_reopen:
                raise

    def read_body(self, memory: Callable[[int], mmap.mmap]) -> int:
        """Read what was asked for into the memory that `memory(size)` gives; return its size.

        Raises:
            OSError: the server cannot be reached, or broke off.
            Refused: it will not serve us.
            RemoteFailed: it could not compute what was asked for.
            Damaged: the checksum is not that of the bytes.
        """
        response = None
        size, expected = self._read_usual_header() or (None, None)
        if size is None:
            response = self._answer()
            size, expected = response.length, response.headers.get(CHECKSUM_HEADER)
        if size is None or size > _MAX_BODY_BYTES:
            self.drop()
            raise Refused("does not say how much it sends" if size is None else f"wants to send {size:,} bytes")
        with self._dropped_on_error(), memoryview(memory(max(size, 1))) as whole, whole[:size] as body:
            found = self._fill(body, response)
        if expected != f"{found:08x}":
            raise Damaged(f"{size:,} bytes arrived damaged")
        return size

    def fileno(self) -> int:
        """The descriptor of the socket, for polling; -1 if it is not open."""
        sock = self._sock
        return -1 if sock is None else sock.fileno()

    def close(self) -> None:
        """Close the socket for good; any thread may call this, also to end a read in another."""
        self._is_closed = True
        self.drop()

    def drop(self) -> None:
        """Close the socket; the next request opens another."""
        sock, response = self._sock, self._response
        self._sock = self._response = None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # first: a thread that reads holds what closing waits for
            sock.close()
        if response is not None:
            response.close()

    def _answer(self) -> http.client.HTTPResponse:
        """What comes; a connection that the server closed while it was idle is opened once more."""
        try:
            response = self._begin()
        except ConnectionError:
            if not self._may_reopen or self._is_closed:
                raise
            self._send()
            response = self._begin()
        if response.status != 200:
            self._raise_refusal(response)
        return response

    def _send(self) -> None:
        sock = self._sock = self._sock or self._open()
        with self._dropped_on_error():
            if self._is_closed:
                raise ConnectionError("the connection was closed")
            sock.sendall(f"GET {self._path} HTTP/1.1\r\n{self._headers}\r\n".encode())

    def _read_usual_header(self) -> tuple[int, str] | None:
        """(size, checksum) of a body with a header as servers of ours send it; otherwise None, and nothing is read."""
        sock, head = self._sock, bytearray(_USUAL_HEADER_BYTES)
        if not isinstance(sock, _PatientSocket):
            return None
        try:
            sock.recv_into(head, len(head), socket.MSG_PEEK)
        except TimeoutError:
            self.drop()
            raise
        except OSError:
            return None  # `http.client` says what is wrong
        found = _USUAL_HEADER.match(head)
        if found is None:
            return None
        sock.recv_into(head, found.end())
        return int(found[2]), found[1].decode()

    def _begin(self) -> http.client.HTTPResponse:
        sock = self._sock
        if sock is None:
            raise ConnectionError("the connection was closed")
        with self._dropped_on_error():
            response = self._response = http.client.HTTPResponse(sock, method="GET")
            try:
                response.begin()
            except (AttributeError, ValueError):  # what it reads from was closed, by another thread
                if not self._is_closed:
                    raise
                raise ConnectionError("the connection was closed") from None
        return response

    def _open(self) -> socket.socket:
        if self._has_token and self._tls is None and not is_loopback(self._address.host):
            raise Refused("would get the token unencrypted; give authority=, so that it is sent over TLS")
        raw = socket.create_connection((self._address.host, self._address.port), timeout=_CONNECT_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if self._tls is None:
                return _PatientSocket(raw, self._seconds)
            sock = self._tls.wrap_socket(raw, server_hostname=self._address.name)
            sock.settimeout(self._seconds)
        except BaseException:
            raw.close()
            raise
        return sock

    def _fill(self, body: memoryview, response: http.client.HTTPResponse | None) -> int:
        """Read a body; returns its checksum, computed piece by piece while the bytes are in the cache."""
        done = 0 if response is None else response.readinto(body[: len(response.peek())])  # came with the header
        found = checksum(body[:done])
        source = self._sock if isinstance(self._sock, _PatientSocket) else response
        while done < len(body):
            left = len(body) - done
            piece = body[done : done + (left % _PIECE_BYTES or _PIECE_BYTES)]  # whole ones last
            if isinstance(source, _PatientSocket):
                source.wake_at(_PIECE_BYTES if left > _PIECE_BYTES else 1)
                count = source.recv_into(piece, len(piece), socket.MSG_WAITALL)
            else:
                count = source.readinto(piece) if source is not None else 0
            if not count:
                raise ConnectionError(f"broke off after {done:,} of {len(body):,} bytes")
            found = checksum(piece[:count], found)
            done += count
        if response is not None:
            response.close()
        return found

    def _read_page(self, response: http.client.HTTPResponse) -> bytes:
        with self._dropped_on_error():
            page = response.read(_MAX_PAGE_BYTES)
        if not response.isclosed():  # there is more of it
            self.drop()
        return page

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """Close the socket when something breaks; malformed HTTP counts as a broken connection."""
        try:
            yield
        except BaseException as error:
            self.drop()
            if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
                raise ConnectionError(f"answers with something other than HTTP: {type(error).__name__}") from error
            raise

    def _raise_refusal(self, response: http.client.HTTPResponse) -> NoReturn:
        page = _parse(self._read_page(response)) or {}
        reason = printable(str(page.get("error", "no reason given"))[:_MAX_REASON], keep="\n\t")
        self.drop()
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

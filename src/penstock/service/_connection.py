"""One connection to one server: asks for a body, and reads it straight into memory that becomes the batch.

The body is received piece by piece into the slot, and each piece is added to the checksum while it is in the
processor's cache. Headers are read here, in a few lines: with `http.client`, a body of 8 MiB took 3.2 ms of processor
time instead of 2.5, its code being cold by then. A connection stays open from request to request, and is opened again
after anything went wrong. No wait outlasts the time limit, and `close` ends one in another thread. A token is sent over
TLS, or to this machine, and nowhere else.
"""

import contextlib
import json
import mmap
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Self

from penstock.errors import CorruptionError, RemoteFailed, printable
from penstock.service._settings import Address, is_loopback
from penstock.service._wire import CHECKSUM_HEADER
from penstock.shards import checksum

_CONNECT_SECONDS = 3.0
_MAX_BODY_BYTES = 4 << 30
_MAX_PAGE_BYTES = 1 << 20
_MAX_HEADER_BYTES, _READ_BYTES = 64 << 10, 4096
_PIECE_BYTES = 1 << 20
"""Of a body, read and checked while it is in the processor's cache."""
_MAX_REASON, _MAX_TRACE = 500, 20_000
"""Characters of a server's reason and of its traceback that are shown."""
_NOT_HTTP = "answers with something other than HTTP"


class Refused(Exception):
    """The server is there and will not serve us."""


class Damaged(CorruptionError):
    """The body is not the one that the server sent."""


class _Header(NamedTuple):
    """What a server says before a body, and the beginning of the body that came with it."""

    status: int
    size: int | None
    """None if it does not say; then the body ends with the connection."""
    checksum: str
    will_close: bool
    first: bytes

    @classmethod
    def parse(cls, text: bytes, first: bytes) -> Self:
        """The header in this text.

        Raises:
            ConnectionError: it is not that of HTTP/1, or the body is sent in a way that we do not read.
        """
        first_line, *lines = text.decode("latin-1").split("\r\n")
        version, status = (*first_line.split(" ", 2), "", "")[:2]
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = fields.get("content-length", "")
        is_number = size.isascii() and size.isdigit() and len(size) < 20
        is_http = version.startswith("HTTP/1.") and len(status) == 3 and status.isascii() and status.isdigit()
        if not is_http or (size and not is_number) or "transfer-encoding" in fields:
            raise ConnectionError(_NOT_HTTP if not is_http else "does not say how much it sends")
        will_close = not size or version == "HTTP/1.0" or fields.get("connection", "").lower() == "close"
        found = fields.get(CHECKSUM_HEADER.lower(), "")
        return cls(int(status), int(size) if size else None, found, will_close, first)


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


class Connection:
    """Kept open from request to request; opened again after anything went wrong."""

    def __init__(self, address: Address, *, tls: ssl.SSLContext | None, token: str | None, seconds: float) -> None:
        self._address, self._tls, self._seconds = address, tls, seconds
        self._has_token = token is not None
        self._headers = f"Host: {address}\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        self._sock: socket.socket | None = None
        self._is_closed = False
        self._path, self._may_reopen = "", False

    def get_json(self, path: str) -> dict[str, Any]:
        """A small page, as JSON."""
        page = _parse(self._get(path))
        if page is None:
            raise Refused(f"answers {path} with something other than a JSON object")
        return page

    def get_text(self, path: str) -> str:
        """A small page, as text."""
        return self._get(path).decode("utf-8", "replace")

    def ask(self, path: str) -> None:
        """Ask for a body, which `read_body` reads: one thread asks through several connections before it reads.

        Raises:
            OSError: the server cannot be reached.
            Refused: it would get the token unencrypted.
        """
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
        header = self._answer()
        size = header.size
        if size is None or size > _MAX_BODY_BYTES:
            self.drop()
            raise Refused("does not say how much it sends" if size is None else f"wants to send {size:,} bytes")
        with self._dropped_on_error(), memoryview(memory(max(size, 1))) as whole, whole[:size] as body:
            found = self._fill(body, header.first)
        if header.will_close:
            self.drop()
        if header.checksum != f"{found:08x}":
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
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # first: a thread that reads holds what closing waits for
            sock.close()

    def _get(self, path: str) -> bytes:
        self.ask(path)
        return self._read_page(self._answer())

    def _answer(self) -> _Header:
        """The header of what comes; a connection that the server closed while it was idle is opened once more."""
        try:
            header = self._read_header()
        except ConnectionError:
            if not self._may_reopen or self._is_closed:
                raise
            self._send()
            header = self._read_header()
        if header.status != 200:
            self._raise_refusal(header)
        return header

    def _send(self) -> None:
        sock = self._sock = self._sock or self._open()
        with self._dropped_on_error():
            if self._is_closed:
                raise ConnectionError("the connection was closed")
            sock.sendall(f"GET {self._path} HTTP/1.1\r\n{self._headers}\r\n".encode())

    def _read_header(self) -> _Header:
        found = b""
        with self._dropped_on_error():
            while b"\r\n\r\n" not in found[-_READ_BYTES - 3 :]:
                if len(found) > _MAX_HEADER_BYTES:
                    raise ConnectionError(_NOT_HTTP)
                if not (piece := self._receive()):
                    raise ConnectionError("broke off before its answer")
                found += piece
            text, _, first = found.partition(b"\r\n\r\n")
            return _Header.parse(text, first)

    def _receive(self) -> bytes:
        """What comes next, a little at a time; nothing at the end."""
        piece, sock = bytearray(_READ_BYTES), self._sock
        count = 0 if sock is None else sock.recv_into(piece)
        if self._is_closed:
            raise ConnectionError("the connection was closed")
        return bytes(piece[:count])

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

    def _fill(self, body: memoryview, first: bytes) -> int:
        """Read a body that begins with `first`; returns its checksum, computed while the bytes are in the cache."""
        done, sock = len(first), self._sock
        if done > len(body):
            raise ConnectionError(f"sends more than the {len(body):,} bytes that it announced")
        body[:done] = first
        found = checksum(first)
        while done < len(body):
            left = len(body) - done
            piece = body[done : done + (left % _PIECE_BYTES or _PIECE_BYTES)]  # whole ones last
            if isinstance(sock, _PatientSocket):
                sock.wake_at(_PIECE_BYTES if left > _PIECE_BYTES else 1)
                count = sock.recv_into(piece, len(piece), socket.MSG_WAITALL)
            else:
                count = 0 if sock is None else sock.recv_into(piece)
            if not count:
                raise ConnectionError(f"broke off after {done:,} of {len(body):,} bytes")
            found = checksum(piece[:count], found)
            done += count
        return found

    def _read_page(self, header: _Header) -> bytes:
        page, size = bytearray(header.first), _MAX_PAGE_BYTES if header.size is None else header.size
        with self._dropped_on_error():
            while len(page) < min(size, _MAX_PAGE_BYTES) and (piece := self._receive()):
                page += piece
        if header.will_close or len(page) != size:
            self.drop()
        return bytes(page)

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """Close the socket when something breaks."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def _raise_refusal(self, header: _Header) -> NoReturn:
        page = _parse(self._read_page(header)) or {}
        reason = printable(str(page.get("error", "no reason given"))[:_MAX_REASON], keep="\n\t")
        self.drop()
        if header.status == 500:
            trace = str(page.get("traceback", ""))[:_MAX_TRACE]
            raise RemoteFailed(f"Computing on {self._address} failed: {reason}\n\nOn the server:\n{trace}")
        if header.status == 503:
            raise ConnectionError(reason)
        raise Refused(f"{header.status}: {reason}")


def _parse(text: bytes) -> dict[str, Any] | None:
    """A JSON object, if it is one."""
    try:
        page = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return page if isinstance(page, dict) else None

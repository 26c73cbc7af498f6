"""What clients may take of a server: connections, time, and memory for the answers on their way out.

aiohttp bounds headers and pauses what it does not read, but a connection may stay silent for ever, and a client may
open any number of them. Here a connection that has asked for nothing within a few seconds is closed, and when an
address has too many, the oldest that never made a valid request make room: a client that opens a thousand and stays
silent keeps nobody out.

An answer holds memory from when it is computed until its reader has taken the last byte. `Allowance` bounds what all of
them hold, in bytes; requests beyond that wait their turn. A reader has to keep up a rate, or is cut off.

asyncio's transports copy whatever a socket does not take at once, so bodies go around them: straight from the slot to a
second descriptor of the same socket, which mostly takes all of it in one call. Under TLS there is no way around.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

HEADER_SECONDS = 3.0
"""Time for a header, and before it for the TLS handshake."""
_MAX_PER_ADDRESS = 128
_CHUNK_BYTES = 512 << 10
_READER_SECONDS = 10.0
"""How long a reader may take for each chunk."""
_MAX_BUFFERS = 1024
"""As many as the kernel takes in one call (IOV_MAX)."""


class Connections(web.Server):
    """Makes a guarded handler for each connection."""

    def __init__(self, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self._options = options
        self.by_address: dict[str, dict[GuardedConnection, None]] = defaultdict(dict)
        """Open connections, oldest first."""

    def __call__(self) -> web.RequestHandler:
        return GuardedConnection(self, loop=asyncio.get_running_loop(), **self._options)

    @property
    def num_open(self) -> int:
        return sum(map(len, self.by_address.values()))


class GuardedConnection(web.RequestHandler):
    """A connection that is closed unless it makes a valid request in time."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(connections, **options)
        self._all = connections
        self._address = ""
        self._deadline: asyncio.TimerHandle | None = None
        self.is_proven = False
        """Whether it has made a valid request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give it a place and a deadline."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) else ""
        mates = self._all.by_address[self._address]
        mates[self] = None
        if len(mates) > _MAX_PER_ADDRESS:
            silent = next((mate for mate in mates if not mate.is_proven), None)
            if silent is not None:
                silent.cut()
        self._deadline = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._close_unless_proven)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the place back."""
        mates = self._all.by_address.get(self._address, {})
        mates.pop(self, None)
        if not mates:
            self._all.by_address.pop(self._address, None)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log our own faults; malformed HTTP and lost clients only as debug messages, or clients could fill the log."""
        if isinstance(options.get("exc_info"), (HttpProcessingError, ConnectionError, TimeoutError)):
            self.logger.debug(*args, **options)
        else:
            super().log_exception(*args, **options)

    def cut(self) -> None:
        """Close it at once, without an answer."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()

    def _close_unless_proven(self) -> None:
        if not self.is_proven:
            self.cut()


class Allowance:
    """Bytes that may be held at a time, first come, first served. For one event loop."""

    def __init__(self, num_bytes: int) -> None:
        self._limit = self._free = num_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold this many bytes, as soon as they are free; more than the limit counts as the limit."""
        num_bytes = min(num_bytes, self._limit)
        await self._enter(num_bytes)
        try:
            yield
        finally:
            self._free += num_bytes
            self._let_in()

    async def _enter(self, num_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._let_in()
        if turn.done():
            return
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # let in, and cancelled before it could run
                self._free += num_bytes
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and (self._waiting[0][0] <= self._free or self._waiting[0][1].cancelled()):
            num_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= num_bytes
                turn.set_result(None)


async def send_body(response: web.StreamResponse, transport: asyncio.Transport, buffers: list[memoryview]) -> None:
    """Send a body whose header is under way.

    Raises:
        OSError: the reader is gone, or too slow. Then it is cut off: closing would wait until it has read what is left.
    """
    try:
        await _send(response, transport, buffers)
    except TimeoutError:
        transport.abort()
        raise ConnectionAbortedError("The reader is too slow.") from None


async def _send(response: web.StreamResponse, transport: asyncio.Transport, buffers: list[memoryview]) -> None:
    head, *arrays = buffers
    is_tls = transport.get_extra_info("ssl_object") is not None
    async with asyncio.timeout(_READER_SECONDS):  # with what is left of the answers before it
        await response.write(head)
        if not is_tls:
            await _flush(transport)
    if is_tls:
        chunks = (
            array[begin : begin + _CHUNK_BYTES] for array in arrays for begin in range(0, len(array), _CHUNK_BYTES)
        )
        for chunk in chunks:
            await asyncio.sleep(0)  # a write that fails does not raise: the loop tells the transport
            if transport.is_closing():  # asyncio only logs what is written after that
                raise ConnectionResetError("The reader is gone.")
            async with asyncio.timeout(_READER_SECONDS):
                await response.write(chunk)
        return
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
        own.setblocking(False)
        await _send_all(own, arrays)


async def _flush(transport: asyncio.Transport) -> None:
    """Wait until nothing is left in asyncio's hands: bodies go around it, and may not overtake their header."""
    while transport.get_write_buffer_size():
        if transport.is_closing():
            raise ConnectionResetError("The reader is gone.")
        await asyncio.sleep(0.001)


async def _send_all(sock: socket.socket, buffers: list[memoryview]) -> None:
    unsent = deque(buffers)
    num_sent, begin = 0, asyncio.get_running_loop().time()
    while unsent:
        try:
            count = sock.sendmsg(itertools.islice(unsent, _MAX_BUFFERS))
        except BlockingIOError:
            async with asyncio.timeout_at(begin + _READER_SECONDS * (1 + num_sent // _CHUNK_BYTES)):
                await _wait_until_writable(sock)
            continue
        num_sent += count
        while count:
            first = unsent.popleft()
            if count < len(first):
                unsent.appendleft(first[count:])
            count -= min(count, len(first))


async def _wait_until_writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_writable = asyncio.Event()
    loop.add_writer(sock, is_writable.set)
    try:
        await is_writable.wait()
    finally:
        loop.remove_writer(sock)

"""Answers on their way out: how much memory they may hold, and how their bytes leave.

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
from collections import deque
from collections.abc import AsyncIterator, Iterable

from aiohttp import web

_CHUNK_BYTES = 512 << 10
_READER_SECONDS = 10.0
"""How long a reader may take for each chunk."""
_MAX_BUFFERS = 1024
"""As many as the kernel takes in one call (IOV_MAX)."""


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
        for chunk in _chunks(arrays):
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


def _chunks(buffers: Iterable[memoryview]) -> Iterable[memoryview]:
    for buffer in buffers:
        for begin in range(0, len(buffer), _CHUNK_BYTES):
            yield buffer[begin : begin + _CHUNK_BYTES]


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

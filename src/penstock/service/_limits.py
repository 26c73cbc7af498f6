"""What clients may take of a server: connections, time, and memory for the answers on their way out.

aiohttp bounds headers and pauses what it does not read, but a connection may stay silent forever, and a client may
open any number of them. Here a connection that has asked for nothing within a few seconds is closed, and when an
address has too many, the oldest that never made a valid request makes room, or else the one that has been idle longest:
a client that opens a thousand and stays silent keeps nobody out, whether it spoke once or never. Clients whose idle
connections are closed open others.

An answer holds memory from when it is computed until its reader has taken the last byte. `Allowance` bounds what all of
them hold, in bytes; requests beyond that wait. A reader has to keep up a rate, measured by what arrives at its machine,
or is cut off.

asyncio's transports copy whatever a socket does not take at once, so bodies go around them: straight from the slot to a
second descriptor of the same socket, which mostly takes all of it in one call. Under TLS there is no way around.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import resource
import socket
import struct
import sys
import termios
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

HEADER_SECONDS = 3.0
"""Time for a header, and before it for the TLS handshake."""
_MAX_PER_ADDRESS = 512
_SHARE_OF_FILES = 3 / 8
"""How much of the files that this process may open connections may take."""
_CHUNK_BYTES, _READER_SECONDS = 512 << 10, 10.0
"""What a reader has to take in every such time, while nobody waits for memory."""
_WANTED_SECONDS, _ENOUGH_PER_SECOND = 1.0, 1 << 20
"""While others wait: for how long a reader's rate is measured, and what is fast enough whatever others reach."""
_LOOK_SECONDS = 0.25
"""How often readers are looked at."""
_NO_LINGER = struct.pack("@ii", 1, 0)
_MAX_BUFFERS = 1024
"""As many as the kernel takes in one call (IOV_MAX)."""


class Connections(web.Server):
    """Makes a guarded handler for each connection."""

    def __init__(self, handler: Any, **options: Any) -> None:
        super().__init__(handler, handler_cancellation=True, **options)  # who has left waits for nothing
        self._options = options
        self.by_address: dict[str, dict[GuardedConnection, None]] = defaultdict(dict)
        """Open connections, those that were used last at the end."""

    def __call__(self) -> web.RequestHandler:
        return GuardedConnection(self, loop=asyncio.get_running_loop(), **self._options)

    @property
    def num_open(self) -> int:
        return sum(map(len, self.by_address.values()))

    def make_room(self, newest: GuardedConnection) -> None:
        """Close a connection if those of the newest one's address are too many, or all are; then of the worst address.

        One that never made a valid request, or else the one that has been idle longest.
        """
        mates = self.by_address[newest.address]
        if len(mates) <= _MAX_PER_ADDRESS:
            if self.num_open <= _SHARE_OF_FILES * resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                return
            mates = max(self.by_address.values(), key=len)
        others = [mate for mate in mates if mate is not newest]
        silent = next((mate for mate in others if not mate.is_proven), None)
        idle = silent or next((mate for mate in others if not mate.is_busy), None)
        if idle is not None:
            idle.cut()


class GuardedConnection(web.RequestHandler):
    """A connection that is closed unless it makes a valid request in time."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(connections, **options)
        self._all = connections
        self.address = ""
        self._deadline: asyncio.TimerHandle | None = None
        self.is_proven = self.is_busy = False
        """Whether it has made a valid request; whether one is being answered."""
        self.has_taken = False
        """Whether it has taken an answer with batches, whole."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give it a place and a deadline."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else ""
        self._all.by_address[self.address][self] = None
        self._all.make_room(self)
        self._deadline = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._close_unless_proven)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the place back."""
        mates = self._all.by_address.get(self.address, {})
        mates.pop(self, None)
        if not mates:
            self._all.by_address.pop(self.address, None)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log our own faults; malformed HTTP and lost clients only as debug messages, or clients could fill the log."""
        if isinstance(options.get("exc_info"), (HttpProcessingError, ConnectionError, TimeoutError)):
            self.logger.debug(*args, **options)
        else:
            super().log_exception(*args, **options)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While a valid request is answered; after that it is the last to be closed for being idle."""
        self.is_proven = self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False
            mates = self._all.by_address.get(self.address, {})
            if self in mates:
                mates[self] = mates.pop(self)

    def cut(self) -> None:
        """Close it at once, without an answer."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()

    def _close_unless_proven(self) -> None:
        if not self.is_proven:
            self.cut()


@dataclass(slots=True, eq=False)
class Held:
    """An answer that holds memory, from before it is computed until its reader has taken it."""

    address: str
    num_bytes: int
    is_trusted: bool
    """Whether its connection has taken an answer before."""
    turn: asyncio.Future[None]
    """Done when there is room for it."""
    num_sent: int = 0
    """Bytes handed to the kernel, or to asyncio under TLS."""
    transport: asyncio.Transport | None = None
    """What it is sent through, once it is computed."""
    patience: asyncio.Timeout | None = None
    """Ends the sending when it is rescheduled."""
    progress: deque[tuple[float, int]] = field(default_factory=deque)
    """(when, bytes that the reader had taken by then)"""

    @property
    def num_taken(self) -> int:
        """Bytes that arrived at the reader's machine: neither asyncio nor the kernel has them any more."""
        assert self.transport is not None
        is_closing = self.transport.is_closing()
        return self.num_sent - (0 if is_closing else self.transport.get_write_buffer_size() + _unsent(self.transport))

    def rate(self, now: float, seconds: float) -> float | None:
        """Bytes per second that the reader took lately; None if it has not been sent to for so long."""
        before = next((entry for entry in reversed(self.progress) if entry[0] <= now - seconds), None)
        return None if before is None else (self.progress[-1][1] - before[1]) / (now - before[0])


class Allowance:
    """Bytes that answers may hold at a time. For one event loop.

    Whoever asks beyond that waits, first come, first served; if several addresses ask, those go first that hold less
    than an equal share. Connections that have not taken an answer yet hold at most half of all together.

    A reader that is too slow is cut off: after some seconds if nobody waits, and soon if others do. Then how fast it
    has to be depends on what the network has carried lately, so that readers behind a slow one are not cut off again
    and again: a sixteenth of the best answer to that address, or to any address if this one holds more than its share;
    and 1 MiB/s is always enough. A reader that is cut off asks again and loses only time.
    """

    def __init__(self, num_bytes: int) -> None:
        self._limit = self._free = num_bytes
        self._waiting: deque[Held] = deque()
        self._held: dict[Held, None] = {}
        self._num_asking: Counter[str] = Counter()
        """Answers of each address, held and waiting."""
        self._bytes: Counter[str] = Counter()
        """Bytes that each address holds."""
        self._untrusted_bytes = 0
        """Bytes that connections hold that have not taken an answer yet."""
        self._best: dict[str, float] = {}
        """The best rate of answers to each address, falling by a twentieth at each look."""
        self._look: asyncio.TimerHandle | None = None

    @property
    def num_free(self) -> int:
        """Bytes that nobody holds."""
        return self._free

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int, address: str, *, is_trusted: bool) -> AsyncIterator[Held]:
        """Hold this many bytes, as soon as they are free; more than the limit counts as the limit."""
        loop = asyncio.get_running_loop()
        held = Held(address, min(num_bytes, self._limit), is_trusted, loop.create_future())
        self._num_asking[address] += 1
        try:
            await self._enter(held)
            if self._look is None:
                self._look = loop.call_later(_look_seconds(), self._look_at_readers)
            try:
                yield held
            finally:
                self._leave(held)
        finally:
            self._num_asking[address] -= 1
            if not self._num_asking[address]:
                del self._num_asking[address]
            self._let_in()

    async def _enter(self, held: Held) -> None:
        self._waiting.append(held)
        self._let_in()
        if held.turn.done():
            return
        try:
            await held.turn
        except asyncio.CancelledError:
            if not held.turn.cancelled():  # let in, and cancelled before it could run
                self._leave(held)
            raise

    def _leave(self, held: Held) -> None:
        del self._held[held]
        self._count(held, -held.num_bytes)
        if held.transport is not None:
            (begin, before), now = held.progress[0], asyncio.get_running_loop().time()
            self._note_rate(held.address, (held.num_taken - before) / max(now - begin, 1e-3))

    def _let_in(self) -> None:
        while (held := self._next_in_turn()) is not None and held.num_bytes <= self._free:
            self._waiting.remove(held)
            self._held[held] = None
            self._count(held, held.num_bytes)
            held.turn.set_result(None)

    def _count(self, held: Held, num_bytes: int) -> None:
        self._free -= num_bytes
        self._untrusted_bytes += 0 if held.is_trusted else num_bytes
        self._bytes[held.address] += num_bytes
        if not self._bytes[held.address]:
            del self._bytes[held.address]

    def _next_in_turn(self) -> Held | None:
        while self._waiting and self._waiting[0].turn.cancelled():
            self._waiting.popleft()
        if not self._waiting:
            return None
        able = (held for held in self._waiting if not held.turn.cancelled() and self._may_trust(held))
        first = next(able, None)
        if first is None or len(self._num_asking) == 1 or self._is_within_share(first.address, first.num_bytes):
            return first
        return next((held for held in able if self._is_within_share(held.address, held.num_bytes)), first)

    def _may_trust(self, held: Held) -> bool:
        if held.is_trusted or not self._untrusted_bytes or not self._bytes[held.address]:
            return True
        return self._untrusted_bytes + held.num_bytes <= self._limit / 2

    def _is_within_share(self, address: str, num_more: int = 0) -> bool:
        """Whether an address that held so much more would not hold more than an equal share; one answer is none."""
        own = self._bytes[address]
        return own == 0 or own + num_more <= self._limit / len(self._num_asking)

    def _look_at_readers(self) -> None:
        """Cut off those that are too slow."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._best = {address: 0.95 * rate for address, rate in self._best.items() if rate > 1}
        are_wanted = any(not held.turn.cancelled() for held in self._waiting)
        for held in self._held:
            if held.transport is None or held.patience is None:
                continue
            held.progress.append((now, held.num_taken))
            while len(held.progress) > 1 and held.progress[1][0] <= now - _READER_SECONDS:
                held.progress.popleft()
            slow, fast = held.rate(now, _READER_SECONDS), held.rate(now, min(_WANTED_SECONDS, _READER_SECONDS))
            if fast is not None:
                self._note_rate(held.address, fast)
            too_slow = slow is not None and slow < _CHUNK_BYTES / _READER_SECONDS
            if too_slow or (are_wanted and fast is not None and fast < self._least_rate(held)):
                held.patience.reschedule(now)
        self._look = loop.call_later(_look_seconds(), self._look_at_readers) if self._held else None

    def _least_rate(self, held: Held) -> float:
        """How fast a reader has to be while others wait."""
        is_modest = self._is_within_share(held.address)
        best = self._best.get(held.address, 0.0) if is_modest else max(self._best.values(), default=0.0)
        return max(_CHUNK_BYTES / _READER_SECONDS, min(_ENOUGH_PER_SECOND, best / 16))

    def _note_rate(self, address: str, rate: float) -> None:
        self._best[address] = max(self._best.get(address, 0.0), rate)


def _look_seconds() -> float:
    return min(_LOOK_SECONDS, _READER_SECONDS / 4)


def _unsent(transport: asyncio.Transport) -> int:
    """What the kernel has not got rid of: the peer has not acknowledged it. Nothing once the connection is closed."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(found, sys.byteorder)
    except (OSError, ValueError):
        return 0


async def send_body(
    response: web.StreamResponse, transport: asyncio.Transport, buffers: list[memoryview], held: Held
) -> None:
    """Send a body whose header is under way.

    Raises:
        OSError: the reader is gone, or too slow. Then it is cut off: closing would wait until it has read what is left.
    """
    held.transport = transport
    held.progress.append((asyncio.get_running_loop().time(), held.num_taken))
    try:
        async with asyncio.timeout(None) as held.patience:
            await _send(response, transport, buffers, held)
    except TimeoutError:
        with contextlib.suppress(OSError):  # the kernel, too, throws away what it still has for the reader
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        transport.abort()
        raise ConnectionAbortedError("The reader is too slow.") from None


async def _send(
    response: web.StreamResponse, transport: asyncio.Transport, buffers: list[memoryview], held: Held
) -> None:
    head, *arrays = buffers
    await response.write(head)
    if transport.get_extra_info("ssl_object") is None:
        await _flush(transport)
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
            own.setblocking(False)
            await _send_all(own, arrays, held)
        return
    chunks = (array[begin : begin + _CHUNK_BYTES] for array in arrays for begin in range(0, len(array), _CHUNK_BYTES))
    for chunk in chunks:
        await asyncio.sleep(0)  # a write that fails does not raise: the loop tells the transport
        if transport.is_closing():  # asyncio only logs what is written after that
            raise ConnectionResetError("The reader is gone.")
        held.num_sent += len(chunk)
        await response.write(chunk)


async def _flush(transport: asyncio.Transport) -> None:
    """Wait until nothing is left in asyncio's hands: bodies go around it, and may not overtake their header."""
    while transport.get_write_buffer_size():
        if transport.is_closing():
            raise ConnectionResetError("The reader is gone.")
        await asyncio.sleep(0.001)


async def _send_all(sock: socket.socket, buffers: list[memoryview], held: Held) -> None:
    unsent = deque(buffers)
    while unsent:
        try:
            count = sock.sendmsg(itertools.islice(unsent, _MAX_BUFFERS))
        except BlockingIOError:
            await _wait_until_writable(sock)
            continue
        held.num_sent += count
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

"""What one connection may take: time for its header, and a place among those of its address.

aiohttp bounds headers and pauses what it does not read, but a connection may stay silent for ever, and a client may
open any number of them. Here a connection that has asked for nothing within a few seconds is closed, and when an
address has too many, the oldest that never made a valid request make room: a client that opens a thousand and stays
silent keeps nobody out.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

HEADER_SECONDS = 3.0
"""Time for a header, and before it for the TLS handshake."""
_MAX_PER_ADDRESS = 128


class Connections(web.Server):
    """Makes a guarded handler for each connection."""

    def __init__(self, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self._options = options
        self.by_address: dict[str, dict[GuardedConnection, None]] = defaultdict(dict)
        """Open connections, oldest first."""

    def __call__(self) -> web.RequestHandler:
        """A handler for a new connection."""
        return GuardedConnection(self, loop=asyncio.get_running_loop(), **self._options)

    @property
    def num_open(self) -> int:
        """Connections there are."""
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

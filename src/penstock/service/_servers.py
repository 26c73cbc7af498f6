"""What a client knows of a server: how far it trusts it, and what the server counts (`penstock top`).

    up ── another overtook it, ────► suspect ──── it answers ────► up
     │    or would by far
     │                                  │
     └──── it refuses, breaks off ──────┴────► down ──── met again, after a pause that doubles ────► up

A suspect server keeps what it was asked, is asked nothing new, and all of it is asked elsewhere. A server that is down
is asked what it serves, never for a batch: a batch would wait for it.

Of what a server counts, two readings make a rate.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import printable
from penstock.service._connection import Connection, Refused
from penstock.service._settings import Address, Security, Servers, resolve

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _REFUSED_PAUSE_SECONDS = 0.05, 0.5, 2.0
_MEMORY = 0.1
"""Weight of the newest answer in the mean."""
_PATIENCE = 4.0
"""How many mean answers a server may take for one before another is asked as well."""
_LEAST_PATIENCE_SECONDS, _MOST_DELAY_SECONDS = 0.25, 0.5
"""The least such time, and the most beyond a mean answer: waits stay bounded where answers take long."""
_READING_SECONDS = 5.0
_PREFIX = "penstock_"


@dataclass(slots=True, eq=False)
class ServerState:
    """One server: how much it is trusted, and the connections to it. Times are seconds of one monotonic clock.

    Its methods are called under the lock of `Requests`, except `close`: see the NOTE in `_requests.py`.
    """

    address: Address
    work: threading.Condition
    """Notified when there may be something to ask this server for."""
    outage: threading.Condition
    """Notified when it may be down."""
    state: Literal["up", "suspect", "down"] = "down"
    reason: str = "not asked yet"
    """How the last request ended, in words."""
    is_refusal: bool = False
    """Whether it is there but will not serve us: another plan, a wrong token. Asking again soon would not help."""
    mean_seconds: float | None = None
    """How long answers took."""
    asks_again_at: float = 0.0
    num_workers: int = 0
    num_asked: int = 0
    is_gone: bool = False
    connections: list[Connection] = field(default_factory=list)
    free: list[Connection] = field(default_factory=list)
    """Those that owe no answer."""
    _pause_seconds: float = _FIRST_PAUSE_SECONDS

    @property
    def patience_seconds(self) -> float:
        """How long one answer may take before another server is asked."""
        mean = self.mean_seconds or 0.0
        return max(_LEAST_PATIENCE_SECONDS, min(_PATIENCE * mean, mean + _MOST_DELAY_SECONDS))

    @property
    def condition(self) -> str:
        """How the last requests ended, in words."""
        if self.num_asked and self.state != "down":
            return f"is connected and owes answers to {self.num_asked} requests"
        return self.reason

    def met(self, expected_seconds: float) -> None:
        """It says that it serves the plan, and about how long an answer takes."""
        self.state, self.reason, self.is_refusal = "up", "answers", False
        if self.mean_seconds is None:
            self.mean_seconds = expected_seconds

    def answered(self, seconds: float) -> None:
        """It gave what it was asked for."""
        self.met(seconds)
        assert self.mean_seconds is not None
        self.mean_seconds += _MEMORY * (seconds - self.mean_seconds)
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def overtaken(self) -> None:
        """It is late: another server, asked later, answered first, or would have by now."""
        if self.state == "up":
            self.state, self.reason = "suspect", "is slow to answer"

    def failed(self, error: Exception, now: float) -> None:
        """It cannot be reached, broke off, or refuses."""
        self.state, self.reason, self.is_refusal = "down", _reason(error), isinstance(error, Refused)
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        self.asks_again_at = now + (_REFUSED_PAUSE_SECONDS if self.is_refusal else self._pause_seconds)

    def ask_at_once(self) -> None:
        """A new loop asks at once instead of waiting out an old pause: the server may be back."""
        self._pause_seconds, self.asks_again_at = _FIRST_PAUSE_SECONDS, 0.0
        self.outage.notify()

    def close(self) -> None:
        """Break off whatever is in transit."""
        self.is_gone = True
        for connection in self.connections:
            connection.close()


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "does not answer"
    return printable(str(error)) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics of one server at one time, without their prefix; or why there are none."""

    server: str
    at: float
    metrics: dict[str, float]
    problem: str | None = None

    def rate(self, name: str, before: Reading | None) -> float | None:
        """How much a counter grew per second since an earlier reading; None if that is unknown."""
        if before is None or self.at <= before.at or name not in self.metrics or name not in before.metrics:
            return None
        gained = self.metrics[name] - before.metrics[name]
        return gained / (self.at - before.at) if gained >= 0 else None  # it was started again


def read_servers(servers: Servers, security: Security) -> list[Reading]:
    """A reading of every server there is now."""
    found = resolve(servers)
    with ThreadPoolExecutor(max(1, len(found))) as readers:
        return list(readers.map(lambda address: _read(address, security), found))


def _read(address: Address, security: Security) -> Reading:
    connection = Connection(address, tls=security.client_context(), token=security.token, seconds=_READING_SECONDS)
    try:
        metrics = parse_metrics(connection.get_text("/metrics"))
        return Reading(str(address), time.monotonic(), metrics)
    except (OSError, Refused, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Reading(str(address), time.monotonic(), {}, printable(problem))
    finally:
        connection.close()


def parse_metrics(page: str) -> dict[str, float]:
    """The values in a page for Prometheus, of metrics without labels.

    Raises:
        ValueError: it has other lines, or values that are not numbers.
    """
    lines = (line.split() for line in page.splitlines() if line.startswith(_PREFIX))
    found = {name.removeprefix(_PREFIX): float(value) for name, value in lines}
    if not all(map(math.isfinite, found.values())):
        raise ValueError("Some metrics are not numbers.")
    return found

"""The servers a loader takes its batches from: where they are, which of them serve this plan, the connections to them.

    Requests ◄── take the oldest ── a thread for each server ── GET, on a free connection ──► server
             ◄── arrived, or failed ◄── the first answer to arrive, checked ─────────────────┘

Each server has several connections, so that it computes while it sends, and one thread that asks through them and reads
whichever answer arrives first. With a thread for each connection, which mostly woke each other, the client took 8 %
more processor time. Another thread asks the server what it serves, at the start and after it was down.
One more sees to servers that take too long, come or leave. Nothing here waits for a result: that is the engine's job.
"""

from __future__ import annotations

import functools
import logging
import select
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.errors import ServiceError, printable
from penstock.loader import Bundle, Item, LoaderStatistics
from penstock.plan import Plan
from penstock.service._addresses import resolve
from penstock.service._arrivals import Arrived, Layouts
from penstock.service._fetch import Connection, Refused
from penstock.service._jobs import Job
from penstock.service._remote import Remote, requests_in_flight
from penstock.service._requests import Link, Requests
from penstock.service._wire import VERSION, BatchRequest

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_RESOLVE_SECONDS = 2.0
_MAX_CONNECTIONS = 16
_MAX_WORKERS = 4096
_MAX_STEP_BYTES = 1 << 40
_MAX_STEP_SECONDS = 1e6


class _Asked(NamedTuple):
    """What a connection owes."""

    job: Job
    connection: Connection
    begin: float


class Fleet:
    """All servers of a plan, and the threads that ask them.

    Raises:
        OSError: the token file or a certificate cannot be read.
    """

    def __init__(self, plan: Plan, remote: Remote, statistics: LoaderStatistics) -> None:
        self._plan, self._remote = plan, remote
        self._tls: ssl.SSLContext | None = remote.security.client_context()
        self._token = remote.security.token
        self.requests = Requests(statistics)
        self._layouts = Layouts()
        self._threads: list[threading.Thread] = []
        self._look_up()
        self._start(self._supervise, "penstock-remote")

    def describe(self) -> str:
        """Which servers are being waited for, in words."""
        servers = [f"{link.address} ({link.condition})" for link in self.requests.links.values()]
        return f"waiting for {', '.join(servers) or self._remote.servers}."

    def check(self) -> None:
        """Raise if waiting is of no use.

        Raises:
            ServiceError: no server has answered for too long, or all refuse; the message names each with its reason.
        """
        links = list(self.requests.links.values())
        waited = self.requests.silent_seconds
        refuse_all = links and all(link.health.is_refusal for link in links)
        if not refuse_all and waited < self._remote.timeout_seconds:
            return
        reasons = "".join(f"\n  {link.address}: {link.condition}" for link in links)
        reasons = reasons or f"\n  {self._remote.servers}: no address found"
        what = "Every server refuses" if refuse_all else f"No server has answered for {waited:.0f} s"
        advice = f"Start `penstock serve` with this plan ({self._plan.fingerprint})"
        if refuse_all and all(link.condition.startswith("401") for link in links):
            advice = "Show the servers their token (penstock.Security(token_file=...))"
        raise ServiceError(
            f"{what}:{reasons}\n{advice}, or load the plan here: leave out remote=. The state of the loader is that of "
            "the last batch handed over."
        )

    def close(self) -> None:
        """Close every connection, also those that wait for an answer."""
        for link in self.requests.close():
            link.close()
        for thread in self._threads:
            thread.join(timeout=2)

    def _supervise(self) -> None:
        resolved_at = time.monotonic()
        while not self.requests.is_closed:
            time.sleep(_TICK_SECONDS)
            if time.monotonic() - resolved_at > _RESOLVE_SECONDS:
                self._look_up()
                resolved_at = time.monotonic()
            self.requests.hedge_and_give_up()

    def _look_up(self) -> None:
        """Look up the servers' addresses; meet servers that are new, close the connections to those that are gone."""
        try:
            found = resolve(self._remote.servers)
        except (OSError, ValueError) as error:
            if not self._threads and isinstance(error, ValueError):
                raise  # the first time, it is what the user passed
            logger.warning("The list of servers cannot be read; keeping the last one: %s", printable(str(error)))
            return
        new, gone = self.requests.replace_links(found)
        for link in gone:
            link.close()
        for link in new:
            self._start(functools.partial(self._meet, link), f"penstock-remote-{link.address}")

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _meet(self, link: Link) -> None:
        """Ask a server what it serves, at the start and after it was down; if it is this plan, open connections."""
        connection = self._connect(link)
        while self.requests.wait_for_outage(link):
            try:
                page = connection.get_json("/v1/plan")
                self._check(page)
            except (OSError, Refused) as error:
                self.requests.not_met(link, error)
            else:
                self._welcome(link, page)

    def _welcome(self, link: Link, page: dict[str, Any]) -> None:
        """Open as many connections as the server should have requests, less those that exist."""
        self.requests.met(
            link, num_workers=page["workers"], step_bytes=page["step_bytes"], step_seconds=page["step_seconds"]
        )
        is_new = len(link.connections) == 1  # the one that it was met through
        for _ in range(len(link.connections), 1 + min(requests_in_flight(link.num_workers), _MAX_CONNECTIONS)):
            link.free.append(self._connect(link))
        if is_new:
            self._start(functools.partial(self._work, link), f"penstock-remote-{link.address}-batches")

    def _connect(self, link: Link) -> Connection:
        seconds = self._remote.timeout_seconds
        connection = Connection(link.address, tls=self._tls, token=self._token, seconds=seconds)
        link.connections.append(connection)
        return connection

    def _check(self, page: dict[str, Any]) -> None:
        version, fingerprint = (str(page.get(name))[:64] for name in ("version", "fingerprint"))
        if version != str(VERSION):
            raise Refused(f"speaks version {version}, this Penstock speaks {VERSION}")
        if fingerprint != self._plan.fingerprint:
            raise Refused(
                f"serves the plan {fingerprint}, not {self._plan.fingerprint}; its data, stages or functions differ"
            )
        most = {"workers": _MAX_WORKERS, "step_bytes": _MAX_STEP_BYTES}
        if not all(type(page.get(name)) is int and 0 < page[name] <= limit for name, limit in most.items()):
            raise Refused("does not say how many workers it has")
        if type(page.get("step_seconds")) is not float or not 0 <= page["step_seconds"] < _MAX_STEP_SECONDS:
            raise Refused("does not say how long a batch takes")

    def _work(self, link: Link) -> None:
        """The life of a server's thread: ask for all it may while connections are free, and read an answer."""
        asked: deque[_Asked] = deque()
        while True:
            job = self.requests.take(link, waits=not asked) if link.free else None
            if job is not None:
                self._ask(link, job, asked)
            elif asked:
                self._read(link, asked)
            else:
                return

    def _ask(self, link: Link, job: Job, asked: deque[_Asked]) -> None:
        connection = link.free.pop()
        begin = time.monotonic()
        try:
            connection.ask(self._request(job.item).path)
        except Exception as error:  # noqa: BLE001 - `failed` tells them apart
            link.free.append(connection)
            self.requests.failed(link, job, error)
        else:
            asked.append(_Asked(job, connection, begin))

    def _read(self, link: Link, asked: deque[_Asked]) -> None:
        """Take the answer that arrives first. If none arrives in time, none of them is waited for any longer."""
        try:
            answering = self._find_answering(link, asked)
        except TimeoutError as error:
            self._give_up(link, asked, error)
            return
        job, connection, begin = answering
        asked.remove(answering)
        slot = None
        try:
            slot = self.requests.take_slot()
            size = connection.read_body(slot.memory)
            arrived = Arrived.read(slot, size, job.item, time.monotonic() - begin, self._layouts)
        except Exception as error:  # noqa: BLE001 - `failed` tells them apart
            if slot is not None:
                self.requests.pool.give_back(slot)
            self.requests.failed(link, job, error)
            if isinstance(error, TimeoutError):
                self._give_up(link, asked, error)
        else:
            self.requests.answered(link, job, arrived)
        link.free.append(connection)

    def _find_answering(self, link: Link, asked: deque[_Asked]) -> _Asked:
        """The oldest of those whose answer has begun to arrive, or whose connection is broken."""
        if len(asked) == 1:
            return asked[0]
        owed = [(each.connection.fileno(), each) for each in asked]
        sockets = select.poll()
        for descriptor, each in owed:
            if descriptor < 0:
                return each
            sockets.register(descriptor, select.POLLIN)
        patience = time.monotonic() + self._remote.timeout_seconds
        while time.monotonic() < patience:
            ready = {descriptor for descriptor, _ in sockets.poll(1000 * _TICK_SECONDS)}
            found = next((each for descriptor, each in owed if descriptor in ready), None)
            if found is not None or self.requests.is_done_with(link):
                return found or asked[0]
        raise TimeoutError("timed out")

    def _give_up(self, link: Link, asked: deque[_Asked], error: TimeoutError) -> None:
        """Wait for no answer any more."""
        for each in asked:
            each.connection.drop()
            self.requests.failed(link, each.job, error)
            link.free.append(each.connection)
        asked.clear()

    def _request(self, item: Item | Bundle) -> BatchRequest:
        plan = self._plan.fingerprint
        if isinstance(item, Bundle):
            return BatchRequest(plan, item.row, item.num_steps, item.rank, item.world_size, 0, item.num_parts)
        return BatchRequest(plan, item.row, 1, item.rank, item.world_size, item.part, item.num_parts)

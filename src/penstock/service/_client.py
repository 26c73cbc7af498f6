"""Servers in the place of worker processes: an engine whose workers are on other machines, and its connections.

    training thread                Requests           ServerPool: a thread for each server         servers
    submit(ticket, item) ───────►  waiting ────────►  GET, on a free connection ────────────────►  compute, or have it
    wait(ticket) ◄───────────────  done ◄───────────  the first answer to arrive, checked ◄──────  body

Each server has several connections, so that it computes while it sends, and one thread that asks through them and reads
whichever answer arrives first. With a thread for each connection, which mostly woke each other, the client took 8 %
more processor time. Another thread asks the server what it serves, at the start and after it was down. A supervisor
thread handles slow, new and vanished servers.

With `local_workers`, workers of this machine take items too, the oldest first, and go on when no server answers. A slot
is free again when the last array of its batch dies, as with every engine.
"""

import functools
import logging
import select
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.errors import ServiceError, printable
from penstock.loader import Bundle, Engine, Item, LoaderStatistics, Result, Wait, WaitedTooLong
from penstock.plan import Plan
from penstock.service._answers import AnswerReader
from penstock.service._connection import Connection, Refused
from penstock.service._requests import Job, Requests
from penstock.service._servers import ServerState
from penstock.service._settings import Remote, requests_in_flight, resolve
from penstock.service._wire import VERSION, BatchRequest
from penstock.shapes import find_mismatch

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_RESOLVE_SECONDS = 2.0
_MAX_CONNECTIONS = 16
_COUNTS = {"workers": range(1, 4097), "step_bytes": range(1, (1 << 40) + 1)}
"""What a server may say of itself."""
_MAX_STEP_SECONDS = 1e6
_REQUEST_BYTES = 8 << 20
"""Size of an answer when steps are small: each answer costs both sides most of a millisecond besides its bytes."""
_REQUEST_SECONDS = 0.1
"""Most time that a worker spends on an answer of several steps: the first batch comes later by as much."""
_MAX_STEPS = 512
_PATIENCE_SECONDS = 1.0
"""How long a start waits for a server when there are workers on this machine."""


class _Asked(NamedTuple):
    """What a connection owes."""

    job: Job
    connection: Connection
    begin: float


class ServerPool:
    """All servers of a plan, and the threads that ask them.

    Raises:
        OSError: the token file or a certificate cannot be read.
    """

    def __init__(self, plan: Plan, remote: Remote, statistics: LoaderStatistics) -> None:
        self._plan, self._remote = plan, remote
        self._tls: ssl.SSLContext | None = remote.security.client_context()
        self._token = remote.security.token
        self.requests = Requests(statistics)
        self._reader = AnswerReader(plan)
        self._threads: list[threading.Thread] = []
        self._look_up()
        self._start(self._supervise, "penstock-remote")

    def describe(self) -> str:
        servers = [f"{server.address} ({server.condition})" for server in self.requests.servers.values()]
        return f"waiting for {', '.join(servers) or self._remote.servers}."

    def check(self) -> None:
        """Raise if waiting cannot help.

        Raises:
            ServiceError: no server has answered for too long, or all refuse; the message names each with its reason.
        """
        servers = list(self.requests.servers.values())
        waited = self.requests.silent_seconds
        refuse_all = servers and all(server.is_refusal for server in servers)
        if not refuse_all and waited < self._remote.timeout_seconds:
            return
        reasons = "".join(f"\n  {server.address}: {server.condition}" for server in servers)
        reasons = reasons or f"\n  {self._remote.servers}: no address found"
        what = "Every server refuses" if refuse_all else f"No server has answered for {waited:.0f} s"
        advice = f"Start `penstock serve` with this plan ({self._plan.fingerprint})"
        if refuse_all and all(server.condition.startswith("401") for server in servers):
            advice = "Show the servers their token (penstock.Security(token_file=...))"
        raise ServiceError(
            f"{what}:{reasons}\n{advice}, or load the plan here: leave out remote=. The state of the loader is that of "
            "the last batch handed over."
        )

    def close(self) -> None:
        """Close every connection, also those that wait for an answer."""
        for server in self.requests.close():
            server.close()
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
        new, gone = self.requests.replace_servers(found)
        for server in gone:
            server.close()
        for server in new:
            self._start(functools.partial(self._meet, server), f"penstock-remote-{server.address}")

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _meet(self, server: ServerState) -> None:
        """Ask a server what it serves, at the start and after it was down; if it is this plan, open connections."""
        connection = self._connect(server)
        while self.requests.wait_for_outage(server):
            try:
                page = connection.get_json("/v1/plan")
                self._check(page)
            except (OSError, Refused) as error:
                self.requests.not_met(server, error)
            else:
                self._welcome(server, page)

    def _welcome(self, server: ServerState, page: dict[str, Any]) -> None:
        """Open as many connections as the server should have requests, less those that exist."""
        self.requests.met(
            server, num_workers=page["workers"], step_bytes=page["step_bytes"], step_seconds=page["step_seconds"]
        )
        is_new = len(server.connections) == 1  # the one that it was met through
        for _ in range(len(server.connections), 1 + min(requests_in_flight(server.num_workers), _MAX_CONNECTIONS)):
            server.free.append(self._connect(server))
        if is_new:
            self._start(functools.partial(self._work, server), f"penstock-remote-{server.address}-batches")

    def _connect(self, server: ServerState) -> Connection:
        seconds = self._remote.timeout_seconds
        connection = Connection(server.address, tls=self._tls, token=self._token, seconds=seconds)
        server.connections.append(connection)
        return connection

    def _check(self, page: dict[str, Any]) -> None:
        version, fingerprint = (str(page.get(name))[:64] for name in ("version", "fingerprint"))
        if version != str(VERSION):
            raise Refused(f"speaks version {version}, this Penstock speaks {VERSION}")
        if fingerprint != self._plan.fingerprint:
            raise Refused(
                f"serves the plan {fingerprint}, not {self._plan.fingerprint}; its data, stages or functions differ"
            )
        if (problem := find_mismatch(page, _COUNTS, "its page")) is not None:
            raise Refused(f"does not say how many workers it has, or how large a batch is: {problem}")
        if find_mismatch(page, {"step_seconds": float}) or not 0 <= page["step_seconds"] < _MAX_STEP_SECONDS:
            raise Refused("does not say how long a batch takes")

    def _work(self, server: ServerState) -> None:
        """The life of a server's thread: ask for all it may while connections are free, and read an answer."""
        asked: deque[_Asked] = deque()
        while True:
            job = self.requests.take(server, waits=not asked) if server.free else None
            if job is not None:
                self._ask(server, job, asked)
            elif asked:
                self._read(server, asked)
            else:
                return

    def _ask(self, server: ServerState, job: Job, asked: deque[_Asked]) -> None:
        connection = server.free.pop()
        begin = time.monotonic()
        try:
            connection.ask(self._request(job.item).path)
        except Exception as error:  # noqa: BLE001 - `failed` tells them apart
            server.free.append(connection)
            self.requests.failed(server, job, error)
        else:
            asked.append(_Asked(job, connection, begin))

    def _read(self, server: ServerState, asked: deque[_Asked]) -> None:
        """Take the answer that arrives first. If none arrives in time, give up on all of them."""
        try:
            answering = self._find_answering(server, asked)
        except TimeoutError as error:
            self._give_up(server, asked, error)
            return
        job, connection, begin = answering
        asked.remove(answering)
        slot = None
        try:
            slot = self.requests.take_slot()
            size = connection.read_body(slot.memory)
            arrived = self._reader.read(slot, size, job.item, time.monotonic() - begin)
        except Exception as error:  # noqa: BLE001 - `failed` tells them apart
            if slot is not None:
                self.requests.slots.give_back(slot)
            self.requests.failed(server, job, error)
            if isinstance(error, TimeoutError):
                self._give_up(server, asked, error)
        else:
            self.requests.answered(server, job, arrived)
        server.free.append(connection)

    def _find_answering(self, server: ServerState, asked: deque[_Asked]) -> _Asked:
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
            if found is not None or self.requests.is_done_with(server):
                return found or asked[0]
        raise TimeoutError("timed out")

    def _give_up(self, server: ServerState, asked: deque[_Asked], error: TimeoutError) -> None:
        """Stop waiting for these answers."""
        for each in asked:
            each.connection.drop()
            self.requests.failed(server, each.job, error)
            server.free.append(each.connection)
        asked.clear()

    def _request(self, item: Item | Bundle) -> BatchRequest:
        plan = self._plan.fingerprint
        if isinstance(item, Bundle):
            return BatchRequest(plan, item.row, item.num_steps, item.rank, item.world_size, 0, item.num_parts)
        return BatchRequest(plan, item.row, 1, item.rank, item.world_size, item.part, item.num_parts)


class RemoteEngine:
    """Computes items on servers, and on workers of this machine if there are any.

    Args:
        statistics: Where it is counted what servers had to be asked again.
        local: An engine of this machine that takes a share, and all of it when no server answers.

    Raises:
        ServiceError: no server answers in time, or all refuse; the message names each with its reason.
    """

    def __init__(
        self, plan: Plan, remote: Remote, statistics: LoaderStatistics, *, local: Engine | None = None
    ) -> None:
        self._plan, self._local = plan, local
        self._local_tickets: set[int] = set()
        self._computed_here: dict[int, Result | Exception] = {}
        self._is_closed = False
        self._servers = ServerPool(plan, remote, statistics)
        self._requests = self._servers.requests
        self._wait_for_a_server()

    @property
    def num_workers(self) -> int:
        """Workers of the servers that answer, and of this machine."""
        return self._requests.num_workers + (0 if self._local is None else self._local.num_workers)

    def steps_per_request(self, world_size: int) -> int:
        """How many steps make an answer of a sensible size: small messages cost more per byte on both sides."""
        if self._local is not None and not self._plan.is_rectangular:
            return 1  # workers of this machine take such batches one by one
        share = max(1, (self._requests.step_bytes or _REQUEST_BYTES) // world_size)
        num_steps = min(_MAX_STEPS, -(-_REQUEST_BYTES // share))
        seconds = num_steps * self._requests.step_seconds / world_size
        if seconds > _REQUEST_SECONDS:
            num_steps = int(num_steps * (_REQUEST_SECONDS / seconds))
        return max(1, num_steps)

    def submit(self, ticket: int, item: Item | Bundle, worker: int | None = None) -> None:
        """Have an item computed by the server or worker that is free first."""
        self._requests.add(ticket, item)
        self._feed_local()

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        was_ready = self.is_done(ticket)
        waiting = Wait(seconds, self._servers.describe)
        while not self.is_done(ticket):
            self._wait_for_news(range(ticket, ticket + 1), waiting)
        return self._finish(ticket, was_ready)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        waiting = Wait(seconds, self._servers.describe)
        was_ready = True
        while (ticket := self._any_done()) is None:
            was_ready = False
            self._wait_for_news(range(sys.maxsize), waiting)
        return ticket, self._finish(ticket, was_ready)

    def is_done(self, ticket: int) -> bool:
        if ticket in self._local_tickets:
            assert self._local is not None
            return self._local.is_done(ticket)
        return ticket in self._requests.done or ticket in self._computed_here

    def forget(self) -> None:
        self._requests.forget()
        if self._local is not None:
            self._local.forget()
        self._local_tickets.clear()
        self._computed_here.clear()

    def set_workers(self, num_workers: int) -> None:
        raise ValueError("The number of workers is set where servers start: `penstock serve --workers N`.")

    def num_started(self) -> int:
        return self.num_workers  # a server answers once its workers have started

    def num_buffers(self) -> tuple[int, int]:
        made, held = self._local.num_buffers() if self._local is not None else (0, 0)
        slots = self._requests.slots
        return made + slots.num_slots, held + slots.num_held

    def close(self) -> None:
        """Close every connection, and end the workers of this machine."""
        self._is_closed = True
        self._servers.close()
        if self._local is not None:
            self._local.close()

    def _wait_for_a_server(self) -> None:
        """Wait until one says that it serves this plan, or, with workers of this machine, for a second."""
        try:
            while not self._requests.has_answered:
                if self._local is None:
                    self._servers.check()
                elif self._requests.silent_seconds > _PATIENCE_SECONDS:
                    return
                self._requests.wait_for((), _TICK_SECONDS)
        except BaseException:
            self.close()
            raise

    def _wait_for_news(self, wanted: range, waiting: Wait) -> None:
        """Wait for a moment; raises when waiting cannot help."""
        if self._is_closed:
            raise RuntimeError("The loader is closed.")
        waiting.next_look()
        self._feed_local()
        if self._local is None:
            self._servers.check()
        here = min(filter(wanted.__contains__, self._local_tickets), default=None)
        if here is not None:
            self._wait_locally(here)
            return
        self._requests.wait_for(wanted, _TICK_SECONDS)

    def _wait_locally(self, ticket: int) -> None:
        """Wait for a moment for a worker of this machine."""
        assert self._local is not None
        try:
            result: Result | Exception = self._local.wait(ticket, _TICK_SECONDS)
        except WaitedTooLong:
            return
        except Exception as error:  # noqa: BLE001 - raised when the ticket is waited for
            result = error
        self._local_tickets.discard(ticket)
        self._computed_here[ticket] = result

    def _any_done(self) -> int | None:
        found = next(iter([*self._requests.done, *self._computed_here]), None)
        return found if found is not None else next(filter(self.is_done, self._local_tickets), None)

    def _finish(self, ticket: int, was_ready: bool) -> Result:
        if ticket in self._local_tickets:
            self._wait_locally(ticket)
        found = self._computed_here.pop(ticket, None)
        if found is None:
            batches, arrived = self._requests.hand_over(ticket)
            return Result(batches, arrived.layout.num_bytes, was_ready, 0, arrived.seconds, 0.0, 0)
        if isinstance(found, Exception):
            raise found
        return found

    def _feed_local(self) -> None:
        """Give each worker of this machine one item to compute and one to go on with."""
        if self._local is None:
            return
        while len(self._local_tickets) < 2 * self._local.num_workers:
            taken = self._requests.take_back()
            if taken is None:
                return
            ticket, item = taken
            self._local_tickets.add(ticket)
            self._local.submit(ticket, item)

"""The servers a loader takes its batches from: who they are, what is asked of whom, and what came.

    Jobs ◄── take the oldest ── connections, a thread each ── GET ──► servers
    done ◄── what lies where, or why not ◄── body, checked ─────────┘

One more thread looks after the rest: which server takes too long, which came or left. All that is shared is changed
under one condition, which is notified with every change. Nothing here waits for a result: that is for the engine.
"""

from __future__ import annotations

import functools
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import FormatError, RemoteFailed, ServiceError, printable
from penstock.loader import Bundle, Item, SlotPool, private_slot
from penstock.plan import Plan
from penstock.service._addresses import Address, Servers, resolve
from penstock.service._arrivals import Arrived
from penstock.service._fetch import Connection, Refused
from penstock.service._health import Health
from penstock.service._jobs import Job, Jobs
from penstock.service._security import Security
from penstock.service._wire import VERSION, BatchRequest

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_RESOLVE_SECONDS = 2.0
_MAX_CONNECTIONS = 16
_MAX_WORKERS = 4096
_MAX_STEP_BYTES = 1 << 40
_MAX_FAILURES = 2
"""Servers on which computing a batch may fail until the batch is at fault."""
_MAX_DAMAGED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where batches come from, and how long to wait for them."""

    servers: Servers
    """Addresses; a name or a file that stands for several is looked up again and again, so servers may come and go."""
    timeout_seconds: float = 30.0
    """How long no server may answer before that is an error. One batch must take less."""
    security: Security = field(default_factory=Security)
    """What beyond loopback is needed: a token, and the authority of the servers' certificates."""

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds={self.timeout_seconds!r}; expected more than 0.")


def requests_in_flight(num_workers: int) -> int:
    """How many requests keep so many workers of servers busy: two each, and two that are under way."""
    return 2 * num_workers + 2


def as_remote(remote: Remote | Servers | None) -> Remote | None:
    """What `remote=` of a loader means: settings as they are, or addresses with nothing else to say."""
    return remote if remote is None or isinstance(remote, Remote) else Remote(servers=remote)


class Link:
    """One server: what is known of it, and the connections to it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.health = Health()
        self.connections: list[Connection] = []
        self.num_asked = 0
        self.num_workers = 0
        self.is_gone = False

    @property
    def condition(self) -> str:
        """What became of the last requests, for people."""
        if self.num_asked and self.health.state != "down":
            return f"is connected and owes answers to {self.num_asked} requests"
        return self.health.reason


class Fleet:
    """All servers of a plan, and what is asked of them.

    Raises:
        OSError: the token file or a certificate cannot be read.
    """

    def __init__(self, plan: Plan, remote: Remote) -> None:
        self._plan, self._remote = plan, remote
        self._tls: ssl.SSLContext | None = remote.security.client_context()
        self._token = remote.security.token
        self.changed = threading.Condition(threading.RLock())
        self._jobs = Jobs()
        self.done: dict[int, Arrived | BaseException] = {}
        """What came, by ticket; whoever takes it gives its slot back to the pool, or hands it over."""
        self.pool = SlotPool(private_slot)
        self._links: dict[Address, Link] = {}
        self._threads: list[threading.Thread] = []
        self._heard_at = time.monotonic()
        self._is_closed = False
        self.num_damaged = 0
        """Bodies that arrived damaged, and were asked for again."""
        self.step_bytes = 0
        """Bytes of one step over all ranks, as a server measured it; 0 until one has answered."""
        self._look_up()
        self._start(self._look_after, "penstock-remote")

    @property
    def num_workers(self) -> int:
        """Workers of the servers that answer."""
        return sum(link.num_workers for link in self._links.values() if link.health.state != "down")

    @property
    def num_hedged(self) -> int:
        """Requests that were asked of a second server because the first took long."""
        return self._jobs.num_hedged

    @property
    def has_answered(self) -> bool:
        """Whether a server has said that it serves this plan."""
        return any(link.health.num_answers for link in self._links.values())

    @property
    def silent_seconds(self) -> float:
        """For how long no server has answered, though something was asked."""
        return time.monotonic() - self._heard_at

    def add(self, ticket: int, item: Item | Bundle) -> None:
        """Ask for an item; what comes of it will be in `done`."""
        with self.changed:
            if not self._jobs.by_ticket:
                self._heard_at = time.monotonic()  # nobody had anything to answer until now
            self._jobs.add(ticket, item)
            self.changed.notify_all()

    def take_back(self) -> tuple[int, Item | Bundle] | None:
        """The oldest item that no server was asked for yet, for somebody else to compute."""
        with self.changed:
            job = self._jobs.take_locally()
            return None if job is None else (job.ticket, job.item)

    def forget(self) -> None:
        """Throw away everything asked for; what servers still send frees its slot when it comes."""
        with self.changed:
            self._jobs.clear()
            for arrived in self.done.values():
                if isinstance(arrived, Arrived):
                    self.pool.give_back(arrived.slot)
            self.done.clear()
            self._heard_at = time.monotonic()

    def describe(self) -> str:
        """Who is waited for, in words."""
        said = [f"{link.address} ({link.condition})" for link in self._links.values()]
        return f"waiting for {', '.join(said) or self._remote.servers}."

    def check(self) -> None:
        """Say so when there is no use in waiting.

        Raises:
            ServiceError: no server has answered for too long, or all refuse; the message names each with its reason.
        """
        links = list(self._links.values())
        waited = self.silent_seconds
        refuse_all = links and all(link.health.is_refusal for link in links)
        if not refuse_all and waited < self._remote.timeout_seconds:
            return
        reasons = "".join(f"\n  {link.address}: {link.condition}" for link in links)
        told = reasons or f"\n  {self._remote.servers}: no address found"
        what = "Every server refuses" if refuse_all else f"No server has answered for {waited:.0f} s"
        raise ServiceError(
            f"{what}:{told}\nStart `penstock serve` with this plan ({self._plan.fingerprint}), or load it here: leave "
            "out remote=. The state of the loader is that of the last batch handed over."
        )

    def close(self) -> None:
        """Close every connection, also those that wait for an answer."""
        with self.changed:
            self._is_closed = True
            links = list(self._links.values())
            self.changed.notify_all()
        for link in links:
            self._let_go(link)
        for thread in self._threads:
            thread.join(timeout=2)

    def _look_after(self) -> None:
        resolved_at = time.monotonic()
        while not self._is_closed:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - resolved_at > _RESOLVE_SECONDS:
                self._look_up()
                resolved_at = time.monotonic()
            with self.changed:
                healths = {address: link.health for address, link in self._links.items()}
                for job in self._jobs.by_ticket.values():  # of servers that are gone
                    for server in [server for server in job.asked if server not in healths]:
                        del job.asked[server]
                self._give_up_hopeless()
                if self._jobs.hedge(healths, now):
                    self.changed.notify_all()

    def _give_up_hopeless(self) -> None:
        """Fail what failed on one server and that nobody is left to try."""
        for job in list(self._jobs.by_ticket.values()):
            if job.failures and not job.asked and self._is_at_fault(job):
                self._jobs.finish(job)
                self.done[job.ticket] = next(reversed(job.failures.values()))
                self.changed.notify_all()

    def _look_up(self) -> None:
        """Find out where servers are; begin with those that are new, let go of those that are gone."""
        try:
            found = resolve(self._remote.servers)
        except (OSError, ValueError) as error:
            if not self._threads and isinstance(error, ValueError):
                raise  # whoever starts with something else than addresses is told so
            logger.warning("The list of servers cannot be read; the last one holds: %s", printable(str(error)))
            return
        with self.changed:
            gone = [link for address, link in self._links.items() if address not in found]
            new = [Link(address) for address in found if address not in self._links]
            for link in gone:
                del self._links[link.address]
                self._jobs.give_up_on(link.address)
            for link in new:
                self._links[link.address] = link
            self.changed.notify_all()
        for link in gone:
            self._let_go(link)
        for link in new:
            self._start(functools.partial(self._meet, link), f"penstock-remote-{link.address}")

    def _let_go(self, link: Link) -> None:
        link.is_gone = True
        for connection in link.connections:
            connection.close()

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _meet(self, link: Link) -> None:
        """Ask a server what it has; when it is this plan, open as many connections as it should have requests."""
        connection = self._connect(link)
        while not (self._is_closed or link.is_gone):
            try:
                said = connection.get_json("/v1/plan")
                self._check(said)
                break
            except (OSError, Refused) as error:
                with self.changed:
                    link.health.failed(time.monotonic(), _reason(error), is_refusal=isinstance(error, Refused))
                    self.changed.notify_all()
                    pause = max(0.0, link.health.asks_again_at - time.monotonic())
                time.sleep(min(pause, 1.0))
        else:
            return
        with self.changed:
            link.num_workers, self.step_bytes = said["workers"], said["step_bytes"]
            link.health.answered(0.0)
            self._heard_at = time.monotonic()
            self.changed.notify_all()
        for number in range(min(requests_in_flight(link.num_workers), _MAX_CONNECTIONS) - 1):
            other = self._connect(link)
            self._start(functools.partial(self._work, link, other), f"penstock-remote-{link.address}-{number + 1}")
        self._work(link, connection)

    def _connect(self, link: Link) -> Connection:
        seconds = self._remote.timeout_seconds
        connection = Connection(link.address, tls=self._tls, token=self._token, seconds=seconds)
        link.connections.append(connection)
        return connection

    def _check(self, said: dict[str, Any]) -> None:
        version, fingerprint = (str(said.get(name))[:64] for name in ("version", "fingerprint"))
        if version != str(VERSION):
            raise Refused(f"speaks version {version}, this Penstock speaks {VERSION}")
        if fingerprint != self._plan.fingerprint:
            raise Refused(
                f"serves the plan {fingerprint}, not {self._plan.fingerprint}; its data, stages or functions differ"
            )
        most = {"workers": _MAX_WORKERS, "step_bytes": _MAX_STEP_BYTES}
        if not all(type(said.get(name)) is int and 0 < said[name] <= limit for name, limit in most.items()):
            raise Refused("does not say how many workers it has")

    def _work(self, link: Link, connection: Connection) -> None:
        """One connection's life: take an item, ask for it, hand over what came."""
        while (job := self._take(link)) is not None:
            with self.changed:
                slot = self.pool.take()
            begin = time.monotonic()
            try:
                size = connection.get_body(self._request(job.item).path, slot.memory)
                arrived = Arrived.read(slot, size, job.item, time.monotonic() - begin)
            except Exception as error:  # noqa: BLE001 - told apart below
                self._failed(link, job, slot, error)
            else:
                self._answered(link, job, arrived)

    def _take(self, link: Link) -> Job | None:
        """The next item for a server; None when there will be none."""
        with self.changed:
            while not (self._is_closed or link.is_gone):
                now = time.monotonic()
                if link.health.may_be_asked(now, link.num_asked):
                    job = self._jobs.take(link.address, now)
                    if job is not None:
                        link.num_asked += 1
                        return job
                self.changed.wait(_TICK_SECONDS if link.health.state == "down" else 1.0)
        return None

    def _request(self, item: Item | Bundle) -> BatchRequest:
        plan = self._plan.fingerprint
        if isinstance(item, Bundle):
            return BatchRequest(plan, item.row, item.num_steps, item.rank, item.world_size, 0, item.num_parts)
        return BatchRequest(plan, item.row, 1, item.rank, item.world_size, item.part, item.num_parts)

    def _answered(self, link: Link, job: Job, arrived: Arrived) -> None:
        with self.changed:
            link.num_asked -= 1
            link.health.answered(arrived.seconds)
            self._heard_at = time.monotonic()
            job.asked.pop(link.address, None)
            if not self._jobs.finish(job):
                self.pool.give_back(arrived.slot)  # another was faster, or nobody wants it any more
            else:
                self.done[job.ticket] = arrived
                for slower in job.asked:
                    if slower in self._links:
                        self._links[slower].health.overtaken()
                        self._jobs.give_up_on(slower)
            self.changed.notify_all()

    def _failed(self, link: Link, job: Job, slot: Any, error: Exception) -> None:
        with self.changed:
            self.pool.give_back(slot)
            link.num_asked -= 1
            job.asked.pop(link.address, None)
            if isinstance(error, FormatError):
                self.num_damaged += 1
                job.num_damaged += 1
                logger.warning("%s: %s; asking again.", link.address, error)
                error.add_note(f"This is what {link.address} sent.")
            elif isinstance(error, RemoteFailed):
                job.failures[link.address] = error
            elif not (link.is_gone or self._is_closed):
                now = time.monotonic()
                link.health.failed(now, _reason(error), is_refusal=isinstance(error, Refused))
                self._jobs.give_up_on(link.address)
            if job.num_damaged > _MAX_DAMAGED or self._is_at_fault(job):
                if self._jobs.finish(job):
                    self.done[job.ticket] = error
            elif not any(self._is_up(server) for server in job.asked):
                self._jobs.ask_again(job)
            self.changed.notify_all()

    def _is_up(self, server: Address) -> bool:
        link = self._links.get(server)
        return link is not None and link.health.state == "up"

    def _is_at_fault(self, job: Job) -> bool:
        """Whether computing an item failed on so many servers that it is not for the servers."""
        others = [link for address, link in self._links.items() if address not in job.failures]
        is_hopeless = not any(link.health.state == "up" for link in others)
        return len(job.failures) >= _MAX_FAILURES or (bool(job.failures) and is_hopeless)


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "does not answer"
    return printable(str(error)) or type(error).__name__

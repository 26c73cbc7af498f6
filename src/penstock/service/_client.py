"""Servers in the place of worker processes: an engine whose workers are on other machines.

    training thread                  connections (threads)               servers
    submit(ticket, item) ──► Jobs ◄── take the oldest
                                      GET ─────────────────────────────► compute, or have it
                                      read into a slot, check ◄───────── body
    wait(ticket) ◄────────── done ◄── what lies where

A body is read into a slot that becomes the batch, as a worker process would have written it; it is free again when
the last array on it dies. One more thread looks after the rest: who takes too long, which servers came or left. With
`local_workers`, workers of this machine take items too, and go on when no server answers.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import FormatError, RemoteFailed, ServiceError
from penstock.loader import (
    Batch,
    BatchLayout,
    Bundle,
    Engine,
    Item,
    PlacedArray,
    PlacedRagged,
    Result,
    SlotPool,
    Wait,
    WaitedTooLong,
    private_slot,
)
from penstock.plan import Plan
from penstock.schema import dtype_name
from penstock.service._addresses import Address, Servers, resolve
from penstock.service._fetch import Connection, Damaged, Refused
from penstock.service._health import Health
from penstock.service._jobs import Job, Jobs
from penstock.service._security import Security
from penstock.service._wire import VERSION, Arrangement, BatchRequest, SentArray, SentRagged, decode

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_RESOLVE_SECONDS = 2.0
_MAX_CONNECTIONS = 16
_MAX_FAILURES = 2
"""Servers on which computing a batch may fail until the batch is at fault."""
_MAX_DAMAGED = 5
_REQUEST_BYTES = 2 << 20
_MAX_STEPS = 512


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


def as_remote(remote: Remote | Servers | None) -> Remote | None:
    """What `remote=` of a loader means: settings as they are, or addresses with nothing else to say."""
    return remote if remote is None or isinstance(remote, Remote) else Remote(servers=remote)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A body in a slot."""

    slot: Any
    layout: BatchLayout
    arrangement: Arrangement
    num_batches: int
    seconds: float
    server: Address


class _Link:
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


class RemoteEngine:
    """Computes items on servers, and on workers of this machine if there are any.

    Args:
        local: An engine of this machine that takes a share, and all of it when no server answers.

    Raises:
        ServiceError: no server answers in time, or all refuse; the message names each with its reason.
    """

    def __init__(self, plan: Plan, remote: Remote, *, local: Engine | None = None) -> None:
        self._plan, self._remote = plan, remote
        self._tls: ssl.SSLContext | None = remote.security.client_context()
        self._token = remote.security.token
        self._local = local
        self._local_tickets: set[int] = set()
        self._changed = threading.Condition(threading.RLock())
        self._jobs = Jobs()
        self._done: dict[int, _Arrived | Result | BaseException] = {}
        self._pool = SlotPool(private_slot)
        self._links: dict[Address, _Link] = {}
        self._threads: list[threading.Thread] = []
        self._heard_at = time.monotonic()
        self._is_closed = False
        self.num_damaged = 0
        """Bodies that arrived damaged, and were asked for again."""
        self._step_bytes = _REQUEST_BYTES
        """Bytes of one step over all ranks, as a server measured it."""
        self._look_up()
        self._start(self._look_after, "penstock-remote")
        self._wait_for_a_server()

    @property
    def num_workers(self) -> int:
        """Workers of the servers that answer, and of this machine."""
        here = 0 if self._local is None else self._local.num_workers
        return here + sum(link.num_workers for link in self._links.values() if link.health.state != "down")

    @property
    def num_hedged(self) -> int:
        """Requests that were asked of a second server because the first took long."""
        return self._jobs.num_hedged

    def steps_per_request(self, world_size: int) -> int:
        """How many steps make an answer of a sensible size: small messages cost more per byte on both sides."""
        if self._local is not None and not self._plan.is_rectangular:
            return 1  # workers of this machine take such batches one by one
        share = max(1, self._step_bytes // world_size)
        return max(1, min(_MAX_STEPS, -(-_REQUEST_BYTES // share)))

    def submit(self, ticket: int, item: Item | Bundle, worker: int | None = None) -> None:
        """Have an item computed by whoever is free first."""
        with self._changed:
            if not self._jobs.by_ticket:
                self._heard_at = time.monotonic()  # nobody had anything to answer until now
            self._jobs.add(ticket, item)
            self._changed.notify_all()
        self._feed_local()

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        """The result of a ticket; raises what its computation raised."""
        was_ready = self.is_done(ticket)
        waiting = Wait(seconds, self._describe)
        while not self.is_done(ticket):
            self._wait_for_news({ticket}, waiting)
        return self._finish(ticket, was_ready)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """Whichever result is there first."""
        waiting = Wait(seconds, self._describe)
        was_ready = True
        while (ticket := self._any_done()) is None:
            was_ready = False
            self._wait_for_news(set(self._local_tickets), waiting)
        return ticket, self._finish(ticket, was_ready)

    def is_done(self, ticket: int) -> bool:
        """Whether the result is there."""
        if ticket in self._local_tickets:
            assert self._local is not None
            return self._local.is_done(ticket)
        return ticket in self._done

    def forget(self) -> None:
        """Throw away everything submitted; what servers still send frees its slot when it comes."""
        with self._changed:
            self._jobs.clear()
            for arrived in self._done.values():
                if isinstance(arrived, _Arrived):
                    self._pool.give_back(arrived.slot)
            self._done.clear()
        if self._local is not None:
            self._local.forget()
        self._local_tickets.clear()
        self._heard_at = time.monotonic()

    def set_workers(self, num_workers: int) -> None:
        """Servers have the workers that they were started with."""
        raise ValueError("How many workers there are is for the servers to say: `penstock serve --workers N`.")

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        made, held = self._local.num_buffers() if self._local is not None else (0, 0)
        return made + self._pool.num_slots, held + self._pool.num_held

    def close(self) -> None:
        """Close every connection, also those that wait for an answer."""
        with self._changed:
            self._is_closed = True
            links = list(self._links.values())
            self._changed.notify_all()
        for link in links:
            self._let_go(link)
        if self._local is not None:
            self._local.close()
        for thread in self._threads:
            thread.join(timeout=2)

    # -- the training thread

    def _any_done(self) -> int | None:
        for ticket in self._done:
            return ticket
        return next((ticket for ticket in self._local_tickets if self.is_done(ticket)), None)

    def _wait_for_news(self, wanted: set[int], waiting: Wait) -> None:
        """Wait a little; raises what there is no use in waiting for."""
        if self._is_closed:
            raise RuntimeError("The loader is closed.")
        waiting.next_look()
        self._feed_local()
        self._raise_if_alone()
        here = min(wanted & self._local_tickets, default=None)
        if here is not None:
            self._wait_locally(here)
            return
        with self._changed:
            if not any(ticket in self._done for ticket in wanted):
                self._changed.wait(_TICK_SECONDS)

    def _wait_locally(self, ticket: int) -> None:
        assert self._local is not None
        try:
            result: Result | Exception = self._local.wait(ticket, _TICK_SECONDS)
        except WaitedTooLong:
            return
        except Exception as error:  # noqa: BLE001 - raised when the ticket is waited for
            result = error
        self._local_tickets.discard(ticket)
        self._done[ticket] = result

    def _describe(self) -> str:
        """Who is waited for."""
        said = [f"{link.address} ({link.condition})" for link in self._links.values()]
        return f"waiting for {', '.join(said) or self._remote.servers}."

    def _finish(self, ticket: int, was_ready: bool) -> Result:
        if ticket in self._local_tickets:
            self._wait_locally(ticket)
        with self._changed:
            arrived = self._done.pop(ticket)
            if isinstance(arrived, BaseException):
                raise arrived
            if isinstance(arrived, Result):
                return arrived
            batches = _cut(self._pool.hand_over(arrived.slot, arrived.layout), arrived)
            self._pool.shrink()
        return Result(batches, arrived.layout.num_bytes, was_ready, 0, arrived.seconds, 0.0, 0)

    def _feed_local(self) -> None:
        """Give this machine's workers what they can begin with, and one more each."""
        if self._local is None:
            return
        with self._changed:
            while len(self._local_tickets) < 2 * self._local.num_workers:
                job = self._jobs.take_locally()
                if job is None:
                    return
                self._local_tickets.add(job.ticket)
                self._local.submit(job.ticket, job.item)

    def _raise_if_alone(self) -> None:
        """Say so when no server answers, and no worker here could go on."""
        if self._local is not None:
            return
        links = list(self._links.values())
        waited = time.monotonic() - self._heard_at
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

    def _wait_for_a_server(self) -> None:
        """Until one says that it serves this plan."""
        try:
            while not any(link.health.num_answers for link in self._links.values()):
                self._raise_if_alone()
                if self._local is not None and time.monotonic() - self._heard_at > 1:
                    return
                with self._changed:
                    self._changed.wait(_TICK_SECONDS)
        except BaseException:
            self.close()
            raise

    # -- the thread that looks after servers

    def _look_after(self) -> None:
        resolved_at = time.monotonic()
        while not self._is_closed:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - resolved_at > _RESOLVE_SECONDS:
                self._look_up()
                resolved_at = time.monotonic()
            with self._changed:
                healths = {address: link.health for address, link in self._links.items()}
                for job in self._jobs.by_ticket.values():  # of servers that are gone
                    for server in [server for server in job.asked if server not in healths]:
                        del job.asked[server]
                self._give_up_hopeless()
                if self._jobs.hedge(healths, now):
                    self._changed.notify_all()

    def _give_up_hopeless(self) -> None:
        """Fail what failed on one server and that nobody is left to try."""
        for job in list(self._jobs.by_ticket.values()):
            if job.failures and not job.asked and self._is_at_fault(job):
                self._jobs.finish(job)
                self._done[job.ticket] = next(reversed(job.failures.values()))
                self._changed.notify_all()

    def _look_up(self) -> None:
        """Find out where servers are; begin with those that are new, let go of those that are gone."""
        try:
            found = resolve(self._remote.servers)
        except OSError as error:
            logger.warning("The list of servers cannot be read; the last one holds: %s", error)
            return
        with self._changed:
            gone = [link for address, link in self._links.items() if address not in found]
            new = [_Link(address) for address in found if address not in self._links]
            for link in gone:
                del self._links[link.address]
                self._jobs.give_up_on(link.address)
            for link in new:
                self._links[link.address] = link
            self._changed.notify_all()
        for link in gone:
            self._let_go(link)
        for link in new:
            self._start(lambda link=link: self._meet(link), f"penstock-remote-{link.address}")

    def _let_go(self, link: _Link) -> None:
        link.is_gone = True
        for connection in link.connections:
            connection.close()

    def _start(self, target: Any, name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- connections

    def _meet(self, link: _Link) -> None:
        """Ask a server what it has; when it is this plan, open as many connections as it has workers, and one more."""
        connection = self._connect(link)
        while not (self._is_closed or link.is_gone):
            try:
                said = connection.get_json("/v1/plan")
                self._check(said)
                break
            except (OSError, Refused) as error:
                with self._changed:
                    link.health.failed(time.monotonic(), _reason(error), is_refusal=isinstance(error, Refused))
                    self._changed.notify_all()
                    pause = max(0.0, link.health.asks_again_at - time.monotonic())
                time.sleep(min(pause, 1.0))
        else:
            return
        with self._changed:
            link.num_workers, self._step_bytes = said["workers"], said["step_bytes"]
            link.health.answered(0.0)
            self._heard_at = time.monotonic()
            self._changed.notify_all()
        for number in range(min(link.num_workers, _MAX_CONNECTIONS - 1)):
            other = self._connect(link)
            self._start(lambda other=other: self._work(link, other), f"penstock-remote-{link.address}-{number + 1}")
        self._work(link, connection)

    def _connect(self, link: _Link) -> Connection:
        seconds = self._remote.timeout_seconds
        connection = Connection(link.address, tls=self._tls, token=self._token, seconds=seconds)
        link.connections.append(connection)
        return connection

    def _check(self, said: dict[str, Any]) -> None:
        if said.get("version") != VERSION:
            raise Refused(f"speaks version {said.get('version')!r}, this Penstock speaks {VERSION}")
        if said.get("fingerprint") != self._plan.fingerprint:
            raise Refused(
                f"serves the plan {said.get('fingerprint')}, not {self._plan.fingerprint}; its data, stages or "
                "functions differ"
            )
        if not all(type(said.get(name)) is int and said[name] > 0 for name in ("workers", "step_bytes")):
            raise Refused("does not say how many workers it has")

    def _work(self, link: _Link, connection: Connection) -> None:
        """One connection's life: take an item, ask for it, hand over what came."""
        while (job := self._take(link)) is not None:
            with self._changed:
                slot = self._pool.take()
            begin = time.monotonic()
            try:
                size = connection.get_body(self._request(job.item).path, slot.memory)
                arrived = self._arrived(job, slot, size, time.monotonic() - begin, link)
            except Exception as error:  # noqa: BLE001 - told apart below
                self._failed(link, job, slot, error)
            else:
                self._answered(link, job, arrived)

    def _take(self, link: _Link) -> Job | None:
        """The next item for a server; None when there will be none."""
        with self._changed:
            while not (self._is_closed or link.is_gone):
                now = time.monotonic()
                if link.health.may_be_asked(now, link.num_asked):
                    job = self._jobs.take(link.address, now)
                    if job is not None:
                        link.num_asked += 1
                        return job
                self._changed.wait(_TICK_SECONDS if link.health.state == "down" else 1.0)
        return None

    def _request(self, item: Item | Bundle) -> BatchRequest:
        plan = self._plan.fingerprint
        if isinstance(item, Bundle):
            return BatchRequest(plan, item.row, item.num_steps, item.rank, item.world_size, 0, item.num_parts)
        return BatchRequest(plan, item.row, 1, item.rank, item.world_size, item.part, item.num_parts)

    def _arrived(self, job: Job, slot: Any, size: int, seconds: float, link: _Link) -> _Arrived:
        with memoryview(slot.memory(size)) as whole, whole[:size] as body:
            values, arrangement = decode(body)
            num_batches = len(job.item.items()) if isinstance(job.item, Bundle) else 1
            parts = {name: _part(value, body) for name, value in values.items()}
        layout = BatchLayout(parts, num_pieces=num_batches if arrangement == "stacked" else 1)
        return _Arrived(slot, layout, arrangement, num_batches, seconds, link.address)

    def _answered(self, link: _Link, job: Job, arrived: _Arrived) -> None:
        with self._changed:
            link.num_asked -= 1
            link.health.answered(arrived.seconds)
            self._heard_at = time.monotonic()
            job.asked.pop(link.address, None)
            if not self._jobs.finish(job):
                self._pool.give_back(arrived.slot)  # another was faster, or nobody wants it any more
            else:
                self._done[job.ticket] = arrived
                for slower in job.asked:
                    if slower in self._links:
                        self._links[slower].health.overtaken()
                        self._jobs.give_up_on(slower)
            self._changed.notify_all()

    def _failed(self, link: _Link, job: Job, slot: Any, error: Exception) -> None:
        with self._changed:
            self._pool.give_back(slot)
            link.num_asked -= 1
            job.asked.pop(link.address, None)
            if isinstance(error, (Damaged, FormatError)):
                self.num_damaged += 1
                job.num_damaged += 1
                logger.warning("%s: %s; asking again.", link.address, error)
            elif isinstance(error, RemoteFailed):
                job.failures[link.address] = error
            elif not (link.is_gone or self._is_closed):
                now = time.monotonic()
                link.health.failed(now, _reason(error), is_refusal=isinstance(error, Refused))
                self._jobs.give_up_on(link.address)
            if job.num_damaged > _MAX_DAMAGED or self._is_at_fault(job):
                if self._jobs.finish(job):
                    self._done[job.ticket] = error
            elif not any(self._is_up(server) for server in job.asked):
                self._jobs.ask_again(job)
            self._changed.notify_all()

    def _is_up(self, server: Address) -> bool:
        link = self._links.get(server)
        return link is not None and link.health.state == "up"

    def _is_at_fault(self, job: Job) -> bool:
        """Whether computing an item failed on so many servers that it is not for the servers."""
        others = [link for address, link in self._links.items() if address not in job.failures]
        is_hopeless = not any(link.health.state == "up" for link in others)
        return len(job.failures) >= _MAX_FAILURES or (bool(job.failures) and is_hopeless)


def _part(value: Any, body: memoryview) -> Any:
    """What a batch's layout has for a value that was sent; arrays inside lists and dicts are copied."""
    match value:
        case SentArray():
            return _placed(value)
        case SentRagged():
            return PlacedRagged(_placed(value.values), _placed(value.offsets), value.is_bytes)
    return _copied(value, body)


def _placed(array: SentArray) -> PlacedArray:
    return PlacedArray(array.offset, array.shape, dtype_name(array.dtype), array.offset + array.num_bytes)


def _copied(value: Any, body: memoryview) -> Any:
    match value:
        case SentArray():
            return value.view(body).copy()
        case SentRagged():
            return value.copy(body)
        case dict():
            return {key: _copied(each, body) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_copied(each, body) for each in value)
    return value


def _cut(batches: list[Batch], arrived: _Arrived) -> list[Batch]:
    """The batches of an item, one by one."""
    if arrived.arrangement != "separate":
        return batches
    separate: list[Batch] = [{} for _ in range(arrived.num_batches)]
    for name, value in batches[0].items():
        place, _, key = name.partition("/")
        separate[int(place)][key] = value
    return separate


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "does not answer"
    return str(error) or type(error).__name__

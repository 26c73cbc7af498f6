"""Which server is asked for what, and what came of it: all that a loader's threads share, and the lock around it.

    submit ──► waiting ──take──► asked of one server ──answered──► done ──► the training thread
                  ▲                      │
                  ├── the server failed ─┤
                  ├── it is suspect ─────┤  all it holds, once
                  └── it takes too long ─┘  at most one request in twenty

Connections pull, so a server that is twice as fast gets twice as much. Whatever is asked twice is done when the first
answer comes; the other is thrown away: both have the same bytes.

A server that is later still, by half a second, hangs: it is suspect (`_servers.py`), as if another had overtaken it,
and all it holds is asked elsewhere whatever its share.

# NOTE [the lock of a loader's servers]
#   `Requests.lock` guards this file's state: items, results, slots, and what is known of each server.
#   Each public method of `Requests` takes it; those of `ServerState` are called under it, except `close`.
#   Nobody else takes it, and nothing is sent or received under it.
#   Read without it: `done`, `is_closed`, numbers, and `servers`, which is replaced as a whole.
#   Not under it: `connections` and `free` of a server, which its own two threads use.
#
#   Its conditions wake each thread only for what concerns it, since a woken thread takes the interpreter from the
#   others: a server's threads wait in `take` (if they have nothing to read) and in `wait_for_outage`, the training
#   thread in `wait_for`. Rare events wake all.
"""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import FormatError, RemoteFailed
from penstock.loader import Batch, Bundle, Item, LoaderStatistics, SlotPool, private_slot
from penstock.service._answers import Arrived
from penstock.service._servers import ServerState
from penstock.service._settings import Address, requests_in_flight

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_OVERDUE_SECONDS = 0.5
"""A server that is late by this much is suspect."""
_MAX_HEDGED_SHARE = 0.05
_MAX_FAILURES = 2
"""When computing a batch has failed on this many servers, the batch is at fault."""
_MAX_DAMAGED, _DAMAGED_PAUSE_SECONDS = 5, 0.05
"""How often a damaged answer is asked for again, and the first pause before that; each is twice the one before."""
_MAX_LOGGED = 300
"""Characters of what is wrong with an answer that are logged."""


@dataclass(slots=True, eq=False)
class Job:
    """One item on its way."""

    ticket: int
    item: Item | Bundle
    asked: dict[Address, float] = field(default_factory=dict)
    """Servers that were asked for it and may still answer, and when they were asked."""
    is_waiting: bool = False
    failures: dict[Address, BaseException] = field(default_factory=dict)
    num_damaged: int = 0


class Requests:
    """All servers of a plan as they are known now, what is asked of them, and what they sent."""

    def __init__(self, statistics: LoaderStatistics, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self._statistics, self._clock = statistics, clock
        self._news = threading.Condition(self.lock)
        self._awaited: Container[int] = ()
        """Tickets that the training thread waits for."""
        self.servers: dict[Address, ServerState] = {}
        self._jobs: dict[int, Job] = {}
        """Items that are not done, by ticket."""
        self._waiting: list[tuple[int, Job]] = []
        """A heap of those that may be asked for now; some are outdated."""
        self._resting: list[tuple[float, Job]] = []
        """Items whose answers were damaged, and when to ask for them again."""
        self.done: dict[int, Arrived | BaseException] = {}
        """How items ended, by ticket."""
        self.slots = SlotPool(private_slot)
        self.step_bytes = 0
        """Bytes of one step over all ranks, as a server measured it; 0 until one has answered."""
        self.step_seconds = 0.0
        """How long computing it took there."""
        self.is_closed = False
        self._has_failed = False
        """Whether an error was raised since the training thread last wanted something: then nothing is asked."""
        self._num_asked = self._num_hedged = 0
        self._heard_at = clock()

    @property
    def num_workers(self) -> int:
        """Workers of the servers that answer."""
        return sum(server.num_workers for server in self.servers.values() if server.state != "down")

    @property
    def has_answered(self) -> bool:
        """Whether a server has said that it serves this plan."""
        return any(server.num_workers for server in self.servers.values())

    @property
    def silent_seconds(self) -> float:
        """For how long no server has answered, though something was asked."""
        return self._clock() - self._heard_at

    # For the training thread.

    def add(self, ticket: int, item: Item | Bundle) -> None:
        """Ask for an item; how it ended will be in `done`."""
        with self.lock:
            if not self._jobs:
                self._heard_at = self._clock()  # no server had anything to answer until now
            self._has_failed = False
            job = self._jobs[ticket] = Job(ticket, item)
            self._offer(job)
            for server in self.servers.values():
                server.work.notify()

    def wait_for(self, tickets: Container[int], seconds: float) -> None:
        """Wait until one of these is done, for at most `seconds`; rare events end the wait early."""
        with self.lock:
            if self._has_failed:
                self._has_failed = False
                self._wake_all()
            if not any(ticket in tickets for ticket in self.done):
                self._awaited = tickets
                self._news.wait(seconds)
                self._awaited = ()

    def hand_over(self, ticket: int) -> tuple[list[Batch], Arrived]:
        """The batches of an item that is done, and how they came; raises what went wrong with it.

        A loop often ends with an error. So after one nothing is asked of servers until the training thread goes on.
        """
        with self.lock:
            arrived = self.done.pop(ticket)
            if isinstance(arrived, BaseException):
                self._has_failed = True
                raise arrived
            batches = arrived.cut(self.slots.hand_over(arrived.slot, arrived.layout))
            self.slots.shrink()
        return batches, arrived

    def take_back(self) -> tuple[int, Item | Bundle] | None:
        """The oldest item that is not asked of a server now, to be computed on this machine."""
        with self.lock:
            job = self._pop_waiting()
            if job is None:
                return None
            del self._jobs[job.ticket]
            return job.ticket, job.item

    def forget(self) -> None:
        """Throw away everything asked for, and start afresh; the slot of a body in transit is freed when it arrives."""
        with self.lock:
            self._jobs.clear()
            self._waiting.clear()
            self._resting.clear()
            self._has_failed = False
            for server in self.servers.values():
                server.ask_at_once()
            for arrived in self.done.values():
                if isinstance(arrived, Arrived):
                    self.slots.give_back(arrived.slot)
            self.done.clear()
            self._heard_at = self._clock()

    # For the threads of servers.

    def is_done_with(self, server: ServerState) -> bool:
        """Whether a server will be asked for nothing more."""
        return self.is_closed or server.is_gone

    def wait_for_outage(self, server: ServerState) -> bool:
        """Wait until a server is down and may be back; False when it will be asked for nothing more."""
        with self.lock:
            while not self.is_done_with(server):
                pause = server.asks_again_at - self._clock() if server.state == "down" else _TICK_SECONDS
                if pause <= 0:
                    return True
                server.outage.wait(pause)
        return False

    def met(self, server: ServerState, *, num_workers: int, step_bytes: int, step_seconds: float) -> None:
        """Note that a server says it serves the plan."""
        with self.lock:
            server.num_workers, self.step_bytes, self.step_seconds = num_workers, step_bytes, step_seconds
            server.met(step_seconds * requests_in_flight(num_workers) / num_workers)
            self._wake_all()

    def not_met(self, server: ServerState, error: Exception) -> None:
        """Note that a server refuses or cannot be reached."""
        with self.lock:
            server.failed(error, self._clock())
            self._wake_all()

    def take(self, server: ServerState, *, waits: bool) -> Job | None:
        """The next item for a server; None when there is none now, or, for one who waits, when there will be none."""
        with self.lock:
            while not self.is_done_with(server):
                may_ask = server.state == "up" and not self._has_failed
                job = self._pop_waiting(server.address) if may_ask else None
                if job is not None:
                    job.asked[server.address] = self._clock()
                    server.num_asked += 1
                    self._num_asked += 1
                if job is not None or not waits:
                    return job
                server.work.wait(_TICK_SECONDS)
        return None

    def take_slot(self) -> Any:
        """Memory for a body."""
        with self.lock:
            return self.slots.take()

    def answered(self, server: ServerState, job: Job, arrived: Arrived) -> None:
        """Take what a server was asked for and sent."""
        with self.lock:
            server.num_asked -= 1
            server.answered(arrived.seconds)
            self._heard_at = self._clock()
            job.asked.pop(server.address, None)
            if not self._finish(job, arrived):
                self.slots.give_back(arrived.slot)  # another was faster, or it is no longer wanted
                return
            for slower in self.servers.keys() & job.asked.keys():
                self.servers[slower].overtaken()
                self._ask_others_than(slower)
                self._wake_all()

    def failed(self, server: ServerState, job: Job, error: Exception) -> None:
        """Note that a server did not deliver: the body is damaged, cannot be computed there, or there is no answer."""
        with self.lock:
            server.num_asked -= 1
            job.asked.pop(server.address, None)
            if isinstance(error, FormatError):
                job.num_damaged += 1
                self._statistics.num_damaged += 1
                logger.warning("%s: %s; asking again.", server.address, str(error)[:_MAX_LOGGED])
                error.add_note(f"This is what {server.address} sent.")
                pause = _DAMAGED_PAUSE_SECONDS * 2 ** (job.num_damaged - 1)
                self._resting.append((self._clock() + pause, job))
            elif isinstance(error, RemoteFailed):
                job.failures[server.address] = error
            elif not self.is_done_with(server) and server.state != "down":  # one outage, however many connections
                server.failed(error, self._clock())
                self._ask_others_than(server.address)
            if job.num_damaged > _MAX_DAMAGED or self._is_at_fault(job):
                self._finish(job, error)
            elif not isinstance(error, FormatError) and not job.asked.keys() & self._servers_up():
                self._offer(job)
            self._wake_all()

    # For the thread that supervises them.

    def replace_servers(self, addresses: Collection[Address]) -> tuple[list[ServerState], list[ServerState]]:
        """Take these addresses as the servers there are; returns those that are new, and those that are gone."""
        with self.lock:
            before = self.servers
            gone = [server for address, server in before.items() if address not in addresses]
            new = [self._make_server(address) for address in addresses if address not in before]
            kept = {address: server for address, server in before.items() if address in addresses}
            self.servers = kept | {server.address: server for server in new}
            for server in gone:
                self._ask_others_than(server.address)
            self._wake_all(gone)
        return new, gone

    def hedge_and_give_up(self) -> None:
        """Ask elsewhere for what takes too long, again for what came damaged; fail what no server is left to try."""
        with self.lock:
            if self._has_failed:
                return
            if due := [job for at, job in self._resting if at <= self._clock()]:
                self._resting = [(at, job) for at, job in self._resting if job not in due]
                for job in due:
                    self._offer(job)
                self._wake_all()
            for job in list(self._jobs.values()):
                job.asked = {server: at for server, at in job.asked.items() if server in self.servers}
                if job.failures and not job.asked and self._is_at_fault(job):
                    self._finish(job, next(reversed(job.failures.values())))
            if self._hedge():
                self._wake_all()

    def close(self) -> list[ServerState]:
        """Ask nothing more; returns the servers there are."""
        with self.lock:
            self.is_closed = True
            self._wake_all()
            return list(self.servers.values())

    def _make_server(self, address: Address) -> ServerState:
        return ServerState(address, threading.Condition(self.lock), threading.Condition(self.lock))

    def _pop_waiting(self, server: Address | None = None) -> Job | None:
        """The oldest item that waits and was not asked of this server; any, for this machine."""
        passed, found = [], None
        while self._waiting and found is None:
            _, job = entry = heapq.heappop(self._waiting)
            if self._jobs.get(job.ticket) is not job or not job.is_waiting:
                continue
            if server in job.asked or server in job.failures:
                passed.append(entry)
            else:
                job.is_waiting = False
                found = job
        for entry in passed:
            heapq.heappush(self._waiting, entry)
        return found

    def _offer(self, job: Job) -> None:
        """Let servers take an item, in addition to those that have it, unless it is done."""
        if self._jobs.get(job.ticket) is job and not job.is_waiting:
            job.is_waiting = True
            heapq.heappush(self._waiting, (job.ticket, job))

    def _ask_others_than(self, server: Address) -> None:
        """Ask other servers for everything that this one holds."""
        for job in self._jobs.values():
            if server in job.asked:
                self._offer(job)

    def _hedge(self) -> bool:
        """Ask another server as well for the oldest item that takes too long, or for all items of a server that hangs.

        Returns whether there was one.
        """
        now, able = self._clock(), self._servers_up()
        for _, job in sorted(self._jobs.items()):
            if job.is_waiting or not job.asked or not able - job.asked.keys() - job.failures.keys():
                continue
            late = min(now - at - self.servers[server].patience_seconds for server, at in job.asked.items())
            if late > _OVERDUE_SECONDS:
                for server in job.asked:
                    self.servers[server].overtaken()
                    self._ask_others_than(server)
                return True
            if late > 0 and self._num_hedged <= _MAX_HEDGED_SHARE * self._num_asked:
                self._num_hedged += 1
                self._statistics.num_hedged += 1
                self._offer(job)
                return True
        return False

    def _finish(self, job: Job, outcome: Arrived | BaseException) -> bool:
        """Keep how an item ended; False if it was done already, or is no longer wanted."""
        if self._jobs.get(job.ticket) is not job:
            return False
        del self._jobs[job.ticket]
        self.done[job.ticket] = outcome
        if job.ticket in self._awaited:
            self._news.notify_all()
        return True

    def _wake_all(self, gone: Iterable[ServerState] = ()) -> None:
        """Wake every thread, after a change that may concern any of them."""
        self._news.notify_all()
        for server in [*self.servers.values(), *gone]:
            server.work.notify_all()
            server.outage.notify()

    def _servers_up(self) -> set[Address]:
        return {address for address, server in self.servers.items() if server.state == "up"}

    def _is_at_fault(self, job: Job) -> bool:
        """Whether the item is at fault, not the servers: it failed on enough of them, or on some with no other up."""
        is_hopeless = not self._servers_up() - job.failures.keys()
        return len(job.failures) >= _MAX_FAILURES or (bool(job.failures) and is_hopeless)

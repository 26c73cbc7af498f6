"""What is asked of which server, and how that ended: all that a loader's connections share.

    Jobs ◄── take the oldest ── a thread for each server
    done ◄── what lies where, or why not ─┘

Everything here is changed under one lock. The threads of servers wait in `take` if they have nothing to read, the
training thread in `wait_for`; each is woken only for what concerns it, since a woken thread takes the interpreter from
the others. Rare events wake all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Container, Iterable
from typing import Any

from penstock.errors import FormatError, RemoteFailed, printable
from penstock.loader import Bundle, Item, SlotPool, private_slot
from penstock.service._addresses import Address
from penstock.service._arrivals import Arrived
from penstock.service._fetch import Connection, Refused
from penstock.service._health import Health
from penstock.service._jobs import Job, Jobs
from penstock.service._remote import requests_in_flight

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_MAX_FAILURES = 2
"""When computing a batch has failed on this many servers, the batch is at fault."""
_MAX_DAMAGED = 5


class Link:
    """One server: what is known about it, and the connections to it."""

    def __init__(self, address: Address, lock: threading.RLock) -> None:
        self.address = address
        self.work = threading.Condition(lock)
        """Notified when there may be something to ask this server for."""
        self.outage = threading.Condition(lock)
        """Notified when it may be down."""
        self.health = Health(state="down")
        self.connections: list[Connection] = []
        self.free: list[Connection] = []
        """Those that owe no answer."""
        self.num_asked = 0
        self.num_workers = 0
        self.is_gone = False

    def close(self) -> None:
        """Break off whatever is in transit."""
        self.is_gone = True
        for connection in self.connections:
            connection.close()

    @property
    def condition(self) -> str:
        """How the last requests ended, in words."""
        if self.num_asked and self.health.state != "down":
            return f"is connected and owes answers to {self.num_asked} requests"
        return self.health.reason


class Requests:
    """All servers of a plan as they are known now, what is asked of them, and what they sent."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._news = threading.Condition(self.lock)
        self._awaited: Container[int] = ()
        """Tickets that the training thread waits for."""
        self.links: dict[Address, Link] = {}
        self.done: dict[int, Arrived | BaseException] = {}
        """What came, by ticket. A caller that takes a body hands it over, or gives its slot back to the pool."""
        self.pool = SlotPool(private_slot)
        self.step_bytes = 0
        """Bytes of one step over all ranks, as a server measured it; 0 until one has answered."""
        self.step_seconds = 0.0
        """How long computing it took there."""
        self.is_closed = False
        self._jobs = Jobs()
        self._heard_at = time.monotonic()

    @property
    def num_workers(self) -> int:
        """Workers of the servers that answer."""
        return sum(link.num_workers for link in self.links.values() if link.health.state != "down")

    @property
    def has_answered(self) -> bool:
        """Whether a server has said that it serves this plan."""
        return any(link.num_workers for link in self.links.values())

    @property
    def silent_seconds(self) -> float:
        """For how long no server has answered, though something was asked."""
        return time.monotonic() - self._heard_at

    def add(self, ticket: int, item: Item | Bundle) -> None:
        """Ask for an item; its outcome will be in `done`."""
        with self.lock:
            if not self._jobs.by_ticket:
                self._heard_at = time.monotonic()  # no server had anything to answer until now
            self._jobs.add(ticket, item)
            for link in self.links.values():
                link.work.notify()

    def wait_for(self, tickets: Container[int], seconds: float) -> None:
        """Wait until one of these is done, for at most `seconds`; rare events end the wait early."""
        with self.lock:
            if not any(ticket in tickets for ticket in self.done):
                self._awaited = tickets
                self._news.wait(seconds)
                self._awaited = ()

    def take_back(self) -> tuple[int, Item | Bundle] | None:
        """The oldest item that is not asked of a server now, to be computed on this machine."""
        with self.lock:
            job = self._jobs.take_locally()
            return None if job is None else (job.ticket, job.item)

    def forget(self) -> None:
        """Throw away everything asked for, and start afresh; the slot of a body in transit is freed when it arrives."""
        with self.lock:
            self._jobs.clear()
            for link in self.links.values():
                link.health.ask_at_once()
                link.outage.notify()
            for arrived in self.done.values():
                if isinstance(arrived, Arrived):
                    self.pool.give_back(arrived.slot)
            self.done.clear()
            self._heard_at = time.monotonic()

    def replace_links(self, addresses: Collection[Address]) -> tuple[list[Link], list[Link]]:
        """Take these addresses as the servers there are; returns the links that are new, and those that are gone."""
        with self.lock:
            gone = [link for address, link in self.links.items() if address not in addresses]
            new = [Link(address, self.lock) for address in addresses if address not in self.links]
            for link in gone:
                del self.links[link.address]
                self._jobs.give_up_on(link.address)
            for link in new:
                self.links[link.address] = link
            self._wake_all(gone)
        return new, gone

    def is_done_with(self, link: Link) -> bool:
        """Whether a server will be asked for nothing more."""
        return self.is_closed or link.is_gone

    def met(self, link: Link, *, num_workers: int, step_bytes: int, step_seconds: float) -> None:
        """Note that a server says it serves the plan."""
        with self.lock:
            link.num_workers, self.step_bytes, self.step_seconds = num_workers, step_bytes, step_seconds
            link.health.met(step_seconds * requests_in_flight(num_workers) / num_workers)
            self._wake_all()

    def not_met(self, link: Link, error: Exception) -> None:
        """Note that a server refuses or cannot be reached."""
        with self.lock:
            link.health.failed(time.monotonic(), _reason(error), is_refusal=isinstance(error, Refused))
            self._wake_all()

    def wait_for_outage(self, link: Link) -> bool:
        """Wait until a server is down and may be back; False when it will be asked for nothing more."""
        with self.lock:
            while not self.is_done_with(link):
                pause = link.health.asks_again_at - time.monotonic() if link.health.state == "down" else _TICK_SECONDS
                if pause <= 0:
                    return True
                link.outage.wait(pause)
        return False

    def take(self, link: Link, *, waits: bool) -> Job | None:
        """The next item for a server; None when there is none now, or, for one who waits, when there will be none."""
        with self.lock:
            while not self.is_done_with(link):
                job = self._jobs.take(link.address, time.monotonic()) if link.health.state == "up" else None
                if job is not None:
                    link.num_asked += 1
                if job is not None or not waits:
                    return job
                link.work.wait(_TICK_SECONDS)
        return None

    def take_slot(self) -> Any:
        """Memory for a body."""
        with self.lock:
            return self.pool.take()

    def answered(self, link: Link, job: Job, arrived: Arrived) -> None:
        """Take what a server was asked for and sent."""
        with self.lock:
            link.num_asked -= 1
            link.health.answered(arrived.seconds)
            self._heard_at = time.monotonic()
            job.asked.pop(link.address, None)
            if not self._jobs.finish(job):
                self.pool.give_back(arrived.slot)  # another was faster, or it is no longer wanted
            else:
                self._finish(job.ticket, arrived)
                for slower in self.links.keys() & job.asked.keys():
                    self.links[slower].health.overtaken()
                    self._jobs.give_up_on(slower)
                    self._wake_all()

    def failed(self, link: Link, job: Job, error: Exception) -> None:
        """Note that a server did not deliver: the body is damaged, cannot be computed there, or there is no answer."""
        with self.lock:
            link.num_asked -= 1
            job.asked.pop(link.address, None)
            if isinstance(error, FormatError):
                job.num_damaged += 1
                logger.warning("%s: %s; asking again.", link.address, error)
                error.add_note(f"This is what {link.address} sent.")
            elif isinstance(error, RemoteFailed):
                job.failures[link.address] = error
            elif not self.is_done_with(link) and link.health.state != "down":  # one outage, however many connections
                link.health.failed(time.monotonic(), _reason(error), is_refusal=isinstance(error, Refused))
                self._jobs.give_up_on(link.address)
            if job.num_damaged > _MAX_DAMAGED or self._is_at_fault(job):
                if self._jobs.finish(job):
                    self._finish(job.ticket, error)
            elif not any(self._is_up(server) for server in job.asked):
                self._jobs.ask_again(job)
            self._wake_all()

    def hedge_and_give_up(self) -> None:
        """Ask elsewhere for what takes too long, and fail what no server is left to try."""
        with self.lock:
            healths = {address: link.health for address, link in self.links.items()}
            for job in self._jobs.by_ticket.values():  # of servers that are gone
                for server in [server for server in job.asked if server not in healths]:
                    del job.asked[server]
            self._give_up_hopeless()
            if self._jobs.hedge(healths, time.monotonic()):
                self._wake_all()

    def close(self) -> list[Link]:
        """Ask nothing more; returns the servers there are."""
        with self.lock:
            self.is_closed = True
            self._wake_all()
            return list(self.links.values())

    def _give_up_hopeless(self) -> None:
        """Fail items that failed on a server when no other server is left to try them."""
        for job in list(self._jobs.by_ticket.values()):
            if job.failures and not job.asked and self._is_at_fault(job):
                self._jobs.finish(job)
                self._finish(job.ticket, next(reversed(job.failures.values())))

    def _finish(self, ticket: int, outcome: Arrived | BaseException) -> None:
        self.done[ticket] = outcome
        if ticket in self._awaited:
            self._news.notify_all()

    def _wake_all(self, gone: Iterable[Link] = ()) -> None:
        """Wake every thread, after a change that may concern any of them."""
        self._news.notify_all()
        for link in [*self.links.values(), *gone]:
            link.work.notify_all()
            link.outage.notify()

    def _is_up(self, server: Address) -> bool:
        link = self.links.get(server)
        return link is not None and link.health.state == "up"

    def _is_at_fault(self, job: Job) -> bool:
        """Whether the item is at fault, not the servers: it failed on enough of them, or on some with no other up."""
        others = [link for address, link in self.links.items() if address not in job.failures]
        is_hopeless = not any(link.health.state == "up" for link in others)
        return len(job.failures) >= _MAX_FAILURES or (bool(job.failures) and is_hopeless)


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "does not answer"
    return printable(str(error)) or type(error).__name__

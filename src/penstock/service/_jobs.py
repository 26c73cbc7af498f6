"""Which server is asked for what: a queue of items that many connections take from, and the rules for asking twice.

    submit ──► waiting ──take──► asked of one server ──answered──► done ──► the training thread
                  ▲                      │
                  ├── the server failed ─┤
                  ├── it is suspect ─────┤  all it holds, once
                  └── it takes too long ─┘  at most one request in twenty

Connections pull, so a server that is twice as fast gets twice as much. Whatever is asked twice is done when the first
answer comes; the other is thrown away: both have the same bytes. A server that is later still, by half a second, hangs:
it is suspect, as if another had overtaken it, and all it holds is asked elsewhere whatever its share.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from penstock.service._addresses import Address
from penstock.service._health import Health

_MAX_HEDGED_SHARE = 0.05
_OVERDUE_SECONDS = 0.5
"""A server that is late by this much is suspect."""


@dataclass(slots=True, eq=False)
class Job:
    """One item on its way."""

    ticket: int
    item: Any
    asked: dict[Address, float] = field(default_factory=dict)
    """Servers that were asked for it and may still answer, and when they were asked."""
    is_waiting: bool = True
    failures: dict[Address, BaseException] = field(default_factory=dict)
    num_damaged: int = 0


class Jobs:
    """Items that are not done. Not thread-safe: callers hold the lock of `Requests`."""

    def __init__(self) -> None:
        self.by_ticket: dict[int, Job] = {}
        self._waiting: list[tuple[int, Job]] = []
        self.num_requests = 0
        self.num_hedged = 0

    def add(self, ticket: int, item: Any) -> None:
        """Queue an item to be asked for."""
        job = self.by_ticket[ticket] = Job(ticket, item)
        heapq.heappush(self._waiting, (ticket, job))

    def take(self, server: Address, now: float) -> Job | None:
        """The oldest item that waits and was not asked of this server."""
        passed = []
        found = None
        while self._waiting and found is None:
            _, job = entry = heapq.heappop(self._waiting)
            if self.by_ticket.get(job.ticket) is not job or not job.is_waiting:
                continue
            if server in job.asked or server in job.failures:
                passed.append(entry)
            else:
                found = job
        for entry in passed:
            heapq.heappush(self._waiting, entry)
        if found is not None:
            found.is_waiting = False
            found.asked[server] = now
            self.num_requests += 1
        return found

    def take_locally(self) -> Job | None:
        """The oldest item that waits, for a worker of this machine."""
        while self._waiting:
            _, job = heapq.heappop(self._waiting)
            if self.by_ticket.get(job.ticket) is job and job.is_waiting:
                del self.by_ticket[job.ticket]
                return job
        return None

    def is_wanted(self, job: Job) -> bool:
        """Whether it is still to be done."""
        return self.by_ticket.get(job.ticket) is job

    def finish(self, job: Job) -> bool:
        """Take a job off the list; False if it was done already, or is no longer wanted."""
        if not self.is_wanted(job):
            return False
        del self.by_ticket[job.ticket]
        return True

    def ask_again(self, job: Job) -> None:
        """Let other servers take it too."""
        if self.is_wanted(job) and not job.is_waiting:
            job.is_waiting = True
            heapq.heappush(self._waiting, (job.ticket, job))

    def give_up_on(self, server: Address) -> None:
        """Ask other servers for everything that this one holds."""
        for job in self.by_ticket.values():
            if server in job.asked:
                self.ask_again(job)

    def hedge(self, healths: dict[Address, Health], now: float) -> bool:
        """Ask another server as well for the oldest item that takes too long, or for all items of a server that hangs.

        Returns whether there was one.
        """
        able = {server for server, health in healths.items() if health.state == "up"}
        for _, job in sorted(self.by_ticket.items()):
            if job.is_waiting or not job.asked or not able - job.asked.keys() - job.failures.keys():
                continue
            late = min(now - at - healths[server].patience_seconds() for server, at in job.asked.items())
            if late > _OVERDUE_SECONDS:
                for server in list(job.asked):
                    healths[server].overtaken()
                    self.give_up_on(server)
                return True
            if late > 0 and self.num_hedged <= _MAX_HEDGED_SHARE * self.num_requests:
                self.num_hedged += 1
                self.ask_again(job)
                return True
        return False

    def clear(self) -> None:
        """Forget every item."""
        self.by_ticket.clear()
        self._waiting.clear()

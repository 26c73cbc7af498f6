"""Servers in the place of worker processes: an engine whose workers are on other machines.

    training thread               Fleet                        servers
    submit(ticket, item) ──────►  asked of a free server ────► compute, or have it
    wait(ticket) ◄──────────────  done ◄────────────────────── body

With `local_workers`, workers of this machine take items too, the oldest first, and go on when no server answers. A slot
is free again when the last array of its batch dies, as with every engine.
"""

from __future__ import annotations

import sys

from penstock.loader import Bundle, Engine, Item, Result, Wait, WaitedTooLong
from penstock.plan import Plan
from penstock.service._fleet import Fleet
from penstock.service._remote import Remote

_TICK_SECONDS = 0.05
_REQUEST_BYTES = 8 << 20
"""Size of an answer when steps are small: each answer costs both sides most of a millisecond besides its bytes."""
_REQUEST_SECONDS = 0.1
"""Most time that a worker spends on an answer of several steps: the first batch comes later by as much."""
_MAX_STEPS = 512
_PATIENCE_SECONDS = 1.0
"""How long a start waits for a server when there are workers on this machine."""


class RemoteEngine:
    """Computes items on servers, and on workers of this machine if there are any.

    Args:
        local: An engine of this machine that takes a share, and all of it when no server answers.

    Raises:
        ServiceError: no server answers in time, or all refuse; the message names each with its reason.
    """

    def __init__(self, plan: Plan, remote: Remote, *, local: Engine | None = None) -> None:
        self._plan, self._local = plan, local
        self._local_tickets: set[int] = set()
        self._computed_here: dict[int, Result | Exception] = {}
        self._is_closed = False
        self._fleet = Fleet(plan, remote)
        self._requests = self._fleet.requests
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
        """The result of a ticket; raises what its computation raised."""
        was_ready = self.is_done(ticket)
        waiting = Wait(seconds, self._fleet.describe)
        while not self.is_done(ticket):
            self._wait_for_news(range(ticket, ticket + 1), waiting)
        return self._finish(ticket, was_ready)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """Whichever result is there first."""
        waiting = Wait(seconds, self._fleet.describe)
        was_ready = True
        while (ticket := self._any_done()) is None:
            was_ready = False
            self._wait_for_news(range(sys.maxsize), waiting)
        return ticket, self._finish(ticket, was_ready)

    def is_done(self, ticket: int) -> bool:
        """Whether the result is there."""
        if ticket in self._local_tickets:
            assert self._local is not None
            return self._local.is_done(ticket)
        return ticket in self._requests.done or ticket in self._computed_here

    def forget(self) -> None:
        """Throw away everything submitted so far."""
        self._requests.forget()
        if self._local is not None:
            self._local.forget()
        self._local_tickets.clear()
        self._computed_here.clear()

    def set_workers(self, num_workers: int) -> None:
        """Not possible: servers keep the workers that they were started with."""
        raise ValueError("The number of workers is set where servers start: `penstock serve --workers N`.")

    def num_started(self) -> int:
        """All of them: a server answers once its workers have started."""
        return self.num_workers

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        made, held = self._local.num_buffers() if self._local is not None else (0, 0)
        return made + self._requests.pool.num_slots, held + self._requests.pool.num_held

    def close(self) -> None:
        """Close every connection, and end the workers of this machine."""
        self._is_closed = True
        self._fleet.close()
        if self._local is not None:
            self._local.close()

    def _wait_for_a_server(self) -> None:
        """Wait until one says that it serves this plan, or, with workers of this machine, for a second."""
        try:
            while not self._requests.has_answered:
                if self._local is None:
                    self._fleet.check()
                elif self._requests.silent_seconds > _PATIENCE_SECONDS:
                    return
                self._requests.wait_for((), _TICK_SECONDS)
        except BaseException:
            self.close()
            raise

    def _wait_for_news(self, wanted: range, waiting: Wait) -> None:
        """Wait for a moment; raises when waiting is of no use."""
        if self._is_closed:
            raise RuntimeError("The loader is closed.")
        waiting.next_look()
        self._feed_local()
        if self._local is None:
            self._fleet.check()
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
            return self._hand_over(ticket, was_ready)
        if isinstance(found, Exception):
            raise found
        return found

    def _hand_over(self, ticket: int, was_ready: bool) -> Result:
        """The batches that a server sent, as a result."""
        requests = self._requests
        with requests.lock:
            arrived = requests.done.pop(ticket)
            if isinstance(arrived, BaseException):
                raise arrived
            batches = arrived.cut(requests.pool.hand_over(arrived.slot, arrived.layout))
            requests.pool.shrink()
        return Result(batches, arrived.layout.num_bytes, was_ready, 0, arrived.seconds, 0.0, 0)

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

"""Requests in, answers out: worker processes on an event loop, and a window of answers that are shared.

    handlers                   dispatcher                      worker processes
    answer(request) ────────►  asked before? the same future
                               else submit ─────────────────►  compute into a slot, encode, checksum
    Future[Answer] ◄────────   body ◄────────────────────────  done
                               and keep it for those who ask again

All of it runs in the thread of the event loop: workers do what takes long, and what is left is so little that handing
it to a thread of its own took more than the work (the two fought over the interpreter for every answer).
An answer is a view of the slot that a worker wrote: the slot is free again once the answer has left the window and is
sent. A batch that several ranks or jobs ask for within the window is computed once.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.loader import ProcessEngine, Result
from penstock.plan import Plan
from penstock.service._answers import ServedWork
from penstock.service._wire import BatchRequest, Body
from penstock.workers import StartMethod


@dataclass(frozen=True, slots=True)
class Answer:
    """A body, ready to be sent any number of times."""

    body: Body
    checksum: int
    num_steps: int
    produce_seconds: float
    _result: Result = field(repr=False)
    """Keeps the memory of the body."""


@dataclass(slots=True)
class DispatcherStatistics:
    """Totals since the server was started."""

    num_shared: int = 0
    num_computed: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    produce_seconds: float = 0.0
    cpu_seconds: float = 0.0


class Dispatcher:
    """Computes answers in worker processes. Made anywhere; once it is `attached`, only that event loop may ask.

    Args:
        window_bytes: How much of what was sent is kept for others that ask for the same.
    """

    def __init__(self, plan: Plan, *, num_workers: int, start_method: StartMethod, window_bytes: int) -> None:
        self.statistics = DispatcherStatistics()
        self.num_workers = num_workers
        self._work = ServedWork(plan)
        self._engine = ProcessEngine(self._work, num_workers, start_method)
        self._window_bytes = window_bytes
        self._tickets = itertools.count()
        self._asked: OrderedDict[BatchRequest, asyncio.Future[Answer]] = OrderedDict()
        """Requests in computation or in the window, least recently used first."""
        self._running: dict[int, BatchRequest] = {}
        self._kept_bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: Collection[int] = ()
        """Workers' descriptors that the event loop listens to."""
        self._broken: BaseException | None = None
        """Why nothing can be computed any more, such as workers that cannot be set up."""

    @property
    def num_queued(self) -> int:
        """Requests whose answers are not computed yet."""
        return len(self._running)

    def compute(self, request: BatchRequest, seconds: float) -> Answer:
        """The answer to a request, before there is an event loop: this call waits for it."""
        ticket = next(self._tickets)
        self._engine.submit(ticket, request)
        return self._make_answer(request, self._engine.wait(ticket, seconds))

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive from workers through this event loop."""
        self._loop = loop
        self._watch()

    def answer(self, request: BatchRequest) -> asyncio.Future[Answer]:
        """The answer to a request, once it is computed. Callers must not cancel it: others may wait for it too."""
        assert self._loop is not None
        if self._broken is not None:
            raise self._broken
        found = self._asked.get(request)
        if found is not None:
            self.statistics.num_shared += 1
            self._asked.move_to_end(request)
            return found
        future = self._asked[request] = self._loop.create_future()
        ticket = next(self._tickets)
        self._running[ticket] = request
        self._work.announce(request)
        self._engine.submit(ticket, request)
        self._watch()
        return future

    def detach(self) -> None:
        """Stop receiving, since the event loop ends; requests without an answer fail."""
        if self._loop is not None:
            self._break(RuntimeError("The server was closed."))
            for descriptor in self._watched:
                self._loop.remove_reader(descriptor)
            self._loop = None

    def close(self) -> None:
        """End the workers."""
        self._engine.close()

    def _watch(self) -> None:
        """Listen to the workers there are now; a dead one's replacement may have the same descriptor."""
        assert self._loop is not None
        descriptors = self._engine.descriptors()
        if descriptors is not self._watched:
            for descriptor in self._watched:
                self._loop.remove_reader(descriptor)
            for descriptor in descriptors:
                self._loop.add_reader(descriptor, self._settle_finished)
            self._watched = descriptors

    def _settle_finished(self) -> None:
        """Take what workers have finished: one of them has sent something, or died."""
        try:
            for ticket, outcome in self._engine.take_finished():
                self._settle(self._running.pop(ticket), outcome)
            self._watch()
        except BaseException as error:  # noqa: BLE001 - it is raised where answers are waited for
            self._break(error)

    def _break(self, error: BaseException) -> None:
        self._broken = error
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # marked as seen: the client may be gone

    def _settle(self, request: BatchRequest, outcome: Result | BaseException) -> None:
        """Turn what a worker made into an answer, or into a failure; the next such request tries again."""
        if isinstance(outcome, BaseException):
            future = self._asked.pop(request)
            self.statistics.num_failed += 1
            future.set_exception(outcome)
            future.exception()  # marked as seen: the client may be gone
            return
        answer = self._make_answer(request, outcome)
        statistics = self.statistics
        statistics.num_computed += 1
        statistics.num_bytes += answer.body.num_bytes
        statistics.produce_seconds += outcome.produce_seconds
        statistics.cpu_seconds += outcome.cpu_seconds
        self._kept_bytes += answer.body.num_bytes
        self._asked[request].set_result(answer)
        self._shrink_window()

    def _make_answer(self, request: BatchRequest, outcome: Result) -> Answer:
        body, checksum = self._work.unpack(outcome.batch)
        return Answer(body, checksum, request.steps, outcome.produce_seconds, outcome)

    def _shrink_window(self) -> None:
        """Drop the least recently used answers until the window fits its size."""
        while self._kept_bytes > self._window_bytes:
            request = next((request for request, future in self._asked.items() if future.done()), None)
            if request is None:
                return
            self._kept_bytes -= self._asked.pop(request).result().body.num_bytes

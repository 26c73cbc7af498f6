"""Requests in, answers out: one thread that owns the worker processes, and a window of answers that are shared.

    any thread                 dispatcher's thread                       worker processes
    answer(request) ────────►  asked before? the same future
                               else submit ───────────────────────────►  compute into a slot
                               encode, checksum ◄──────────────────────  done
    Future[Answer] ◄────────   and keep it for those who ask again

An answer is a view of the slot that a worker wrote: it is free again when the last who sends it is done, and it has
left the window. Ranks and jobs that ask for the same batch within the window have it computed once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.loader import ProcessEngine, Result
from penstock.plan import Plan
from penstock.service._wire import BatchRequest, Body, body_checksum, encode
from penstock.service._work import ServedWork
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
    """Totals since the server was started; written by the dispatcher's thread alone."""

    num_asked: int = 0
    num_shared: int = 0
    num_computed: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    produce_seconds: float = 0.0
    cpu_seconds: float = 0.0


class Dispatcher:
    """Computes answers in worker processes.

    Args:
        window_bytes: How much of what was sent is kept for those who ask for the same.
    """

    def __init__(self, plan: Plan, *, num_workers: int, start_method: StartMethod, window_bytes: int) -> None:
        self.statistics = DispatcherStatistics()
        self.num_workers = num_workers
        self._work = ServedWork(plan)
        self._engine = ProcessEngine(self._work, num_workers, start_method)
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._inbox: deque[tuple[int, BatchRequest]] = deque()
        self._tickets = itertools.count()
        self._asked: OrderedDict[BatchRequest, Future[Answer]] = OrderedDict()
        """In computation, or in the window; the longest untouched first."""
        self._running: dict[int, BatchRequest] = {}
        self._kept_bytes = 0
        self._is_closed = False
        self._broken: BaseException | None = None
        """Why nothing can be computed any more: workers that cannot be set up, for one."""
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._engine.wake_on(self._waker)
        self._thread = threading.Thread(target=self._run, name="penstock-dispatcher", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Requests that are waited for."""
        return len(self._running) + len(self._inbox)

    def answer(self, request: BatchRequest) -> Future[Answer]:
        """The answer to a request, when it is computed. Any thread may ask; nobody may cancel what others wait for."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The server is closed.")
            if self._broken is not None:
                raise self._broken
            self.statistics.num_asked += 1
            found = self._asked.get(request)
            if found is not None:
                self.statistics.num_shared += 1
                self._asked.move_to_end(request)
                return found
            future: Future[Answer] = Future()
            self._asked[request] = future
            self._inbox.append((next(self._tickets), request))
        os.eventfd_write(self._waker, 1)
        return future

    def close(self) -> None:
        """End the workers; what is still asked for fails."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._waker, 1)
        self._thread.join(timeout=10)
        self._engine.close()
        os.close(self._waker)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(RuntimeError("The server was closed."))

    def _run(self) -> None:
        try:
            self._compute()
        except BaseException as error:  # noqa: BLE001 - it is raised where answers are waited for
            with self._lock:
                self._broken = error
                waiting = [future for future in self._asked.values() if not future.done()]
            for future in waiting:
                future.set_exception(error)

    def _compute(self) -> None:
        """Until it is closed: pass on what is asked for, settle what is done."""
        while not self._is_closed:
            while self._inbox:
                ticket, request = self._inbox.popleft()
                self._running[ticket] = request
                self._work.announce(request)
                self._engine.submit(ticket, request)
            finished = self._engine.take_finished(seconds=1.0)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._waker)
            for ticket, outcome in finished:
                self._settle(self._running.pop(ticket), outcome)

    def _settle(self, request: BatchRequest, outcome: Result | BaseException) -> None:
        """Turn what a worker made into an answer, or a failure that the next who asks tries again."""
        try:
            answer: Any = self._make_answer(request, outcome)
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
            with self._lock:
                future = self._asked.pop(request)
            self.statistics.num_failed += 1
            future.set_exception(error)
            return
        with self._lock:
            future = self._asked[request]
            self._kept_bytes += answer.body.num_bytes
            dropped = self._shrink_window()
        future.set_result(answer)
        del dropped

    def _make_answer(self, request: BatchRequest, outcome: Result | BaseException) -> Answer:
        if isinstance(outcome, BaseException):
            raise outcome
        body = encode(outcome.batch, self._work.arrangement(request))
        statistics = self.statistics
        statistics.num_computed += 1
        statistics.num_bytes += body.num_bytes
        statistics.produce_seconds += outcome.produce_seconds
        statistics.cpu_seconds += outcome.cpu_seconds
        return Answer(body, body_checksum(body.buffers), request.steps, outcome.produce_seconds, outcome)

    def _shrink_window(self) -> list[Future[Answer]]:
        """Let go of the answers that nobody asked for the longest, beyond the window's size."""
        dropped = []
        for request, future in list(self._asked.items()):
            if self._kept_bytes <= self._window_bytes:
                break
            if future.done():
                self._kept_bytes -= future.result().body.num_bytes
                dropped.append(self._asked.pop(request))
        return dropped

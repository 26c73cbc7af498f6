"""Worker processes: for Python-heavy work, which threads would do one at a time.

Items go out over a socket, batches come back in shared memory that the worker wrote them into: nothing
is pickled but a few numbers, nothing is copied. There is no thread in the trainer: messages are read
when a batch is asked for, and a worker's death is an end of file there, seen at once. Its items are
given to other workers: they are pure functions, so computing one twice is computing it once. Items that
are assigned to a worker are not: they need what that worker kept, so its death is theirs.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from typing import Any

from penstock.errors import WorkerDied
from penstock.loader._compute import Computed
from penstock.loader._diagnosis import diagnose_death
from penstock.loader._engine import Result, StartMethod, patience
from penstock.loader._memory import Slot
from penstock.loader._sending import check_not_importing_main, pack_work
from penstock.loader._starting import ForkServerStarter, ForkStarter, SpawnStarter, Starter, occupy_standard_descriptors
from penstock.loader._work import Work
from penstock.loader._worker_proxy import WorkerProxy

_MAX_DEATHS = 3
"""Deaths over one item until it is taken for the cause."""

_Waiting = tuple[int, Any, int | None]
"""(ticket, item, worker it is assigned to)"""


class ProcessEngine:
    """Computes in processes."""

    def __init__(self, work: Work, num_workers: int, start_method: StartMethod, *, is_assigned: bool = False) -> None:
        check_not_importing_main()
        self._greeting = None if start_method == "fork" else pack_work(work)
        occupy_standard_descriptors()
        self._life_line_reader, self._life_line = os.pipe()
        self._starter: Starter = _make_starter(self._life_line_reader, work, start_method)
        self._end = weakref.finalize(self, _end, self._life_line, self._life_line_reader, self._starter)
        self._is_assigned = is_assigned
        self._workers: list[WorkerProxy] = []
        """Those that answer, oldest first."""
        self._staying: list[WorkerProxy] = []
        """Those that are given items."""
        self._deaths_of_workers: dict[int, str] = {}
        """What happened to workers that have items assigned to them."""
        self._next_number = 0
        self._waiting: deque[_Waiting] = deque()
        self._done: dict[int, tuple[WorkerProxy | None, Slot | None, Computed | BaseException]] = {}
        self._deaths: dict[int, int] = {}
        self._last_ticket, self._first_wanted = -1, 0
        self._is_closed = False
        self._ears: tuple[dict[int, WorkerProxy], select.poll] | None = None
        """(workers by descriptor, what waits for any of them)"""
        _engines.add(self)
        self.num_workers = num_workers
        self._dispatch()

    def submit(self, ticket: int, item: Any, worker: int | None = None) -> None:
        """Give an item to the worker that has the least to do, or to the one it is assigned to."""
        self._last_ticket = ticket
        self._waiting.append((ticket, item, worker))
        self._dispatch()

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        """The result of a ticket; raises what its computation raised."""
        was_ready = self.is_done(ticket)
        deadline = None if seconds is None else time.monotonic() + seconds
        while ticket not in self._done:
            self._read(patience(deadline))
        return self._finish(ticket, was_ready)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """Whichever result is there first."""
        was_ready = bool(self._done) or (self._read(0) and bool(self._done))
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._done:
            self._read(patience(deadline))
        ticket = next(iter(self._done))
        return ticket, self._finish(ticket, was_ready)

    def is_done(self, ticket: int) -> bool:
        """Whether the result is there; reads what workers have said."""
        return ticket in self._done or (self._read(0) and ticket in self._done)

    def forget(self) -> None:
        """Throw away what was submitted; an answer that nobody wants frees its slot when it comes."""
        self._first_wanted = self._last_ticket + 1
        self._waiting.clear()
        self._deaths.clear()
        for worker, slot, _ in self._done.values():
            if worker is not None and slot is not None:
                worker.pool.give_back(slot)
        self._done.clear()
        while self._read(0):
            pass

    def set_workers(self, num_workers: int) -> None:
        """Have as many workers when the next item is submitted or waited for; any thread may ask for it."""
        if self._is_assigned:
            raise ValueError("Each item belongs to one of these workers; their number cannot change while they run.")
        self.num_workers = num_workers

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        pools = [worker.pool for worker in self._workers]
        return sum(pool.num_slots for pool in pools), sum(pool.num_held for pool in pools)

    def close(self) -> None:
        """Cut the life-line: every process ends at once, whatever it is doing."""
        self._let_go()
        self._end()

    def abandon(self) -> None:
        """In a forked child: let go of what belongs to the trainer, without ending it."""
        self._let_go()
        if self._end.detach() is not None:
            os.close(self._life_line)

    def _let_go(self) -> None:
        self._is_closed = True
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._staying.clear()

    def _dispatch(self) -> None:
        """Have as many workers as wanted, and give them what is waiting while they take it."""
        if self._is_closed:
            return
        if len(self._staying) != self.num_workers:
            self._start_or_release()
        while self._waiting:
            ticket, item, assigned = self._waiting[0]
            worker = self._worker_for(assigned)
            if worker is None:
                assert assigned is not None
                self._done[ticket] = (None, None, WorkerDied(self._deaths_of_workers[assigned]))
            elif not worker.give(ticket, item):
                return
            self._waiting.popleft()

    def _start_or_release(self) -> None:
        """Start workers that are missing, or let some leave after what they are doing."""
        for worker in self._staying[self.num_workers :]:
            worker.is_leaving = True
            self._staying.remove(worker)
            self._release_if_idle(worker)
        while len(self._staying) < self.num_workers and not (self._is_assigned and self._deaths_of_workers):
            self._start()
        for worker in self._workers:
            worker.pool.share_files(len(self._workers))

    def _start(self) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        worker = WorkerProxy(self._starter.start(number))
        self._workers.append(worker)
        self._staying.append(worker)
        self._ears = None
        worker.greet(self._greeting, self.num_workers)

    def _worker_for(self, assigned: int | None) -> WorkerProxy | None:
        """The worker that is given an item; None when it is dead."""
        if assigned is None:
            return min(self._staying, key=lambda worker: len(worker.outstanding))
        return next((worker for worker in self._staying if worker.number == assigned), None)

    def _read(self, seconds: float) -> bool:
        """Read what workers say, waiting at most so long for the first word; whether there was one."""
        self._check_open()
        try:
            workers, poller = self._ears or self._listen()
            ready = poller.poll(seconds * 1000)
            for descriptor, _ in ready:
                self._hear(workers[descriptor])
            self._dispatch()
        except (OSError, ValueError):  # also what comes of a descriptor that another thread has just closed
            self._check_open()
            raise
        return bool(ready)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("The loader is closed.")

    def _listen(self) -> tuple[dict[int, WorkerProxy], select.poll]:
        """Listen to the workers there are now."""
        workers = {worker.started.channel.fileno(): worker for worker in self._workers}
        poller = select.poll()  # `select` refuses descriptors from 1,024 on
        for descriptor in workers:
            poller.register(descriptor, select.POLLIN)
        self._ears = workers, poller
        return self._ears

    def _hear(self, worker: WorkerProxy) -> None:
        try:
            ticket, slot, outcome = worker.hear()
        except EOFError:
            self._bury(worker)
            return
        if ticket < self._first_wanted:
            worker.pool.give_back(slot)
        else:
            self._done[ticket] = (worker, slot, outcome)
            self._deaths.pop(ticket, None)
        self._release_if_idle(worker)

    def _release_if_idle(self, worker: WorkerProxy) -> None:
        if worker.is_leaving and not worker.outstanding:
            worker.close()
            self._workers.remove(worker)
            self._ears = None

    def _finish(self, ticket: int, was_ready: bool) -> Result:
        worker, slot, outcome = self._done.pop(ticket)
        if isinstance(outcome, BaseException):
            if worker is not None and slot is not None:
                worker.pool.give_back(slot)
            raise outcome
        assert worker is not None
        assert slot is not None
        result = worker.hand_over(slot, outcome, was_ready)
        for each in self._workers:  # whoever's batches died: some may have nothing to hand over for long
            each.let_go()
        return result

    def _bury(self, worker: WorkerProxy) -> None:
        """A worker died: what it had waits again, first things first, for the one that is started instead."""
        self._workers.remove(worker)
        if not worker.is_leaving:
            self._staying.remove(worker)
        self._ears = None
        code = self._starter.exit_code(worker.started)
        worker.close()
        lost = [(ticket, item) for ticket, (item, _) in worker.outstanding.items() if ticket >= self._first_wanted]
        if self._is_assigned:
            item = next(iter(worker.outstanding.values()), ("nothing",))[0]
            death = diagnose_death(worker.started, code, item)
            self._deaths_of_workers[worker.number] = death
            self._done.update({ticket: (None, None, WorkerDied(death)) for ticket, _ in lost})
            return
        if lost:
            ticket, item = lost[0]
            self._deaths[ticket] = self._deaths.get(ticket, 0) + 1
            if self._deaths[ticket] > _MAX_DEATHS:
                self._done[ticket] = (None, None, WorkerDied(diagnose_death(worker.started, code, item, _MAX_DEATHS)))
                lost = lost[1:]
        self._waiting.extendleft((ticket, item, None) for ticket, item in reversed(lost))


def _make_starter(life_line: int, work: Work, method: StartMethod) -> Starter:
    if method == "fork":
        return ForkStarter(life_line, work)
    return SpawnStarter(life_line) if method == "spawn" else ForkServerStarter(life_line)


def _end(life_line: int, reader: int, starter: Starter) -> None:
    os.close(life_line)
    os.close(reader)
    starter.close()


_engines: weakref.WeakSet[ProcessEngine] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    for engine in list(_engines):
        engine.abandon()


os.register_at_fork(after_in_child=_abandon_after_fork)

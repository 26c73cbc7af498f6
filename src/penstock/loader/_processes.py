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
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import WorkerDied
from penstock.loader._compute import Computed
from penstock.loader._diagnosis import diagnose_death, rebuild_error
from penstock.loader._engine import Result, StartMethod, patience
from penstock.loader._layout import Layout
from penstock.loader._memory import Slot, SlotPool
from penstock.loader._sending import check_not_importing_main, pack_work
from penstock.loader._starting import ForkServerStarter, ForkStarter, SpawnStarter, Started, Starter
from penstock.loader._work import Work
from penstock.loader._worker import KNOWN_LAYOUT

_MAX_DEATHS = 3
"""Deaths over one item until it is taken for the cause."""

_Waiting = tuple[int, Any, int | None]
"""(ticket, item, worker it is assigned to)"""


@dataclass(slots=True, eq=False)
class _Worker:
    started: Started
    pool: SlotPool[Slot] = field(default_factory=lambda: SlotPool(Slot))
    known: set[int] = field(default_factory=set)
    """Slots that the process has open."""
    dropped: list[int] = field(default_factory=list)
    """Slots that it is to close, said with the next item."""
    outstanding: dict[int, tuple[Any, Slot]] = field(default_factory=dict)
    """Items by ticket; the first is the one being computed."""
    layouts: dict[int, Layout] = field(default_factory=dict)
    """Layouts that it refers to by number."""
    is_leaving: bool = False


class ProcessEngine:
    """Computes in processes."""

    def __init__(self, work: Work, num_workers: int, start_method: StartMethod, *, is_assigned: bool = False) -> None:
        check_not_importing_main()
        self._greeting = None if start_method == "fork" else pack_work(work)
        self._life_line_reader, self._life_line = os.pipe()
        self._starter: Starter = _make_starter(self._life_line_reader, work, start_method)
        self._end = weakref.finalize(self, _end, self._life_line, self._life_line_reader, self._starter)
        self._is_assigned = is_assigned
        self._workers: list[_Worker] = []
        """Those that answer, oldest first."""
        self._staying: list[_Worker] = []
        """Those that are given items."""
        self._deaths_of_workers: dict[int, str] = {}
        """What happened to workers that have items assigned to them."""
        self._next_number = 0
        self._waiting: deque[_Waiting] = deque()
        self._done: dict[int, tuple[_Worker | None, Slot | None, Computed | BaseException]] = {}
        self._deaths: dict[int, int] = {}
        self._last_ticket, self._first_wanted = -1, 0
        self._is_closed = False
        self._ears: tuple[dict[int, _Worker], select.poll] | None = None
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
        """Start workers, or let some leave after what they are doing."""
        if self._is_assigned:
            raise ValueError("Each item belongs to one of these workers; their number cannot change while they run.")
        self.num_workers = num_workers
        for worker in self._staying[num_workers:]:
            worker.is_leaving = True
            self._staying.remove(worker)
            self._release_if_idle(worker)
        self._dispatch()

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
            worker.started.channel.close()
        self._workers.clear()
        self._staying.clear()

    def _start(self) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        started = self._starter.start(number)
        worker = _Worker(started)
        self._workers.append(worker)
        self._staying.append(worker)
        self._ears = None
        if self._greeting is not None:
            _send(started, self._greeting)
        _send(started, ("begin", number, self.num_workers))

    def _dispatch(self) -> None:
        """Have as many workers as wanted, and give them what is waiting while they take it."""
        if self._is_closed:
            return
        while len(self._staying) < self.num_workers and not (self._is_assigned and self._deaths_of_workers):
            self._start()
        while self._waiting:
            ticket, item, assigned = self._waiting[0]
            worker = self._worker_for(assigned)
            if worker is None:
                assert assigned is not None
                self._done[ticket] = (None, None, WorkerDied(self._deaths_of_workers[assigned]))
            elif not self._give(worker, ticket, item):
                return
            self._waiting.popleft()

    def _worker_for(self, assigned: int | None) -> _Worker | None:
        """The worker that is given an item; None when it is dead."""
        if assigned is None:
            return min(self._staying, key=lambda worker: len(worker.outstanding))
        return next((worker for worker in self._staying if worker.started.number == assigned), None)

    def _give(self, worker: _Worker, ticket: int, item: Any) -> bool:
        """Send an item to a worker; False when so much waits for it already that it must answer first."""
        slot = worker.pool.take()
        descriptors = () if slot.number in worker.known else (slot.descriptor,)
        if not _send(worker.started, ("run", ticket, item, slot.number, worker.dropped), descriptors):
            worker.pool.give_back(slot)
            return False
        worker.dropped = []
        worker.known.add(slot.number)
        worker.outstanding[ticket] = (item, slot)
        return True

    def _read(self, seconds: float) -> bool:
        """Read what workers say, waiting at most so long for the first word; whether there was one."""
        if self._is_closed:
            raise RuntimeError("The loader is closed.")
        workers, poller = self._ears or self._listen()
        ready = poller.poll(seconds * 1000)
        for descriptor, _ in ready:
            worker = workers[descriptor]
            try:
                message, _ = worker.started.channel.receive()
            except EOFError:
                self._bury(worker)
            else:
                self._hear(worker, message)
        self._dispatch()
        return bool(ready)

    def _listen(self) -> tuple[dict[int, _Worker], select.poll]:
        """Listen to the workers there are now."""
        workers = {worker.started.channel.fileno(): worker for worker in self._workers}
        poller = select.poll()  # `select` refuses descriptors from 1,024 on
        for descriptor in workers:
            poller.register(descriptor, select.POLLIN)
        self._ears = workers, poller
        return self._ears

    def _hear(self, worker: _Worker, message: Any) -> None:
        outcome: Computed | BaseException
        if type(message) is bytes:
            ticket, number, *costs = KNOWN_LAYOUT.unpack(message)
            outcome = Computed(worker.layouts[number], *costs)
        elif message[0] == "broken":
            raise rebuild_error(*message[1:], note=f"while worker process {worker.started.number} was being set up")
        elif message[0] == "done":
            _, ticket, layout, number, costs = message
            if number is not None:
                worker.layouts[number] = layout
            outcome = Computed(layout, *costs)
        else:
            _, ticket, *described = message
            item = worker.outstanding[ticket][0]
            note = f"in worker process {worker.started.number}, while computing {item}"
            outcome = rebuild_error(*described, note=note)
        self._settle(worker, ticket, outcome)

    def _settle(self, worker: _Worker, ticket: int, outcome: Computed | BaseException) -> None:
        _, slot = worker.outstanding.pop(ticket)
        if ticket < self._first_wanted:
            worker.pool.give_back(slot)
        else:
            self._done[ticket] = (worker, slot, outcome)
            self._deaths.pop(ticket, None)
        self._release_if_idle(worker)

    def _release_if_idle(self, worker: _Worker) -> None:
        if worker.is_leaving and not worker.outstanding:
            worker.started.channel.close()  # the worker sees the end of file and exits
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
        batches = worker.pool.hand_over(slot, outcome.layout)
        dropped = {slot.number for slot in worker.pool.shrink()}
        if dropped:
            worker.dropped += dropped & worker.known
            worker.known -= dropped
        return Result(batches, outcome.layout.num_bytes, was_ready, worker.started.number, *outcome[1:])

    def _bury(self, worker: _Worker) -> None:
        """A worker died: what it had waits again, first things first, for the one that is started instead."""
        self._workers.remove(worker)
        if not worker.is_leaving:
            self._staying.remove(worker)
        self._ears = None
        code = self._starter.exit_code(worker.started)
        worker.started.channel.close()
        lost = [(ticket, item) for ticket, (item, _) in worker.outstanding.items() if ticket >= self._first_wanted]
        if self._is_assigned:
            item = next(iter(worker.outstanding.values()), ("nothing",))[0]
            death = diagnose_death(worker.started, code, item)
            self._deaths_of_workers[worker.started.number] = death
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


def _send(started: Started, message: tuple[Any, ...], descriptors: tuple[int, ...] = ()) -> bool:
    """Send to a worker; False when its inbox is full. If it is dead, its end of file will say so."""
    try:
        started.channel.send(message, descriptors, is_patient=False)
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def _end(life_line: int, reader: int, starter: Starter) -> None:
    os.close(life_line)
    os.close(reader)
    starter.close()


_engines: weakref.WeakSet[ProcessEngine] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    for engine in list(_engines):
        engine.abandon()


os.register_at_fork(after_in_child=_abandon_after_fork)

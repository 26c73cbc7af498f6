"""Worker threads: for work that spends its time outside the GIL, as gathers do.

Threads are daemons that hold no reference to the engine, only to what they share with it, so a
loader that is forgotten is collected and takes its threads along.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from typing import Any

from penstock.loader._compute import Computed, compute
from penstock.loader._engine import Result
from penstock.loader._memory import Slot, SlotPool
from penstock.loader._work import Work

_CLOSE_SECONDS = 5.0
_LOOK_AROUND_SECONDS = 1.0


class _Shared:
    """What the threads and the engine share, under one lock."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.pool = SlotPool()
        self.changed = threading.Condition()
        self.waiting: deque[tuple[int, Any, Slot]] = deque()
        self.done: dict[int, tuple[int, Slot, Computed | BaseException, Any]] = {}
        self.running: set[int] = set()
        self.num_wanted = 0
        self.first_wanted = 0
        self.is_closed = False

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.waiting.clear()
            self.changed.notify_all()

    def forget(self, before: int) -> None:
        with self.changed:
            self.first_wanted = before
            for *_, slot in self.waiting:
                self.pool.give_back(slot)
            for _, slot, *_ in self.done.values():
                self.pool.give_back(slot)
            self.waiting.clear()
            self.done.clear()

    def take(self, number: int) -> tuple[int, Any, Slot] | None:
        """The oldest item, when there is one; None when thread `number` is not needed any more."""
        with self.changed:
            while not (self.is_closed or number >= self.num_wanted):
                if self.waiting:
                    return self.waiting.popleft()
                self.changed.wait()
            self.running.discard(number)
            self.changed.notify()  # the call to work may have been for another
            return None

    def finish(self, ticket: int, number: int, slot: Slot, outcome: Computed | BaseException, item: Any) -> None:
        with self.changed:
            if ticket < self.first_wanted:
                self.pool.give_back(slot)
            else:
                self.done[ticket] = (number, slot, outcome, item)
                self.changed.notify_all()


def _run(shared: _Shared, number: int) -> None:
    """A worker thread: takes the oldest item until it is told to stop or there are too many threads."""
    while _run_one(shared, number):
        pass


def _run_one(shared: _Shared, number: int) -> bool:
    taken = shared.take(number)
    if taken is None:
        return False
    ticket, item, slot = taken
    outcome: Computed | BaseException
    try:
        outcome = compute(shared.work, item, slot)
    except BaseException as error:  # noqa: BLE001 - it is raised in the caller's next()
        outcome = error
    shared.finish(ticket, number, slot, outcome, item)
    return True


class ThreadEngine:
    """Computes in threads of this process."""

    def __init__(self, work: Work, num_workers: int) -> None:
        self._shared = _Shared(work)
        self._threads: dict[int, threading.Thread] = {}
        self._last_ticket = -1
        self.num_workers = 0
        weakref.finalize(self, self._shared.close).atexit = False
        _engines.add(self)
        self.set_workers(num_workers)

    def submit(self, ticket: int, item: Any) -> None:
        """Have an item computed by the next free thread."""
        slot = self._shared.pool.take()
        self._last_ticket = ticket
        with self._shared.changed:
            self._shared.waiting.append((ticket, item, slot))
            self._shared.changed.notify()

    def wait(self, ticket: int) -> Result:
        """The result of a ticket; raises what its computation raised."""
        shared = self._shared
        with shared.changed:
            while ticket not in shared.done:
                self._check_alive()
                shared.changed.wait(_LOOK_AROUND_SECONDS)
        return self._finish(ticket)

    def wait_any(self) -> tuple[int, Result]:
        """Whichever result is there first."""
        shared = self._shared
        with shared.changed:
            while not shared.done:
                self._check_alive()
                shared.changed.wait(_LOOK_AROUND_SECONDS)
            ticket = next(iter(shared.done))
        return ticket, self._finish(ticket)

    def is_done(self, ticket: int) -> bool:
        """Whether `wait` would return at once."""
        return ticket in self._shared.done

    def forget(self) -> None:
        """Throw away what was submitted; a thread's result that nobody wants frees its slot."""
        self._shared.forget(self._last_ticket + 1)

    def set_workers(self, num_workers: int) -> None:
        """Start threads, or let the last ones end after what they are doing."""
        shared = self._shared
        with shared.changed:
            shared.num_wanted = self.num_workers = num_workers
            shared.changed.notify_all()
            missing = set(range(num_workers)) - shared.running
            shared.running |= missing
        for number in sorted(missing):
            name = f"penstock-loader-{number}"
            self._threads[number] = threading.Thread(target=_run, args=(shared, number), name=name, daemon=True)
            self._threads[number].start()

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        return self._shared.pool.num_slots, self._shared.pool.num_held

    def close(self) -> None:
        """Stop the threads; one that is inside a user's function is left to end by itself."""
        self._shared.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads.values():
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()

    def abandon(self) -> None:
        """In a forked child: the threads are the parent's, and the lock may have been held at the time."""
        self._shared.changed = threading.Condition()
        self._shared.is_closed = True
        self._threads.clear()

    def _finish(self, ticket: int) -> Result:
        pool = self._shared.pool
        number, slot, outcome, item = self._shared.done.pop(ticket)
        if isinstance(outcome, BaseException):
            pool.give_back(slot)
            outcome.add_note(f"in worker thread {number}, while computing {item}")
            raise outcome
        batch = pool.hand_over(slot, outcome.layout)
        pool.shrink()
        return Result(batch, number, outcome.produce_seconds, outcome.cpu_seconds, outcome.page_faults)

    def _check_alive(self) -> None:
        if self._shared.is_closed:
            raise RuntimeError("The loader is closed.")
        if not any(thread.is_alive() for thread in self._threads.values()):
            raise RuntimeError("Every worker thread ended. This is a bug in Penstock; please report it.")


_engines: weakref.WeakSet[ThreadEngine] = weakref.WeakSet()


@atexit.register  # a daemon thread that comes back from C while the interpreter is taken down can crash it
def _close_at_exit() -> None:
    for engine in list(_engines):
        engine.close()


def _abandon_after_fork() -> None:
    for engine in list(_engines):
        engine.abandon()


os.register_at_fork(after_in_child=_abandon_after_fork)

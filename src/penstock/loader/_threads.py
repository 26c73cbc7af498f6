"""Worker threads: for work that spends its time outside the GIL, as gathers do.

Threads are daemons that hold no reference to the engine, only to what they share with it, so a
loader that is forgotten is collected and takes its threads along.
"""

from __future__ import annotations

import threading
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
        self.changed = threading.Condition()
        self.waiting: deque[tuple[int, Any, Slot]] = deque()
        self.done: dict[int, tuple[int, Slot, Computed | BaseException, Any]] = {}
        self.num_wanted = 0
        self.is_closed = False

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.waiting.clear()
            self.changed.notify_all()


def _run(shared: _Shared, number: int) -> None:
    """A worker thread: takes the oldest item until it is told to stop or there are too many threads."""
    while True:
        with shared.changed:
            while not shared.waiting:
                if shared.is_closed or number >= shared.num_wanted:
                    return
                shared.changed.wait()
            if number >= shared.num_wanted:
                shared.changed.notify()
                return
            ticket, item, slot = shared.waiting.popleft()
        outcome: Computed | BaseException
        try:
            outcome = compute(shared.work, item, slot)
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's next()
            outcome = error
        with shared.changed:
            shared.done[ticket] = (number, slot, outcome, item)
            shared.changed.notify_all()


class ThreadEngine:
    """Computes in threads of this process."""

    def __init__(self, work: Work, num_workers: int) -> None:
        self._shared = _Shared(work)
        self._pool = SlotPool()
        self._threads: dict[int, threading.Thread] = {}
        self.num_workers = 0
        self._num_in_flight = 0
        self.set_workers(num_workers)
        weakref.finalize(self, self._shared.close)

    def submit(self, ticket: int, item: Any) -> None:
        """Have an item computed by the next free thread."""
        slot, _ = self._pool.take()
        with self._shared.changed:
            self._shared.waiting.append((ticket, item, slot))
            self._shared.changed.notify()
        self._num_in_flight += 1

    def wait(self, ticket: int) -> Result:
        """The result of a ticket; raises what its computation raised."""
        shared = self._shared
        with shared.changed:
            while ticket not in shared.done:
                self._check_alive()
                shared.changed.wait(_LOOK_AROUND_SECONDS)
            number, slot, outcome, item = shared.done.pop(ticket)
        return self._finish(number, slot, outcome, item)

    def wait_any(self) -> tuple[int, Result]:
        """Whichever result is there first."""
        shared = self._shared
        with shared.changed:
            while not shared.done:
                self._check_alive()
                shared.changed.wait(_LOOK_AROUND_SECONDS)
            ticket = next(iter(shared.done))
            number, slot, outcome, item = shared.done.pop(ticket)
        return ticket, self._finish(number, slot, outcome, item)

    def is_done(self, ticket: int) -> bool:
        """Whether `wait` would return at once."""
        return ticket in self._shared.done

    def set_workers(self, num_workers: int) -> None:
        """Start threads, or let the last ones end after what they are doing."""
        with self._shared.changed:
            self._shared.num_wanted = num_workers
            self._shared.changed.notify_all()
        for number in range(num_workers):
            thread = self._threads.get(number)
            if thread is None or not thread.is_alive():
                name = f"penstock-loader-{number}"
                thread = threading.Thread(target=_run, args=(self._shared, number), name=name, daemon=True)
                self._threads[number] = thread
                thread.start()
        self.num_workers = num_workers

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        return self._pool.num_slots, self._pool.num_held

    def close(self) -> None:
        """Stop the threads; one that is inside a user's function is left to end by itself."""
        self._shared.close()
        for thread in self._threads.values():
            if thread is not threading.current_thread():
                thread.join(_CLOSE_SECONDS)
        self._threads.clear()

    def _finish(self, number: int, slot: Slot, outcome: Computed | BaseException, item: Any) -> Result:
        self._num_in_flight -= 1
        if isinstance(outcome, BaseException):
            self._pool.give_back(slot)
            outcome.add_note(f"in worker thread {number}, while computing {item}")
            raise outcome
        batch = self._pool.hand_over(slot, outcome.layout)
        self._pool.shrink(self._num_in_flight + 2)
        return Result(batch, number, outcome.produce_seconds, outcome.cpu_seconds, outcome.page_faults)

    def _check_alive(self) -> None:
        if self._shared.is_closed:
            raise RuntimeError("The loader is closed.")
        if not any(thread.is_alive() for thread in self._threads.values()):
            raise RuntimeError("Every worker thread ended. This is a bug in Penstock; please report it.")

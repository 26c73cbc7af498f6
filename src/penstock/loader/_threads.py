"""Worker threads, for work that spends its time outside the GIL, as gathers do.

Threads are daemons that hold no reference to the engine, only to what they share with it, so a
forgotten loader is garbage collected and takes its threads with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
import time
import weakref
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from penstock.loader._engine import Computed, Computer, Result, Wait, Work
from penstock.loader._memory import AnySlot, SlotPool, private_slot
from penstock.workers import abandon_in_forks, describe_silence

_CLOSE_SECONDS = 5.0

_Task = tuple[int, Any, AnySlot]
"""(ticket, item, slot)"""
_Outcome = tuple[int, int, AnySlot, Computed | BaseException, Any]
"""(ticket, thread, slot, result or error, item)"""


class _Shared:
    """What the threads and the engine share: two queues in C, which cost a microsecond per hand-over, and a few flags.

    A condition would cost ten times as much, and wake both sides when only one is waiting.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.tasks: SimpleQueue[_Task | None] = SimpleQueue()
        """None ends one thread."""
        self.results: SimpleQueue[_Outcome] = SimpleQueue()
        self.at_work: dict[int, tuple[int, Any, float]] = {}
        """Ticket, item and start time, by thread."""
        self.ended: list[int] = []
        """Threads that have ended. `Thread.is_alive` may report a live one as dead after a Ctrl-C inside it (3.11)."""
        self.is_closed = False


def _run(shared: _Shared, number: int) -> None:
    """A worker thread: takes the oldest task, until there is None."""
    computer = Computer(shared.work)
    while (task := shared.tasks.get()) is not None and not shared.is_closed:
        shared.at_work[number] = (task[0], task[1], time.monotonic())
        outcome = _outcome(computer, number, task)
        del shared.at_work[number]
        shared.results.put(outcome)
        del task, outcome  # otherwise this thread would hold on to their slot until the next task
    shared.ended.append(number)


def _outcome(computer: Computer, number: int, task: _Task) -> _Outcome:
    ticket, item, slot = task
    try:
        return ticket, number, slot, computer.compute(item, slot), item
    except BaseException as error:  # noqa: BLE001 - raised in the caller's next()
        return ticket, number, slot, error, item


class ThreadEngine:
    """Computes in threads of this process."""

    def __init__(self, work: Work, num_workers: int) -> None:
        self._shared = _Shared(work)
        self._pool = SlotPool(private_slot)
        self._done: dict[int, _Outcome] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._num_started = 0
        self._first_wanted = 0
        self._last_ticket = -1
        self.num_workers = 0
        weakref.finalize(self, _send_home, self._shared, self._threads).atexit = False
        _engines.add(self)
        abandon_in_forks(self)
        self.set_workers(num_workers)

    def submit(self, ticket: int, item: Any, worker: int | None = None) -> None:
        """Have an item computed by the next free thread."""
        self._last_ticket = ticket
        self._shared.tasks.put((ticket, item, self._pool.take()))

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        """The result of a ticket; raises what its computation raised."""
        was_ready = self.is_done(ticket)
        if not was_ready:
            wait = Wait(seconds, functools.partial(self._describe_wait, ticket))
            while ticket not in self._done:
                self._collect(wait.next_look())
        return self._finish(self._done.pop(ticket), was_ready)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """Whichever result is there first."""
        was_ready = bool(self._done) or (self._collect(0) and bool(self._done))
        if not was_ready:
            wait = Wait(seconds, self._describe_wait)
            while not self._done:
                self._collect(wait.next_look())
        ticket = next(iter(self._done))
        return ticket, self._finish(self._done.pop(ticket), was_ready)

    def is_done(self, ticket: int) -> bool:
        """Whether the result is there; collects results from the threads."""
        while ticket not in self._done:
            if not self._collect(0):
                return False
        return True

    def forget(self) -> None:
        """Throw away what was submitted; an unwanted result frees its slot."""
        self._first_wanted = self._last_ticket + 1
        for _, _, slot, *_ in self._done.values():
            self._pool.give_back(slot)
        self._done.clear()
        num_leaving = 0
        with contextlib.suppress(Empty):
            while True:
                task = self._shared.tasks.get_nowait()
                if task is None:
                    num_leaving += 1
                else:
                    self._pool.give_back(task[2])
        for _ in range(num_leaving):
            self._shared.tasks.put(None)
        while self._collect(0):
            pass

    def set_workers(self, num_workers: int) -> None:
        """Start threads, or end some after what has been submitted so far."""
        for _ in range(self.num_workers - num_workers):
            self._shared.tasks.put(None)
        for _ in range(num_workers - self.num_workers):
            number, self._num_started = self._num_started, self._num_started + 1
            name = f"penstock-loader-{number}"
            thread = threading.Thread(target=_run, args=(self._shared, number), name=name, daemon=True)
            self._threads[number] = thread
            thread.start()
        while self._shared.ended:
            self._threads.pop(self._shared.ended.pop(), None)
        self.num_workers = num_workers

    def num_started(self) -> int:
        """All of them: threads start at once."""
        return self.num_workers

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        return self._pool.num_slots, self._pool.num_held

    def close(self) -> None:
        """Stop the threads; one that is inside a user's function ends when that returns."""
        _send_home(self._shared, self._threads)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads.values():
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()

    def abandon(self) -> None:
        """In a forked child: the threads are the parent's, and a queue may have been in use during the fork."""
        self._shared = _Shared(self._shared.work)
        self._shared.is_closed = True
        self._threads.clear()

    def _collect(self, seconds: float) -> bool:
        """Collect one result from the threads, waiting at most this long; return whether there was one."""
        try:
            outcome = self._shared.results.get(seconds > 0, seconds)
        except Empty:
            self._check_open()
            return False
        if outcome[0] < self._first_wanted:
            self._pool.give_back(outcome[2])
        else:
            self._done[outcome[0]] = outcome
        return True

    def _finish(self, outcome: _Outcome, was_ready: bool) -> Result:
        _, number, slot, computed, item = outcome
        if isinstance(computed, BaseException):
            self._pool.give_back(slot)
            computed.add_note(f"in worker thread {number}, while computing {item}")
            raise computed
        batches = self._pool.hand_over(slot, computed.layout)
        self._pool.shrink()
        return Result(batches, computed.layout.num_bytes, was_ready, number, *computed[1:])

    def _describe_wait(self, ticket: int | None = None) -> str:
        """What the thread with this ticket is doing; without a ticket, or if no thread has it yet, what all are."""
        at_work = dict(self._shared.at_work)
        found = [number for number, (its, _, _) in at_work.items() if its == ticket] or list(at_work)
        return " ".join(_describe_thread(number, self._threads.get(number), *at_work[number][1:]) for number in found)

    def _check_open(self) -> None:
        if self._shared.is_closed:
            raise RuntimeError("The loader is closed.")
        if len(self._shared.ended) >= len(self._threads):
            raise RuntimeError("Every worker thread ended. This is a bug in Penstock; please report it.")


def _describe_thread(number: int, thread: threading.Thread | None, item: Any, since: float) -> str:
    frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
    where = "" if frame is None else f", now {_describe_place(frame)},"
    return describe_silence(f"worker thread {number}", None, f"computing {item}{where}", time.monotonic() - since)


def _describe_place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    if {"llvmlite", "numba"} & set(path.parts):
        return "compiling (Penstock's loops are compiled once, and kept)"
    return f"at {path}:{frame.f_lineno}"


def _send_home(shared: _Shared, threads: dict[int, threading.Thread]) -> None:
    shared.is_closed = True
    for _ in threads:
        shared.tasks.put(None)


_engines: weakref.WeakSet[ThreadEngine] = weakref.WeakSet()


@atexit.register  # a daemon thread that returns from C while the interpreter shuts down can crash it
def _close_at_exit() -> None:
    for engine in list(_engines):
        engine.close()

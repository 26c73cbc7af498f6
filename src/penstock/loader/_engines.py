"""The engines of this process, and which engine to make.

`InlineEngine` has no workers, and all others must agree with it. `ThreadEngine` is for work that spends its time
outside the GIL, as gathers do. `ElasticEngine` computes in the caller's thread until workers are wanted. Processes are
in `_processes`.

Threads are daemons that hold no reference to the engine, only to what they share with it, so a forgotten loader is
garbage collected and takes its threads with it.
"""

import atexit
import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from penstock.loader._engine import Computed, Engine, ItemRunner, Result, Wait, Work, WorkerKind
from penstock.loader._memory import AnySlot, SlotPool, private_slot
from penstock.loader._processes import ProcessEngine
from penstock.workers import StartMethod, abandon_in_forks, describe_silence

_CLOSE_SECONDS = 5.0


def make_engine(
    work: Work, *, kind: WorkerKind, num_workers: int, start_method: StartMethod, is_assigned: bool = False
) -> Engine:
    """An engine with its workers started; with `num_workers=0` it computes inline until it is given some.

    In an assigned engine, each item says which worker process computes it: for work that keeps something from
    one item to the next, so that no other worker can take over if that one dies.
    """
    if kind != "inline" and not num_workers:

        def make_workers(count: int) -> Engine:
            return make_engine(work, kind=kind, num_workers=count, start_method=start_method)

        return ElasticEngine(InlineEngine(work), make_workers)
    if kind == "process":
        return ProcessEngine(work, num_workers, start_method, is_assigned=is_assigned)
    if is_assigned:
        raise ValueError("Items can be assigned only to processes.")
    return InlineEngine(work) if kind == "inline" else ThreadEngine(work, num_workers)


class InlineEngine:
    """No workers: computes an item in the caller's thread when its result is requested."""

    num_workers = 0

    def __init__(self, work: Work) -> None:
        self._runner = ItemRunner(work)
        self._items: dict[int, Any] = {}
        self._pool = SlotPool(private_slot)

    def submit(self, ticket: int, item: Any, worker: int | None = None) -> None:
        self._items[ticket] = item

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        """Compute the item now, however long it takes."""
        item = self._items.pop(ticket)
        slot = self._pool.take()
        try:
            computed = self._runner.compute(item, slot)
        except BaseException as error:
            self._pool.give_back(slot)
            error.add_note(f"while computing {item}")
            raise
        batches = self._pool.hand_over(slot, computed.layout)
        self._pool.shrink()
        return Result(batches, computed.layout.num_bytes, False, 0, *computed[1:])

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """Compute the oldest item."""
        ticket = min(self._items)
        return ticket, self.wait(ticket)

    def is_done(self, ticket: int) -> bool:
        """Never: nothing is computed ahead."""
        return False

    def forget(self) -> None:
        self._items.clear()

    def set_workers(self, num_workers: int) -> None:
        """There are none."""

    def num_started(self) -> int:
        """There are none."""
        return 0

    def num_buffers(self) -> tuple[int, int]:
        return self._pool.num_slots, self._pool.num_held

    def close(self) -> None:
        """Nothing runs."""
        self._items.clear()


class ElasticEngine:
    """Computes in the caller's thread until workers are wanted.

    Args:
        inline: Computes what is submitted until then.
        make_workers: Starts an engine with this many workers.
    """

    def __init__(self, inline: Engine, make_workers: Callable[[int], Engine]) -> None:
        self._inline, self._make_workers = inline, make_workers
        self._workers: Engine | None = None
        self._own: set[int] = set()
        """Tickets that are computed in the caller's thread."""

    @property
    def num_workers(self) -> int:
        return 0 if self._workers is None else self._workers.num_workers

    def submit(self, ticket: int, item: Any, worker: int | None = None) -> None:
        if self._workers is None:
            self._own.add(ticket)
            self._inline.submit(ticket, item)
        else:
            self._workers.submit(ticket, item, worker)

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        return self._engine_of(ticket).wait(ticket, seconds)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """The first result; items submitted before there were workers come first."""
        if self._own or self._workers is None:
            ticket, result = self._inline.wait_any(seconds)
            self._own.discard(ticket)
            return ticket, result
        return self._workers.wait_any(seconds)

    def is_done(self, ticket: int) -> bool:
        return ticket not in self._own and self._workers is not None and self._workers.is_done(ticket)

    def forget(self) -> None:
        self._own.clear()
        for engine in self._engines():
            engine.forget()

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on; once there are some, at least one stays."""
        if self._workers is not None:
            self._workers.set_workers(max(1, num_workers))
        elif num_workers:
            self._workers = self._make_workers(num_workers)

    def num_started(self) -> int:
        return 0 if self._workers is None else self._workers.num_started()

    def num_buffers(self) -> tuple[int, int]:
        counts = [engine.num_buffers() for engine in self._engines()]
        return sum(count for count, _ in counts), sum(used for _, used in counts)

    def close(self) -> None:
        for engine in self._engines():
            engine.close()

    def _engine_of(self, ticket: int) -> Engine:
        if ticket in self._own:
            self._own.discard(ticket)
            return self._inline
        assert self._workers is not None
        return self._workers

    def _engines(self) -> list[Engine]:
        return [self._inline] if self._workers is None else [self._inline, self._workers]


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
    runner = ItemRunner(shared.work)
    while (task := shared.tasks.get()) is not None and not shared.is_closed:
        shared.at_work[number] = (task[0], task[1], time.monotonic())
        outcome = _outcome(runner, number, task)
        del shared.at_work[number]
        shared.results.put(outcome)
        del task, outcome  # otherwise this thread would hold on to their slot until the next task
    shared.ended.append(number)


def _outcome(runner: ItemRunner, number: int, task: _Task) -> _Outcome:
    ticket, item, slot = task
    try:
        return ticket, number, slot, runner.compute(item, slot), item
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
        while ticket not in self._done and self._collect(0):
            pass
        was_ready = ticket in self._done
        if not was_ready:
            wait = Wait(seconds, functools.partial(self._describe_wait, ticket))
            while ticket not in self._done:
                self._collect(wait.next_look())
        return self._finish(self._done.pop(ticket), was_ready)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
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
    where = "" if frame is None else f", now at {frame.f_code.co_filename}:{frame.f_lineno},"
    return describe_silence(f"worker thread {number}", None, f"computing {item}{where}", time.monotonic() - since)


def _send_home(shared: _Shared, threads: dict[int, threading.Thread]) -> None:
    shared.is_closed = True
    for _ in threads:
        shared.tasks.put(None)


_engines: weakref.WeakSet[ThreadEngine] = weakref.WeakSet()


@atexit.register  # a daemon thread that returns from C while the interpreter shuts down can crash it
def _close_at_exit() -> None:
    for engine in list(_engines):
        engine.close()

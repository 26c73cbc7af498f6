"""Worker processes: for Python-heavy work, which threads would do one at a time.

Items go out over a socket, batches come back in shared memory that the worker wrote them into: nothing
is pickled but a few numbers, nothing is copied. There is no thread in the trainer: messages are read
when a batch is asked for, and a worker's death is an end of file there, seen at once. Its items are
given to other workers: they are pure functions, so computing one twice is computing it once.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import WorkerDied
from penstock.loader import _worker
from penstock.loader._compute import Computed
from penstock.loader._engine import Result, StartMethod
from penstock.loader._memory import Slot, SlotPool
from penstock.loader._starting import ForkServerStarter, ForkStarter, SpawnStarter, Started, Starter
from penstock.loader._work import Work

_LOOK_AROUND_SECONDS = 1.0
_MAX_DEATHS = 3
"""Deaths over one item until it is taken for the cause."""


class RemoteTraceback(Exception):
    """Where an error happened in a worker process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


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
    is_leaving: bool = False


class ProcessEngine:
    """Computes in processes."""

    def __init__(self, work: Work, num_workers: int, start_method: StartMethod) -> None:
        _check_not_importing_main()
        self._greeting = None if start_method == "fork" else _pack_work(work)
        self._life_line_reader, self._life_line = os.pipe()
        self._starter: Starter = _make_starter(self._life_line_reader, work, start_method)
        self._end = weakref.finalize(self, _end, self._life_line, self._life_line_reader, self._starter)
        self._workers: list[_Worker] = []
        self._next_number = 0
        self._waiting: deque[tuple[int, Any]] = deque()
        self._done: dict[int, tuple[_Worker, Slot | None, Computed | BaseException]] = {}
        self._deaths: dict[int, int] = {}
        self._last_ticket, self._first_wanted = -1, 0
        self._is_closed = False
        self._ears: tuple[dict[int, _Worker], select.poll] | None = None
        _engines.add(self)
        self.set_workers(num_workers)

    def submit(self, ticket: int, item: Any) -> None:
        """Give an item to the worker that has the least to do."""
        self._last_ticket = ticket
        self._waiting.append((ticket, item))
        self._dispatch()

    def wait(self, ticket: int) -> Result:
        """The result of a ticket; raises what its computation raised."""
        while ticket not in self._done:
            self._read(_LOOK_AROUND_SECONDS)
        return self._finish(ticket)

    def wait_any(self) -> tuple[int, Result]:
        """Whichever result is there first."""
        while not self._done:
            self._read(_LOOK_AROUND_SECONDS)
        ticket = next(iter(self._done))
        return ticket, self._finish(ticket)

    def is_done(self, ticket: int) -> bool:
        """Whether `wait` would return at once."""
        if ticket not in self._done:
            self._read(0)
        return ticket in self._done

    def forget(self) -> None:
        """Throw away what was submitted; an answer that nobody wants frees its slot when it comes."""
        self._first_wanted = self._last_ticket + 1
        self._waiting.clear()
        self._deaths.clear()
        for worker, slot, _ in self._done.values():
            if slot is not None:
                worker.pool.give_back(slot)
        self._done.clear()
        while self._read(0):
            pass

    def set_workers(self, num_workers: int) -> None:
        """Start workers, or let some leave after what they are doing."""
        self.num_workers = num_workers
        for worker in self._staying[num_workers:]:
            worker.is_leaving = True
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

    @property
    def _staying(self) -> list[_Worker]:
        return [worker for worker in self._workers if not worker.is_leaving]

    def _let_go(self) -> None:
        self._is_closed = True
        for worker in self._workers:
            worker.started.channel.close()
        self._workers.clear()

    def _start(self) -> None:
        started = self._starter.start(self._next_number)
        self._workers.append(_Worker(started))
        self._next_number += 1
        if self._greeting is not None:
            _send(started, self._greeting)

    def _dispatch(self) -> None:
        """Have as many workers as wanted, and give them what is waiting while they take it."""
        if self._is_closed:
            return
        for _ in range(self.num_workers - len(self._staying)):
            self._start()
        while self._waiting:
            worker = min(self._staying, key=lambda worker: len(worker.outstanding))
            if not self._give(worker, *self._waiting[0]):
                return
            self._waiting.popleft()

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
        workers, poller = self._listened_to()
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

    def _listened_to(self) -> tuple[dict[int, _Worker], select.poll]:
        """(workers by descriptor, what waits for any of them), made anew when workers came or went."""
        if self._ears is None or list(self._ears[0].values()) != self._workers:
            workers = {worker.started.channel.fileno(): worker for worker in self._workers}
            poller = select.poll()  # `select` refuses descriptors from 1,024 on
            for descriptor in workers:
                poller.register(descriptor, select.POLLIN)
            self._ears = workers, poller
        return self._ears

    def _hear(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        kind, *fields = message
        if kind == "broken":
            raise _rebuild(*fields, note="while a worker process was being set up")
        ticket, *rest = fields
        item, slot = worker.outstanding.pop(ticket)
        if ticket < self._first_wanted:
            worker.pool.give_back(slot)
        else:
            outcome = rest[0] if kind == "done" else _rebuild(*rest, note=_where(worker.started.number, item))
            self._done[ticket] = (worker, slot, outcome)
            self._deaths.pop(ticket, None)
        self._release_if_idle(worker)

    def _release_if_idle(self, worker: _Worker) -> None:
        if worker.is_leaving and not worker.outstanding:
            worker.started.channel.close()  # the worker sees the end of file and exits
            self._workers.remove(worker)

    def _finish(self, ticket: int) -> Result:
        worker, slot, outcome = self._done.pop(ticket)
        if isinstance(outcome, BaseException):
            if slot is not None:
                worker.pool.give_back(slot)
            raise outcome
        assert slot is not None
        batch = worker.pool.hand_over(slot, outcome.layout)
        dropped = {slot.number for slot in worker.pool.shrink()}
        worker.dropped += dropped & worker.known
        worker.known -= dropped
        return Result(batch, worker.started.number, outcome.produce_seconds, outcome.cpu_seconds, outcome.page_faults)

    def _bury(self, worker: _Worker) -> None:
        """A worker died: what it had waits again, first things first, for the one that is started instead."""
        self._workers.remove(worker)
        code = self._starter.exit_code(worker.started)
        worker.started.channel.close()
        lost = [(ticket, item) for ticket, (item, _) in worker.outstanding.items()]
        if lost:
            ticket, item = lost[0]
            self._deaths[ticket] = self._deaths.get(ticket, 0) + 1
            if self._deaths[ticket] > _MAX_DEATHS:
                self._done[ticket] = (worker, None, WorkerDied(_diagnose(worker.started, code, item)))
        again = [(ticket, item) for ticket, item in lost if ticket >= self._first_wanted and ticket not in self._done]
        self._waiting.extendleft(reversed(again))


def _make_starter(life_line: int, work: Work, method: StartMethod) -> Starter:
    if method == "fork":
        return ForkStarter(life_line, work)
    return SpawnStarter(life_line) if method == "spawn" else ForkServerStarter(life_line)


def _where(number: int, item: Any) -> str:
    return f"in worker process {number}, while computing {item}"


def _send(started: Started, message: tuple[Any, ...], descriptors: tuple[int, ...] = ()) -> bool:
    """Send to a worker; False when its inbox is full. If it is dead, its end of file will say so."""
    try:
        started.channel.send(message, descriptors, is_patient=False)
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def _check_not_importing_main() -> None:
    if _worker.is_importing_main:
        raise RuntimeError(
            "This script starts worker processes while a worker imports it, because a mapped function lives in it. "
            "Put the training loop under `if __name__ == '__main__':`, or the function into a module of its own."
        )


def _pack_work(work: Work) -> tuple[Any, ...]:
    try:
        pickled = pickle.dumps(work)
    except Exception as error:
        raise TypeError(
            f"The plan cannot be sent to worker processes: {error}. Put mapped functions at the top of a module, "
            "or use workers='thread' with @penstock.pure, or start_method='fork'."
        ) from error
    return "work", {"sys_path": list(sys.path)} | (_where_main_is() if b"__main__" in pickled else {}), pickled


def _where_main_is() -> dict[str, str]:
    """How a worker imports the user's script, in the words of `multiprocessing.spawn.prepare`."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if path is None:
        raise TypeError(
            "A mapped function lives in a notebook or an interactive session, where worker processes cannot find it. "
            "Put it into a module, or use workers='thread' with @penstock.pure, or start_method='fork'."
        )
    return {"init_main_from_path": os.path.abspath(path)}


def _rebuild(pickled: bytes | None, message: str, text: str, *, note: str) -> BaseException:
    """The worker's error as it was, with its traceback as the cause; if it cannot travel, one of its type."""
    error: BaseException
    try:
        found = RuntimeError if pickled is None else pickle.loads(pickled)  # noqa: S301 - from a worker of this process
        error = found if isinstance(found, BaseException) else found.__new__(found, message)
    except Exception:  # noqa: BLE001 - a class that only the worker can import, or that only it can make
        error = RuntimeError(text.strip().splitlines()[-1])
    error.__cause__ = RemoteTraceback(text)
    error.add_note(note)
    return error


def _diagnose(started: Started, code: int | None, item: Any) -> str:
    if code is not None and code < 0:
        how = f"was killed by {_signal_name(-code)}"
    else:
        how = "ended" if code is None else f"exited with code {code}"
    pid = "" if started.pid is None else f" (pid {started.pid})"
    guess = " (out of memory?)" if code == -signal.SIGKILL else ""
    return (
        f"Worker {started.number}{pid} {how} while computing {item}{guess}, as did the {_MAX_DEATHS} before it. "
        f"System memory is {_memory_used():.0f} % used. Lower num_workers or prefetch, or see what this batch needs."
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _memory_used() -> float:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return 100 * (1 - available / total)


def _end(life_line: int, reader: int, starter: Starter) -> None:
    os.close(life_line)
    os.close(reader)
    starter.close()


_engines: weakref.WeakSet[ProcessEngine] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    for engine in list(_engines):
        engine.abandon()


os.register_at_fork(after_in_child=_abandon_after_fork)

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
    pool: SlotPool = field(default_factory=SlotPool)
    outstanding: dict[int, tuple[Any, Slot]] = field(default_factory=dict)
    is_leaving: bool = False


class ProcessEngine:
    """Computes in processes."""

    def __init__(self, work: Work, num_workers: int, start_method: StartMethod) -> None:
        self._greeting = None if start_method == "fork" else _pack_work(work)
        self._life_line_reader, self._life_line = os.pipe()
        self._starter: Starter = self._make_starter(work, start_method)
        self._workers: list[_Worker] = []
        self._next_number = 0
        self._waiting: deque[tuple[int, Any]] = deque()
        self._done: dict[int, tuple[_Worker, Slot, Computed | BaseException, Any]] = {}
        self._deaths: dict[int, int] = {}
        self._is_closed = False
        self.num_workers = 0
        self._end = weakref.finalize(self, _end, self._life_line, self._life_line_reader, self._starter)
        _engines.add(self)
        self.set_workers(num_workers)

    def submit(self, ticket: int, item: Any) -> None:
        """Give an item to the worker that has the least to do."""
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

    def set_workers(self, num_workers: int) -> None:
        """Start workers, or let some leave after what they are doing."""
        self.num_workers = num_workers
        staying = [worker for worker in self._workers if not worker.is_leaving]
        for worker in staying[num_workers:]:
            worker.is_leaving = True
            self._release_if_idle(worker)
        for _ in range(num_workers - len(staying)):
            self._start()
        self._dispatch()

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        pools = [worker.pool for worker in self._workers]
        return sum(pool.num_slots for pool in pools), sum(pool.num_held for pool in pools)

    def close(self) -> None:
        """Cut the life-line: every process ends at once, whatever it is doing."""
        self._is_closed = True
        for worker in self._workers:
            worker.started.channel.close()
        self._workers.clear()
        self._end()

    def abandon(self) -> None:
        """In a forked child: let go of what belongs to the trainer, without ending it."""
        self._is_closed = True
        self._end.detach()
        os.close(self._life_line)
        for worker in self._workers:
            worker.started.channel.close()
        self._workers.clear()

    def _make_starter(self, work: Work, method: StartMethod) -> Starter:
        if method == "fork":
            return ForkStarter(self._life_line_reader, work)
        return (SpawnStarter if method == "spawn" else ForkServerStarter)(self._life_line_reader)

    def _start(self) -> None:
        started = self._starter.start(self._next_number)
        self._next_number += 1
        if self._greeting is not None:
            started.channel.send(self._greeting)
        self._workers.append(_Worker(started))

    def _dispatch(self) -> None:
        while self._waiting:
            ready = [worker for worker in self._workers if not worker.is_leaving]
            if not ready:
                return
            worker = min(ready, key=lambda worker: len(worker.outstanding))
            ticket, item = self._waiting.popleft()
            slot, is_new = worker.pool.take()
            worker.outstanding[ticket] = (item, slot)
            try:
                worker.started.channel.send(("run", ticket, item, slot.number), (slot.descriptor,) * is_new)
            except (ConnectionError, OSError):
                self._bury(worker)

    def _read(self, seconds: float) -> None:
        """Read what workers say, waiting at most so long for the first word."""
        if self._is_closed:
            raise RuntimeError("The loader is closed.")
        channels = {worker.started.channel.fileno(): worker for worker in self._workers}
        for descriptor in select.select(list(channels), [], [], seconds)[0]:
            worker = channels[descriptor]
            try:
                message, _ = worker.started.channel.receive()
            except (EOFError, ConnectionError):
                self._bury(worker)
            else:
                self._hear(worker, message)

    def _hear(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        kind, *fields = message
        if kind == "broken":
            raise _rebuild((fields[0], fields[1]), "while a worker process was being set up")
        ticket, *rest = fields
        item, slot = worker.outstanding.pop(ticket)
        self._deaths.pop(ticket, None)
        note = f"in worker process {worker.started.number}, while computing {item}"
        outcome = rest[0] if kind == "done" else _rebuild((rest[0], rest[1]), note)
        self._done[ticket] = (worker, slot, outcome, item)
        self._release_if_idle(worker)

    def _release_if_idle(self, worker: _Worker) -> None:
        if worker.is_leaving and not worker.outstanding:
            worker.started.channel.close()  # the worker sees the end of file and exits
            self._workers.remove(worker)

    def _finish(self, ticket: int) -> Result:
        worker, slot, outcome, _ = self._done.pop(ticket)
        if isinstance(outcome, BaseException):
            worker.pool.give_back(slot)
            raise outcome
        batch = worker.pool.hand_over(slot, outcome.layout)
        self._shrink(worker)
        return Result(batch, worker.started.number, outcome.produce_seconds, outcome.cpu_seconds, outcome.page_faults)

    def _shrink(self, worker: _Worker) -> None:
        dropped = worker.pool.shrink(len(worker.outstanding) + 2)
        for slot in dropped if worker in self._workers else []:
            try:
                worker.started.channel.send(("drop", slot.number))
            except (ConnectionError, OSError):
                return

    def _bury(self, worker: _Worker) -> None:
        """A worker died: start another and give it what the dead one had, first things first."""
        self._workers.remove(worker)
        code = self._starter.exit_code(worker.started)
        worker.started.channel.close()
        lost = [(ticket, item) for ticket, (item, _) in worker.outstanding.items()]
        if lost:
            ticket, item = lost[0]
            self._deaths[ticket] = self._deaths.get(ticket, 0) + 1
            if self._deaths[ticket] > _MAX_DEATHS:
                raise WorkerDied(_diagnose(worker.started.number, code, item))
        self._waiting.extendleft(reversed(lost))
        if not worker.is_leaving:
            self._start()
        self._dispatch()


def _pack_work(work: Work) -> tuple[Any, ...]:
    try:
        pickled = pickle.dumps(work)
    except Exception as error:
        raise TypeError(
            f"The plan cannot be sent to worker processes: {error}. Put mapped functions at the top of a module, "
            "or use workers='thread' with @penstock.pure, or multiprocessing_context='fork'."
        ) from error
    main = sys.modules.get("__main__")
    lives_in_main = b"__main__" in pickled
    main_path = getattr(main, "__file__", None) if lives_in_main else None
    return "work", list(sys.path), main_path, pickled


def _rebuild(described: tuple[bytes | None, str], note: str) -> BaseException:
    """The worker's error as it was, with its traceback as the cause; a stand-in when it cannot travel."""
    pickled, text = described
    if pickled is not None:
        error = pickle.loads(pickled)  # noqa: S301 - from a worker that this process started
    else:
        error = RuntimeError(text.strip().splitlines()[-1])
    error.__cause__ = RemoteTraceback(text)
    error.add_note(note)
    return error  # type: ignore[no-any-return]


def _diagnose(number: int, code: int | None, item: Any) -> str:
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = "ended" if code is None else f"exited with code {code}"
    guess = " (out of memory?)" if code == -signal.SIGKILL else ""
    return (
        f"Worker {number} {how} while computing {item}{guess}, as did the {_MAX_DEATHS} before it. "
        f"System memory is {_memory_used():.0f} % used. Lower num_workers or prefetch, or see what this batch needs."
    )


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

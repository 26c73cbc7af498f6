"""Worker processes, for Python-heavy work, which threads would do one at a time.

Items go out over a socket, batches come back in shared memory that the worker wrote them to: only a few
numbers are pickled, and nothing is copied. There is no thread in the trainer: messages are read when a
batch is requested, and a worker's death shows up there at once, as an end of file. Its items go to other
workers: they are pure functions, so it does no harm to compute one twice. Items assigned to a worker are
not: they need what that worker kept, so they fail with it.
"""

import functools
from collections import deque
from collections.abc import Collection
from typing import Any

from penstock.errors import WorkerDied
from penstock.loader._engine import Computed, Result, Wait, Work
from penstock.loader._memory import Slot
from penstock.loader._plan_work import warm_up_for
from penstock.loader._worker_process import ComputeItems, ItemWorker
from penstock.plan import Plan
from penstock.workers import Crew, ServerLease, StartMethod, describe_death, is_crash, lease_early, may_lack_memory

_MAX_DEATHS = 3
"""After this many deaths on one item, it is taken to be the cause."""

_OTHERWISE = (
    "do without worker processes: num_workers=0, or for a plan workers='thread' with functions marked @penstock.pure."
)
"""The alternative for work that cannot be sent to workers."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""As in torch's workers, whatever the trainer's setting."""

_Waiting = tuple[int, Any, int | None]
"""(ticket, item, worker it is assigned to)"""


class ProcessEngine:
    """Computes in processes."""

    def __init__(self, work: Work, num_workers: int, start_method: StartMethod, *, is_assigned: bool = False) -> None:
        program, warm_up = ComputeItems(work), work.warm_up
        self._crew = Crew(program, start_method, environment=_ENVIRONMENT, warm_up=warm_up, otherwise=_OTHERWISE)
        self._is_assigned = is_assigned
        self._workers: dict[int, ItemWorker] = {}
        """Workers that are alive, by number, oldest first."""
        self._active: list[ItemWorker] = []
        """Workers that get new items."""
        self._deaths_of_workers: dict[int, str] = {}
        """How workers died that have items assigned to them."""
        self._waiting: deque[_Waiting] = deque()
        self._done: dict[int, tuple[ItemWorker | None, Slot | None, Computed | BaseException]] = {}
        self._deaths: dict[int, int] = {}
        self._last_ticket, self._first_wanted = -1, 0
        self._num_finished = 0
        self.num_workers = num_workers
        self._dispatch()

    def submit(self, ticket: int, item: Any, worker: int | None = None) -> None:
        """Give an item to the worker with the least to do, or to the one it is assigned to."""
        self._last_ticket = ticket
        self._waiting.append((ticket, item, worker))
        self._dispatch()

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        was_ready = ticket in self._done or (self._read(0) and ticket in self._done)
        if not was_ready:
            wait = Wait(seconds, functools.partial(self._describe_wait, ticket))
            while ticket not in self._done:
                self._read(wait.next_look())
        return self._finish(ticket, was_ready)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        was_ready = bool(self._done) or (self._read(0) and bool(self._done))
        if not was_ready:
            wait = Wait(seconds, self._describe_wait)
            while not self._done:
                self._read(wait.next_look())
        ticket = next(iter(self._done))
        return ticket, self._finish(ticket, was_ready)

    def take_finished(self) -> list[tuple[int, Result | BaseException]]:
        """What is finished; nothing is waited for."""
        self._read(0)
        finished: list[tuple[int, Result | BaseException]] = []
        for ticket in list(self._done):
            try:
                finished.append((ticket, self._finish(ticket, was_ready=True)))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                finished.append((ticket, error))
        return finished

    def descriptors(self) -> Collection[int]:
        """For an event loop: when to `take_finished`. Another object whenever the workers have changed."""
        return self._crew.descriptors()

    def is_done(self, ticket: int) -> bool:
        """Whether the result is there; reads what workers have sent."""
        return ticket in self._done or (self._read(0) and ticket in self._done)

    def forget(self) -> None:
        """Throw away what was submitted; an unwanted answer frees its slot when it arrives."""
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
        """Have this many workers from the next time an item is submitted or waited for; any thread may call this."""
        if self._is_assigned:
            raise ValueError("Each item belongs to one of these workers; their number cannot change while they run.")
        self.num_workers = num_workers

    def num_started(self) -> int:
        """How many of the wanted workers are computing."""
        return sum(worker.is_started for worker in self._active)

    def num_buffers(self) -> tuple[int, int]:
        pools = [worker.pool for worker in self._workers.values()]
        return sum(pool.num_slots for pool in pools), sum(pool.num_held for pool in pools)

    def close(self) -> None:
        """End every process at once, whatever it is doing."""
        self._crew.close()
        self._workers.clear()
        self._active.clear()

    def _dispatch(self) -> None:
        """Start or release workers, and give them waiting items for as long as they take them."""
        if self._crew.is_closed:
            return
        if len(self._active) != self.num_workers:
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
        """Start missing workers, or let some leave once they have finished what they are doing."""
        for worker in self._active[self.num_workers :]:
            worker.is_leaving = True
            self._active.remove(worker)
            self._release_if_idle(worker)
        while len(self._active) < self.num_workers and not (self._is_assigned and self._deaths_of_workers):
            self._start()
        for worker in self._workers.values():
            worker.pool.share_files(len(self._workers))

    def _start(self) -> None:
        worker = ItemWorker(self._crew.start(), self.num_workers)
        self._workers[worker.number] = worker
        self._active.append(worker)

    def _worker_for(self, assigned: int | None) -> ItemWorker | None:
        """The worker to give an item to; None if it is dead. One that is still starting would delay it."""
        if assigned is not None:
            return self._workers.get(assigned)
        started = [worker for worker in self._active if worker.is_started]
        return min(started or self._active, key=lambda worker: len(worker.outstanding))

    def _read(self, seconds: float) -> bool:
        """Read what workers send, waiting at most this long for the first message; return whether there was one."""
        self._check_open()
        try:
            ready = self._crew.wait(seconds)
            for process in ready:
                self._receive(self._workers[process.number])
            self._dispatch()
        except (OSError, ValueError, KeyError):  # also raised if another thread has just closed the crew
            self._check_open()
            raise
        return bool(ready)

    def _describe_wait(self, ticket: int | None = None) -> str:
        """What the worker with this ticket is doing; without a ticket, or if no worker has it yet, what all are."""
        workers = [worker for worker in self._workers.values() if worker.outstanding]
        found = [worker for worker in workers if ticket in worker.outstanding] or workers
        return " ".join(worker.describe(self._crew.find_pid(worker.process)) for worker in found)

    def _check_open(self) -> None:
        if self._crew.is_closed:
            raise RuntimeError("The loader is closed.")

    def _receive(self, worker: ItemWorker) -> None:
        try:
            answer = worker.receive()
        except EOFError:
            self._replace(worker)
            return
        if answer is None:
            return
        ticket, slot, outcome = answer
        if ticket < self._first_wanted:
            worker.pool.give_back(slot)
        else:
            self._done[ticket] = (worker, slot, outcome)
            self._deaths.pop(ticket, None)
        if worker.is_leaving:
            self._release_if_idle(worker)

    def _release_if_idle(self, worker: ItemWorker) -> None:
        if worker.is_leaving and not worker.outstanding:
            self._crew.release(worker.process)
            del self._workers[worker.number]

    def _finish(self, ticket: int, was_ready: bool) -> Result:
        worker, slot, outcome = self._done.pop(ticket)
        if isinstance(outcome, BaseException):
            if worker is not None and slot is not None:
                worker.pool.give_back(slot)
            raise outcome
        assert worker is not None
        assert slot is not None
        batches = worker.pool.hand_over(slot, outcome.layout)
        self._drop_spare_slots(worker)
        return Result(batches, outcome.layout.num_bytes, was_ready, worker.number, *outcome[1:])

    def _drop_spare_slots(self, worker: ItemWorker) -> None:
        """Drop superfluous slots of a worker, and of another in turn; if there are any, batches have died: of all."""
        self._num_finished += 1
        in_turn = self._active[self._num_finished % len(self._active)] if self._active else worker
        if worker.drop_spare_slots() or in_turn.drop_spare_slots():
            for each in self._workers.values():
                each.drop_spare_slots()

    def _replace(self, worker: ItemWorker) -> None:
        """After a worker died: put its items back in the queue, oldest first, for its replacement."""
        code = self._crew.remove_dead(worker.process)
        del self._workers[worker.number]
        if not worker.is_leaving:
            self._active.remove(worker)
        lost = [(ticket, item) for ticket, (item, _) in worker.outstanding.items() if ticket >= self._first_wanted]
        if self._is_assigned:
            item = next(iter(worker.outstanding.values()), ("nothing",))[0]
            death = _explain_death(worker, code, item)
            self._deaths_of_workers[worker.number] = death
            self._done.update({ticket: (None, None, WorkerDied(death)) for ticket, _ in lost})
            return
        if lost:
            ticket, item = lost[0]
            self._deaths[ticket] = self._deaths.get(ticket, 0) + 1
            if self._deaths[ticket] > _MAX_DEATHS:
                self._done[ticket] = (None, None, WorkerDied(_explain_death(worker, code, item, _MAX_DEATHS)))
                lost = lost[1:]
        self._waiting.extendleft((ticket, item, None) for ticket, item in reversed(lost))


def start_early(plan: Plan) -> ServerLease | None:
    """Start the fork server for the workers of a plan's next engine; it runs as long as the lease is kept."""
    return lease_early(_ENVIRONMENT, warm_up_for(plan))


def _explain_death(worker: ItemWorker, code: int | None, item: Any, num_before: int = 0) -> str:
    process = worker.process
    death = describe_death(f"Worker {process.number}", process.pid, code, f"computing {item}", num_before=num_before)
    return f"{death}{_advise(code)}"


def _advise(code: int | None) -> str:
    """The next step after a worker that ended so."""
    if is_crash(code):
        return "Compiled code crashed: run it again with PYTHONFAULTHANDLER=1 to see where."
    if may_lack_memory(code):
        return "Lower num_workers or prefetch, or see what this batch needs."
    return "See what computes this batch, and what it printed to stderr."

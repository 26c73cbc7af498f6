"""One `for` loop over a torch dataset with worker processes.

The order of everything that can be seen is torch's: batch k goes to worker k mod n, an ended worker of an
iterable dataset is passed over, `prefetch_factor` batches per worker are asked for before the first is
waited for, and one more whenever one is handed over. Only the way of the batches is another.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from typing import Any

from penstock.errors import WorkerDied
from penstock.loader import Engine, LoaderStatistics, Result, count_computed
from penstock.pytorch._indices import Indices
from penstock.pytorch._torch_loop import Loop, Mark, Progress
from penstock.pytorch._torch_work import TorchItem, TorchTask
from penstock.pytorch._transport import unpack
from penstock.pytorch._warnings import warn_repeating_workers


class WorkerLoop(Loop):
    """Has batches computed by worker processes. Several threads may take from it: each batch goes to one of them."""

    def __init__(
        self,
        loader: Any,
        task: TorchTask,
        indices: Indices,
        progress: Progress,
        statistics: LoaderStatistics,
        engine: Engine,
    ) -> None:
        self._engine, self._pid = engine, os.getpid()
        self._lock = threading.RLock()  # a signal handler may take a batch while its own thread waits for one
        self._is_persistent, self._in_order = loader.persistent_workers, loader.in_order
        self._timeout = loader.timeout
        is_watched = task.is_iterable and loader.worker_init_fn is None
        self._name_to_watch = type(task.dataset).__name__ if is_watched else None
        self._next_ticket = 0
        self._epoch = -1
        self._death: str | None = None
        """How a worker died: no batch of this loop comes after that, for those of the dead one would be missing."""
        self._first_batches: dict[Any, int] = {}
        self._max_tasks = loader.prefetch_factor * loader.num_workers
        self.restart(loader, task, indices, progress, statistics)

    def restart(
        self, loader: Any, task: TorchTask, indices: Indices, progress: Progress, statistics: LoaderStatistics
    ) -> None:
        """Begin an epoch, with the same workers."""
        with self._lock:
            super().__init__(loader, task, progress, statistics)
            self._engine.forget()
            self._indices = indices
            self._epoch += 1
            self._tasks: deque[tuple[int, TorchItem, Any]] = deque()
            self._was_cut_short = False
            self._num_tasks = [0] * progress.num_workers
            self._num_put = progress.position
            self._turn, self._ended = progress.next_worker, progress.ended
            self._starts = list(progress.worker_states)
            for _ in range(self._max_tasks):
                self._put()

    @property
    def can_restart(self) -> bool:
        """Whether all workers are there for another epoch, and belong to this process."""
        return self._death is None and os.getpid() == self._pid

    def __next__(self) -> Any:
        self._check_process()  # before the lock, which another thread may have held when this process was forked
        with self._lock:
            return super().__next__()

    def next(self) -> tuple[Mark, Any] | None:
        """Wait for the next batch, in order or not."""
        self._check_process()
        if self._death is not None:
            raise WorkerDied(self._death)
        if self._was_cut_short:
            raise RuntimeError("The loader was closed. A new `for` loop starts it again.")
        begin = time.perf_counter()
        while self._tasks:
            item, sampler_state, result = self._receive()
            self._num_tasks[item.worker] -= 1
            if "end" in result.batch:
                self._end(item.worker)
                continue
            self._put()
            waited = time.perf_counter()
            if "error" in result.batch:
                self._advance(self._mark(item, sampler_state, result))
                raise _rebuild(result.batch["error"], item)
            batch = unpack(result.batch)
            self._watch(item.worker, result)
            self._count_result(result, begin, waited)
            return self._mark(item, sampler_state, result), batch
        if not self._is_persistent:
            self.close()
        return None

    def is_ready(self) -> bool:
        """Whether an answer is there: a batch, or that a worker has ended, of which there are few."""
        if self._death is not None or not self._tasks:  # it says so at once
            return True
        candidates = itertools.islice(self._tasks, 1 if self._in_order else None)
        return any(self._engine.is_done(ticket) for ticket, *_ in candidates)

    def close(self) -> None:
        """Stop the workers."""
        self._was_cut_short = self._was_cut_short or bool(self._tasks)
        self._tasks.clear()
        if os.getpid() == self._pid:
            self._engine.close()

    def __del__(self) -> None:
        if hasattr(self, "_tasks"):
            self.close()

    @property
    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        return self._engine.num_buffers()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("This loop was begun before a fork; its workers belong to the parent.")

    def _put(self) -> None:
        """Give the next index to the worker whose turn it is, if there is one."""
        try:
            index, sampler_state = self._indices.next()
        except StopIteration:
            return
        worker = self._choose()
        if worker is None:
            return
        start = None
        if self._task.is_iterable:
            start, self._starts[worker] = self._starts[worker], None
        item = TorchItem(self._num_put, worker, self._epoch, index, start, self._indices.shared_seed)
        self._engine.submit(self._next_ticket, item, worker)
        self._tasks.append((self._next_ticket, item, sampler_state))
        self._num_tasks[worker] += 1
        self._next_ticket += 1
        self._num_put += 1

    def _choose(self) -> int | None:
        """The next worker in turn that goes on; out of order, the next that has not yet its share of tasks."""
        num_workers, ended = self.progress.num_workers, self._ended
        for _ in range(num_workers):
            worker, self._turn = self._turn, (self._turn + 1) % num_workers
            if worker in ended:
                continue
            if self._in_order or self._num_tasks[worker] < self._max_tasks // (num_workers - len(ended)):
                return worker
        return None

    def _receive(self) -> tuple[TorchItem, Any, Result]:
        seconds = self._timeout if self._timeout > 0 else None
        try:
            if self._in_order:
                ticket, item, sampler_state = self._tasks[0]
                result = self._engine.wait(ticket, seconds)
                self._tasks.popleft()
                return item, sampler_state, result
            ticket, result = self._engine.wait_any(seconds)
        except TimeoutError as error:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from error
        except WorkerDied as error:
            self._death = str(error)
            raise
        found = next(task for task in self._tasks if task[0] == ticket)
        self._tasks.remove(found)
        return found[1], found[2], result

    def _mark(self, item: TorchItem, sampler_state: Any, result: Result) -> Mark:
        return Mark(item.worker, sampler_state, result.batch.get("state"), self._ended)

    def _end(self, worker: int) -> None:
        """A worker's share of an iterable dataset is used up; what else it was asked for it answers the same way."""
        if worker not in self._ended:
            self._ended |= {worker}
            self._put()

    def _watch(self, worker: int, result: Result) -> None:
        """See whether workers of an iterable dataset begin with the same batches, not knowing of each other."""
        digests, has_asked = result.batch.get("look", (None, True))
        if self._name_to_watch is None or has_asked:
            return
        other = self._first_batches.setdefault(digests, worker)
        if other != worker:
            warn_repeating_workers(self._name_to_watch, (other, worker))

    def _count_result(self, result: Result, begin: float, waited: float) -> None:
        self._statistics.num_ready += result.was_ready
        count_computed(self._statistics, result)
        self._count(begin, waited)


def _rebuild(error: Any, item: TorchItem) -> Exception:
    """What a worker raised, as torch does it: of its type, with the worker's traceback in the message.

    Without the traceback of making it, whose frames refer to the error: a cycle that would keep the workers alive.
    """
    try:
        error.reraise()
    except Exception as raised:  # noqa: BLE001 - of any type
        raised.add_note(f"while computing {item}")
        return raised.with_traceback(None)
    raise AssertionError("an error that is none")

"""Batches of a torch dataset, computed by worker processes.

Everything that can be observed happens in torch's order: batch k goes to worker k mod n, an ended worker of an
iterable dataset is passed over, `prefetch_factor` batches per worker are asked for before the first is
waited for, and one more whenever one is handed over. Only the way the batches travel differs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from penstock.errors import WorkerDied
from penstock.loader import Engine, LoaderStatistics, Pipeline, Result, count_computed
from penstock.pytorch._torch_datasets import Fetching
from penstock.pytorch._torch_epochs import Indices
from penstock.pytorch._torch_loop import LoopProgress, Receipt
from penstock.pytorch._torch_transport import FirstBatches, WorkerEnd, WorkerFailure, read_answer, unpack
from penstock.pytorch._torch_work import TorchItem, TorchStart, TorchWork
from penstock.pytorch._warnings import warn_repeating_workers

if TYPE_CHECKING:
    from penstock.pytorch._live_tuning import LiveTuning
    from penstock.pytorch._online import Setting


class WorkerBatches:
    """Has batches computed by worker processes. Several threads may take from it: each batch goes to one of them."""

    profiled_as = "_MultiProcessingDataLoaderIter"

    def __init__(
        self,
        loader: Any,
        fetching: Fetching,
        indices: Indices,
        progress: LoopProgress,
        statistics: LoaderStatistics,
        work: TorchWork,
        engine: Engine,
        tuning: LiveTuning | None = None,
    ) -> None:
        self._engine = engine
        self._pipeline = Pipeline(
            engine,
            work,
            statistics,
            prefetch=loader.prefetch_factor * loader.num_workers,
            in_order=loader.in_order,
            timeout=loader.timeout,
        )
        # Another lock than the pipeline's: a thread that waits for a feed holds that, and the feed calls `begin`.
        self._start_lock = threading.RLock()
        self._is_persistent, self._in_order = loader.persistent_workers, loader.in_order
        self._statistics = statistics
        is_watched = fetching.is_iterable and loader.worker_init_fn is None
        self._watched_name = type(fetching.dataset).__name__ if is_watched else None
        self._epoch = -1
        self._death: str | None = None
        """How a worker died: no batch of this loop comes after that, because the dead worker's would be missing."""
        self._first_batches: dict[tuple[int, ...], int] = {}
        self._tuning = tuning
        """With it, items belong to no worker in particular, and the number of workers may change."""
        self.restart(fetching, indices, progress)

    def restart(self, fetching: Fetching, indices: Indices, progress: LoopProgress) -> None:
        """Begin an epoch, with the same workers."""
        with self._pipeline.lock:
            self._pipeline.forget()
            self.progress = progress
            self._is_iterable, self._indices = fetching.is_iterable, indices
            self._epoch += 1
            self._sampler_states: dict[int, Any] = {}
            """The sampler's state after each batch in flight, by number."""
            self._was_cut_short = False
            self._num_given = [0] * progress.num_workers
            """Batches in flight of each worker."""
            self._turn = progress.next_worker
            self.ended: Mapping[int, bytes | None] = dict.fromkeys(progress.ended)
            self._awaits_starts = fetching.may_have_state
            if self._awaits_starts:
                for worker in range(progress.num_workers):
                    self._start(worker)
            self._fill()
            if self._tuning is not None:
                self._tuning.begin(self._pipeline.prefetch)

    @property
    def can_restart(self) -> bool:
        """Whether all workers are there for another epoch, and belong to this process."""
        return self._death is None and self._pipeline.is_ours

    def turn(self) -> AbstractContextManager[Any]:
        self._check_process()  # before the lock, which another thread may have held when this process was forked
        return self._pipeline.lock

    def begin(self) -> None:
        """Wait until all workers have said where they started; the oldest items in flight are these questions."""
        if not self._awaits_starts:
            return
        self._check_process()
        with self._start_lock:
            while isinstance(self._pipeline.oldest, TorchStart) and not self._was_cut_short:
                start, result = self._receive(oldest=True)
                state = read_answer(result.batch)[0].state
                if state is not None:
                    self.progress.worker_states[start.worker] = state
            self._awaits_starts = False

    def next(self) -> tuple[Receipt, Any] | None:
        self._check_process()
        if self._death is not None:
            raise WorkerDied(self._death)
        if self._was_cut_short:
            raise RuntimeError("The loader was closed. A new `for` loop starts it again.")
        begin = time.perf_counter()
        if self._awaits_starts:
            self.begin()
        while self._pipeline.oldest is not None:
            item, result = self._receive()
            self._num_given[item.worker] -= 1
            answer, arrays = read_answer(result.batches[0])
            content = answer.content
            if isinstance(content, WorkerEnd):
                self._end(item.worker, answer.state)
                continue
            sampler_state = self._sampler_states.pop(item.number)
            ended = {**self.ended, item.worker: answer.state} if answer.has_ended else self.ended
            receipt = Receipt(item.number, item.worker, sampler_state, answer.state, ended)
            self._fill()
            waited = time.perf_counter()
            if isinstance(content, WorkerFailure):
                self.progress.advance(receipt)
                raise _rebuild(content.error, item)
            batch = unpack(content, arrays)
            if answer.first_batches is not None:
                self._compare(item.worker, answer.first_batches)
            count_computed(self._statistics, result)
            self._pipeline.count_handed_over(begin, time.perf_counter() - waited, was_ready=result.was_ready)
            if self._tuning is not None:
                self._tuning.step()
            return receipt, batch
        if not self._is_persistent:
            self.close()
        return None

    def is_ready(self) -> bool:
        """Whether an answer is there: a batch, or, seldom, that a worker has ended."""
        return self._death is not None or self._was_cut_short or self._pipeline.is_ready()

    def update_statistics(self) -> None:
        self._pipeline.update_statistics()

    def close(self) -> None:
        self._was_cut_short = self._was_cut_short or self._pipeline.oldest is not None
        self._pipeline.close()

    def __del__(self) -> None:
        if hasattr(self, "_was_cut_short"):
            self.close()

    def change(self, setting: Setting) -> int:
        """Go on with another number of workers and batches ahead; returns the latter."""
        self._engine.set_workers(setting.num_workers)
        self._pipeline.prefetch = setting.num_workers * setting.depth
        self._fill()
        return self._pipeline.prefetch

    def has_started(self) -> bool:
        return self._engine.num_started() >= self._engine.num_workers

    def _check_process(self) -> None:
        if not self._pipeline.is_ours:
            raise RuntimeError("This loop was started before a fork; its workers belong to the parent process.")

    def _fill(self) -> None:
        """Have as many batches in flight as there may be; the questions at the beginning are not batches."""
        while sum(self._num_given) < self._pipeline.prefetch and self._submit():
            pass

    def _submit(self) -> bool:
        """Give the next index, if there is one, to the worker whose turn it is."""
        try:
            number, index, sampler_state = self._indices.next()
        except StopIteration:
            return False
        worker = 0 if self._tuning is not None else self._choose()
        if worker is None:
            return False
        item = TorchItem(number, worker, self._epoch, index)
        self._pipeline.submit(item, worker if self._tuning is None else None)
        self._sampler_states[item.number] = sampler_state
        self._num_given[worker] += 1
        return True

    def _start(self, worker: int) -> None:
        """Have a worker start the epoch, from its state if there is one."""
        progress, seed = self.progress, self._indices.shared_seed
        state, has_ended = progress.worker_states[worker], worker in self.ended
        is_over, index = progress.begins_after_states, self._indices.any_index
        self._pipeline.submit(TorchStart(worker, self._epoch, state, is_over, has_ended, index, seed), worker)

    def _choose(self) -> int | None:
        """The next worker in turn that has more to give; out of order, the next with less than its share in flight."""
        num_workers, ended = self.progress.num_workers, self.ended
        for _ in range(num_workers):
            worker, self._turn = self._turn, (self._turn + 1) % num_workers
            if worker in ended:
                continue
            if self._in_order or self._num_given[worker] < self._pipeline.prefetch // (num_workers - len(ended)):
                return worker
        return None

    def _receive(self, *, oldest: bool = False) -> tuple[Any, Result]:
        try:
            return self._pipeline.receive(oldest=oldest)
        except WorkerDied as error:
            self._death = str(error)
            raise

    def _end(self, worker: int, state: bytes | None) -> None:
        """A worker's share of an iterable dataset is used up; it answers the same to whatever else it was given."""
        if worker not in self.ended:
            self.ended = {**self.ended, worker: state}  # a new one: receipts refer to the old
            self._submit()

    def _compare(self, worker: int, first: FirstBatches) -> None:
        """See whether workers of an iterable dataset begin with the same batches, unaware of each other."""
        if self._watched_name is None or first.has_asked:
            return
        other = self._first_batches.setdefault(first.digests, worker)
        if other != worker:
            warn_repeating_workers(self._watched_name, (other, worker))


def _rebuild(error: Any, item: TorchItem) -> Exception:
    """What a worker raised, as torch does it: of its type, with the worker's traceback in the message.

    Without the traceback of making it, whose frames refer to the error: a cycle that would keep the workers alive.
    """
    try:
        error.reraise()
    except Exception as raised:  # noqa: BLE001 - of any type
        raised.add_note(f"while computing {item}")
        return raised.with_traceback(None)
    raise AssertionError("reraise() did not raise")

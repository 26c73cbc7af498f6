"""Items in, batches out, in order, a few ahead: what lies between a loop and its engine, and its statistics."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.errors import counted
from penstock.loader._engine import Engine, Result, WaitedTooLong, Work
from penstock.loader._layout import Batch
from penstock.loader._plan_work import Bundle

if TYPE_CHECKING:
    from penstock.report import FigureLine


@dataclass(kw_only=True)
class LoaderStatistics:
    """Totals since the loader was made; divide by `num_batches` for means.

    Always on, a few microseconds per step.
    """

    num_batches: int = 0
    """Batches handed over."""
    num_replaced: int = 0
    """Rows in them that replace others, on which a function of map(on_error="skip") failed."""
    num_ready: int = 0
    """Batches that were ready when requested: no waiting."""
    num_bytes: int = 0
    """Bytes of the arrays handed over."""
    wait_seconds: float = 0.0
    """Time the training thread waited in `next()`."""
    step_seconds: float = 0.0
    """Time between hand-overs spent outside the loader: the training step."""
    produce_seconds: float = 0.0
    """Time workers took to compute batches, summed over workers."""
    copy_seconds: float = 0.0
    """Time to turn arrays into tensors and move them to the device."""
    worker_cpu_seconds: float = 0.0
    """CPU time of workers."""
    page_faults: int = 0
    """Pages that workers had to wait for from disk."""
    num_hedged: int = 0
    """Requests that were asked of a second server because the first took long."""
    num_damaged: int = 0
    """Answers of servers that arrived damaged, and were asked for again."""
    fetched_bytes: int = 0
    """Bytes of remote data that this process's fetcher received."""
    num_fetched: int = 0
    """Shards among them."""
    num_fetched_again: int = 0
    """Requests that were sent again: the store was busy, slow, or what came was damaged."""
    num_fetch_waits: int = 0
    """Times that a reader had to wait for a shard."""
    fetch_wait_seconds: float = 0.0
    """How long, summed over readers."""
    fetch_bytes_per_second: float = 0.0
    """What the store delivered while anything was asked of it."""
    fetch_request_seconds: float = 0.0
    """How long it took to answer a request, on average."""
    num_buffers: int = 0
    """Buffers now; batches that are held keep theirs."""
    num_buffers_in_use: int = 0
    """Buffers with a batch that is in use or being computed."""
    num_workers: int = 0
    """Workers now."""
    prefetch: int = 0
    """Batches computed ahead now."""
    num_queued: int = 0
    """Batches that are ready now: this many steps need not wait."""
    decisions: tuple[str, ...] = ()
    """What was changed during the run, at which step and why; the latest hundred."""

    def copy(self) -> LoaderStatistics:
        """As they are now, in a tenth of the time that `dataclasses.replace` takes: `watch` asks at every step."""
        copied = object.__new__(LoaderStatistics)
        vars(copied).update(vars(self))
        return copied

    @property
    def ready_share(self) -> float:
        """Share of batches that were ready when requested: 1.0 means the loader keeps up."""
        return self.num_ready / self.num_batches if self.num_batches else 1.0

    def __str__(self) -> str:
        from penstock.report import align_figures

        return "\n".join([align_figures(self._lines()), *self.decisions])

    def _lines(self) -> Iterator[FigureLine]:
        from penstock.report import format_bytes, format_seconds

        spent = max(self.wait_seconds + self.step_seconds + self.copy_seconds, 1e-9)
        yield "batches", self.num_batches, f"{100 * self.ready_share:.0f} % were ready when asked for"
        yield "bytes", format_bytes(self.num_bytes), ""
        if self.num_replaced:
            yield "rows replaced", self.num_replaced, 'by map(on_error="skip")'
        yield (
            "waiting",
            format_seconds(self.wait_seconds),
            f"{100 * self.wait_seconds / spent:.0f} % of the loop's time",
        )
        yield "steps", format_seconds(self.step_seconds), ""
        yield "copying", format_seconds(self.copy_seconds), "into tensors, to the device"
        on_processor = f", of which {format_seconds(self.worker_cpu_seconds)} on a processor"
        note = f"in workers{on_processor if self.worker_cpu_seconds else ''}"
        yield "computing", format_seconds(self.produce_seconds), note
        yield "workers", self.num_workers, f"{self.prefetch:,} batches ahead, {self.num_queued:,} ready now"
        yield "buffers", self.num_buffers, f"{self.num_buffers_in_use:,} in use"
        if self.num_hedged or self.num_damaged:
            damaged = counted(self.num_damaged, "answer")
            yield "asked again", self.num_hedged, f"because servers were slow; {damaged} arrived damaged"
        if self.num_fetched:
            rate = format_bytes(self.fetch_bytes_per_second)
            waits = f"{counted(self.num_fetch_waits, 'wait')}, {format_seconds(self.fetch_wait_seconds)}"
            yield (
                "fetched",
                format_bytes(self.fetched_bytes),
                f"in {counted(self.num_fetched, 'shard')}, {rate}/s; {waits}",
            )
            if self.num_fetched_again:
                yield "fetched again", self.num_fetched_again, "requests that failed, were slow or came damaged"
        if self.page_faults:
            yield "page faults", self.page_faults, "that workers waited for"


def count_computed(statistics: LoaderStatistics, result: Result) -> None:
    """Add what it took to compute a batch, or a bundle of them."""
    statistics.num_bytes += result.num_bytes
    statistics.produce_seconds += result.produce_seconds
    statistics.worker_cpu_seconds += result.cpu_seconds
    statistics.page_faults += result.page_faults


def count_handed_over(statistics: LoaderStatistics, begin: float, copying: float, left_at: float | None) -> float:
    """Add a batch that was requested at `begin`, `copying` seconds of which went into its tensors.

    The one before it was handed over at `left_at`. Returns the time now, when this one is handed over.
    """
    now = time.perf_counter()
    statistics.num_batches += 1
    statistics.wait_seconds += now - begin - copying
    statistics.copy_seconds += copying
    if left_at is not None:
        statistics.step_seconds += begin - left_at
    return now


class Pipeline:
    """Items that an engine computes ahead of the training loop, received in order unless order does not matter.

    `start` and `next` run through items that are known in advance, and keep `prefetch` batches in flight. `submit` and
    `receive` leave the choice of the next item to the caller, as torch datasets need it: there, what comes next depends
    on what came. `convert` is applied in the training thread, to all batches of an item in one go: between two training
    steps the same code takes twice as long, because the step has emptied the caches.

    One thread at a time uses the engine, under `lock`: a thread that starts new items while another waits for a result
    waits, too. Any thread may close.

    Args:
        timeout: Seconds to wait for a result; 0 means for ever.
    """

    def __init__(
        self,
        engine: Engine,
        work: Work,
        statistics: LoaderStatistics,
        *,
        convert: Callable[[Batch], Batch] | None = None,
        prefetch: int,
        in_order: bool,
        timeout: float = 0,
    ) -> None:
        self._engine, self._work, self._statistics = engine, work, statistics
        self._convert, self._in_order, self._timeout = convert, in_order, timeout
        self.prefetch = prefetch
        """Batches to compute ahead."""
        self.lock = threading.RLock()  # a signal handler may begin a loop while its own thread waits in another
        self._pid = os.getpid()
        self._is_closed = False
        self._tickets = itertools.count()
        self._in_flight: deque[tuple[int, Any]] = deque()
        """(ticket, item) of what was submitted and not yet received, oldest first."""
        self._items: Iterator[Any] = iter(())
        self._batches_per_item = 1
        self._received: deque[tuple[Any, Batch]] = deque()
        """(item, batch) of what was received and not yet handed over."""
        self._left_at: float | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and not its parent before a fork."""
        return os.getpid() == self._pid

    @property
    def oldest(self) -> Any:
        """The item that was submitted first of those in flight; None if there are none."""
        return self._in_flight[0][1] if self._in_flight else None

    def start(self, items: Iterator[Any], batches_per_item: int = 1) -> None:
        """Start over with new items; results of the old ones are thrown away."""
        if self._is_closed or not self.is_ours:
            _refuse(is_ours=self.is_ours)
        with self.lock:
            self.forget()
            self._items, self._batches_per_item = items, batches_per_item
            self._fill()

    def next(self) -> tuple[Any, Batch] | None:
        """(item, batch) of the next item, or None if there are no more."""
        if self._is_closed or os.getpid() != self._pid:
            _refuse(is_ours=self.is_ours)
        begin = time.perf_counter()
        was_ready, converting = True, 0.0
        with self.lock:
            if not self._received:
                if not self._in_flight:
                    self._fill()
                    if not self._in_flight:
                        return None
                was_ready, converting = self._receive_batches()
                self._fill()
            handed_over = self._received.popleft()
        self.count_handed_over(begin, converting, was_ready=was_ready)
        return handed_over

    def submit(self, item: Any, worker: int | None = None, *, is_next: bool = False) -> None:
        """Have an item computed, by this worker if one is named; with `is_next` it is received before all others."""
        self._work.announce(item)
        ticket = next(self._tickets)
        self._engine.submit(ticket, item, worker)
        if is_next:
            self._in_flight.appendleft((ticket, item))
        else:
            self._in_flight.append((ticket, item))

    def receive(self, *, oldest: bool = False) -> tuple[Any, Result]:
        """The oldest item and its result; if order does not matter, the first that is ready, unless asked otherwise.

        Raises:
            RuntimeError: it was not ready in time, in torch's words; it stays in flight.
            Exception: what computing it raised; it is over.
        """
        seconds = self._timeout if self._timeout > 0 else None
        ticket, is_any = self._in_flight[0][0], not (self._in_order or oldest)
        try:
            if is_any:
                ticket, result = self._engine.wait_any(seconds)
            else:
                result = self._engine.wait(ticket, seconds)
        except WaitedTooLong as error:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds: {error}") from error
        except Exception:
            if not is_any:
                self._in_flight.popleft()
            raise
        if self._in_flight[0][0] == ticket:
            return self._in_flight.popleft()[1], result
        found = next(one for one in self._in_flight if one[0] == ticket)
        self._in_flight.remove(found)
        return found[1], result

    def is_ready(self) -> bool:
        """Whether a batch can be taken, or the end seen, without waiting for a worker."""
        with self.lock:
            if self._received or not self._in_flight:
                return True
            candidates = itertools.islice(self._in_flight, 1 if self._in_order else None)
            return any(self._engine.is_done(ticket) for ticket, _ in candidates)

    def refill(self) -> None:
        """Compute as many batches ahead as `prefetch` now says; if another thread is waiting for one, after that."""
        if self.lock.acquire(blocking=False):
            try:
                self._fill()
            finally:
                self.lock.release()

    def count_handed_over(self, begin: float, converting: float, *, was_ready: bool) -> None:
        """Count a batch that was asked for at `begin`, and is handed over now."""
        self._statistics.num_ready += was_ready
        self._left_at = count_handed_over(self._statistics, begin, converting, self._left_at)

    def update_statistics(self) -> None:
        """Update those statistics that describe the present; the rest is counted batch by batch."""
        statistics = self._statistics
        statistics.num_buffers, statistics.num_buffers_in_use = self._engine.num_buffers()
        statistics.num_workers, statistics.prefetch = self._engine.num_workers, self.prefetch
        statistics.num_queued = 0
        if self.is_ours and self.lock.acquire(blocking=False):  # otherwise a thread waits for a batch: none is ready
            try:
                statistics.num_queued = len(self._received) + self._batches_per_item * self._num_done()
            finally:
                self.lock.release()

    def forget(self) -> None:
        """Throw away what was submitted, and what was not handed over."""
        self._engine.forget()
        self._in_flight.clear()
        self._received.clear()
        self._left_at = None

    def close(self) -> None:
        """Stop the engine."""
        self._is_closed = True
        if self.is_ours:
            self._engine.close()

    def _fill(self) -> None:
        limit = max(1, self.prefetch // self._batches_per_item)
        while len(self._in_flight) < limit:
            item = next(self._items, None)
            if item is None:
                return
            self.submit(item)

    def _receive_batches(self) -> tuple[bool, float]:
        """Wait for the next result; return whether it was already there, and how long converting it took."""
        next_item = self._in_flight[0][1]
        try:
            item, result = self.receive()
        except Exception as error:  # retry a bundle one by one, to hand over the batches before the failing one
            if not isinstance(next_item, Bundle) or isinstance(error.__cause__, WaitedTooLong):
                raise
            item = None
        if item is None:
            for single in reversed(next_item.items()):
                self.submit(single, is_next=True)
            return self._receive_batches()
        begin = time.perf_counter()
        items = item.items() if isinstance(item, Bundle) else (item,)
        batches = result.batches if self._convert is None else map(self._convert, result.batches)
        self._received.extend(zip(items, batches, strict=True))
        count_computed(self._statistics, result)
        return result.was_ready, time.perf_counter() - begin

    def _num_done(self) -> int:
        """How many items could be received without waiting; 0 if the engine failed, which `receive` will report."""
        try:
            is_done = (self._engine.is_done(ticket) for ticket, _ in self._in_flight)
            return sum(itertools.takewhile(bool, is_done) if self._in_order else is_done)
        except (OSError, RuntimeError):
            return 0


def _refuse(*, is_ours: bool) -> NoReturn:
    if not is_ours:
        raise RuntimeError(
            "This loop was started before a fork; its workers belong to the parent. Start a new one in the child."
        )
    raise RuntimeError("The loader was closed. A new `for` loop starts it again.")

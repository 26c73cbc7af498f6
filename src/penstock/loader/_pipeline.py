"""Items in, results out, in order, a few ahead: the loop between a list of items and an engine."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from penstock.loader._engine import Engine, Result
from penstock.loader._layout import Batch
from penstock.loader._statistics import LoaderStatistics, count_computed, count_handed_over
from penstock.loader._work import Stretch, Work


class Pipeline:
    """Keeps `prefetch` batches in flight and hands their batches over, in order unless told otherwise.

    `convert` is applied to a batch when it is handed over, in the caller's thread; `assign` says which worker
    of an assigned engine computes an item. An engine is asked by one thread at a time: one that starts anew while
    another waits in `next` waits for it. Any thread may close.
    """

    def __init__(
        self,
        engine: Engine,
        work: Work,
        statistics: LoaderStatistics,
        *,
        convert: Callable[[Batch], Batch],
        prefetch: int,
        in_order: bool,
        assign: Callable[[Any], int] | None = None,
    ) -> None:
        self._engine, self._work = engine, work
        self._statistics = statistics
        self._convert = convert
        self._in_order = in_order
        self._assign = assign
        self._tickets = itertools.count()
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._received: deque[tuple[Any, Batch]] = deque()
        self._items: Iterator[Any] = iter(())
        self._batches_per_item = 1
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may begin a loop while its own thread waits in another
        self._left_at: float | None = None
        self._is_closed = False
        self.prefetch = prefetch

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and not the one that it was forked from."""
        return os.getpid() == self._pid

    def start(self, items: Iterator[Any], batches_per_item: int = 1) -> None:
        """Begin with new items; results of the old ones are thrown away."""
        if self._is_closed or not self.is_ours:
            self._refuse()
        with self._lock:
            self._engine.forget()
            self._in_flight.clear()
            self._received.clear()
            self._items = items
            self._batches_per_item = batches_per_item
            self._left_at = None
            self._fill()

    def next(self) -> tuple[Any, Batch] | None:
        """(item, batch) of the next item, or None when there are no more."""
        if self._is_closed or os.getpid() != self._pid:
            self._refuse()
        begin = time.perf_counter()
        was_ready = True
        with self._lock:
            if not self._received:
                if not self._in_flight:
                    self._fill()
                    if not self._in_flight:
                        return None
                was_ready = self._receive()
                self._fill()
            item, batch = self._received.popleft()
        waited = time.perf_counter()
        converted = self._convert(batch)
        self._statistics.num_ready += was_ready
        self._left_at = count_handed_over(self._statistics, begin, waited, self._left_at)
        return item, converted

    def is_ready(self) -> bool:
        """Whether `next` would not wait for a worker."""
        with self._lock:
            if self._received or not self._in_flight:
                return True
            candidates = itertools.islice(self._in_flight, 1 if self._in_order else None)
            return any(self._engine.is_done(ticket) for ticket, _ in candidates)

    def refill(self) -> None:
        """Compute as many batches ahead as `prefetch` says now; if another thread waits for one, when it has it."""
        if self._lock.acquire(blocking=False):
            try:
                self._fill()
            finally:
                self._lock.release()

    def look(self) -> None:
        """Bring what the statistics say of now up to date; the rest is counted batch by batch."""
        statistics = self._statistics
        statistics.num_buffers, statistics.num_buffers_in_use = self._engine.num_buffers()
        statistics.num_workers, statistics.prefetch = self._engine.num_workers, self.prefetch

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
            self._in_flight.append((self._submit(item), item))

    def _submit(self, item: Any) -> int:
        ticket = next(self._tickets)
        self._work.announce(item)
        self._engine.submit(ticket, item, None if self._assign is None else self._assign(item))
        return ticket

    def _receive(self) -> bool:
        """Wait for the next result; whether it was there already."""
        item, result = self._take()
        items = item.items() if isinstance(item, Stretch) else (item,)
        self._received.extend(zip(items, result.batches, strict=True))
        count_computed(self._statistics, result)
        return result.was_ready

    def _take(self) -> tuple[Any, Result]:
        if self._in_order:
            ticket, item = self._in_flight.popleft()
            try:
                return item, self._engine.wait(ticket)
            except Exception:  # a stretch is tried again one by one: batches before the one at fault come first
                if not isinstance(item, Stretch):
                    raise
            self._in_flight.extendleft((self._submit(single), single) for single in reversed(item.items()))
            return self._take()
        ticket, result = self._engine.wait_any()
        item = next(item for number, item in self._in_flight if number == ticket)
        self._in_flight.remove((ticket, item))
        return item, result

    def _refuse(self) -> NoReturn:
        if not self.is_ours:
            raise RuntimeError(
                "This loop was begun before a fork; its workers belong to the parent. Begin a new one in the child."
            )
        raise RuntimeError("The loader was closed. A new `for` loop starts it again.")

"""Items in, results out, in order, a few ahead: the loop between a list of items and an engine."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from penstock.loader._engine import Engine, Result
from penstock.loader._memory import Batch
from penstock.loader._statistics import LoaderStatistics
from penstock.loader._work import Work
from penstock.schema import Ragged


class Pipeline:
    """Keeps `prefetch` items in flight and hands their batches over, in order unless told otherwise.

    `convert` is applied to a batch when it is handed over, in the caller's thread.
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
    ) -> None:
        self._engine, self._work = engine, work
        self._statistics = statistics
        self._convert = convert
        self._in_order = in_order
        self._tickets = itertools.count()
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._items: Iterator[Any] = iter(())
        self._pid = os.getpid()
        self._left_at: float | None = None
        self._is_closed = False
        self.prefetch = prefetch

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and not the one that it was forked from."""
        return os.getpid() == self._pid

    def start(self, items: Iterator[Any]) -> None:
        """Begin with new items; results of the old ones are thrown away."""
        self._check()
        self._engine.forget()
        self._in_flight.clear()
        self._items = items
        self._left_at = None
        self._fill()

    def next(self) -> tuple[Any, Batch] | None:
        """(item, batch) of the next item, or None when there are no more."""
        self._check()
        begin = time.perf_counter()
        self._fill()
        if not self._in_flight:
            return None
        is_ready = self._is_ready()
        item, result = self._take()
        self._fill()
        waited = time.perf_counter()
        batch = self._convert(result.batch)
        self._count(result, is_ready, begin, waited)
        return item, batch

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
        while len(self._in_flight) < self.prefetch:
            item = next(self._items, None)
            if item is None:
                return
            ticket = next(self._tickets)
            self._work.announce(item)
            self._engine.submit(ticket, item)
            self._in_flight.append((ticket, item))

    def _is_ready(self) -> bool:
        candidates = itertools.islice(self._in_flight, 1 if self._in_order else None)
        return any(self._engine.is_done(ticket) for ticket, _ in candidates)

    def _take(self) -> tuple[Any, Result]:
        if self._in_order:
            ticket, item = self._in_flight.popleft()
            return item, self._engine.wait(ticket)
        ticket, result = self._engine.wait_any()
        item = next(item for number, item in self._in_flight if number == ticket)
        self._in_flight.remove((ticket, item))
        return item, result

    def _count(self, result: Result, is_ready: bool, begin: float, waited: float) -> None:
        statistics, now = self._statistics, time.perf_counter()
        statistics.num_batches += 1
        statistics.num_ready += is_ready
        statistics.num_bytes += sum(_num_bytes(value) for value in result.batch.values())
        statistics.wait_seconds += waited - begin
        statistics.copy_seconds += now - waited
        if self._left_at is not None:
            statistics.step_seconds += begin - self._left_at
        self._left_at = now
        statistics.produce_seconds += result.produce_seconds
        statistics.worker_cpu_seconds += result.cpu_seconds
        statistics.page_faults += result.page_faults

    def _check(self) -> None:
        if not self.is_ours:
            raise RuntimeError(
                "This loop was begun before a fork; its workers belong to the parent. Begin a new one in the child."
            )
        if self._is_closed:
            raise RuntimeError("The loader was closed. A new `for` loop starts it again.")


def _num_bytes(value: Any) -> int:
    if isinstance(value, Ragged):
        return value.values.nbytes + value.offsets.nbytes
    return int(getattr(value, "nbytes", 0))

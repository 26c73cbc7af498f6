"""Items in, results out, in order, a few ahead: the loop between a list of items and an engine."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock.loader._engine import Engine, Result
from penstock.loader._memory import Batch
from penstock.loader._statistics import LoaderStatistics
from penstock.loader._work import Work


class Pipeline:
    """Keeps `prefetch` items in flight and hands their batches over, in order unless told otherwise."""

    def __init__(
        self, engine: Engine, work: Work, statistics: LoaderStatistics, *, prefetch: int, in_order: bool
    ) -> None:
        self._engine, self._work = engine, work
        self._statistics = statistics
        self._in_order = in_order
        self._tickets = itertools.count()
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._items: Iterator[Any] = iter(())
        self._pid = os.getpid()
        self._left_at: float | None = None
        self.prefetch = prefetch

    def start(self, items: Iterator[Any]) -> None:
        """Begin with new items; results of the old ones are thrown away."""
        for ticket, _ in self._in_flight:
            self._discard(ticket)
        self._in_flight.clear()
        self._items = items
        self._left_at = None

    def next(self) -> tuple[Any, Batch] | None:
        """(item, batch) of the next item, or None when there are no more."""
        self._check_process()
        begin = time.perf_counter()
        self._fill()
        if not self._in_flight:
            return None
        is_ready = self._engine.is_done(self._in_flight[0][0])
        item, result = self._take()
        self._fill()
        self._count(result, begin, is_ready)
        return item, result.batch

    def close(self) -> None:
        """Stop the engine."""
        if os.getpid() == self._pid:
            self._engine.close()

    def _fill(self) -> None:
        while len(self._in_flight) < max(1, self.prefetch):
            item = next(self._items, None)
            if item is None:
                return
            ticket = next(self._tickets)
            self._work.announce(item)
            self._engine.submit(ticket, item)
            self._in_flight.append((ticket, item))

    def _take(self) -> tuple[Any, Result]:
        if self._in_order:
            ticket, item = self._in_flight.popleft()
            return item, self._engine.wait(ticket)
        ticket, result = self._engine.wait_any()
        item = next(item for number, item in self._in_flight if number == ticket)
        self._in_flight.remove((ticket, item))
        return item, result

    def _discard(self, ticket: int) -> None:
        try:
            self._engine.wait(ticket)
        except Exception:  # noqa: BLE001 - nobody asked for this batch any more
            return

    def _count(self, result: Result, begin: float, is_ready: bool) -> None:
        statistics, now = self._statistics, time.perf_counter()
        statistics.num_batches += 1
        statistics.num_ready += is_ready
        statistics.num_bytes += sum(getattr(value, "nbytes", 0) for value in result.batch.values())
        statistics.wait_seconds += now - begin
        if self._left_at is not None:
            statistics.step_seconds += begin - self._left_at
        self._left_at = now
        statistics.produce_seconds += result.produce_seconds
        statistics.worker_cpu_seconds += result.cpu_seconds
        statistics.page_faults += result.page_faults
        statistics.num_buffers, statistics.num_buffers_in_use = self._engine.num_buffers()
        statistics.num_workers, statistics.prefetch = self._engine.num_workers, self.prefetch

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "This loader was started before a fork; its workers belong to the parent. Make a new one in the child."
            )

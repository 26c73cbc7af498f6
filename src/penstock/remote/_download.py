"""Ranges of an object into a local file: many at once, asked again when they fail, asked twice when they are slow.

A request that takes much longer than most is asked a second time, and the first answer counts: stores stall single
requests for a minute. What is much longer follows from the last answers, so on a narrow line, where all are slow,
nothing is asked twice. Price: 8 MiB of memory for each range in flight.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.errors import StoreBusy
from penstock.remote._store import Store, pause_seconds

RANGE_BYTES = 8 << 20
_IN_FLIGHT = 32
_ATTEMPTS = 10
_REMEMBERED = 64
_SLOWER = 3.0
"""Times the ninth decile of the last answers: then a request is asked again."""
_LEAST_SECONDS, _FIRST_SECONDS = 0.75, 5.0
_HEDGED_SHARE = 0.05
"""Of all requests at most so many are asked twice."""

Span = tuple[int, int]


@dataclass(kw_only=True)
class Traffic:
    """What was asked of stores, and what came."""

    num_files: int = 0
    num_bytes: int = 0
    """Bytes received, of requests that were asked twice both times."""
    num_requests: int = 0
    num_retries: int = 0
    num_hedged: int = 0
    num_damaged: int = 0
    """Ranges that arrived with wrong bytes."""
    busy_seconds: float = 0.0
    """Time in which something was asked for."""
    request_seconds: float = 0.0
    """Time that answered requests took, summed over them."""


class Downloader:
    """Fetches ranges, at most so many at once, over all files."""

    def __init__(self, in_flight: int = _IN_FLIGHT) -> None:
        self.traffic = Traffic()
        self._slots = asyncio.Semaphore(in_flight)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._arrived: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        """(when it was asked for, bytes) of the last answers."""
        self._num_busy, self._busy_since = 0, 0.0

    async def fetch(self, store: Store, name: str, spans: Iterable[Span], descriptor: int) -> None:
        """Write these bytes of an object to the same bytes of an open file.

        Raises:
            StoreError: the store refuses, or failed too often.
            OSError: the file cannot be written.
        """
        tasks = [asyncio.ensure_future(self._fill(store, name, *span, descriptor)) for span in _pieces(spans)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # none may write to the file when it is closed
            raise

    async def _fill(self, store: Store, name: str, begin: int, end: int, descriptor: int) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                async with self._slots:
                    data = await self._ask(store, name, begin, end)
                    await asyncio.to_thread(_write, descriptor, data, begin)
                return
            except StoreBusy:
                if attempt == _ATTEMPTS - 1:
                    raise
                self.traffic.num_retries += 1
            await asyncio.sleep(pause_seconds(attempt))

    async def _ask(self, store: Store, name: str, begin: int, end: int) -> memoryview:
        first = asyncio.ensure_future(self._measured(store, name, begin, end))
        asked = {first}
        try:
            done, _ = await asyncio.wait(asked, timeout=self._patience())
            if not done and self.traffic.num_hedged < max(2, _HEDGED_SHARE * self.traffic.num_requests):
                self.traffic.num_hedged += 1
                asked.add(asyncio.ensure_future(self._measured(store, name, begin, end)))
            while True:
                done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                good = next((each for each in done if each.exception() is None), None)
                if good is not None or not waiting:
                    return (good or done.pop()).result()
                asked = waiting
        finally:
            for each in asked:
                each.cancel()

    async def _measured(self, store: Store, name: str, begin: int, end: int) -> memoryview:
        asked_at = time.monotonic()
        self.traffic.num_requests += 1
        if not self._num_busy:
            self._busy_since = asked_at
        self._num_busy += 1
        try:
            data = await store.fetch(name, begin, end)
        finally:
            self._num_busy -= 1
            if not self._num_busy:
                self.traffic.busy_seconds += time.monotonic() - self._busy_since
        self._seconds.append(time.monotonic() - asked_at)
        self.traffic.request_seconds += self._seconds[-1]
        self.traffic.num_bytes += len(data)
        self._arrived.append((asked_at, len(data)))
        return data

    def bytes_per_second(self) -> float:
        """How fast the last answers came."""
        if not self._arrived:
            return 0.0
        since = min(asked_at for asked_at, _ in self._arrived)
        return sum(size for _, size in self._arrived) / max(time.monotonic() - since, 1e-3)

    def _patience(self) -> float:
        """Seconds after which a request is asked again."""
        if len(self._seconds) < 8:
            return _FIRST_SECONDS
        return max(_LEAST_SECONDS, _SLOWER * sorted(self._seconds)[len(self._seconds) * 9 // 10])


def _pieces(spans: Iterable[Span]) -> Iterator[Span]:
    for begin, end in spans:
        for first in range(begin, end, RANGE_BYTES):
            yield first, min(first + RANGE_BYTES, end)


def _write(descriptor: int, data: memoryview, begin: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, begin)
        data, begin = data[count:], begin + count

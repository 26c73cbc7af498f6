"""Clocks around the stages of a batch, put into torch's own classes: sample, collate, pack, unpack, idle.

    index queue -> [idle] -> fetch( [sample]… [collate] ) -> [pack] -> result queue -> [unpack] -> trainer

A clock costs about 2 µs. Samples that take less than 100 µs are timed once in 16 batches, so that the clocks do not
become what is measured.
"""

from __future__ import annotations

import functools
import multiprocessing.queues
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from penstock.doctor._recording import Recorder, recorder
from penstock.doctor._supplies import bytes_of, rows_of
from penstock.machine import EventKind, ThreadMeter

_QUICK_NS = 100_000
_EVERY = 16
_MOST_UNPACKED = 1000
"""Batches whose unpacking is timed: a report draws the first steps, and nothing else needs it."""
PLAIN_ITERS: dict[type, Callable[[Any], Iterator[Any]]] = {}
"""The `__iter__` that each class of loaders had before it was hooked."""


def time_fetchers(fetch: Any) -> None:
    """Have torch's fetchers, wherever they run, time what they do. `fetch` is `torch.utils.data._utils.fetch`."""
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(fetch, name)
        fetcher.__init__ = _timed_init(fetcher.__init__)
        fetcher.fetch = _timed_fetch(fetcher.fetch)


def time_unpacking() -> None:
    """Time what a trainer takes out of queues."""
    multiprocessing.queues._ForkingPickler = _TimedPickler(  # type: ignore[attr-defined]
        multiprocessing.queues._ForkingPickler,  # type: ignore[attr-defined]
        EventKind.UNPICKLE,
    )


def time_workers(torch_worker: Any) -> None:
    """Keep torch's worker loop where `timed_worker_loop` finds it, in `torch.utils.data._utils.worker`."""
    torch_worker._plain_worker_loop = torch_worker._worker_loop


def timed_worker_loop(loader: int, trial: int, *arguments: Any) -> None:
    """Torch's worker loop with clocks; a function of this module, so that spawned workers find it."""
    from torch.utils.data._utils import worker as torch_worker

    log = recorder()
    log.loader, log.trial, log.worker = loader, trial, arguments[10]
    plain = getattr(multiprocessing.queues._ForkingPickler, "plain", multiprocessing.queues._ForkingPickler)  # type: ignore[attr-defined]
    multiprocessing.queues._ForkingPickler = _TimedPickler(plain, EventKind.PICKLE)  # type: ignore[attr-defined]
    queue = _TimedQueue(arguments[2], log)
    plain_loop: Any = getattr(torch_worker, "_plain_worker_loop", torch_worker._worker_loop)
    plain_loop(*arguments[:2], queue, *arguments[3:])


def iterate_plainly(loader: Any, number: int, trial: int) -> Iterator[Any]:
    """The loader's own iterator, whose workers know their loader and trial."""
    plain = next(PLAIN_ITERS[each] for each in type(loader).__mro__ if each in PLAIN_ITERS)
    worker = sys.modules["torch.utils.data._utils.worker"]
    worker._worker_loop = functools.partial(timed_worker_loop, number, trial)  # type: ignore[attr-defined]
    try:
        if trial == 0:
            return plain(loader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return plain(loader)
    finally:
        worker._worker_loop = worker._plain_worker_loop  # type: ignore[attr-defined]


class _Timed:
    """What is timed; in everything else, as it is."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["plain"], name)


class _TimedDataset(_Timed):
    """A dataset whose samples are timed."""

    def __init__(self, dataset: Any, clock: _SampleClock) -> None:
        super().__init__(dataset)
        self._clock = clock

    def __getitem__(self, index: Any) -> Any:
        if not self._clock.is_on:
            return self.plain[index]
        begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
        sample = self.plain[index]
        self._clock.add(begin, cpu, index)
        return sample


class _TimedSamples(_Timed):
    """An iterator whose samples are timed."""

    def __init__(self, samples: Iterator[Any], clock: _SampleClock) -> None:
        super().__init__(samples)
        self._clock = clock

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
        sample = next(self.plain)
        if self._clock.is_on:
            self._clock.add(begin, cpu, None)
        return sample


class _SampleClock:
    """Whether to time samples, and what was timed."""

    def __init__(self) -> None:
        self.is_on = True
        self._num_fetches = 0

    def add(self, begin: int, cpu: int, index: Any) -> None:
        """A sample is ready."""
        end, used = time.perf_counter_ns(), time.thread_time_ns() - cpu
        number = index if isinstance(index, int) else -1
        recorder().add(EventKind.SAMPLE, begin, end, cpu_seconds=used / 1e9, value=number)

    def fetched(self, nanoseconds: int, num_samples: int) -> None:
        """Decide from this batch whether to time the samples of the next."""
        self._num_fetches += 1
        self.is_on = nanoseconds > _QUICK_NS * max(1, num_samples) or self._num_fetches % _EVERY == 0


class _TimedQueue(_Timed):
    """A queue of indices that records how long a worker waited for one."""

    def __init__(self, queue: Any, log: Recorder) -> None:
        super().__init__(queue)
        self._log = log

    def get(self, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter_ns()
        item = self.plain.get(*arguments, **options)
        if isinstance(item, tuple):
            self._log.sequence = item[0]
            self._log.add(EventKind.IDLE, begin, time.perf_counter_ns())
        return item


class _TimedPickler(_Timed):
    """What `multiprocessing.queues` packs and unpacks with, timed for (number, batch) pairs."""

    def __init__(self, plain: Any, kind: EventKind) -> None:
        super().__init__(plain)
        self._kind, self._num_unpacked = kind, 0

    def dumps(self, value: Any, *arguments: Any) -> Any:
        if self._kind is not EventKind.PICKLE:
            return self.plain.dumps(value, *arguments)
        begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
        packed = self.plain.dumps(value, *arguments)
        self._add(value, begin, len(packed), cpu_seconds=(time.thread_time_ns() - cpu) / 1e9)
        return packed

    def loads(self, packed: Any, *arguments: Any, **options: Any) -> Any:
        """Unpack. Only the clock is read: asking for processor time as well would keep the training thread waiting."""
        if self._kind is not EventKind.UNPICKLE or self._num_unpacked >= _MOST_UNPACKED:
            return self.plain.loads(packed, *arguments, **options)
        begin = time.perf_counter_ns()
        value = self.plain.loads(packed, *arguments, **options)
        self._num_unpacked += 1
        self._add(value, begin, len(packed), cpu_seconds=0.0)
        return value

    def _add(self, value: Any, begin: int, num_bytes: int, *, cpu_seconds: float) -> None:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int):
            end = time.perf_counter_ns()
            recorder().add(self._kind, begin, end, cpu_seconds=cpu_seconds, sequence=value[0], value=num_bytes)


def _timed_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.clock, self.meter = _SampleClock(), ThreadMeter()
        if hasattr(self, "dataset_iter"):
            self.dataset_iter = _TimedSamples(self.dataset_iter, self.clock)
        else:
            self.dataset = _TimedDataset(self.dataset, self.clock)
        self.collate_fn = _timed_collate(self.collate_fn)

    return init


def _timed_fetch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fetch(self: Any, index: Any) -> Any:
        meter: ThreadMeter = self.meter
        begin, before = time.perf_counter_ns(), meter.read()
        batch = original(self, index)
        end, now = time.perf_counter_ns(), meter.read()
        num_samples = len(index) if isinstance(index, list | tuple) else rows_of(batch)
        self.clock.fetched(end - begin, num_samples)
        log = recorder()
        used, faults = now.cpu_seconds - before.cpu_seconds, now.major_faults - before.major_faults
        log.add(EventKind.FETCH, begin, end, cpu_seconds=used, value=num_samples, extra=faults)
        delay = (now.delay_seconds or 0.0) - (before.delay_seconds or 0.0)
        if delay:
            log.add(EventKind.DELAY, begin, end, value=int(1e9 * delay))
        if log.worker >= 0 and end >= log.memory_due_at:
            log.look_at_memory()
        return batch

    return fetch


def _timed_collate(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original, updated=())
    def collate(samples: Any) -> Any:
        begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
        batch = original(samples)
        end, used = time.perf_counter_ns(), (time.thread_time_ns() - cpu) / 1e9
        recorder().add(EventKind.COLLATE, begin, end, cpu_seconds=used, value=bytes_of(batch))
        return batch

    return collate

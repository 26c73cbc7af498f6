"""What all engines have in common: the protocol, results, how they wait, and how a worker computes one item."""

import logging
import resource
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from penstock.loader._layout import Batch, BatchLayout
from penstock.loader._memory import Arena
from penstock.workers import Patience

WorkerKind = Literal["inline", "thread", "process"]
_READING_SECONDS = 0.005
_LOOK_AROUND_SECONDS = 1.0
_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """A finished item."""

    batches: list[Batch]
    """One, or those of a bundle."""
    num_bytes: int
    was_ready: bool
    """Whether it was there when it was requested."""
    worker: int
    produce_seconds: float
    cpu_seconds: float
    page_faults: int

    @property
    def batch(self) -> Batch:
        """The first, which usually is the only one."""
        return self.batches[0]


class Engine(Protocol):
    """Computes items by ticket. Submit some, then wait for any of them in any order."""

    @property
    def num_workers(self) -> int:
        """How many workers are wanted."""
        ...

    def submit(self, ticket: int, item: Any, worker: int | None = None) -> None:
        """Have an item computed, by any worker, or in an assigned engine by this one."""
        ...

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        """Wait for the result of a ticket; raises what its computation raised.

        Raises:
            WaitedTooLong: it was not there after this many seconds; the message says who is computing it.
        """
        ...

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """Wait for the first result, and return it with its ticket."""
        ...

    def is_done(self, ticket: int) -> bool:
        """Whether the result is there."""
        ...

    def forget(self) -> None:
        """Throw away everything submitted so far, without waiting for what is being computed."""
        ...

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on."""
        ...

    def num_started(self) -> int:
        """How many workers are computing; recently added ones may still be starting."""
        ...

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        ...

    def close(self) -> None:
        """Stop the workers, in bounded time. Idempotent."""
        ...


class WaitedTooLong(TimeoutError):
    """A result was not there in time. A separate class, because users' functions may raise `TimeoutError`, too."""


class Wait:
    """One wait for a result: bounded, and not silent.

    Args:
        seconds: How long it may take; None means for ever.
        describe: Says who is being waited for, and what they are doing.
    """

    def __init__(self, seconds: float | None, describe: Callable[[], str]) -> None:
        self._limit, self._describe = seconds, describe
        self._patience = Patience()

    def next_look(self) -> float:
        """Seconds to wait before looking around again.

        Raises:
            WaitedTooLong: the time is up.
        """
        if self._patience.is_report_due():
            _log.warning("No batch for %.0f s: %s", self._patience.seconds, self._describe())
        if self._limit is None:
            return _LOOK_AROUND_SECONDS
        left = self._limit - self._patience.seconds
        if left <= 0:
            raise WaitedTooLong(self._describe())
        return min(left, _LOOK_AROUND_SECONDS)


class Work(Protocol):
    """Computes items, in any worker, in any order; small enough to be sent to workers."""

    @property
    def warm_up(self) -> Callable[[], None]:
        """What a fork server does once for all workers: a function in a module, or a `WarmUp`."""
        ...

    def compute(self, item: Any, arena: Arena) -> Batch:
        """Compute one item; arrays taken from `arena` are handed over without a copy."""
        ...

    def announce(self, item: Any) -> None:
        """Tell the kernel what an item will read."""
        ...


class Computed(NamedTuple):
    """Where a batch lies, and what it took to compute it."""

    layout: BatchLayout
    produce_seconds: float
    cpu_seconds: float
    page_faults: int


class ItemRunner:
    """Computes items in one thread, and says what they cost.

    The kernel is asked what the thread used every few milliseconds, not for every batch: asking takes
    longer than some batches. In between the cost is reported as 0, and added to a later batch.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._last_reading = time.perf_counter()
        self._cpu_seconds, self._page_faults = _used()

    def compute(self, item: Any, arena: Arena) -> Computed:
        """Compute an item into a slot."""
        begin = time.perf_counter()
        arena.begin()
        layout = arena.lay_out(self._work.compute(item, arena))
        end = time.perf_counter()
        if end - self._last_reading < _READING_SECONDS:
            return Computed(layout, end - begin, 0.0, 0)
        before, faults_before = self._cpu_seconds, self._page_faults
        self._last_reading, (self._cpu_seconds, self._page_faults) = end, _used()
        return Computed(layout, end - begin, self._cpu_seconds - before, self._page_faults - faults_before)


def _used() -> tuple[float, int]:
    """(CPU seconds, major page faults) of this thread."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime, usage.ru_majflt

"""Any loader, watched: it gives what the loader gives, and remembers what each step took.

                         ask            batch                    ask
    training thread  ----|--- wait -----|-------- step ----------|--- wait …
                         |              |                        |
    asked each time:     batches ready                           clocks, faults -> one row of `StepHistory`

A step costs 10 to 40 µs (`benchmarks/bench_watch.py`); what processes, machine and accelerators use is read by a
thread, four times a second. A loop that is left early does not count its last step, since nothing says when it ended.

A *gauge* asks the loader which batches are ready, and how long it copied. Torch's iterator has it in attributes that
are not public; with a version that has others, nothing is known.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from penstock.filesystem import put_in_place
from penstock.machine import Sampler, ThreadMeter, ThreadUsage, UsageHistory, describe_machine
from penstock.report import Page, render_html, to_perfetto
from penstock.watching._page import watch_page
from penstock.watching._summary import Log, Scalars, StepHistory, StepRow, WatchSummary, summarise

Gauge = Callable[[], tuple[float, float]]
"""(batches ready now, seconds of copying so far); NaN for what the loader does not say."""
_SECONDS_BETWEEN_READINGS = 0.005
_MOST_READING_SHARE = 0.002
"""Share of the time that the training thread may spend reading what it has used: 40 µs each time if caches are cold."""
_SECONDS_BETWEEN_LOOKS = 0.05
"""At processes: their clocks tick every 10 ms, so rates over less are noise."""

AnyBatch = TypeVar("AnyBatch")


def watch(
    loader: Iterable[AnyBatch],
    *,
    log: Log | None = None,
    log_every: int = 50,
    sample_seconds: float = 0.25,
    name: str = "",
) -> Watch[AnyBatch]:
    """Measure a training loop: `for batch in penstock.watch(loader)`.

    Args:
        loader: Anything that can be iterated over: torch's loader, Penstock's, any other. Everything else that it
            offers (`len`, `state_dict`, `set_epoch`, …) is available on the returned object.
        log: Called with a dictionary of scalars and the number of steps, in the training thread.
        log_every: Steps between two calls of `log`.
        sample_seconds: Time between two looks at processes, machine and accelerators; 0 never looks.
        name: What reports call this run.

    >>> watched = watch([1, 2, 3], sample_seconds=0)
    >>> [batch for batch in watched]
    [1, 2, 3]
    >>> watched.summary().num_steps
    3
    """
    return Watch(loader, log=log, log_every=log_every, sample_seconds=sample_seconds, name=name)


class Watch(Generic[AnyBatch]):
    """A loader, and what was measured of the loops over it. Made by `watch`.

    As a context manager it is closed at the end of the block.
    """

    _OWN = frozenset({"_loader", "_name", "_history", "_starts", "_scalars", "_sampler", "_current", "_lock"})

    def __init__(
        self, loader: Iterable[AnyBatch], *, log: Log | None, log_every: int, sample_seconds: float, name: str
    ) -> None:
        if isinstance(loader, Watch):
            raise ValueError("This loader is watched already; use the value of the first `watch`.")
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise TypeError(f"watch() needs something to iterate over, not {type(loader).__name__}.")
        if log_every < 1 or sample_seconds < 0:
            raise ValueError(f"log_every={log_every} must be 1 or more, sample_seconds={sample_seconds} 0 or more.")
        self._loader: Any = loader
        self._name = name or type(loader).__name__
        self._history = StepHistory()
        self._starts: list[float] = []
        """Seconds that `iter(loader)` took, for each loop."""
        self._sampler = Sampler(interval_seconds=sample_seconds) if sample_seconds else None
        self._scalars = None if log is None else Scalars(log, log_every, self._sampler)
        self._current: weakref.ref[WatchedLoop[AnyBatch]] | None = None
        self._lock = threading.Lock()
        if self._sampler is not None:
            weakref.finalize(self, self._sampler.close)

    def __iter__(self) -> WatchedLoop[AnyBatch]:
        """A new loop over the loader."""
        if self._sampler is not None and not self._starts:
            self._sampler.start()
        begin = time.perf_counter()
        batches = iter(self._loader)
        self._starts.append(time.perf_counter() - begin)
        loop = WatchedLoop(self, batches, gauge_of(self._loader, batches))
        self._current = weakref.ref(loop)
        return loop

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, key: Any) -> Any:
        return self._loader[key]

    def __getattr__(self, name: str) -> Any:
        """Whatever the loader has."""
        if name in Watch._OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Watch._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __repr__(self) -> str:
        return f"watch({self._loader!r})"

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """Count what happens inside as transfer: `with watched.transfer(): batch = batch.to(device)`.

        It is the time of the training thread; a copy that continues in the background is not in it.
        """
        begin = time.perf_counter()
        try:
            yield
        finally:
            loop = None if self._current is None else self._current()
            if loop is not None:
                loop.add_transfer(time.perf_counter() - begin)

    def summary(self) -> WatchSummary:
        """What was measured so far; printed, it is words."""
        return self._summarise()[0]

    def to_html(self, path: str | Path) -> Path:
        """Write a report: one file, for any browser. Returns where."""
        put_in_place(Path(path), render_html(self.page()))
        return Path(path)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace of the latest steps, for ui.perfetto.dev. Returns where."""
        put_in_place(Path(path), to_perfetto(self.page()))
        return Path(path)

    def page(self) -> Page:
        """The report as data, for `penstock.report` to draw."""
        summary, usage = self._summarise()
        with self._lock:
            return watch_page(summary, self._history, usage)

    def close(self) -> None:
        """Stop looking at processes, machine and accelerators, and close the loader if it can be closed.

        What was measured stays.
        """
        if self._sampler is not None:
            self._sampler.close()
        close = getattr(self._loader, "close", None)
        if callable(close):
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def record(self, row: StepRow) -> None:
        """Keep a step that has ended."""
        with self._lock:
            self._history.add(row)
            num_steps = self._history.num_added
        if self._scalars is not None:
            self._scalars.add(row, num_steps)

    def _summarise(self) -> tuple[WatchSummary, UsageHistory | None]:
        if self._sampler is not None:
            latest = self._sampler.history(last=1).time_seconds
            if not len(latest) or time.perf_counter() - latest[0] > _SECONDS_BETWEEN_LOOKS:
                self._sampler.sample(with_pss=True)
        usage = None if self._sampler is None else self._sampler.history()
        with self._lock:
            return summarise(self._name, self._history, tuple(self._starts), usage, describe_machine()), usage


class WatchedLoop(Generic[AnyBatch]):
    """One loop over a watched loader. What else the loader's own iterator offers is reached through it."""

    _usage: ThreadUsage
    _read_again_at: float

    def __init__(self, watched: Watch[AnyBatch], batches: Iterator[AnyBatch], gauge: Gauge | None) -> None:
        self._watched, self._batches, self._gauge = watched, batches, gauge
        self._open_meter()
        self._step: tuple[float, float, float] | None = None
        """(asked at, batch at, queued) of the step that runs."""
        self._copied = math.nan
        """Seconds of copying that the loader had reported when it was last asked."""
        self._transfer = math.nan

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnyBatch:
        now = time.perf_counter()
        queued, copied = (math.nan, math.nan) if self._gauge is None else self._gauge()
        if self._step is not None:
            if copied == copied:  # reported: not NaN
                self.add_transfer(copied - self._copied)
            self._complete(self._step, now)
        self._copied = copied
        asked = time.perf_counter()
        batch = next(self._batches)
        self._step = (asked, time.perf_counter(), queued)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in vars(self):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def add_transfer(self, seconds: float) -> None:
        """Count part of the step that runs as transfer."""
        self._transfer = seconds if math.isnan(self._transfer) else self._transfer + seconds

    def _complete(self, step: tuple[float, float, float], now: float) -> None:
        asked, got, queued = step
        self._step = None
        used = self._used_since(now)
        self._watched.record(StepRow(asked, got - asked, now - got, self._transfer, *used, queued))
        self._transfer = math.nan

    def _used_since(self, now: float) -> tuple[float, float, float, float]:
        """Processor time, delay and faults of this thread since they were last read; nothing, if that was just now.

        Reading lets go of the interpreter's lock, for which torch's own threads are waiting in a busy loop.
        """
        if threading.get_ident() != self._thread:  # handed from one thread to another
            self._open_meter()
        if now < self._read_again_at:
            return 0.0, math.nan if self._usage.delay_seconds is None else 0.0, 0.0, 0.0
        begin = time.perf_counter()
        before, after = self._usage, self._meter.read()
        pause = (time.perf_counter() - begin) / _MOST_READING_SHARE
        self._usage, self._read_again_at = after, now + max(_SECONDS_BETWEEN_READINGS, pause)
        is_known = before.delay_seconds is not None and after.delay_seconds is not None
        return (
            after.cpu_seconds - before.cpu_seconds,
            (after.delay_seconds or 0.0) - (before.delay_seconds or 0.0) if is_known else math.nan,
            after.minor_faults - before.minor_faults,
            after.major_faults - before.major_faults,
        )

    def _open_meter(self) -> None:
        self._thread = threading.get_ident()
        self._meter = ThreadMeter()
        weakref.finalize(self, self._meter.close)
        self._usage = self._meter.read()
        self._read_again_at = 0.0


def gauge_of(loader: Any, batches: Any) -> Gauge | None:
    """How to ask this loader, whose loop is `batches`; None when there is nothing to ask."""
    queue, held = getattr(batches, "_data_queue", None), getattr(batches, "_task_info", None)

    def ask_penstock() -> tuple[float, float]:
        statistics = loader.stats()
        return statistics.num_queued, statistics.copy_seconds

    def ask_torch() -> tuple[float, float]:
        """In the queue, and out of order beside it."""
        try:
            return queue.qsize() + sum(len(info) == 2 for info in held.values()), math.nan  # type: ignore[union-attr]
        except (NotImplementedError, OSError, TypeError):  # no qsize on this system; a queue that is closed
            return math.nan, math.nan

    if type(loader).__module__.startswith("penstock.") and callable(getattr(loader, "stats", None)):
        return ask_penstock
    return ask_torch if callable(getattr(queue, "qsize", None)) and isinstance(held, dict) else None

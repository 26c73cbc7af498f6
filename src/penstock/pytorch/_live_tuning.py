"""Measures the training loop for `tuning.OnlineTuner`, and applies what it decides. All in the training thread.

    step  step  step  …  step │ change │ step … step │ step  step …
    └──────── stretch ────────┘        └ settling ───┘ └ stretch …

A stretch lasts ten steps or a tenth of a second, whichever is longer; how uneven its steps are says how far its rate
can be trusted. After a change, what was computed with the old setting is handed out first, and workers start: these
steps are not counted. A step costs about a microsecond, a stretch a few readings of clocks.
"""

import logging
import math
import os
import threading
import time
import weakref
from typing import Any, NamedTuple, Protocol

from penstock.loader import LoaderStatistics
from penstock.machine import ThreadMeter, available_memory, process_tree, usable_cpus
from penstock.pytorch._online import Bounds, Decision, OnlineTuner, Setting, Stretch

_STEPS, _SECONDS = 10, 0.1
_MOST_START_SECONDS = 60.0
"""How long added workers may take to start before the loop is measured as it is."""
_MOST_WORKERS_PER_CPU, _MOST_WORKERS, _MOST_DEPTH = 4, 32, 16
_QUEUE_SHARE, _WORKERS_SHARE = 0.1, 0.25
"""Of the memory that is free: for batches computed ahead, and for worker processes."""
_WORKER_BYTES = 100e6
"""Assumed for a worker process until one can be measured."""
_MOST_DECISIONS = 100

_log = logging.getLogger(__name__)


class _LoopTotals(NamedTuple):
    """Totals at one moment."""

    at: float
    num_batches: int
    wait: float
    produce: float
    cpu: float
    delay: float


class TunedRun(Protocol):
    """What is tuned: a run that has workers."""

    def apply(self, setting: Setting) -> int:
        """Go on with another setting; returns how many batches are ahead of the loop then."""
        ...

    def has_started(self) -> bool:
        """Whether all workers have started."""
        ...


class LiveTuning:
    """Watches one run, and changes it.

    Args:
        tuned: The run, which keeps this, and is not kept by it: a loader that is forgotten must end at once, not with
            the next garbage collection.
        statistics: The run's, which are read, and which list the decisions.
        kind: What computes: "thread" or "process".
        start: The setting from which on the run is tuned.
        how: What may be changed, as `OnlineTuner` takes it.
    """

    def __init__(self, tuned: TunedRun, statistics: LoaderStatistics, kind: str, start: Setting, **how: Any) -> None:
        self._find_tuned = weakref.ref(tuned)
        self._tuner = OnlineTuner(start, usable_cpus(), **how)
        self._statistics, self._kind = statistics, kind
        self._meter: ThreadMeter | None = None
        self._thread = 0
        self._begun: _LoopTotals | None = None
        self._num_steps, self._settle_steps, self._settled_at = 0, _STEPS, 0.0
        self._awaits_workers, self._num_ahead = True, 0
        self._longest_step, self._last_step_seconds, self._last_seconds, self._squares = 0.0, 0.0, 0.0, 0.0

    def begin(self, num_ahead: int) -> None:
        """A loop begins: its first steps fill the queue, and time between loops does not count."""
        self._num_ahead = num_ahead
        self._settle(num_ahead)

    def step(self) -> None:
        """A batch is about to be handed over."""
        self._num_steps += 1
        statistics = self._statistics
        self._longest_step = max(self._longest_step, statistics.step_seconds - self._last_step_seconds)
        self._last_step_seconds = statistics.step_seconds
        seconds = statistics.step_seconds + statistics.wait_seconds
        self._squares += (seconds - self._last_seconds) ** 2
        self._last_seconds = seconds
        if self._awaits_workers:
            self._look_for_workers()
            return
        if self._num_steps < self._settle_steps:
            return
        now = time.perf_counter()
        if self._begun is None:
            self._begin_stretch(now)
        elif now - self._begun.at >= _SECONDS:
            self._end_stretch(self._begun, now)

    def close(self) -> None:
        """Close the kernel's file."""
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()

    def _apply(self, setting: Setting) -> int:
        tuned = self._find_tuned()
        return 0 if tuned is None else tuned.apply(setting)

    def _has_started(self) -> bool:
        tuned = self._find_tuned()
        return tuned is None or tuned.has_started()

    def _settle(self, num_steps: int) -> None:
        """Count nothing until workers have started, and then until what was computed before is used up."""
        self._begun, self._num_steps, self._awaits_workers = None, 0, not self._has_started()
        self._settle_steps = max(2, num_steps)
        self._settled_at = time.perf_counter() + _MOST_START_SECONDS

    def _look_for_workers(self) -> None:
        if self._has_started() or time.perf_counter() > self._settled_at:
            self._awaits_workers, self._num_steps = False, 0

    def _begin_stretch(self, now: float) -> None:
        self._begun, self._num_steps, self._settle_steps = self._read(now), 0, _STEPS
        self._longest_step, self._squares = 0.0, 0.0

    def _end_stretch(self, begun: _LoopTotals, now: float) -> None:
        decision = self._tuner.observe(self._stretch(begun, self._read(now)), self._bounds)
        if decision is None:
            self._begin_stretch(now)
            return
        self._record(decision)
        num_before = self._num_ahead
        self._num_ahead = self._apply(decision.setting)
        self._settle(max(num_before, self._num_ahead) + 1)

    def _stretch(self, begun: _LoopTotals, now: _LoopTotals) -> Stretch:
        """What happened between two readings, without a step that took most of the time, such as a checkpoint."""
        seconds, num_steps = now.at - begun.at, now.num_batches - begun.num_batches
        wait, squares = now.wait - begun.wait, self._squares
        if self._longest_step > (seconds - wait) / 2:
            seconds, num_steps, squares = seconds - self._longest_step, num_steps - 1, squares - self._longest_step**2
        num_steps, seconds = max(1, num_steps), max(seconds, 1e-9)
        variance = max(0.0, squares / num_steps - (seconds / num_steps) ** 2)
        return Stretch(
            num_steps,
            seconds,
            wait,
            now.produce - begun.produce,
            (now.cpu - begun.cpu) / max(now.at - begun.at, 1e-9) / usable_cpus(),
            (now.delay - begun.delay) / max(now.at - begun.at, 1e-9),
            math.sqrt(variance * num_steps) / seconds,
        )

    def _read(self, now: float) -> _LoopTotals:
        if self._meter is None or threading.get_ident() != self._thread:
            self.close()
            self._meter, self._thread = ThreadMeter(), threading.get_ident()
        statistics = self._statistics
        produce = statistics.produce_seconds
        in_workers = statistics.worker_cpu_seconds if self._kind == "process" and self._tuner.setting.num_workers else 0
        delay = self._meter.read().delay_seconds or 0.0
        return _LoopTotals(
            now, statistics.num_batches, statistics.wait_seconds, produce, time.process_time() + in_workers, delay
        )

    def _bounds(self) -> Bounds:
        workers, depth = max(1, self._tuner.setting.num_workers), self._tuner.setting.depth
        most_workers = min(_MOST_WORKERS, _MOST_WORKERS_PER_CPU * usable_cpus())
        free = available_memory()
        if free is None:
            return Bounds(most_workers, _MOST_DEPTH)
        if self._kind == "process":
            most_workers = min(most_workers, workers + int(_WORKERS_SHARE * free / _worker_bytes()))
        batch_bytes = self._statistics.num_bytes / max(1, self._statistics.num_batches)
        item_bytes = batch_bytes * max(1.0, self._num_ahead / (workers * depth))  # an item may be a bundle of batches
        return Bounds(most_workers, min(_MOST_DEPTH, int(_QUEUE_SHARE * free / max(1.0, item_bytes * workers))))

    def _record(self, decision: Decision) -> None:
        statistics = self._statistics
        line = f"step {statistics.num_batches:,}: {decision.reason}"
        _log.info("%s", line)
        statistics.decisions = (*statistics.decisions, line)[-_MOST_DECISIONS:]


def _worker_bytes() -> float:
    """Memory of a worker process, pages that it shares included."""
    children = process_tree(os.getpid())[1:]
    return max([_WORKER_BYTES, *(float(child.rss_bytes) for child in children)])

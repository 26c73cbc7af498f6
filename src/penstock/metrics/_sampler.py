"""How much a process and its descendants use over time.

    Sampler(pid).sample()     once, now: for a loop of your own, inside the process or beside it
    with Sampler(pid): …      a thread samples every `interval_seconds`

Memory is bounded however long it runs: when it is full, every second reading is dropped and the interval doubles.
Totals include processes that have ended, so that they never decrease. A reading costs about 0.1 ms, plus 10 ms per
GB of memory if it also asks which pages are shared, which happens in one of `pss_every` readings, and never for
more than 0.2 % of the time.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from penstock.metrics._accelerators import Accelerators, AcceleratorUsage
from penstock.metrics._machine import read_machine
from penstock.metrics._processes import ProcessUsage, process_tree

_MOST_READINGS = 2048
_MOST_ROWS = 40_000
_MOST_PSS_SHARE = 0.002

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageHistory:
    """Columns of equal length, one row per reading. NaN: not measured. `cpu`, `read`, faults and delay are totals."""

    time_seconds: Floats
    """On the clock of `time.perf_counter`, which all processes of a machine share."""
    root_cpu_seconds: Floats
    """CPU time of the process itself."""
    children_cpu_seconds: Floats
    """CPU time of all its descendants."""
    machine_busy_seconds: Floats
    """CPU time of everything that runs on the machine."""
    rss_bytes: Floats
    pss_bytes: Floats
    read_bytes: Floats
    minor_faults: Floats
    major_faults: Floats
    root_delay_seconds: Floats
    num_processes: Floats
    accelerator_utilization: Floats
    """Mean over devices."""
    accelerator_memory_bytes: Floats
    """Sum over devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHistory:
    """One process at each reading in which it was alive."""

    pid: int
    parent: int
    name: str
    time_seconds: Floats
    cpu_seconds: Floats
    rss_bytes: Floats
    pss_bytes: Floats
    read_bytes: Floats
    minor_faults: Floats
    major_faults: Floats
    delay_seconds: Floats


class _Reading(NamedTuple):
    totals: tuple[float, ...]
    """In the order of the fields of `UsageHistory`."""
    processes: tuple[ProcessUsage, ...]


class Sampler:
    """Records what a process and its descendants use, by default this one.

    >>> with Sampler(interval_seconds=0.01) as sampler:
    ...     _ = sampler.sample()
    >>> len(sampler.history().time_seconds) >= 1
    True
    """

    def __init__(self, pid: int | None = None, *, interval_seconds: float = 0.25, pss_every: int = 20) -> None:
        if interval_seconds <= 0 or pss_every < 0:
            raise ValueError(f"interval_seconds={interval_seconds} must be positive, pss_every={pss_every} 0 or more.")
        self.pid = os.getpid() if pid is None else pid
        self.interval_seconds = interval_seconds
        self._pss_every = pss_every
        self._accelerators = Accelerators()
        self._readings: list[_Reading] = []
        self._last: dict[tuple[int, int], ProcessUsage] = {}
        self._num_taken = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self, *, with_pss: bool = False) -> bool:
        """Read once; False if the process is gone, or cannot be read."""
        with self._lock:
            self._num_taken += 1
            with_pss = with_pss or (self._pss_every > 0 and self._num_taken % self._pss_every == 0)
            begin = time.perf_counter()
            processes = process_tree(self.pid, with_pss=with_pss)
            if not processes:
                return False
            if with_pss:
                self._spare_pss(time.perf_counter() - begin)
            self._last.update(((each.pid, each.started_ticks), each) for each in processes)
            self._readings.append(_Reading(self._totals(processes), processes))
            self._stay_bounded()
            return True

    def history(self, last: int | None = None) -> UsageHistory:
        """All processes together; with `last`, only that many of the latest readings."""
        with self._lock:
            rows = [reading.totals for reading in (self._readings if last is None else self._readings[-last:])]
        names = UsageHistory.__dataclass_fields__
        table = np.array(rows, np.float64).reshape(len(rows), len(names))
        return UsageHistory(**dict(zip(names, np.ascontiguousarray(table.T), strict=True)))

    def processes(self) -> tuple[ProcessHistory, ...]:
        """Each process, in the order in which they were first seen."""
        with self._lock:
            readings = list(self._readings)
        seen: dict[tuple[int, int], list[tuple[float, ProcessUsage]]] = {}
        for reading in readings:
            for usage in reading.processes:
                seen.setdefault((usage.pid, usage.started_ticks), []).append((reading.totals[0], usage))
        return tuple(_process_history(rows) for rows in seen.values())

    def start(self) -> None:
        """Sample in a thread until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-sampler", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread. The history stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        self._accelerators.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        while self.sample() and not self._stop.wait(self.interval_seconds):
            pass

    def _totals(self, processes: tuple[ProcessUsage, ...]) -> tuple[float, ...]:
        root, ever, machine = processes[0], self._last.values(), read_machine()
        accelerators = self._accelerators.read()
        return (
            time.perf_counter(),
            root.cpu_seconds,
            sum(each.cpu_seconds for each in ever if each.pid != self.pid),
            _number(None if machine is None else machine.busy_seconds),
            sum(each.rss_bytes for each in processes),
            _sum([each.pss_bytes for each in processes]),
            _sum([each.read_bytes for each in ever]),
            sum(each.minor_faults for each in ever),
            sum(each.major_faults for each in ever),
            _number(root.delay_seconds),
            len(processes),
            _mean_utilization(accelerators),
            _sum([each.memory_used_bytes for each in accelerators]),
        )

    def _spare_pss(self, seconds: float) -> None:
        """After walking pages took this long, do it rarely enough to bound its share of the time."""
        if self._pss_every:
            self._pss_every = max(self._pss_every, math.ceil(seconds / (_MOST_PSS_SHARE * self.interval_seconds)))

    def _stay_bounded(self) -> None:
        rows = sum(len(reading.processes) for reading in self._readings)
        if len(self._readings) >= _MOST_READINGS or (rows >= _MOST_ROWS and len(self._readings) > 2):
            del self._readings[1::2]
            self.interval_seconds *= 2


def _process_history(rows: list[tuple[float, ProcessUsage]]) -> ProcessHistory:
    usages = [usage for _, usage in rows]

    def column(values: list[float | None] | list[int | None] | list[float] | list[int]) -> Floats:
        return np.array([_number(value) for value in values], np.float64)

    return ProcessHistory(
        pid=usages[-1].pid,
        parent=usages[-1].parent,
        name=usages[-1].name,
        time_seconds=column([moment for moment, _ in rows]),
        cpu_seconds=column([usage.cpu_seconds for usage in usages]),
        rss_bytes=column([usage.rss_bytes for usage in usages]),
        pss_bytes=column([usage.pss_bytes for usage in usages]),
        read_bytes=column([usage.read_bytes for usage in usages]),
        minor_faults=column([usage.minor_faults for usage in usages]),
        major_faults=column([usage.major_faults for usage in usages]),
        delay_seconds=column([usage.delay_seconds for usage in usages]),
    )


def _mean_utilization(accelerators: tuple[AcceleratorUsage, ...]) -> float:
    known = [each.utilization for each in accelerators if each.utilization is not None]
    return sum(known) / len(known) if known else float("nan")


def _sum(values: list[int | None]) -> float:
    """Sum of the known values; NaN if there are none."""
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else float("nan")


def _number(value: float | None) -> float:
    return float("nan") if value is None else value

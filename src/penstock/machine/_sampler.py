"""How much a process and its descendants use over time.

    Sampler(pid).sample()     once, now: for a loop of your own, inside the process or beside it
    with Sampler(pid): …      a thread samples every `interval_seconds`

Memory is bounded however long it runs: when it is full, every second reading is dropped and the interval doubles.
Totals include processes that have ended, so that they never decrease. A reading costs about 0.1 ms, plus 10 ms per
GB of memory if it also asks which pages are shared, which happens in one of `pss_every` readings, and never for
more than 0.2 % of the time.
"""

import math
import os
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from penstock.machine._limits import machine_busy_seconds
from penstock.machine._usage import Accelerators, ProcessUsage, process_tree

_MOST_READINGS = 2048
_MOST_PSS_SHARE = 0.002

Floats = NDArray[np.float64]


class UsageRates(NamedTuple):
    """What was used per second of each interval. NaN: not measured."""

    root_cores: Floats
    """Cores that the process itself used."""
    children_cores: Floats
    other_cores: Floats
    """Cores that everything else on the machine used."""
    read_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageHistory:
    """Columns of equal length, one row per reading. NaN: not measured. `cpu`, `busy` and `read` are totals."""

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
    num_processes: Floats
    accelerator_utilization: Floats
    """Mean over devices."""
    accelerator_memory_bytes: Floats
    """Sum over devices."""

    def rates(self, *, overall: bool = False) -> UsageRates:
        """Of each interval between two readings; overall, of the one from the first to the last."""
        rows = slice(None, None, max(1, len(self.time_seconds) - 1) if overall else 1)
        totals = (self.root_cpu_seconds, self.children_cpu_seconds, self.machine_busy_seconds, self.read_bytes)
        seconds = np.maximum(np.diff(self.time_seconds[rows]), 1e-9)
        root, children, machine, read = (np.diff(column[rows]) / seconds for column in totals)
        return UsageRates(root, children, np.maximum(0, machine - root - children), read)


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
        self._readings: list[tuple[float, ...]] = []
        """In the order of the fields of `UsageHistory`."""
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
            if (
                with_pss and self._pss_every
            ):  # walking pages took this long: rarely enough to bound its share of the time
                rarely = (time.perf_counter() - begin) / (_MOST_PSS_SHARE * self.interval_seconds)
                self._pss_every = max(self._pss_every, math.ceil(rarely))
            self._last.update(((each.pid, each.started_ticks), each) for each in processes)
            self._readings.append(self._totals(processes))
            if len(self._readings) >= _MOST_READINGS:
                del self._readings[1::2]
                self.interval_seconds *= 2
            return True

    def history(self, last: int | None = None) -> UsageHistory:
        """All processes together; with `last`, only that many of the latest readings."""
        with self._lock:
            rows = self._readings[0 if last is None else -last :]
        names = UsageHistory.__dataclass_fields__
        table = np.array(rows, np.float64).reshape(len(rows), len(names))
        return UsageHistory(**dict(zip(names, np.ascontiguousarray(table.T), strict=True)))

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
        root, ever, busy = processes[0], self._last.values(), machine_busy_seconds()
        accelerators = self._accelerators.read()
        return (
            time.perf_counter(),
            root.cpu_seconds,
            sum(each.cpu_seconds for each in ever if each.pid != self.pid),
            math.nan if busy is None else busy,
            sum(each.rss_bytes for each in processes),
            _sum([each.pss_bytes for each in processes]),
            _sum([each.read_bytes for each in ever]),
            len(processes),
            _mean([each.utilization for each in accelerators]),
            _sum([each.memory_used_bytes for each in accelerators]),
        )


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _sum(values: list[int | None]) -> float:
    """Sum of the known values; NaN if there are none."""
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else math.nan

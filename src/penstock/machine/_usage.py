"""What processes, the calling thread and accelerators use, as the kernel and NVML say: now, and over time.

What a container may not read, or a kernel does not offer, is None. One read of `stat` gives most of what a process has
used. Accelerators are asked through NVML (`nvidia-ml-py`), if it is installed and finds a device: it answers in 10 to
100 µs, and its utilisation is a mean over the last 0.2 to 1 s, so read it a few times a second, not at every step.

    Sampler(pid).sample()     once, now: for a loop of your own, inside the process or beside it
    with Sampler(pid): …      a thread samples every `interval_seconds`

A sampler's memory is bounded however long it runs: when it is full, every second reading is dropped and the interval
doubles. Totals include processes that have ended, so that they never decrease. A reading costs about 0.1 ms, plus 10 ms
per GB of memory if it also asks which pages are shared, which happens in one of `pss_every` readings, and never for
more than 0.2 % of the time.
"""

import contextlib
import importlib
import math
import os
import resource
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

_PROC = "/proc"
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OF_THIS_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class ProcessUsage(NamedTuple):
    """Totals since a process began, and the memory it has now."""

    pid: int
    parent: int
    started_ticks: int
    """When it started, since boot: together with the pid, which is reused, it identifies one process."""
    cpu_seconds: float
    """In ticks of 10 ms."""
    rss_bytes: int
    """Pages in memory, each counted in full in every process that shares it."""
    pss_bytes: int | None
    """Pages in memory, each divided by the number of processes that share it; None if not requested."""
    read_bytes: int | None
    """Bytes read from storage for it; None if that may not be read."""


def read_process(pid: int, *, with_pss: bool = False) -> ProcessUsage | None:
    """Usage of one process, or None if it has ended or there is no `/proc`.

    `with_pss` makes the kernel walk its pages: 10 ms for each GB it holds.
    """
    try:
        stat = _contents(f"{_PROC}/{pid}/stat")
        fields = stat[stat.rindex(b")") + 2 :].split()  # behind its name, which may hold anything
        return ProcessUsage(
            pid=pid,
            parent=int(fields[1]),
            started_ticks=int(fields[19]),
            cpu_seconds=(int(fields[11]) + int(fields[12])) * _TICK_SECONDS,
            rss_bytes=int(fields[21]) * _PAGE_BYTES,
            pss_bytes=_number(pid, "smaps_rollup", b"Pss:", scale=1024) if with_pss else None,
            read_bytes=_number(pid, "io", b"read_bytes:"),
        )
    except (OSError, ValueError, IndexError):
        return None


def process_tree(root: int, *, with_pss: bool = False) -> tuple[ProcessUsage, ...]:
    """Usage of a process and of all its descendants, parents first; empty if it is gone."""
    found: list[ProcessUsage] = []
    children: dict[int, list[int]] | None = None
    waiting = [root]
    while waiting:
        pid = waiting.pop(0)
        usage = read_process(pid, with_pss=with_pss)
        if usage is None:
            continue
        found.append(usage)
        own = _children_of(pid)
        if own is None:
            children = _all_children() if children is None else children
            own = children[pid]
        waiting += own
    return tuple(found)


def _children_of(pid: int) -> list[int] | None:
    """Children of each thread, if the kernel lists them; otherwise None."""
    try:
        threads = os.listdir(f"{_PROC}/{pid}/task")
    except OSError:
        return []
    children: list[int] = []
    for thread in threads:
        try:
            children += map(int, _contents(f"{_PROC}/{pid}/task/{thread}/children").split())
        except FileNotFoundError:
            if os.path.exists(f"{_PROC}/{pid}/task/{thread}"):
                return None
        except OSError:
            continue
    return children


def _all_children() -> dict[int, list[int]]:
    """Children of every process, by its pid, from the parent that each process names."""
    children = defaultdict(list)
    with contextlib.suppress(OSError):
        for entry in os.listdir(_PROC):
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = _contents(f"{_PROC}/{int(entry)}/stat")
                children[int(stat[stat.rindex(b")") + 2 :].split()[1])].append(int(entry))
    return children


def _number(pid: int, file: str, label: bytes, scale: int = 1) -> int | None:
    """The number after a label at the beginning of a line."""
    try:
        lines = _contents(f"{_PROC}/{pid}/{file}").splitlines()
        return next(scale * int(line.split()[1]) for line in lines if line.startswith(label))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _contents(path: str) -> bytes:
    """Contents of one of the kernel's files, in half the time of `open`: a reading takes three of them per process."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


def machine_busy_seconds() -> float | None:
    """CPU time of all that has run on this machine since it started, over all processors; None without `/proc`."""
    try:
        first = _contents(f"{_PROC}/stat").split(b"\n", 1)[0].split()[1:]
        user, nice, system, _idle, _disk, interrupt, soft_interrupt = (int(field) for field in first[:7])
    except (OSError, ValueError):
        return None
    return (user + nice + system + interrupt + soft_interrupt) * _TICK_SECONDS


class ThreadUsage(NamedTuple):
    """Totals since the thread began; subtract two readings."""

    cpu_seconds: float
    delay_seconds: float | None
    """Time that it was ready to run, but no core was free (run-queue delay); None if the kernel does not say."""
    minor_faults: int
    """Pages that were already in memory, or were zero-filled."""
    major_faults: int
    """Pages that it had to wait for from disk."""


class ThreadMeter:
    """Reads the usage of the thread that made it, in 2 µs, or 10 if caches are cold; only that thread may read.

    >>> with ThreadMeter() as meter:
    ...     before = meter.read()
    ...     meter.read().cpu_seconds >= before.cpu_seconds
    True
    """

    def __init__(self) -> None:
        self._schedstat = _open_schedstat()

    def read(self) -> ThreadUsage:
        usage = resource.getrusage(_OF_THIS_THREAD)
        return ThreadUsage(time.thread_time(), self.read_delay(), usage.ru_minflt, usage.ru_majflt)

    def read_delay(self) -> float | None:
        """Only `delay_seconds`, now."""
        if self._schedstat is None:
            return None
        try:
            return int(os.pread(self._schedstat, 96, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the kernel was built, or booted, without these figures
            return None

    def close(self) -> None:
        """Close the kernel's file."""
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open_schedstat() -> int | None:
    """The open file describes the thread that opened it, whichever thread reads it."""
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


class AcceleratorUsage(NamedTuple):
    """One device, now."""

    number: int
    name: str
    utilization: float | None
    """Share of the time in which it computed at all, 0 to 1; not how much of the device did."""
    memory_used_bytes: int | None
    memory_bytes: int | None


class Accelerators:
    """The devices of this machine: none, without an error, if the library, a driver or a device is missing."""

    def __init__(self) -> None:
        self._nvml, self._handles = _open_nvml()

    def read(self) -> tuple[AcceleratorUsage, ...]:
        return tuple(self._read(number, handle) for number, handle in enumerate(self._handles))

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            _ask(self._nvml.nvmlShutdown)
            self._nvml, self._handles = None, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, number: int, handle: Any) -> AcceleratorUsage:
        assert self._nvml is not None
        name = _ask(self._nvml.nvmlDeviceGetName, handle)
        rates = _ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return AcceleratorUsage(
            number=number,
            name=name.decode(errors="replace") if isinstance(name, bytes) else str(name or "accelerator"),
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_bytes=None if memory is None else int(memory.total),
        )


def _open_nvml() -> tuple[Any, tuple[Any, ...]]:
    """The library and a handle for each device; (None, ()) if there is nothing to ask."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no library, driver or permission: NVML's errors have no common built-in base
        return None, ()
    count = _ask(nvml.nvmlDeviceGetCount) or 0
    handles = (_ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count))
    return nvml, tuple(handle for handle in handles if handle is not None)


def _ask(question: Any, *arguments: Any) -> Any:
    """The library's answer, or None if this device has none."""
    try:
        return question(*arguments)
    except Exception:  # noqa: BLE001 - as above
        return None


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

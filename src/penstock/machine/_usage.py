"""What processes, the calling thread and accelerators use, as the kernel and NVML say.

What a container may not read, or a kernel does not offer, is None. One read of `stat` gives most of what a process has
used. Accelerators are asked through NVML (`nvidia-ml-py`), if it is installed and finds a device: it answers in 10 to
100 µs, and its utilisation is a mean over the last 0.2 to 1 s, so read it a few times a second, not at every step.
"""

import contextlib
import importlib
import os
import resource
import time
from collections import defaultdict
from typing import Any, NamedTuple, Self

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

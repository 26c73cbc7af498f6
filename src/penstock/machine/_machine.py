"""The machine as a whole: how long its processors were busy, its memory, and what kind of machine it is."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from penstock.machine._accelerators import Accelerators
from penstock.machine._cgroups import cpu_quota, fullest_memory, memory_limit
from penstock.machine._cpus import usable_cpus

_PROC = Path("/proc")
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The machine that a measurement was made on. None means unknown."""

    processor: str
    num_processors: int
    """All processors of the machine."""
    usable_processors: int
    """Those that this process may use: affinity, quota, Slurm's share."""
    cpu_quota: float | None
    """The control group's."""
    memory_bytes: int | None
    memory_limit_bytes: int | None
    """The control group's."""
    system: str
    python: str
    accelerators: tuple[str, ...]


def machine_busy_seconds() -> float | None:
    """CPU time of all that has run on this machine since it started, over all processors; None without `/proc`."""
    try:
        first = (_PROC / "stat").read_bytes().split(b"\n", 1)[0].split()[1:]
        user, nice, system, _idle, _disk, interrupt, soft_interrupt = (int(field) for field in first[:7])
    except (OSError, ValueError):
        return None
    return (user + nice + system + interrupt + soft_interrupt) * _TICK_SECONDS


def available_memory() -> int | None:
    """Bytes that programs can still get without swapping, on the machine and in the control group."""
    free = _memory("MemAvailable")
    limit = fullest_memory()
    bounds = [free, None if limit is None else limit.free_bytes]
    return min((bound for bound in bounds if bound is not None), default=None)


def job_memory() -> int | None:
    """Bytes that this job may use in total: the machine's, its control group's, or what was requested from Slurm."""
    limit = memory_limit()
    bounds = [_memory("MemTotal"), None if limit is None else limit.limit_bytes, _slurm_memory()]
    return min((bound for bound in bounds if bound is not None), default=None)


def describe_machine() -> MachineFacts:
    """What this machine is. Asks the accelerators' library for names, if it is installed."""
    limit = memory_limit()
    with Accelerators() as accelerators:
        names = tuple(each.name for each in accelerators.read())
    return MachineFacts(
        processor=_processor(),
        num_processors=os.cpu_count() or 1,
        usable_processors=usable_cpus(),
        cpu_quota=cpu_quota(),
        memory_bytes=_memory("MemTotal"),
        memory_limit_bytes=None if limit is None else limit.limit_bytes,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        accelerators=names,
    )


def _slurm_memory() -> int | None:
    """Memory on this node, from --mem or --mem-per-cpu; 0 requests all of it."""
    values = {name: os.environ.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")}
    numbers = {name: int(value) for name, value in values.items() if value.isdecimal() and int(value) > 0}
    if "MEM_PER_NODE" in numbers:
        return numbers["MEM_PER_NODE"] << 20
    if "MEM_PER_CPU" in numbers:
        return numbers["MEM_PER_CPU"] * numbers.get("CPUS_ON_NODE", usable_cpus()) << 20
    return None


def _memory(field: str) -> int | None:
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _processor() -> str:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, IndexError, StopIteration):
        return platform.machine()

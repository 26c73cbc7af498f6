"""What this job may use: processors, threads and memory; and what kind of machine it runs on.

A container or a batch job sees the whole machine in `/proc`, but is held to the limits of its control group. Groups are
nested, and the tightest limit counts. Versions 1 and 2 are supported; a value that cannot be read is None, never an
error.

Workers are many, so each library gets one thread in a worker. Libraries that are loaded later read that from the
environment. Those that a fork brings along must be told: OpenMP's threads do not exist in the child, and a loop handed
to them would wait forever.
"""

import contextlib
import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.machine._usage import Accelerators

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60
"""Without a limit, version 1 gives the largest number of pages, in bytes."""
_OPENMP = ("libgomp", "libomp", "libiomp")
_PROC = Path("/proc")


class MemoryLimit(NamedTuple):
    """The memory limit of one group."""

    limit_bytes: int
    used_bytes: int
    """Not counting file pages that the kernel would reclaim first."""
    num_killed: int = 0
    """Processes in the group that the kernel has killed for lack of memory."""

    @property
    def free_bytes(self) -> int:
        """How much is left."""
        return max(0, self.limit_bytes - self.used_bytes)


def cpu_quota() -> float | None:
    """CPU time that the control group and all groups around it allow, in processors."""
    return min((quota for quota in map(_quota_of, _groups("cpu")) if quota is not None), default=None)


def memory_limit() -> MemoryLimit | None:
    """The tightest memory limit of the groups around this process; None if there is none."""
    return min(_memory_limits(), default=None)


def fullest_memory() -> MemoryLimit | None:
    """The group with the least memory left, which may be an outer one that several jobs share."""
    return min(_memory_limits(), key=lambda limit: limit.free_bytes, default=None)


def _memory_limits() -> Iterator[MemoryLimit]:
    return (limit for limit in map(_memory_of, _groups("memory")) if limit is not None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's groups that may have the controller, innermost first."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
        entries = [line.split(":", 2) for line in lines]
        paths = [(controllers, own) for _, controllers, own in entries]
    except (OSError, ValueError):
        return
    for controllers, own in paths:
        if not controllers or controller in controllers.split(","):
            root = _CGROUPS / controllers if controllers else _CGROUPS
            inner = root / own.lstrip("/")
            yield from (group for group in (inner, *inner.parents) if group.is_relative_to(root))


def _quota_of(group: Path) -> float | None:
    """One group's quota: version 2 has "quota period" in one file, version 1 one file for each."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file; "max"
        return None


def _memory_of(group: Path) -> MemoryLimit | None:
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
        except (OSError, ValueError):  # no such file; "max"
            continue
        stat = _table(group / "memory.stat")
        reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        num_killed = (_table(group / "memory.events") or _table(group / "memory.oom_control")).get("oom_kill", 0)
        return MemoryLimit(limit, max(0, used - reclaimable), num_killed) if limit < _NO_LIMIT else None
    return None


def _table(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number."""
    try:
        return {name: int(number) for name, number in (line.split() for line in path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def usable_cpus() -> int:
    """The least of affinity, cgroup quota and Slurm's share, split over this machine's ranks, and at least 1."""
    limits = [float(len(os.sched_getaffinity(0)))]
    limits += [limit for limit in (cpu_quota(), _slurm_share()) if limit is not None]
    return max(1, int(min(limits) / (_positive_variable("LOCAL_WORLD_SIZE") or 1)))


def cpu_shortfall() -> str | None:
    """What to do where a task of a Slurm step got fewer processors than its job asked for; None elsewhere.

    `srun` takes `--cpus-per-task` from `sbatch` only before Slurm 22.05, but the variable of the job stays in the
    environment, so that nothing else tells.
    """
    asked, given = _positive_variable("SLURM_CPUS_PER_TASK"), len(os.sched_getaffinity(0))
    if asked is None or "SLURM_STEP_ID" not in os.environ:
        return None
    if given >= int(asked / (_positive_variable("LOCAL_WORLD_SIZE") or 1)):
        return None
    return (
        f"Slurm gave this task {given} of the {asked:.0f} processors that --cpus-per-task={asked:.0f} asked for. Since "
        "version 22.05 srun does not take that from sbatch: put `export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK` "
        "before it in the job script."
    )


def ranks_on_node() -> int:
    """This job's training processes on this machine, as far as torchrun and Slurm say."""
    return _slurm_tasks() * int(_positive_variable("LOCAL_WORLD_SIZE") or 1)


def default_workers(kind: str) -> int:
    """Workers to start with: one processor is left to the training thread, and more than a few seldom help."""
    return max(1, min(4 if kind == "thread" else 8, usable_cpus() - 1))


def thread_settings(num_threads: int, names: Iterable[str]) -> dict[str, str]:
    """Environment variables that tell a worker's libraries how many threads to use; what the user has set wins."""
    return {name: os.environ.get(name, str(num_threads)) for name in names}


def use_one_thread_each(environment: Mapping[str, str]) -> None:
    """In a forked worker: set the environment, and have every loaded library compute in the calling thread."""
    os.environ.update(environment)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):  # it may be only half imported
        torch.set_num_threads(1)  # MKL, once loaded, listens to nothing else
    for library in _loaded_openmp():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_set_num_threads(1)


def _slurm_share() -> float | None:
    """Processors of one Slurm task, counted as the site counts them: cores, or hardware threads.

    Without --cpus-per-task, the step's tasks on this node share what the job has there.
    """
    per_task, on_node = _positive_variable("SLURM_CPUS_PER_TASK"), _positive_variable("SLURM_CPUS_ON_NODE")
    return per_task if per_task is not None or on_node is None else on_node / _slurm_tasks()


def _slurm_tasks() -> int:
    """Tasks of this step on this node: the variable lists all nodes, and sites give each as many."""
    counts = re.fullmatch(r"(\d+)(?:\(x\d+\))?(?:,\d+(?:\(x\d+\))?)*", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max(1, int(counts[1])) if counts else 1


def _positive_variable(name: str) -> float | None:
    value = os.environ.get(name, "")
    return float(value) if value.isdecimal() and int(value) > 0 else None


def _loaded_openmp() -> set[str]:
    """Paths of the OpenMP libraries in this process: many packages bring their own."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    return {path for path in paths if Path(path).name.startswith(_OPENMP)}


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

"""How many processors this job may use, which is not how many the machine has; and how many threads a worker gets.

Workers are many, so each library gets one thread in a worker. Libraries that are loaded later read that from the
environment. Those that a fork brings along must be told: OpenMP's threads do not exist in the child, and a loop handed
to them would wait for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.machine._cgroups import cpu_quota

_OPENMP = ("libgomp", "libomp", "libiomp")


def usable_cpus() -> int:
    """The least of affinity, cgroup quota and Slurm's share, split over this machine's ranks, and at least 1."""
    limits = [float(len(os.sched_getaffinity(0)))]
    limits += [limit for limit in (cpu_quota(), _slurm_share()) if limit is not None]
    return max(1, int(min(limits) / (_positive_variable("LOCAL_WORLD_SIZE") or 1)))


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

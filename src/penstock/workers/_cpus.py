"""How many processors this job may use, which is not how many the machine has; and how many threads a worker gets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from penstock.cgroups import cpu_quota


def usable_cpus() -> int:
    """The least of affinity, cgroup quota and Slurm's share, split over this machine's ranks, and at least 1."""
    limits = [float(len(os.sched_getaffinity(0)))]
    limits += [limit for limit in (cpu_quota(), _slurm_share()) if limit is not None]
    return max(1, int(min(limits) / (_given("LOCAL_WORLD_SIZE") or 1)))


def ranks_on_node() -> int:
    """Training processes of this job that share the memory of this machine, as far as torchrun and Slurm tell."""
    return _slurm_tasks() * int(_given("LOCAL_WORLD_SIZE") or 1)


def default_workers(kind: str) -> int:
    """Workers to start with: one processor is left to the training thread; more than a few seldom help."""
    return max(1, min(4 if kind == "thread" else 8, usable_cpus() - 1))


def thread_settings(num_threads: int, names: Iterable[str]) -> dict[str, str]:
    """What a worker's environment tells its libraries: how many threads each may use.

    Workers are many; each with as many threads as there are processors would be too many. What the user has set wins.
    """
    return {name: os.environ.get(name, str(num_threads)) for name in names}


def _slurm_share() -> float | None:
    """Processors of one task, counted as the site counts them: cores, or hardware threads.

    Without --cpus-per-task, what the job has on this node is shared by the tasks of the step there.
    """
    per_task, on_node = _given("SLURM_CPUS_PER_TASK"), _given("SLURM_CPUS_ON_NODE")
    return per_task if per_task is not None or on_node is None else on_node / _slurm_tasks()


def _slurm_tasks() -> int:
    """Of the step, on this node; the variable lists all nodes, and sites give them as many each."""
    counts = re.fullmatch(r"(\d+)(?:\(x\d+\))?(?:,\d+(?:\(x\d+\))?)*", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max(1, int(counts[1])) if counts else 1


def _given(name: str) -> float | None:
    value = os.environ.get(name, "")
    return float(value) if value.isdecimal() and int(value) > 0 else None

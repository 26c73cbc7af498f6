"""How many processors this job may use: not how many the machine has."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """The least of affinity, cgroup quota and Slurm's share, and at least 1."""
    limits = [float(len(os.sched_getaffinity(0)))]
    limits += [limit for limit in (_cgroup_quota(), _slurm_share()) if limit is not None]
    return max(1, int(min(limits)))


def default_workers(kind: str) -> int:
    """Workers to start with: one processor is left to the training thread; more than a few seldom help."""
    return max(1, min(4 if kind == "thread" else 8, usable_cpus() - 1))


def _cgroup_quota() -> float | None:
    """Processors' worth of time that the control group may use (version 2: "quota period")."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        quota, period = (_CGROUP / own.lstrip("/") / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _slurm_share() -> float | None:
    value = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return float(value) if value.isdigit() and int(value) > 0 else None

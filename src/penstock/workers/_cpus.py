"""How many processors this job may use, which is not how many the machine has; and how many threads a worker gets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """The least of affinity, cgroup quota and Slurm's share, split over this machine's ranks, and at least 1."""
    limits = [float(len(os.sched_getaffinity(0)))]
    limits += [limit for limit in (_cgroup_quota(), _given("SLURM_CPUS_PER_TASK")) if limit is not None]
    return max(1, int(min(limits) / (_given("LOCAL_WORLD_SIZE") or 1)))


def default_workers(kind: str) -> int:
    """Workers to start with: one processor is left to the training thread; more than a few seldom help."""
    return max(1, min(4 if kind == "thread" else 8, usable_cpus() - 1))


def thread_settings(num_threads: int, names: Iterable[str]) -> dict[str, str]:
    """What a worker's environment tells its libraries: how many threads each may use.

    Workers are many; each with as many threads as there are processors would be too many. What the user has set wins.
    """
    return {name: os.environ.get(name, str(num_threads)) for name in names}


def _cgroup_quota() -> float | None:
    """Processors' worth of time that the control group, and each one around it, may use."""
    quotas = []
    try:
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                root = _CGROUPS / controllers if controllers else _CGROUPS
                inner = root / own.lstrip("/")
                quotas += [_quota_of(group) for group in (inner, *inner.parents) if group.is_relative_to(root)]
    except (OSError, ValueError):
        return None
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    """Of one group: version 2 has "quota period" in one file, version 1 a file for each."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file; "max"
        return None


def _given(name: str) -> float | None:
    value = os.environ.get(name, "")
    return float(value) if value.isdecimal() and int(value) > 0 else None

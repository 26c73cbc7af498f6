"""What the control groups around this process allow, and how much of it is used.

A container or a batch job sees the whole machine in `/proc`, but is held to its group's limits. Groups are nested,
and the tightest limit counts. Versions 1 and 2 are supported; a value that cannot be read is None, never an error.

May import: nothing. Imported by: `metrics`, `workers`. Holds no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60
"""Without a limit, version 1 gives the largest number of pages, in bytes."""


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

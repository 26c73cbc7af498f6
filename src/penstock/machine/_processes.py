"""What processes have used, read from `/proc`; and which processes descend from one.

One read of `stat` gives most of it. What a container may not read, or a kernel does not offer, is None.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from typing import NamedTuple

_PROC = "/proc"
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
            pss_bytes=_pss_of(pid) if with_pss else None,
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


def _pss_of(pid: int) -> int | None:
    kilobytes = _number(pid, "smaps_rollup", b"Pss:")
    return None if kilobytes is None else kilobytes * 1024


def _number(pid: int, file: str, label: bytes) -> int | None:
    """The number after a label at the beginning of a line."""
    try:
        lines = _contents(f"{_PROC}/{pid}/{file}").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(label))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _contents(path: str) -> bytes:
    """Contents of one of the kernel's files, in half the time of `open`: a reading takes three of them per process."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)

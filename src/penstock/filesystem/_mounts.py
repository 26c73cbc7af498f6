"""Which kind of file system a path is on.

A vanished page of a memory map is a signal (SIGBUS) that ends the process; a failed read is an
error that can be named. Servers vanish and local disks seldom do, so maps are for local disks.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

_NETWORK_TYPES = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs"}
    | {"nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)
_OCTAL = re.compile(r"\\([0-7]{3})")


def is_network_filesystem(path: Path) -> bool:
    """Whether reads of `path` may depend on another machine; a FUSE mount counts."""
    kind = filesystem_type(path)
    return kind in _NETWORK_TYPES or kind.startswith("fuse")


def filesystem_type(path: Path) -> str:
    """Name of the file system that holds `path` ("ext4", "nfs4"), or "" where it cannot be told."""
    try:
        device = os.stat(path).st_dev
        return _types_by_device().get(f"{os.major(device)}:{os.minor(device)}", "") or _by_longest_prefix(path)
    except OSError:
        return ""


@functools.lru_cache(maxsize=1)
def _types_by_device() -> dict[str, str]:
    return {device: kind for device, _, kind in _mounts()}


def _by_longest_prefix(path: Path) -> str:
    # Subvolumes (btrfs) answer stat() with a device that no mount lists.
    real = os.path.realpath(path)
    inside = [
        (point, kind) for _, point, kind in _mounts() if real == point or real.startswith(point.rstrip("/") + "/")
    ]
    return max(inside, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _mounts() -> list[tuple[str, str, str]]:
    """(device, mount point, type) of each mount; see proc_pid_mountinfo(5)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        mounts.append((fields[2], point, right.split(" ")[0]))
    return mounts

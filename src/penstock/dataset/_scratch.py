"""Storage of this node: what kind of storage a folder is on, and where there is room for a copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.filesystem import filesystem_type, is_network_filesystem

StorageKind = Literal["memory", "ssd", "rotating", "network", "unknown"]

_SCRATCH_VARIABLES = ("JOBSCRATCH", "SLURM_TMPDIR", "LOCAL_SCRATCH", "SCRATCH_LOCAL", "TMPDIR", "SCRATCH")
"""Variables by which sites announce node-local storage, the most specific first. `SCRATCH` is often on the network."""
_SYS_DEVICES = Path("/sys/dev/block")


class Scratch(NamedTuple):
    """A folder on this node with room in it."""

    variable: str
    path: Path
    free_bytes: int


def storage_kind(path: Path) -> StorageKind:
    """What kind of storage a path is on, as far as the kernel says."""
    if is_network_filesystem(path):
        return "network"
    if filesystem_type(path) in ("tmpfs", "ramfs"):
        return "memory"
    try:
        device = os.stat(path).st_dev
        folder = (_SYS_DEVICES / f"{os.major(device)}:{os.minor(device)}").resolve()
        for place in (folder, folder.parent):  # a partition has its disk's queue
            if (place / "queue" / "rotational").exists():
                return "rotating" if (place / "queue" / "rotational").read_text().strip() == "1" else "ssd"
    except OSError:
        pass
    return "unknown"


def find_scratch(needed_bytes: int) -> Scratch | None:
    """The first folder named by the environment that is local to this node and has room."""
    return next((each for each in _candidates() if each.free_bytes >= needed_bytes), None)


def _candidates() -> Iterator[Scratch]:
    for variable in _SCRATCH_VARIABLES:
        path = Path(os.environ.get(variable, ""))
        if os.environ.get(variable) and path.is_dir() and os.access(path, os.W_OK) and not is_network_filesystem(path):
            yield Scratch(variable, path, shutil.disk_usage(path).free)

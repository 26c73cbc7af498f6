"""What a path means: `~`, URLs and typing errors in what people give, and the kind of file system it leads to.

A vanished page of a memory map is a signal (SIGBUS) that ends the process; a failed read is an error that can be named.
Servers vanish and local disks seldom do, so maps are for local disks.
"""

import glob
import itertools
import os
import re
from pathlib import Path

from penstock.errors import nearest_name

_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/+")  # one slash: a Path has already lost the second
_GLOB = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{(?:(?P<first>[0-9]{1,12})\.\.(?P<last>[0-9]{1,12})|(?P<parts>[^{}]*,[^{}]*))\}")
_MOST_SIBLINGS = 10_000
"""How many names in a folder to compare: a message must not wait for a folder of millions."""
_NETWORK_TYPES = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs"}
    | {"nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)
_OCTAL = re.compile(rb"\\([0-7]{3})")


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """The path, with `~` and `~user` expanded.

    Args:
        path: As the user gave it.
        what: What should be there, for the message, such as "a dataset".

    Raises:
        ValueError: it is a URL. Without this check, a folder called `s3:` would silently be made or looked for.
    """
    text = os.fspath(path).removeprefix("file://")
    if scheme := _URL.match(text):
        url = f"{scheme[0].rstrip('/')}//{text[scheme.end() :]}"
        raise ValueError(
            f"{url} is a URL, but {what} must be local for now. Use a path on this machine or on a mounted "
            "file system, and copy from or to the store."
        )
    return Path(os.path.expanduser(text))


def matching_paths(pattern: str) -> list[Path]:
    """The files that a pattern means, each once: braces in the order they are written in, then globs, sorted.

    Raises:
        FileNotFoundError: there is none.

    """
    found: dict[Path, None] = {}
    for path in map(Path, [pattern] if os.path.lexists(pattern) else expand_braces(pattern)):
        is_glob = _GLOB.search(str(path)) and not os.path.lexists(path)
        files = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))] if is_glob else [path]
        if not files or not os.path.isfile(files[0]):
            raise FileNotFoundError(f"{path}: no such file.{similar_path(path)}")
        found |= dict.fromkeys(files)
    return list(found)


def expand_braces(pattern: str) -> list[str]:
    """The paths that a pattern with `{000..099}` and `{a,b}` stands for, in their order.

    >>> expand_braces("train-{098..100}.{tar,idx}")[:3]
    ['train-098.tar', 'train-098.idx', 'train-099.tar']
    """
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    if match["last"] is None:
        parts = match["parts"].split(",")
    else:
        width = max(len(match["first"]), len(match["last"])) if match["first"].startswith("0") else 0
        parts = [f"{number:0{width}}" for number in range(int(match["first"]), int(match["last"]) + 1)]
    return [path for part in parts for path in expand_braces(f"{before}{part}{after}")]


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a URL of a store, not a path of this machine."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def similar_path(path: str | os.PathLike[str]) -> str:
    """A question to end a message with, if nothing is at `path` but something has a similar name; otherwise nothing.

    Compares the first part of the path that does not exist with the names beside it.
    """
    parent = Path()
    for part in Path(path).parts:
        if not os.path.lexists(parent / part):
            near = None if _GLOB.search(part) else nearest_name(part, _names_in(parent))
            return "" if near is None else f" Did you mean {str(parent / near)!r}?"
        parent /= part
    return ""


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in itertools.islice(entries, _MOST_SIBLINGS)]
    except OSError:
        return []


def is_network_filesystem(path: Path) -> bool:
    """Whether reads of `path` may depend on another machine; a FUSE mount counts."""
    kind = filesystem_type(path)
    return kind in _NETWORK_TYPES or kind.startswith("fuse")


def filesystem_type(path: Path) -> str:
    """Type of the file system that holds `path` ("ext4", "nfs4"), or "" if unknown."""
    try:
        status = os.stat(path)
        mounts = _mount_lines()
    except OSError:
        return ""
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}".encode()
    # A later mount hides an earlier one. Subvolumes (btrfs) have a device that is listed in no mount.
    by_device = [line for line in mounts if line.split(b" ", 3)[2] == device]
    return _parse_mount(by_device[-1])[1] if by_device else _by_longest_prefix(os.path.realpath(path), mounts)


def _by_longest_prefix(real: str, mounts: list[bytes]) -> str:
    inside = [
        (point, kind) for point, kind in map(_parse_mount, mounts) if f"{real}/".startswith(point.rstrip("/") + "/")
    ]
    return max(reversed(inside), key=lambda mount: len(mount[0]), default=("", ""))[1]


def _mount_lines() -> list[bytes]:
    """One line for each mount; see proc_pid_mountinfo(5).

    Read again each time: the device numbers of network mounts are reused after an unmount.
    """
    return [line for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n") if line]


def _parse_mount(line: bytes) -> tuple[str, str]:
    """(mount point, type) of a mount."""
    left, _, right = line.partition(b" - ")
    point = _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), left.split(b" ")[4])
    return os.fsdecode(point), right.split(b" ")[0].decode()

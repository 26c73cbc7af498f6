"""Copy a dataset to node-local storage: verified, resumable, one copy per node however many ranks want it.

The source is a folder, or the URL of a dataset in an object store (`_stage_remote`).

    DST/.corpus.staging/.lock       held by the process that copies, and released when it dies; others wait
    DST/.corpus.staging/data/…      complete files, each renamed into place after its bytes were synced
    DST/corpus                      appears at once, by a rename, after every checksum was verified

Whatever is killed, full or unplugged halfway, there is either no `DST/corpus` or all of it. The next run continues
with the files that are complete.

Storage of this node: what kind of storage a folder is on, and where there is room for a copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.dataset._stage_remote import RemoteSource, Source
from penstock.errors import CorruptionError, DatasetExists, IncompleteDataset, StorageError, WriterBusy, counted
from penstock.filesystem import (
    DirectoryLock,
    PositionedFile,
    filesystem_type,
    is_network_filesystem,
    is_url,
    local_path,
    make_directory,
    remove_if_present,
    rename,
    storage_errors,
    sync_directory,
)
from penstock.shards import read_manifest, verify_folder

_CHUNK_BYTES = 8 << 20
_LOOK_SECONDS = 0.2
_OTHERS = ("manifest.json", "run.json")
"""Files that the manifest does not name; the manifest is copied last, because it makes a folder a dataset."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A dataset on the node's own storage."""

    path: Path
    """Where to open it."""
    num_bytes: int
    copied_bytes: int
    """Bytes copied by this call; 0 if it was already there, or another rank copied it."""
    seconds: float
    is_remote: bool
    """Whether the destination is also on a network, so that nothing was gained."""

    def __str__(self) -> str:
        from penstock.report import format_bytes, format_seconds

        copied = "already there, or copied by another process"
        if self.copied_bytes:
            rate = format_bytes(self.copied_bytes / max(self.seconds, 1e-9))
            copied = (
                f"copied {format_bytes(self.copied_bytes)} and verified in {format_seconds(self.seconds)}, {rate}/s"
            )
        nothing_gained = "\nThis folder is also on a network: reading from it is no faster." if self.is_remote else ""
        return f"{self.path}: {format_bytes(self.num_bytes)}, {copied}.{nothing_gained}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        names = ("num_bytes", "copied_bytes", "seconds", "is_remote")
        return {"path": str(self.path), **{name: getattr(self, name) for name in names}}


def stage(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, on_progress: OnProgress | None = None
) -> Staged:
    """Copy a dataset into a folder on this node, unless it is there; any number of processes may call this at once.

    Args:
        source: The dataset's folder, or its URL, such as s3://bucket/corpus.
        destination: An existing folder, such as `$SCRATCH`; the dataset becomes a folder of the same name in it.
        on_progress: Called with (bytes done, bytes in all) in the process that copies.

    Raises:
        IncompleteDataset: there is no dataset at the source, or no folder at the destination.
        DatasetExists: another dataset, a link, or another user's file or folder has that name at the destination.
        CorruptionError: bytes of the source differ from their checksums.
        StorageError: the destination is full, read-only or gone, or the store refuses; what was copied stays, and can
            be continued.
    """
    begin, scratch = time.monotonic(), local_path(destination, "a folder").absolute()
    with contextlib.ExitStack() as stack:
        found: Source
        if is_url(source):
            from penstock.remote import connect  # with the clients of stores come 30 ms of imports

            store = stack.enter_context(connect(os.fspath(source)))
            found = RemoteSource(store)
        else:
            found = _FolderSource(local_path(source, "a dataset").absolute())
        final = _check_scratch(scratch, found)
        copied = 0
        while not _is_there(final, found):
            if (copied := _copy_or_wait(found, final, on_progress)) >= 0:
                break
    return Staged(
        path=final,
        num_bytes=found.manifest.num_bytes,
        copied_bytes=max(0, copied),
        seconds=time.monotonic() - begin,
        is_remote=is_network_filesystem(scratch),
    )


def _check_scratch(scratch: Path, source: Source) -> Path:
    """Where the copy of the dataset will be in this folder.

    Raises:
        IncompleteDataset: there is no such folder.
        DatasetExists: the folder is the dataset's own.
    """
    if not scratch.is_dir():
        problem = (
            "a file, not a folder. Name a folder" if scratch.exists() else "no such folder. Create it, or name one"
        )
        raise IncompleteDataset(f"{scratch}: {problem} on this node ($SCRATCH).")
    final = scratch / source.name
    if source.folder is None:
        return final
    folder, real, real_scratch = source.folder, source.folder.resolve(), scratch.resolve()
    if real in (real_scratch, *real_scratch.parents):
        raise DatasetExists(f"{scratch} is the dataset itself, or in it. Give a folder elsewhere, such as $SCRATCH.")
    if final.resolve() == real:
        raise DatasetExists(f"{folder} is already in {scratch}: staging it there would copy it onto itself.")
    return final


def _is_there(final: Path, source: Source) -> bool:
    """Whether the dataset has been staged.

    Raises:
        DatasetExists: something else is there.
    """
    if not os.path.lexists(final):
        return False
    _check_owner(final, source)
    try:
        is_same = read_manifest(final).fingerprint == source.manifest.fingerprint
    except IncompleteDataset:
        is_same = False
    if not is_same:
        raise DatasetExists(f"{final}: something else is there. Remove it, or stage into another folder.")
    return True


def _check_owner(path: Path, source: Source) -> None:
    """Refuse a folder that somebody else may have put there: scratch is often shared, and copies are trusted.

    Raises:
        DatasetExists: it is a link, or belongs to a user other than this one, the source's owner or root.
    """
    status = os.lstat(path)
    owners = {os.geteuid(), 0, os.stat("/").st_uid}  # "/": root, in a user namespace
    owners |= set() if source.folder is None else {os.stat(source.folder).st_uid}
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners:
        whose = f"belongs to user {status.st_uid}" if stat.S_ISDIR(status.st_mode) else "is a link, or not a folder"
        raise DatasetExists(f"{path} {whose}. Remove it, or stage into a folder of your own.")


def _copy_or_wait(source: Source, final: Path, on_progress: OnProgress | None) -> int:
    """Bytes copied; -1 if another process was copying, and the dataset may be there now."""
    staging = final.parent / f".{final.name}.staging"
    make_directory(staging)
    with contextlib.suppress(FileNotFoundError):  # the process that finished has just removed it
        _check_owner(staging, source)
    lock = DirectoryLock(staging)
    try:
        lock.acquire()
    except WriterBusy:
        time.sleep(_LOOK_SECONDS)
        return -1
    except StorageError as error:
        if error.errno == errno.ENOENT:  # the process that was copying has just removed the folder
            return -1
        raise
    try:
        if _is_there(final, source):
            return -1
        return _copy(source, staging / "data", final, on_progress)
    finally:
        with contextlib.suppress(OSError):  # renamed into place, or not empty: the next run continues with those files
            os.rmdir(staging / "data")
        lock.release()
        with contextlib.suppress(OSError):  # not empty: as above, or another rank is about to see that all is done
            os.rmdir(staging)


def _copy(source: Source, data: Path, final: Path, on_progress: OnProgress | None) -> int:
    make_directory(data)
    _check_owner(data, source)
    sizes = source.sizes()
    missing = {name: size for name, size in sizes.items() if not _is_complete(data / name, size)}
    _check_room(final, sum(missing.values()))
    total, done = sum(sizes.values()), sum(sizes.values()) - sum(missing.values())
    source.copy(missing, data, (lambda count: None) if on_progress is None else _Tally(done, total, on_progress).add)
    sync_directory(data)
    with storage_errors(final, doing="renamed into place"):
        os.rename(data, final)
    sync_directory(final.parent)
    return sum(missing.values())


class _Tally:
    """Adds up what is done, for the caller's bar."""

    def __init__(self, done: int, total: int, on_progress: OnProgress) -> None:
        self._done, self._total, self._on_progress = done, total, on_progress

    def add(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        self._done += num_bytes
        self._on_progress(self._done, self._total)


class _FolderSource:
    """A dataset in a folder. Copies are verified in the end, all together, by reading them back."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder, self.manifest = folder.name, folder, read_manifest(folder)

    def sizes(self) -> dict[str, int]:
        others = (name for name in reversed(_OTHERS) if (self.folder / name).exists())
        with storage_errors(self.folder, doing="read"):
            names = [*sorted(self.manifest.file_names), *others]
            return {name: (self.folder / name).stat().st_size for name in names}

    def copy(self, sizes: Mapping[str, int], data: Path, on_bytes: Callable[[int], None]) -> None:
        for name in sizes:
            _copy_file(self.folder / name, data / name, on_bytes)
        sync_directory(data)
        _verify(data, self.folder)


def _is_complete(path: Path, size: int) -> bool:
    """A file gets its name only after its bytes are synced, so its size is enough until everything is verified."""
    try:
        status = os.lstat(path)
        return stat.S_ISREG(status.st_mode) and status.st_size == size
    except OSError:
        return False


def _check_room(final: Path, needed: int) -> None:
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise StorageError(
            errno.ENOSPC,
            f"{final.parent}: {needed:,} bytes to copy, but only {free:,} are free. Make room, or stage elsewhere.",
        )


def _copy_file(source: Path, target: Path, on_bytes: Callable[[int], None]) -> None:
    working = target.with_name(f"{target.name}.partial")
    remove_if_present(working)
    with storage_errors(source, doing="read"):
        file = PositionedFile(source)
    with storage_errors(working, doing="created"):
        descriptor = os.open(working, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with storage_errors(working, doing="copied"):
            for begin in range(0, file.size, _CHUNK_BYTES):
                chunk = piece = memoryview(file.read(begin, min(begin + _CHUNK_BYTES, file.size)).data)
                while piece:
                    piece = piece[os.write(descriptor, piece) :]
                on_bytes(len(chunk))
            os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(working)
        raise
    finally:
        os.close(descriptor)
    rename(working, target)


def _verify(data: Path, folder: Path) -> None:
    """Read every byte back; damaged files are removed, so that the next run copies them again."""
    found = verify_folder(data)
    if found.is_sound:
        return
    for fault in found.faults:
        for name in {path.name for path in data.iterdir() if path.name in fault}:
            remove_if_present(data / name)
    raise CorruptionError(
        f"{folder}: {counted(len(found.faults), 'fault')} in the copy, the first: {found.faults[0]} Check the source "
        f"(penstock verify {folder}), then run again: intact files are kept."
    )


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

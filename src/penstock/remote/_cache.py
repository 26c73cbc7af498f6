"""What a node keeps of remote datasets: whole files, within a budget, shared by all processes of a user.

    ROOT/.budget                        bytes used; whoever reserves or evicts holds a lock on it
    ROOT/corpus-1f0c2a…/url             one folder for each version of a dataset, and where it is from
    ROOT/corpus-1f0c2a…/manifest.json
    ROOT/corpus-1f0c2a…/shard-…         whole and checked: it got its name after its last byte
    ROOT/corpus-1f0c2a…/part-shard-…    being fetched, by who holds a lock on it; if nobody does, he died, and the
                                        next one goes on with what is there
    ROOT/corpus-1f0c2a…/gone-shard-…    evicted, but still open somewhere: readers hold a shared lock on what they
                                        have open, and let go of what is gone when they open something else

# NOTE [what keeps a cache right]
#   A name says that a file is whole, and checksums say that it is right; a lock only saves work. So whatever is killed
#   or whichever file system ignores locks, a reader sees all of a file or none. Evicted files count until they are
#   really gone, so the budget holds for the disk, not for names. Only files of these kinds in folders of this kind are
#   ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.errors import StorageError
from penstock.filesystem import (
    check_trusted,
    create_file,
    filesystem_type,
    is_network_filesystem,
    rename,
    storage_errors,
    sync_directory,
)

PART, GONE = "part-", "gone-"
MANIFEST_NAME, URL_NAME = "manifest.json", "url"
_BUDGET_NAME = ".budget"
_KEPT = (MANIFEST_NAME, URL_NAME)
_SHARE_OF_FREE = 0.8
_CLOSED_SECONDS = 0.5
"""So soon after an eviction, readers have noticed."""
_FOLDER = re.compile(r".*-[0-9a-f]{24}", re.ASCII)


class CachedFile(NamedTuple):
    """A whole file of the cache."""

    folder: Path
    name: str
    num_bytes: int
    used_at: float
    """When it was last fetched, or found to be needed soon."""


Choose = Callable[[Sequence[CachedFile], int], Sequence[CachedFile] | None]
"""Which of these files to evict so that so many bytes become free; None if that cannot be."""


@dataclass(frozen=True, slots=True)
class CachedDataset:
    """A version of a dataset in the cache."""

    url: str
    path: Path
    num_files: int
    num_bytes: int


class Cache:
    """The files under one folder.

    Raises:
        StorageError: the folder is on a network, belongs to others, or cannot be made.
    """

    def __init__(self, root: Path, budget_bytes: int | None = None) -> None:
        self.root = root
        with storage_errors(root, doing="made"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_network_filesystem(root):
            raise StorageError(
                errno.ENOTSUP,
                f"{root} is on a network ({filesystem_type(root)}), where a cache would gain nothing, and where locks "
                "may do nothing. Give a folder on a disk of this node: cache=…",
            )
        try:
            check_trusted(root, Path(__file__))
        except PermissionError as error:
            raise StorageError(
                errno.EPERM, f"{root} cannot be a cache: {error} Give a folder of your own: cache=…"
            ) from None
        if budget_bytes is None:
            used = sum(each.num_bytes for each in self.datasets())
            budget_bytes = int(_SHARE_OF_FREE * (shutil.disk_usage(root).free + used))
        self.budget_bytes = budget_bytes

    def folder_for(self, url: str, manifest: bytes) -> Path:
        """The folder of this version of a dataset, with its manifest, which is what makes the version."""
        version = hashlib.sha256(url.encode() + b"\n" + manifest).hexdigest()[:24]
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", url.rpartition("/")[2])[:80]
        folder = self.root / f"{name}-{version}"
        with storage_errors(folder, doing="made"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in ((URL_NAME, url.encode()), (MANIFEST_NAME, manifest)):
            if not (folder / name).exists():
                working = folder / f".{name}-{os.getpid()}"
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(working)
                create_file(working, [content])
                rename(working, folder / name)
        sync_directory(folder)
        return folder

    def datasets(self) -> list[CachedDataset]:
        """What is in the cache."""
        found = []
        for folder in _folders(self.root):
            with contextlib.suppress(OSError):
                sizes = [each.stat().st_size for each in os.scandir(folder) if each.name not in _KEPT]
                url = (folder / URL_NAME).read_text(errors="replace")
                found.append(CachedDataset(url, folder, len(sizes), sum(sizes)))
        return sorted(found, key=lambda each: (each.url, each.path))

    def clear(self, url: str | None = None) -> int:
        """Remove the datasets of one URL, or all, but files that are open; return the bytes that became free."""
        freed = 0
        with self._counter() as counter:
            for dataset in self.datasets():
                if url is None or dataset.url == url:
                    for file in _files(dataset.path):
                        _evict(file)
                    for part in list(dataset.path.glob(f"{PART}*")):
                        freed += _unlink_unlocked(part)
                    freed += _remove_gone(dataset.path)
                    with contextlib.suppress(OSError):  # not empty: what is open stays
                        if not any(each.name not in _KEPT for each in os.scandir(dataset.path)):
                            shutil.rmtree(dataset.path)
            counter.count()
        return freed

    def claim(self, folder: Path, name: str, num_bytes: int) -> tuple[int, bool] | None:
        """(descriptor of the file to fill, whether there may be something in it already); None if another fills it.

        There is no room yet: see `reserve`. Closing the descriptor lets go of it.
        """
        path = folder / (PART + name)
        with storage_errors(path, doing="created"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have emptied the cache by hand
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(descriptor)
                if status.st_nlink and not (folder / name).exists():
                    return descriptor, status.st_size == num_bytes
            except BlockingIOError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
        os.close(descriptor)
        return None

    def reserve(self, descriptor: int, path: Path, num_bytes: int, choose: Choose, spare: int = 0) -> bool:
        """Make a claimed file this long, on the disk, too, evicting others if need be; False if there is no room yet.

        Args:
            spare: Bytes to make free for those that come next: what is evicted takes a moment to be closed.

        Raises:
            StorageError: the disk is full, of other things.
        """
        with self._counter() as counter:
            if counter.used + num_bytes + spare > self.budget_bytes:
                if not self._make_room(counter, num_bytes + spare, choose):
                    self._make_room(counter, num_bytes, choose)
                if counter.used + num_bytes > self.budget_bytes:
                    return False
            while True:
                try:
                    os.posix_fallocate(descriptor, 0, num_bytes)
                except OSError as error:
                    os.ftruncate(descriptor, 0)
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        with storage_errors(path, doing="made as long as the file"):
                            raise
                    free = shutil.disk_usage(path.parent).free
                    if not self._evict(counter, max(1, num_bytes - free), choose):
                        if self._coming_bytes():
                            return False
                        with storage_errors(path, doing=f"reserving {num_bytes:,} bytes for the cache"):
                            raise
                else:
                    counter.add(num_bytes)
                    return True

    def finish(self, folder: Path, name: str, descriptor: int) -> None:
        """Give a claimed file, whose bytes are right, its name."""
        path = folder / (PART + name)
        with storage_errors(path, doing="synced"):
            os.fdatasync(descriptor)
            os.utime(descriptor)
            os.rename(path, folder / name)

    def restore(self, folder: Path, name: str) -> bool:
        """Whether an evicted file that is still open somewhere was given its name back."""
        try:
            os.rename(folder / (GONE + name), folder / name)
        except FileNotFoundError:
            return False
        return True

    def used(self) -> int:
        """Bytes used, as last counted."""
        with self._counter() as counter:
            return counter.used

    def count(self) -> int:
        """Bytes used, counted anew."""
        with self._counter() as counter:
            return counter.count()

    def _make_room(self, counter: _Counter, num_bytes: int, choose: Choose) -> bool:
        missing = counter.count() + num_bytes - self.budget_bytes
        return missing <= 0 or self._evict(counter, missing, choose)

    def _evict(self, counter: _Counter, missing: int, choose: Choose) -> bool:
        """Whether so many bytes became free. What readers are about to close is not evicted twice over."""
        folders = _folders(self.root)
        missing -= sum(map(_remove_gone, folders))
        coming = self._coming_bytes()
        if missing > coming:
            chosen = choose([file for folder in folders for file in _files(folder)], missing - coming)
            for file in chosen or ():
                _evict(file)
            missing -= sum(map(_remove_gone, {file.folder for file in chosen or ()}))
        counter.count()
        return missing <= 0

    def _coming_bytes(self) -> int:
        """Bytes of evicted files that readers are about to close; one that waits for room meanwhile keeps its own."""
        since = time.time() - _CLOSED_SECONDS
        found = [path.stat() for folder in _folders(self.root) for path in folder.glob(f"{GONE}*")]
        return sum(status.st_size for status in found if status.st_ctime > since)

    @contextlib.contextmanager
    def _counter(self) -> Iterator[_Counter]:
        with storage_errors(self.root, doing="locked"):
            descriptor = os.open(self.root / _BUDGET_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield _Counter(descriptor, self.root)
            finally:
                os.close(descriptor)


class _Counter:
    """Bytes used, in a file that is locked. Who is killed between reserving and counting leaves it wrong, too small or
    too large by a file; it is counted anew whenever the budget seems used up, and when a fetcher starts.
    """

    def __init__(self, descriptor: int, root: Path) -> None:
        self._descriptor, self._root = descriptor, root
        text = os.pread(descriptor, 32, 0).strip()
        self.used = int(text) if text.isdigit() else self.count()

    def add(self, num_bytes: int) -> None:
        self._write(self.used + num_bytes)

    def count(self) -> int:
        used = 0
        for folder in _folders(self._root):
            for each in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):
                    used += each.stat(follow_symlinks=False).st_size
        self._write(used)
        return used

    def _write(self, used: int) -> None:
        self.used = used
        os.pwrite(self._descriptor, b"%-32d" % used, 0)


def _folders(root: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return [Path(each.path) for each in os.scandir(root) if _FOLDER.fullmatch(each.name) and each.is_dir()]
    return []


def _files(folder: Path) -> Iterator[CachedFile]:
    for each in os.scandir(folder):
        if each.name not in _KEPT and not each.name.startswith((PART, GONE, ".")):
            with contextlib.suppress(FileNotFoundError):
                status = each.stat(follow_symlinks=False)
                yield CachedFile(folder, each.name, status.st_size, status.st_mtime)


def _evict(file: CachedFile) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rename(file.folder / file.name, file.folder / (GONE + file.name))


def _remove_gone(folder: Path) -> int:
    """Remove evicted files that nobody has open; return how many bytes became free."""
    return sum(_unlink_unlocked(path) for path in list(folder.glob(f"{GONE}*")))


def _unlink_unlocked(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(descriptor).st_size
            os.unlink(path)
            return size
        except BlockingIOError:
            return 0
        finally:
            os.close(descriptor)
    return 0

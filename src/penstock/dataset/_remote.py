"""A dataset in an object store, read through the node's cache: where both are, and every byte of it checked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.dataset._stage import find_scratch
from penstock.errors import CorruptionError, ObjectMissing, StorageError
from penstock.filesystem import is_url, user_cache
from penstock.shards import (
    Check,
    Io,
    ShardFolder,
    Storage,
    Verification,
    read_contents,
    read_manifest,
    verify_folder,
)

if TYPE_CHECKING:
    from penstock.remote import RemoteFolder

_LEAST_SCRATCH_BYTES = 1 << 30
_VERIFIED_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLocation:
    """A dataset in an object store, and the folder of the node's cache in which its shards appear."""

    url: str
    folder: RemoteFolder
    io: Io
    check: Check
    cache: Path | None = None
    """Where the cache is, if not in its usual place."""
    cache_bytes: int | None = None
    as_of: str | None = None

    def open(self, fingerprint: str | None = None) -> ShardFolder:
        return ShardFolder(
            self.folder.path,
            io=self.io,
            check=self.check,
            fingerprint=fingerprint,
            as_of=self.as_of,
            supply=self.folder,
        )

    def to_json(self) -> dict[str, Any]:
        fields = {"path": self.url, "io": self.io, "check": self.check, "cache_bytes": self.cache_bytes}
        fields |= {"cache": None if self.cache is None else str(self.cache), "as_of": self.as_of}
        return {name: value for name, value in fields.items() if value is not None}

    def folders(self, storage: Storage) -> tuple[str, ...]:
        return (storage.fingerprint,)

    def __str__(self) -> str:
        return self.url


def open_store_folder(url: str, cache: Path | None, cache_bytes: int | None) -> RemoteFolder:
    """The folder of the cache for a dataset in a store; without `cache`, where this node has fast storage."""
    from penstock.remote import open_remote  # with the clients of stores come 30 ms of imports

    return open_remote(url, cache or default_cache(), cache_bytes, read_contents)


def default_cache() -> Path:
    """The cache of remote datasets: on the node's scratch if there is one, else in `~/.cache`.

    Raises:
        StorageError: the user has no home.
    """
    scratch = find_scratch(_LEAST_SCRATCH_BYTES)
    if scratch is not None:
        return scratch.path / f"penstock-cache-{os.geteuid()}"
    if (cache := user_cache("datasets")) is None:
        raise StorageError("This user has no home, so there is no place for a cache. Give cache=, a folder on a disk.")
    return cache


def open_folder(path: str | os.PathLike[str]) -> ShardFolder:
    """The shards of a dataset, in a folder or at a URL, as they are read by default."""
    if not is_url(path):
        return ShardFolder(Path(path).absolute(), io="auto", check="window")
    folder = open_store_folder(os.fspath(path), None, None)
    return RemoteLocation(url=os.fspath(path), folder=folder, io="auto", check="window").open()


def verify(path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None) -> Verification:
    """Read every byte of the dataset at `path`; `on_progress` is called with (bytes done, bytes in all).

    At a URL everything is fetched once more, past the cache, a few shards at a time.

    Raises:
        DatasetChanged: a writer replaced the dataset meanwhile, so missing files may not be faults.
        IncompleteDataset: there is no dataset.
        StorageError: the manifest, or the store, cannot be read.
    """
    if not is_url(path):
        return verify_folder(path, on_progress=on_progress)
    url, root = os.fspath(path).rstrip("/"), default_cache()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=root) as cache:
        folder = open_store_folder(url, Path(cache), None)
        manifest = read_manifest(folder.path)
        sizes = read_contents(folder.path).sizes

        def check(name: str) -> str | None:
            try:
                folder.obtain(name)  # it is checked on arrival
            except (CorruptionError, ObjectMissing) as error:
                return str(error)
            os.unlink(folder.path / name)
            return None

        faults, done = [], 0
        with ThreadPoolExecutor(_VERIFIED_AT_ONCE) as pool:
            for name, fault in zip(sizes, pool.map(check, sizes), strict=True):
                faults += [] if fault is None else [fault]
                done += sizes[name]
                if on_progress is not None:
                    on_progress(done, sum(sizes.values()))
    return Verification(url, len(manifest.shards), manifest.num_samples, manifest.num_bytes, tuple(faults))

"""A dataset in an object store: its manifest, and a copy of all of it on this node.

whole files, several at once, each in ranges that are asked for again when they fail or stall
-> every block against its checksum; ranges that are damaged are fetched again
-> renamed into place, so that what has its name is right, and the next run need not fetch it again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.errors import CorruptionError, DatasetChanged, FormatError, IncompleteDataset, ObjectMissing
from penstock.filesystem import create_file, remove_if_present, rename, storage_errors
from penstock.shards import MANIFEST_NAME, DatasetContents, Manifest, parse_manifest

if TYPE_CHECKING:
    from penstock.remote import Store

_FILES_AT_ONCE = 6
_ROUNDS = 4
"""So often a range may arrive damaged before the object itself must be."""


class Source(Protocol):
    """A dataset to be copied."""

    name: str
    """Of the folder that it becomes."""
    manifest: Manifest

    @property
    def folder(self) -> Path | None:
        """Where it is, if it is on this machine."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, the manifest last."""
        ...

    def copy(self, sizes: Mapping[str, int], data: Path, on_bytes: Callable[[int], None]) -> None:
        """Have these files in a folder: each whole, synced and verified, or not at all.

        Raises:
            CorruptionError: bytes differ from their checksums.
        """
        ...


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """The object that makes a prefix a dataset."""

    raw: bytes
    etag: str | None
    manifest: Manifest | None
    """None if it is not the manifest of a dataset, or is damaged."""


def read_remote(store: Store) -> RemoteManifest | None:
    """The dataset that is there; None if there is none."""
    try:
        found = store.get_whole(MANIFEST_NAME)
    except ObjectMissing:
        return None
    assert found is not None
    raw, etag = found
    try:
        return RemoteManifest(raw, etag, parse_manifest(raw, f"{store.url}/{MANIFEST_NAME}"))
    except FormatError:
        return RemoteManifest(raw, etag, None)


class RemoteSource:
    """A dataset in an object store.

    Raises:
        IncompleteDataset: there is none.
        FormatError: its manifest is damaged, or of a newer version.
    """

    folder: Path | None = None

    def __init__(self, store: Store) -> None:
        found = read_remote(store)
        if found is None:
            raise IncompleteDataset(f"{store.url}: no dataset is there ({MANIFEST_NAME} is missing). Check the URL.")
        self.manifest = found.manifest or parse_manifest(found.raw, f"{store.url}/{MANIFEST_NAME}")
        self.name = store.url.rpartition("/")[2]
        self._store, self._raw, self._contents = store, found.raw, DatasetContents(self.manifest)

    def sizes(self) -> dict[str, int]:
        return {**self._contents.sizes, MANIFEST_NAME: len(self._raw)}

    def copy(self, sizes: Mapping[str, int], data: Path, on_bytes: Callable[[int], None]) -> None:
        pool = ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="penstock-stage")
        running = {pool.submit(self._fetch, name, data): name for name in sizes if name != MANIFEST_NAME}
        try:
            for future in as_completed(running):
                future.result()
                on_bytes(sizes[running[future]])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the store's end fails what is under way
            raise
        pool.shutdown()
        if MANIFEST_NAME in sizes:
            working = data / f"{MANIFEST_NAME}.partial"
            remove_if_present(working)
            create_file(working, [self._raw])
            rename(working, data / MANIFEST_NAME)
            on_bytes(len(self._raw))

    def _fetch(self, name: str, data: Path) -> None:
        from penstock.remote import download

        working, damage = data / f"{name}.partial", [(0, self._contents.sizes[name])]
        remove_if_present(working)
        for _ in range(_ROUNDS):
            try:
                with storage_errors(working, doing="downloaded"):
                    download(self._store, name, damage, working)
            except ObjectMissing:
                self._check_unchanged()
                raise
            damage = self._contents.find_damage(working, name)
            if not damage:
                rename(working, data / name)
                return
        remove_if_present(working)
        raise CorruptionError(
            f"{self._store.url}/{name}: bytes {damage[0][0]:,} to {damage[0][1]:,} do not match their checksum, each "
            f"of {_ROUNDS} times they were fetched. The object is damaged: `penstock push` it again from the original."
        )

    def _check_unchanged(self) -> None:
        now = read_remote(self._store)
        if now is None or now.raw != self._raw:
            raise DatasetChanged(f"{self._store.url}: the dataset was replaced while it was copied. Run it again.")

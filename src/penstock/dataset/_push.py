"""Push a dataset to an object store: there it is the old one or the new one, and never half.

    HEAD of each file -> check, PUT what is missing, several at once -> PUT the manifest, if nobody else has -> prune

Names of files carry a hash of their content and are never reused, so those of both datasets can be there at once, and
the remote dataset changes with one object, its manifest. Whatever is killed on the way, the next run sends what is
missing. Price of a run that sends nothing: one small request per file, 32 at once.

Files of the dataset that was there before stay, because runs that have it open still read them; they are deleted when
asked. **Two at once**: each sends its files; the manifest is written only in place of the one that was seen at first,
where the store can do that (S3, Google, Azure), so the second is refused and nothing that it relied on is missing.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.dataset._stage import OnProgress
from penstock.dataset._stage_remote import RemoteManifest, read_remote
from penstock.errors import DatasetExists, WriterBusy, counted
from penstock.filesystem import is_url, local_path
from penstock.shards import (
    MANIFEST_NAME,
    Manifest,
    find_faults,
    is_file_of_a_dataset,
    read_manifest,
)

if TYPE_CHECKING:  # with the clients of stores come 30 ms of imports
    from penstock.remote import Parcel, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A dataset in an object store."""

    url: str
    """Where to open it."""
    num_files: int
    num_bytes: int
    """Bytes of its shards."""
    sent_bytes: int
    """Bytes that this call sent; 0 if everything was there."""
    seconds: float
    num_left: int
    """Shards of the dataset that was there before, left for its readers."""
    num_pruned: int
    """Files that the dataset does not need, deleted because that was asked."""

    def __str__(self) -> str:
        from penstock.report import format_bytes, format_seconds

        sent = "all of it was there"
        if self.sent_bytes:
            rate = format_bytes(self.sent_bytes / max(self.seconds, 1e-9))
            sent = f"sent {format_bytes(self.sent_bytes)} in {format_seconds(self.seconds)}, {rate}/s"
        left = (
            f"\n{counted(self.num_left, 'shard')} of the dataset that was there before can still be read by whoever "
            "has it open; prune=True (--prune) deletes them."
        )
        pruned = f"\n{counted(self.num_pruned, 'file')} that it does not need deleted."
        size = f"{format_bytes(self.num_bytes)} in {counted(self.num_files, 'file')}"
        return f"{self.url}: {size}, {sent}.{left if self.num_left else ''}{pruned if self.num_pruned else ''}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def push(
    source: str | os.PathLike[str],
    url: str,
    *,
    overwrite: bool = False,
    prune: bool = False,
    on_progress: OnProgress | None = None,
) -> Pushed:
    """Copy a dataset to an object store. Stop it at any moment and call it again: it sends what is missing.

    Every file is checked before it is sent. Until the last moment, those who open the URL see what was there before.

    Args:
        source: The dataset's folder.
        url: Where it will be opened, such as s3://bucket/corpus.
        overwrite: Replace a dataset that has no file in common with this one.
        prune: Delete files of datasets that were there before. Runs that still read one of them fail, and so may a
            push to the same URL that is running meanwhile.
        on_progress: Called with (bytes there, bytes in all).

    Raises:
        IncompleteDataset: there is no dataset at the source.
        CorruptionError: a file of the source differs from its checksums.
        DatasetExists: an unrelated dataset, or something else, is there, and `overwrite` is not set.
        WriterBusy: another push has replaced the dataset meanwhile.
        StoreError: the store refuses, for the reason that the message gives; what was sent is not sent again.
    """
    begin, url = time.monotonic(), check_destination_url(url)
    folder = local_path(source, "the dataset to push").absolute()
    manifest = read_manifest(folder)
    parcels = [parcel_of(folder, manifest, entry) for entry in manifest.files]
    from penstock.remote import Sender, connect

    with connect(url) as store, Sender(store) as sender:
        before = read_remote(store)
        if not overwrite:
            check_related(url, before, manifest)
        sent = sender.send_all(parcels, on_progress)
        sent += put_manifest(store, manifest, before)
        old = before.manifest if before is not None else None
        pruned = _prune(store, manifest) if prune else 0
    return Pushed(
        url=url,
        num_files=len(parcels) + 1,
        num_bytes=manifest.num_bytes,
        sent_bytes=sent,
        seconds=time.monotonic() - begin,
        num_left=0 if prune or old is None else old.num_shards_beside(manifest),
        num_pruned=pruned,
    )


def check_destination_url(url: str) -> str:
    """The URL, if something can be written there.

    Raises:
        ValueError: it is a path, or a web server's.
    """
    if not is_url(url):
        raise ValueError(
            f"{url} is a path. Give a URL, such as s3://bucket/corpus; `penstock stage` copies to a folder."
        )
    if url.startswith(("http://", "https://")):
        raise ValueError(
            f"{url}: web servers are only read from. Push to the store behind it (s3://, gs://, az://), or copy the "
            "folder to the server's own disk."
        )
    from penstock.remote import check_url

    return check_url(url)


def parcel_of(folder: Path, manifest: Manifest, entry: Any) -> Parcel:
    """One file of a dataset, to be sent."""
    from penstock.remote import Parcel

    return Parcel(entry.name, folder / entry.name, entry.num_bytes, lambda: find_faults(folder, entry, manifest.schema))


def check_related(url: str, before: RemoteManifest | None, manifest: Manifest) -> None:
    """Refuse to replace what is not an earlier or later state of the dataset: the URL may be mistyped.

    Raises:
        DatasetExists: it is something else.
    """
    if before is None or before.manifest == manifest:
        return
    what = "a manifest.json that cannot be read"
    if before.manifest is not None:
        if not before.manifest.file_names.isdisjoint(manifest.file_names) or not before.manifest.shards:
            return
        what = f"another dataset, of {counted(before.manifest.num_samples, 'sample')},"
    raise DatasetExists(
        f"{url}: {what} is there, which has nothing in common with this one. Pass overwrite=True (--overwrite) to "
        "replace it, or choose another URL."
    )


def put_manifest(store: Store, manifest: Manifest, before: RemoteManifest | None) -> int:
    """Make the manifest, whose files are all there, the dataset; return how many bytes were sent.

    Raises:
        WriterBusy: the one that is there is not `before`.
    """
    raw = manifest.to_bytes()
    if before is not None and before.raw == raw:
        return 0
    if not store.replace(MANIFEST_NAME, raw, None if before is None else before.etag):
        raise WriterBusy(
            f"{store.url}: another push has replaced the dataset there meanwhile, so this one stopped. Its files are "
            "there: run it again if this dataset is to take the place of that one."
        )
    return len(raw)


def _prune(store: Store, manifest: Manifest) -> int:
    kept = manifest.file_names
    names = [name for name in store.names() if is_file_of_a_dataset(name) and name not in kept]
    now = read_remote(store)
    if now is None or now.manifest != manifest:
        raise WriterBusy(f"{store.url}: another push has replaced the dataset there meanwhile, so nothing was deleted.")
    for name in names:
        store.delete(name)
    return len(names)

"""Prepare straight to an object store: finished shards travel while later ones are made.

    ~/.cache/penstock/prepare/s3/bucket/corpus    the URL's work folder, prepared into like any destination; but of a
                                                  shard that the store has, only a hollow file is kept

    open_shipment   the folder becomes a hollow copy of the dataset that the store has, if it is not one already
    begin, take     finished tasks, in the order of their shards' final names: sent, made hollow, recorded as `shipped`
    deliver         provenance and manifest: now the store has the new dataset; then the folder is committed, too

Everything else of this room works as for a folder: continuing, adding and removing sources, refusing, counting packed
rows (a hollow shard has its offsets). The folder is a convenience: without it, what the store has is learned again, and
an unfinished run starts over. A name contains a number that depends on all tasks before, so shards are sent in order,
and tasks are begun in order. The bytes and names are those of a dataset that was prepared locally and pushed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from penstock.dataset import RemoteManifest, check_destination_url, parcel_of, put_manifest, read_remote
from penstock.errors import DatasetExists, FormatError, IncompleteDataset, SchemaError, WriterBusy, counted
from penstock.filesystem import (
    DirectoryLock,
    create_file,
    remove_if_present,
    remove_tree,
    rename,
    storage_errors,
)
from penstock.preparation._records import TaskRecord
from penstock.preparation._specification import Settings
from penstock.preparation._survey import Request
from penstock.preparation._work_folder import WORK_NAME, WorkFolder
from penstock.remote import Parcel, Sender, Store, connect
from penstock.schema import Schema
from penstock.shards import (
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    Workspace,
    find_faults,
    read_manifest,
    write_hollow,
)

_SHARDS_WAITING = 4
"""Full shards that may wait for the network before preparation does."""


def check_shippable(url: str, settings: Settings) -> str:
    """The URL, if a dataset can be prepared there.

    Raises:
        ValueError: it cannot be written to, or machines of a cluster would have to see the work folder.
    """
    if settings.engine == "ray":
        raise ValueError(
            f"{url}: engine='ray' needs a folder that every machine sees. Prepare into one, then `penstock push` it."
        )
    return check_destination_url(url)


@contextlib.contextmanager
def naming(folder: Path, url: str | None) -> Iterator[None]:
    """Have what a dataset is refused for name the URL that was given, not its work folder."""
    try:
        yield
    except (DatasetExists, FormatError, SchemaError, WriterBusy) as error:
        if url is not None:
            error.args = tuple(str(each).replace(os.fspath(folder), url) for each in error.args)
        raise


def final_name(number: int, shard: ShardEntry) -> str:
    """The name of a new shard in the dataset, in place of its name while tasks run."""
    return f"shard-{number:06d}-{shard.name.rsplit('-', 1)[1]}"


@contextlib.contextmanager
def open_shipment(request: Request) -> Iterator[Shipment | None]:
    """What a run sends to the request's URL; None if it has none. The work folder is a hollow copy of what is there."""
    if request.url is None:
        yield None
        return
    with connect(request.url) as store, Sender(store) as sender:
        before = read_remote(store)
        if before is not None and before.manifest is None and not request.settings.overwrite:
            raise DatasetExists(
                f"{request.url}: a manifest.json that cannot be read is there. Pass overwrite=True (--overwrite) to "
                "replace it, or choose another URL."
            )
        with storage_errors(request.destination, doing="creating the folder"):
            request.destination.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(request.destination)
        lock.acquire()
        try:
            _copy_hollow(request.destination, store, sender, before, with_lengths=bool(request.settings.pack))
        finally:
            lock.release()
        yield Shipment(request, store, sender, before)


def _copy_hollow(
    folder: Path, store: Store, sender: Sender, before: RemoteManifest | None, *, with_lengths: bool
) -> None:
    """Make the folder a hollow copy of what the store has; shards that are missing there are missing here, too."""
    manifest = before.manifest if before is not None else None
    if not _is_copy(folder, before):
        for path in folder.iterdir():
            if path.name not in (WORK_NAME, ".lock"):
                remove_tree(path) if path.is_dir() and not path.is_symlink() else remove_if_present(path)
        if before is None or manifest is None:
            return
        if (entry := manifest.provenance) is not None:
            create_file(folder / entry.name, [store.get(entry.name, 0, entry.num_bytes)])
        for shard in manifest.shards:
            name = shard.name
            read = functools.partial(store.get, name) if with_lengths else None
            write_hollow(folder / name, shard, manifest.schema, read)
        create_file(folder / f".{MANIFEST_NAME}", [before.raw])
        rename(folder / f".{MANIFEST_NAME}", folder / MANIFEST_NAME)
    if manifest is not None:
        for shard, is_there in zip(manifest.shards, sender.are_there(manifest.shards), strict=True):
            if not is_there:
                remove_if_present(folder / shard.name)


def _is_copy(folder: Path, before: RemoteManifest | None) -> bool:
    try:
        return before is not None and read_manifest(folder).to_bytes() == before.raw
    except (IncompleteDataset, ValueError):
        return False


class Shipment:
    """The shards of one run, on their way."""

    def __init__(self, request: Request, store: Store, sender: Sender, before: RemoteManifest | None) -> None:
        self._folder, self._work = request.destination, WorkFolder(request.destination)
        self._store, self._sender, self._before = store, sender, before
        self._most_waiting = _SHARDS_WAITING * request.settings.shard_bytes
        self._keys: collections.deque[str] = collections.deque()
        """Tasks whose shards have not been named yet."""
        self._finished: dict[str, TaskRecord] = {}
        self._under_way: collections.deque[tuple[TaskRecord, list[Future[int]]]] = collections.deque()
        self._num_waiting, self._num_sent = 0, 0

    def expect(self, schema: Schema, first_shard: int) -> None:
        """Say what the run makes, before `begin`."""
        self._schema, self._number = schema, first_shard

    def begin(self, keys: Sequence[str], finished: Mapping[str, TaskRecord]) -> dict[str, TaskRecord]:
        """Take the finished tasks of an earlier run; return those that need not be done again.

        Shards that are hollow here must be in the store under their final names, which are only known up to the first
        task that is not finished.
        """
        kept = self._find_shipped(keys, finished)
        self._keys = collections.deque(keys)
        for record in kept.values():
            self.take(record)
        return kept

    def take(self, record: TaskRecord) -> None:
        """Send the shards of a finished task as soon as they can be named; wait if too many bytes are waiting.

        Raises:
            StoreError: the store has refused one.
        """
        self._finished[record.key] = record
        while self._keys and self._keys[0] in self._finished:
            self._send(self._finished.pop(self._keys.popleft()))
        while self._under_way and (self._num_waiting > self._most_waiting or self._is_first_there()):
            self._receipt()

    def deliver(self, manifest: Manifest, workspace: Workspace) -> list[str]:
        """Send the rest, and make it the dataset; return what the user should know.

        Raises:
            WriterBusy: somebody else has replaced the dataset in the store meanwhile.
        """
        while self._under_way:
            self._receipt()
        if (entry := manifest.provenance) is not None:
            parcel = parcel_of(workspace.shard_path(entry.name).parent, manifest, entry)
            self._num_sent += self._sender.send(parcel).result()
        self._num_sent += put_manifest(self._store, manifest, self._before)
        old = self._before.manifest if self._before is not None else None
        left = old.num_shards_beside(manifest) if old is not None else 0
        command = f"`penstock push {self._folder} {self._store.url} --prune` deletes them"
        notes = [f"{counted(left, 'shard')} of the dataset before are left there for its readers; {command}."]
        return [f"Sent {counted(self._num_sent, 'byte')} to the store.", *(notes if left else [])]

    def _find_shipped(self, keys: Sequence[str], finished: Mapping[str, TaskRecord]) -> dict[str, TaskRecord]:
        named: dict[str, list[ShardEntry]] = {}
        number = self._number
        for key in keys:
            if key not in finished:
                break
            named[key] = [
                dataclasses.replace(shard, name=final_name(number + place, shard))
                for place, shard in enumerate(finished[key].shards)
            ]
            number += len(named[key])
        hollow = [key for key in named if finished[key].shelf == "shipped"]
        wanted = [shard for key in hollow for shard in named[key]]
        there = {shard.name for shard, is_there in zip(wanted, self._sender.are_there(wanted), strict=True) if is_there}
        safe = {key for key in hollow if there.issuperset(shard.name for shard in named[key])}
        return {key: record for key, record in finished.items() if record.shelf != "shipped" or key in safe}

    def _send(self, record: TaskRecord) -> None:
        sent: list[Future[int]] = []
        ready = self._work.path / "ready"
        for shard in record.shards:
            name, self._number = final_name(self._number, shard), self._number + 1
            if record.shelf != "shipped":
                check = functools.partial(find_faults, ready, shard, self._schema)
                sent.append(self._sender.send(Parcel(name, ready / shard.name, shard.num_bytes, check)))
                self._num_waiting += shard.num_bytes
        if sent:
            self._under_way.append((record, sent))

    def _is_first_there(self) -> bool:
        return all(each.done() for each in self._under_way[0][1])

    def _receipt(self) -> None:
        """Wait until the store has the shards of the first task under way."""
        record, sent = self._under_way.popleft()
        self._num_sent += sum(each.result() for each in sent)
        self._work.ship(record, self._schema)
        self._num_waiting -= sum(shard.num_bytes for shard in record.shards)

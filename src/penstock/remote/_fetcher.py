"""The process that fetches: it obtains files when they are asked for, and ahead of a run that said what it reads.

    readers, any process ── "obtain this file" ──► Fetcher ── ranges ──► store
    a run ── "these shards between these rows; I am at row r" ──► it fetches what is needed first, evicts what is
                                                                  needed last, and never what is needed before it

It is a process of its own because obstore hangs in a forked child, and so that fetching takes nothing of the training
process's time. It holds the life-line of the process that started it. Others of the same run, workers too, reach it by
an address in the abstract namespace, which leaves no file behind; both sides check that the other is the same user.
Each request is a connection: there is nothing to clean up after a client that died.

Several fetchers of a node may share a cache. A lock on the file being fetched makes them fetch it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import (
    CorruptionError,
    DatasetChanged,
    ObjectMissing,
    PenstockError,
    StorageError,
)
from penstock.remote._cache import MANIFEST_NAME, PART, URL_NAME, Cache, CachedFile
from penstock.remote._download import Downloader, Span, Traffic
from penstock.remote._store import Store, open_store
from penstock.remote._uses import NEVER, Uses, choose_evictions
from penstock.workers import Channel, SentError, guard_life_line

CALLS_AT_ONCE = 32
_AHEAD_LEAST, _AHEAD_MOST, _AHEAD_SECONDS = 2, 32, 0.5
"""Files fetched ahead at once, each in many ranges: as many as the line delivers in half a second. More would be there
no sooner, and those that are needed first later."""
_SPARE = 16
"""Of a full cache at most a sixteenth is free for files that come next."""
_EARLY_LEAST = 6
"""Files that are fetched ahead whatever a full cache holds."""
_LEAD = 8
"""A full cache is filled ahead with an eighth of what it may hold; the rest stays what is needed soonest."""
_ROUNDS = 8
"""How often the damaged parts of a file are fetched again."""
_LOOK_SECONDS = 0.05
_NO_ROOM_SECONDS = 60.0
"""How long a reader waits for room that others do not make."""
_YIELD_SECONDS = 2.0
"""How long a reader waits for those that need something sooner."""
_RECENT_SECONDS = 120.0
"""A file that another fetcher needs was touched no longer ago than this."""
_SETTINGS = ("aws_", "azure_", "google_", "gcs_", "hf_", "ssl_cert_", "http_proxy", "https_proxy", "no_proxy")
_PAUSE_SECONDS = 5.0
"""After a failure ahead of the run."""

_log = logging.getLogger(__name__)


class Contents(Protocol):
    """What the manifest of a dataset says about its files."""

    sizes: Mapping[str, int]
    """Bytes of each file, in the order of its number."""
    etags: Mapping[str, str]
    """Those that a file must still have when it was fetched; none of files that have checksums."""

    def find_damage(self, path: Path, name: str) -> list[Span]:
        """The bytes of a file at `path` that are not those of file `name`."""
        ...


ReadContents = Callable[[Path], Contents]


class Objects:
    """Some objects that no manifest names: as large, and of the same ETags, as when they were opened.

    Where an ETag is an MD5 (S3, in one part and without keys of its own), what arrived is compared with it.
    """

    def __init__(self, folder: Path) -> None:
        described = json.loads((folder / MANIFEST_NAME).read_bytes())
        self.sizes: Mapping[str, int] = {name: size for name, (size, _) in described.items()}
        self.etags: Mapping[str, str] = {name: etag for name, (_, etag) in described.items()}

    def find_damage(self, path: Path, name: str) -> list[Span]:
        """All of a file, if its MD5 is another; nothing is told without one."""
        etag = self.etags[name].strip('"')
        if re.fullmatch("[0-9a-f]{32}", etag) is None:
            return []
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        return [] if found == etag else [(0, self.sizes[name])]


class CacheFolder(NamedTuple):
    """Where a dataset is in a cache, what that may hold, and how to know the dataset's files."""

    path: str
    root: str
    budget_bytes: int
    read_contents: ReadContents


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a run reads: shards of some folders of the cache, between which rows."""

    key: str
    """Of the run; a later schedule with the same key takes this one's place."""
    folders: tuple[CacheFolder, ...]
    uses: Uses
    until: int
    """What is first needed from this row on is not fetched yet; it only decides what is evicted."""
    slack: int
    """Rows by which other ranks, and batches that are still being computed, may be behind."""


@dataclass(slots=True, eq=False)
class _Folder:
    path: Path
    url: str
    store: Store
    cache: Cache
    contents: Contents
    names: list[str] = field(init=False)
    numbers: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.names = list(self.contents.sizes)
        self.numbers = {name: number for number, name in enumerate(self.names)}

    def __contains__(self, name: str) -> bool:
        return name in self.numbers

    def size_of(self, number: int) -> int:
        return self.contents.sizes[self.names[number]]

    def has(self, name: str) -> bool:
        return os.path.exists(self.path / name) or self.cache.restore(self.path, name)


@dataclass(slots=True, eq=False)
class _Run:
    schedule: Schedule
    row: int
    next: int = 0
    """The first use that may not be fetched yet."""
    lacks_room: bool = False

    def next_rows(self, number: int, num_files: int) -> NDArray[np.int64]:
        """When each file of one of its folders is needed next."""
        return self.schedule.uses.of_folder(number).next_rows(self.row - self.schedule.slack, num_files)


class Fetcher:
    """The program of the process; the channel is told the address, once it can be reached."""

    def run(self, channel: Channel, life_line: int) -> None:
        """Serve until the owner is gone."""
        guard_life_line(life_line)
        _raise_descriptor_limit()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"\0penstock-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(128)
        asyncio.run(self._serve(listener, channel, address))

    async def _serve(self, listener: socket.socket, channel: Channel, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._caches: dict[tuple[str, int | None], Cache] = {}
        self._stores: dict[str, Store] = {}
        self._folders: dict[str, _Folder] = {}
        self._runs: dict[str, _Run] = {}
        self._obtaining: dict[tuple[str, str], asyncio.Future[bool]] = {}
        self._downloader = Downloader()
        self._callers = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="penstock-store")
        self._counts = {"num_hits": 0, "num_waits": 0, "wait_seconds": 0.0}
        self._noted_at: dict[tuple[str, str], float] = {}
        self._changed = asyncio.Event()
        ahead = asyncio.ensure_future(self._fetch_ahead())
        threading.Thread(target=self._accept, args=(listener,), name="penstock-accept", daemon=True).start()
        channel.send(address)
        owner = threading.Thread(target=_wait_for_end, args=(channel,), name="penstock-owner", daemon=True)
        owner.start()
        while owner.is_alive():
            await asyncio.sleep(1)
        ahead.cancel()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            end, _ = listener.accept()
            if is_same_user(end):
                threading.Thread(target=self._answer, args=(Channel(end),), daemon=True).start()
            else:
                end.close()

    def _answer(self, channel: Channel) -> None:
        try:
            (verb, *arguments), _ = channel.receive()
            try:
                answer = asyncio.run_coroutine_threadsafe(getattr(self, f"on_{verb}")(*arguments), self._loop).result()
            except Exception as error:  # noqa: BLE001 - raised again in the reader
                answer = error if isinstance(error, PenstockError) else SentError.pack(error)
            channel.send(answer)
        except (EOFError, ConnectionError):
            pass
        finally:
            channel.close()

    async def on_connect(self, url: str, settings: Mapping[str, str]) -> None:
        """Use these settings of stores, those of the process that asks: credentials may just have been corrected."""
        for name in settings_of_stores().keys() - settings.keys():
            del os.environ[name]
        os.environ.update(settings)
        self._stores.pop(url, None)
        store = self._store(url)
        for each in self._folders.values():
            each.store = store if each.url == url else each.store

    async def on_call(self, url: str, method: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """What the store answers."""
        ask = functools.partial(getattr(self._store(url), method), *arguments, **options)
        answer = await self._loop.run_in_executor(self._callers, ask)
        return bytes(answer) if isinstance(answer, memoryview) else answer

    async def on_download(self, url: str, name: str, spans: Sequence[Span], path: Path) -> None:
        """Write these bytes of an object to the same place of a file."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            await self._downloader.fetch(self._store(url), name, spans, descriptor)
            await asyncio.to_thread(os.fsync, descriptor)
        finally:
            os.close(descriptor)

    async def on_open(self, url: str, root: str, budget: int | None, read_contents: ReadContents) -> CacheFolder:
        """The folder of the dataset as it is now; only the manifest is fetched."""
        cache, store = await asyncio.to_thread(self._cache, root, budget), self._store(url)
        try:
            found = await asyncio.to_thread(store.get_whole, MANIFEST_NAME)
        except ObjectMissing as error:
            raise ObjectMissing(
                f"{url}: no dataset is there ({MANIFEST_NAME} is missing). Check the URL; or wait: `penstock push` and "
                "`penstock prepare` write the manifest last."
            ) from error
        assert found is not None, "there was no condition"
        return await self._open(url, cache, found[0], read_contents)

    async def on_open_objects(self, url: str, names: Sequence[str], root: str, budget: int | None) -> CacheFolder:
        """A folder for some objects as they are now; one request for each, and nothing of them is fetched."""
        cache, store = await asyncio.to_thread(self._cache, root, budget), self._store(url)
        heads = await asyncio.gather(*(self._loop.run_in_executor(self._callers, store.head, name) for name in names))
        described: dict[str, tuple[int, str]] = {}
        for name, head in zip(names, heads, strict=True):
            if head is None:
                raise ObjectMissing(f"{url}/{name}: there is no such object. Check the URL.")
            described[name] = head.size, head.etag or ""
        return await self._open(url, cache, json.dumps(described).encode(), Objects)

    async def _open(self, url: str, cache: Cache, manifest: bytes, read_contents: ReadContents) -> CacheFolder:
        path = await asyncio.to_thread(cache.folder_for, url, manifest)
        where = CacheFolder(str(path), str(cache.root), cache.budget_bytes, read_contents)
        folder = await self._folder(where)
        largest = max(folder.contents.sizes.values(), default=0)
        if largest > cache.budget_bytes:
            raise StorageError(
                f"{url}: the largest file has {largest:,} bytes, and the cache may have {cache.budget_bytes:,}. Give "
                f"cache_bytes={2 * largest:,} or more."
            )
        return where

    async def on_obtain(self, where: CacheFolder, name: str) -> None:
        """Return when the file is in the cache."""
        found = await self._folder(where)
        if found.has(name):
            return
        begin = time.monotonic()
        self._counts["num_waits"] += 1
        try:
            while not await self._obtain(found, name, self._needed_at(found, name, time.monotonic() - begin)):
                if time.monotonic() - begin > _NO_ROOM_SECONDS:
                    raise StorageError(
                        f"{found.cache.root}: no room for {name}. Files that are open or being fetched take all of the "
                        f"{found.cache.budget_bytes:,} bytes that the cache may have. Give a larger cache_bytes=."
                    )
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._counts["wait_seconds"] += time.monotonic() - begin

    def _needed_at(self, folder: _Folder, name: str, waited: float) -> int:
        """The row for which somebody waits: what is needed before it stays, or readers evict each other's files.

        -1 if no run needs the file, or if it waits for long: then everything may be evicted.
        """
        rows = self._next_rows([CachedFile(folder.path, name, 0, 0.0)])
        return -1 if rows[0] == NEVER or waited > _YIELD_SECONDS else int(rows[0])

    async def on_schedule(self, schedule: Schedule, row: int) -> None:
        """From now on, fetch ahead by this."""
        for where in schedule.folders:
            await self._folder(where)
        self._runs[schedule.key] = _Run(schedule, row)
        self._changed.set()

    async def on_progress(self, key: str, row: int) -> bool:
        """A run is at this row; whether its schedule is known."""
        run = self._runs.get(key)
        if run is not None:
            run.row = row
            self._changed.set()
        return run is not None

    async def on_forget(self, key: str) -> None:
        """A run is over."""
        self._runs.pop(key, None)

    async def on_counts(self) -> dict[str, float]:
        """What was fetched so far, and what had to be waited for."""
        traffic: Traffic = self._downloader.traffic
        return {**vars(traffic), **self._counts}

    def _cache(self, root: str, budget: int | None) -> Cache:
        cache = self._caches.get((root, budget))
        if cache is None:
            cache = Cache(Path(root), budget)
            cache.count()
            self._caches[root, budget] = self._caches[root, cache.budget_bytes] = cache
        return cache

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]

    async def _folder(self, where: CacheFolder) -> _Folder:
        """A folder of the cache, which this or another fetcher made."""
        if where.path not in self._folders:
            path = Path(where.path)
            cache = await asyncio.to_thread(self._cache, where.root, where.budget_bytes)
            url = (path / URL_NAME).read_text()
            contents = await asyncio.to_thread(where.read_contents, path)
            self._folders[where.path] = _Folder(path, url, self._store(url), cache, contents)
        return self._folders[where.path]

    async def _obtain(self, folder: _Folder, name: str, needed_at: int) -> bool:
        """Have a file in the cache; False if there is no room for one that is needed at this row."""
        key = str(folder.path), name
        running = self._obtaining.get(key)
        if running is not None:
            return await asyncio.shield(running)
        running = self._obtaining[key] = asyncio.ensure_future(self._fetch(folder, name, needed_at))
        running.add_done_callback(lambda _: self._obtaining.pop(key))
        return await asyncio.shield(running)

    async def _fetch(self, folder: _Folder, name: str, needed_at: int) -> bool:
        size, path = folder.contents.sizes[name], folder.path / (PART + name)
        claimed = folder.cache.claim(folder.path, name, size)
        while claimed is None:
            if folder.has(name):
                return True
            await asyncio.sleep(_LOOK_SECONDS)
            claimed = folder.cache.claim(folder.path, name, size)
        descriptor, is_begun = claimed
        etag = folder.contents.etags.get(name)
        is_begun = is_begun and etag is None  # else nothing could be told of what is there
        try:
            if not is_begun:
                os.ftruncate(descriptor, 0)
                choose, spare = self._chooser(folder, needed_at), self._spare_bytes(folder.cache)
                if not await asyncio.to_thread(folder.cache.reserve, descriptor, path, size, choose, spare):
                    return False
            await self._fill(folder, name, descriptor, path, [] if is_begun else [(0, size)])
            if etag is not None:
                head = await self._loop.run_in_executor(self._callers, folder.store.head, name)
                if head is None or head.etag != etag:
                    raise _changed(folder)
            await asyncio.to_thread(folder.cache.finish, folder.path, name, descriptor)
        finally:
            os.close(descriptor)
        self._downloader.traffic.num_files += 1
        self._note(folder, name)
        return True

    def _note(self, folder: _Folder, name: str) -> None:
        """Tell other fetchers that a file is needed, and remember that it was this one who did."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(folder.path / name)
            self._noted_at[str(folder.path), name] = time.time()

    async def _fill(self, folder: _Folder, name: str, descriptor: int, path: Path, damage: Sequence[Span]) -> None:
        for _ in range(_ROUNDS):
            is_fresh = bool(damage)
            try:
                await self._downloader.fetch(folder.store, name, damage, descriptor)
            except ObjectMissing as error:
                raise await self._missing(folder, name) from error
            damage = await asyncio.to_thread(folder.contents.find_damage, path, name)
            if not damage:
                return
            self._downloader.traffic.num_damaged += len(damage) if is_fresh else 0
        os.ftruncate(descriptor, 0)
        raise CorruptionError(
            f"{folder.url}/{name}: bytes {damage[0][0]:,} to {damage[0][1]:,} do not match their checksum, each of "
            f"{_ROUNDS} times they were fetched. The object is damaged: `penstock push` it again from the original."
        )

    async def _missing(self, folder: _Folder, name: str) -> PenstockError:
        """The error for an object that the manifest names and the store has not."""
        try:
            found = await asyncio.to_thread(folder.store.get_whole, MANIFEST_NAME)
            is_same = found is not None and found[0] == (folder.path / MANIFEST_NAME).read_bytes()
        except ObjectMissing:
            is_same = False
        if is_same:
            return ObjectMissing(
                f"{folder.url}/{name}: the store has no such object. `penstock push` the dataset again."
            )
        return _changed(folder)

    async def _fetch_ahead(self) -> None:
        """Keep files of all runs coming, those first that are needed first."""
        running: dict[asyncio.Future[Any], int] = {}
        while True:
            self._changed.clear()
            for run in list(self._runs.values()):
                while not run.lacks_room and self._keeps_up(running) and (found := self._next_of(run)) is not None:
                    folder, name, _ = found
                    running[asyncio.ensure_future(self._obtain_ahead(run, *found))] = folder.contents.sizes[name]
                    run.next += 1
                    await asyncio.sleep(0)  # so that the file counts as being obtained
            change: asyncio.Future[Any] = asyncio.ensure_future(self._changed.wait())
            done, _ = await asyncio.wait({change, *running}, return_when=asyncio.FIRST_COMPLETED)
            running = {future: size for future, size in running.items() if future not in done}
            change.cancel()

    def _keeps_up(self, running: Mapping[asyncio.Future[Any], int]) -> bool:
        """Whether the line could deliver another file soon."""
        soon = self._downloader.bytes_per_second() * _AHEAD_SECONDS
        return len(running) < _AHEAD_LEAST or (len(running) < _AHEAD_MOST and sum(running.values()) < soon)

    def _next_of(self, run: _Run) -> tuple[_Folder, str, int] | None:
        """The next file of a run that is not there, and the row at which it is needed."""
        uses = run.schedule.uses
        for number in range(run.next, len(uses)):
            run.next = number
            if uses.first_row[number] >= run.schedule.until:
                return None
            folder = self._folders[run.schedule.folders[uses.folder[number]].path]
            name = folder.names[uses.shard[number]]
            is_past = uses.last_row[number] < run.row - run.schedule.slack
            if is_past or (str(folder.path), name) in self._obtaining:
                continue
            if not folder.has(name):
                if self._is_early(run, number, folder, name):
                    return None
                return folder, name, int(uses.first_row[number])
            self._counts["num_hits"] += 1
            self._note(folder, name)
        run.next = len(uses)
        return None

    def _is_early(self, run: _Run, number: int, folder: _Folder, name: str) -> bool:
        """Whether a use can wait, so that what a full cache holds for later may stay: enough is there before it."""
        uses, cache = run.schedule.uses, folder.cache
        if cache.used() + folder.contents.sizes[name] <= cache.budget_bytes:
            return False
        first = int(np.searchsorted(uses.first_row, run.row + run.schedule.slack, side="right"))
        coming = sum(
            self._folders[run.schedule.folders[uses.folder[each]].path].size_of(int(uses.shard[each]))
            for each in range(first, number)
        )
        return coming * _LEAD > cache.budget_bytes and number - first >= _EARLY_LEAST

    async def _obtain_ahead(self, run: _Run, folder: _Folder, name: str, needed_at: int) -> None:
        """Have a file before it is needed; if there is no room, wait for the run to go on."""
        while self._runs.get(run.schedule.key) is run:
            try:
                if await self._obtain(folder, name, needed_at):
                    run.lacks_room = False
                    return
                run.lacks_room = True
                await asyncio.sleep(_LOOK_SECONDS)
            except (PenstockError, OSError) as error:
                _log.warning("Fetching %s/%s ahead failed: %s", folder.url, name, error)
                await asyncio.sleep(_PAUSE_SECONDS)

    def _spare_bytes(self, cache: Cache) -> int:
        """What the line delivers until readers have closed what is evicted; not much of a cache that is small."""
        return min(int(self._downloader.bytes_per_second() * _AHEAD_SECONDS), cache.budget_bytes // _SPARE)

    def _chooser(
        self, folder: _Folder, needed_at: int
    ) -> Callable[[Sequence[CachedFile], int], list[CachedFile] | None]:
        """Which files to evict for one that is needed at a row of a run; -1 if somebody waits for it.

        First files that no run of this fetcher needs, the oldest first; then those that are needed last. What another
        fetcher fetched, or found to be needed soon, a short while ago goes last, and only for somebody who waits.
        """

        def choose(files: Sequence[CachedFile], missing: int) -> list[CachedFile] | None:
            now, next_rows = time.time(), self._next_rows(files)
            sizes = np.array([file.num_bytes for file in files], np.int64)
            used_at = np.array([file.used_at for file in files])
            noted_at = np.array([self._noted_at.get((str(file.folder), file.name), 0.0) for file in files])
            is_others = (next_rows == NEVER) & (used_at > noted_at + 1) & (used_at > now - _RECENT_SECONDS)
            ranked = np.where(is_others, max(needed_at, 0), next_rows)
            by_age = np.argsort(used_at, kind="stable")
            chosen = choose_evictions(ranked[by_age], sizes[by_age], missing, needed_at)
            return None if chosen is None else [files[place] for place in by_age[chosen].tolist()]

        return choose

    def _next_rows(self, files: Sequence[CachedFile]) -> NDArray[np.int64]:
        """Rows until each file's next use, by any run."""
        found = np.full(len(files), NEVER, np.int64)
        for run in list(self._runs.values()):
            for number, where in enumerate(run.schedule.folders):
                folder = self._folders[where.path]
                own = [place for place, file in enumerate(files) if file.folder == folder.path and file.name in folder]
                if own:
                    next_rows = run.next_rows(number, len(folder.names))
                    rows = next_rows[[folder.numbers[files[place].name] for place in own]]
                    found[own] = np.minimum(found[own], rows)
        return found


def _changed(folder: _Folder) -> DatasetChanged:
    return DatasetChanged(f"{folder.url}: the dataset was replaced or removed since it was opened. Open it again.")


def settings_of_stores() -> dict[str, str]:
    """The variables of this process that say how stores are reached."""
    return {name: value for name, value in os.environ.items() if name.lower().startswith(_SETTINGS)}


def is_same_user(end: socket.socket) -> bool:
    """Whether the other side of a Unix socket is a process of this user."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def _wait_for_end(channel: Channel) -> None:
    try:
        while True:
            channel.receive()
    except (EOFError, OSError):
        return


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

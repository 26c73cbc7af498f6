"""How any process has a remote file in the cache: it looks there, else it asks the fetcher.

A fetcher is started by the first process that opens a remote dataset, and lives as long as that process. Forked
children know its address; workers started otherwise are told it with the dataset. Who cannot reach it, because it died,
starts one. Nothing is kept between requests, so nothing has to be mended after a fork.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, StorageError, StoreBusy
from penstock.remote._cache import GONE
from penstock.remote._download import Downloader, Span
from penstock.remote._fetcher import CacheFolder, Fetcher, ReadContents, Schedule, is_same_user, settings_of_stores
from penstock.remote._store import Head, Store, check_url, is_of_obstore, open_store
from penstock.remote._uses import Uses
from penstock.workers import Channel, Crew, SentError, describe_death

_RANGES_AT_ONCE = 8
"""Of one file, in this process."""
_STARTS = 3
"""How often a fetcher is started for one request before it is given up."""


@dataclass(slots=True)
class _Own:
    """What this process knows of fetchers."""

    address: str | None = None
    crew: Crew | None = None


_own = _Own()
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()
    _own.crew = None  # the parent's, which lets go of itself


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A version of a remote dataset, as a folder of the cache in which files appear when they are obtained.

    A copy in another process finds the fetcher that this one uses.
    """

    where: CacheFolder

    @property
    def path(self) -> Path:
        """The folder, with the manifest in it."""
        return Path(self.where.path)

    def obtain(self, name: str) -> None:
        """Return when a file is there. It may be evicted again: open it, `hold` it, and if it is gone, start over.

        Raises:
            DatasetChanged: the dataset was replaced, and no longer has the file.
            StoreError: the store does not deliver it, for the reason that the message gives.
            StorageError: the cache cannot take it.
        """
        if not os.path.exists(f"{self.where.path}/{name}"):
            _request("obtain", self.where, name)

    def hold(self, descriptor: int) -> bool:
        """Keep the bytes of an open file of the cache until it is closed; False if they were removed before."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # it is about to be removed, or has just arrived: without a lock, nobody would count it
            return False
        except OSError:  # locks are missing here, which only save work
            pass
        return os.fstat(descriptor).st_nlink > 0

    def is_evicted(self, name: str) -> bool:
        """Whether a file should be closed, so that it can be removed."""
        return os.path.exists(f"{self.where.path}/{GONE}{name}")

    def announce(
        self, key: str, folders: tuple[RemoteFolder, ...], uses: Uses, *, row: int, until: int, slack: int
    ) -> None:
        """Have files of several folders fetched ahead of a run that is at this row, until `end_run(key)`."""
        where = tuple(each.where for each in folders)
        schedule = Schedule(key=key, folders=where, uses=uses, until=until, slack=slack)
        _request("schedule", schedule, row)

    def report_progress(self, key: str, row: int) -> bool:
        """Say where a run is; False if it has to be announced again."""
        return bool(_request("progress", key, row))

    def end_run(self, key: str) -> None:
        """Fetch no more for a run; nothing happens if the fetcher is gone."""
        _ask_if_there("forget", key)

    def read_counts(self) -> dict[str, float]:
        """What this process's fetcher fetched so far, and what was waited for; empty if there is none."""
        return _ask_if_there("counts") or {}

    def __reduce__(self) -> tuple[Callable[..., RemoteFolder], tuple[Any, ...]]:
        return _join, (self.where, _own.address)


def _join(where: CacheFolder, address: str | None) -> RemoteFolder:
    if _own.address is None:
        _own.address = address
    return RemoteFolder(where)


def open_remote(url: str, root: Path, budget_bytes: int | None, read_contents: ReadContents) -> RemoteFolder:
    """The dataset at a URL as it is now; one request to the store.

    Raises:
        ObjectMissing: there is none.
        StoreError: the store refuses, for the reason that the message gives.
        StorageError: the folder cannot be a cache, or the budget is too small for a single file.
        MissingExtra: the client for this kind of URL is not installed.
    """
    _request("connect", check_url(url), settings_of_stores())
    return RemoteFolder(_request("open", check_url(url), str(root), budget_bytes, read_contents))


def open_objects(url: str, names: Sequence[str], root: Path, budget_bytes: int | None) -> RemoteFolder:
    """Objects directly under a URL, that are no dataset of ours, as files to `obtain`; one request for each.

    One that is replaced while it is open is `DatasetChanged`.

    Raises:
        As `open_remote`.
    """
    _request("connect", check_url(url), settings_of_stores())
    return RemoteFolder(_request("open_objects", check_url(url), list(names), str(root), budget_bytes))


@contextlib.contextmanager
def connect(url: str) -> Iterator[Store]:
    """The store behind `url` for any process and from any thread, until the end of the block.

    obstore's threads are not in a forked child, which waits for them for ever as soon as it uses obstore itself, even
    with a new store (measured, 0.12). Whether a program will fork is not ours to know, so the fetcher is asked. File
    systems of fsspec have no such trouble, and may only exist in this process: they are asked here.

    Raises:
        ValueError, MissingExtra, StoreError: as `open_store`.
    """
    if not is_of_obstore(check_url(url)):
        yield open_store(url)
        return
    _request("connect", check_url(url), settings_of_stores())
    store = _StoreApart(check_url(url))
    try:
        yield store
    finally:
        store.close()


def download(store: Store, name: str, spans: Sequence[Span], path: Path) -> None:
    """Write these bytes of an object to the same place of a file, a few ranges at once; the file need not exist.

    Raises:
        StoreError: the store refuses, or failed too often.
        OSError: the file cannot be written.
    """
    if isinstance(store, _StoreApart):
        _request("download", store.url, name, spans, path, store=store)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        asyncio.run(Downloader(_RANGES_AT_ONCE).fetch(store, name, spans, descriptor))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _StoreApart:
    """A store that the fetcher asks; closing it fails what is under way."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asking: set[socket.socket] = set()
        self.is_closed = False

    def close(self) -> None:
        """Wait for no more answers."""
        self.is_closed = True
        for end in list(self.asking):
            with contextlib.suppress(OSError):  # it has just been answered
                end.shutdown(socket.SHUT_RDWR)

    async def fetch(self, name: str, begin: int, end: int) -> memoryview:
        raise AssertionError("ranges are fetched where they are written")

    def get(self, name: str, begin: int, end: int) -> memoryview:
        return memoryview(self._ask("get", name, begin, end))

    def get_whole(self, name: str, *, if_none_match: str | None = None) -> tuple[bytes, str | None] | None:
        found: tuple[bytes, str | None] | None = self._ask("get_whole", name, if_none_match=if_none_match)
        return found

    def put(self, name: str, content: Path | bytes) -> str | None:
        etag: str | None = self._ask("put", name, content)
        return etag

    def replace(self, name: str, content: bytes, etag: str | None) -> bool:
        return bool(self._ask("replace", name, content, etag))

    def head(self, name: str) -> Head | None:
        found: Head | None = self._ask("head", name)
        return found

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def names(self) -> list[str]:
        found: list[str] = self._ask("names")
        return found

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        return _request("call", self.url, method, arguments, options, store=self)


def _ask_if_there(*message: Any) -> Any:
    try:
        return None if _own.address is None else _ask(_own.address, message)
    except (OSError, EOFError):
        return None


def _request(*message: Any, store: _StoreApart | None = None) -> Any:
    for _ in range(_STARTS):
        address = _own.address
        if address is not None:
            try:
                answer = _ask(address, message, store)
            except (ConnectionError, EOFError):
                if store is not None and store.is_closed:
                    raise StoreBusy(f"{store.url}: nobody waits for the answer any more.") from None
            else:
                return _unpacked(answer)
        _start(instead_of=address)
    raise StorageError(
        f"The process that fetches remote data ended {_STARTS} times while it was to {message[0]} {message[1]}. Is "
        "memory short (dmesg)? It takes about 300 MB."
    )


def _ask(address: str, message: Any, store: _StoreApart | None = None) -> Any:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking = set[socket.socket]() if store is None else store.asking
    try:
        end.connect(address)
        if not is_same_user(end):
            raise ConnectionRefusedError("another user's process has this address")
        asking.add(end)
        channel = Channel(end)
        channel.send(message)
        answer, _ = channel.receive()
    finally:
        asking.discard(end)
        end.close()
    return answer


def _unpacked(answer: Any) -> Any:
    if isinstance(answer, SentError):
        raise answer.rebuild("while fetching remote data")
    if isinstance(answer, PenstockError):
        raise answer
    return answer


def _start(instead_of: str | None) -> None:
    with _lock:
        if _own.address != instead_of:
            return  # another thread has just started one
        if _own.crew is not None:
            _own.crew.close()
        crew = Crew(Fetcher(), "spawn", environment={}, warm_up=_nothing, otherwise="")
        worker = crew.start()
        try:
            _own.address = worker.receive()
        except EOFError:
            code = crew.remove_dead(worker)
            crew.close()
            raise StorageError(
                describe_death("The process that fetches remote data", worker.pid, code, "starting")
            ) from None
        if _own.crew is None:
            atexit.register(_close)
        _own.crew = crew


def _close() -> None:
    if _own.crew is not None:
        _own.crew.close()


def _nothing() -> None:
    """A new interpreter needs no preparation."""

"""How any process has a remote file in the cache: it looks there, else it asks the fetcher.

A fetcher is started by the first process that opens a remote dataset, and lives as long as that process. Forked
children know its address; workers started otherwise are told it with the dataset. Who cannot reach it, because it died,
starts one. Nothing is kept between requests, so nothing has to be mended after a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, StorageError
from penstock.remote._cache import GONE
from penstock.remote._fetcher import CacheFolder, Contents, Fetcher, Schedule, is_same_user, settings_of_stores
from penstock.remote._store import check_url
from penstock.remote._uses import Uses
from penstock.workers import Channel, Crew, SentError, describe_death

_STARTS = 3
"""How often a fetcher is started for one request before it is given up."""

ReadContents = Callable[[Path], Contents]


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
    read_contents: ReadContents

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
            _request(self.read_contents, "obtain", self.where, name)

    def hold(self, descriptor: int) -> bool:
        """Keep the bytes of an open file of the cache until it is closed; False if they were removed before."""
        with contextlib.suppress(OSError):  # it is being removed; or locks are missing here, which only save work
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
        _request(self.read_contents, "schedule", schedule, row)

    def report_progress(self, key: str, row: int) -> bool:
        """Say where a run is; False if it has to be announced again."""
        return bool(_request(self.read_contents, "progress", key, row))

    def end_run(self, key: str) -> None:
        """Fetch no more for a run; nothing happens if the fetcher is gone."""
        _ask_if_there("forget", key)

    def read_counts(self) -> dict[str, float]:
        """What this process's fetcher fetched so far, and what was waited for; empty if there is none."""
        return _ask_if_there("counts") or {}

    def __reduce__(self) -> tuple[Callable[..., RemoteFolder], tuple[Any, ...]]:
        return _join, (self.where, self.read_contents, _own.address)


def _join(where: CacheFolder, read_contents: ReadContents, address: str | None) -> RemoteFolder:
    if _own.address is None:
        _own.address = address
    return RemoteFolder(where, read_contents)


def open_remote(url: str, root: Path, budget_bytes: int | None, read_contents: ReadContents) -> RemoteFolder:
    """The dataset at a URL as it is now; one request to the store.

    Raises:
        ObjectMissing: there is none.
        StoreError: the store refuses, for the reason that the message gives.
        StorageError: the folder cannot be a cache, or the budget is too small for a single file.
        MissingExtra: the client for this kind of URL is not installed.
    """
    where = _request(read_contents, "open", check_url(url), str(root), budget_bytes, settings_of_stores())
    return RemoteFolder(where, read_contents)


def _ask_if_there(*message: Any) -> Any:
    try:
        return None if _own.address is None else _ask(_own.address, message)
    except (OSError, EOFError):
        return None


def _request(read_contents: ReadContents, *message: Any) -> Any:
    for _ in range(_STARTS):
        address = _own.address
        if address is not None:
            try:
                answer = _ask(address, message)
            except (ConnectionError, EOFError):
                pass
            else:
                return _unpacked(answer)
        _start(read_contents, instead_of=address)
    raise StorageError(
        f"The process that fetches remote data ended {_STARTS} times while it was to {message[0]} {message[1]}. Is "
        "memory short (dmesg)? It takes about 300 MB."
    )


def _ask(address: str, message: Any) -> Any:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.connect(address)
        if not is_same_user(end):
            raise ConnectionRefusedError("another user's process has this address")
        channel = Channel.of_descriptor(end.detach())
    finally:
        end.close()
    try:
        channel.send(message)
        answer, _ = channel.receive()
    finally:
        channel.close()
    return answer


def _unpacked(answer: Any) -> Any:
    if isinstance(answer, SentError):
        raise answer.rebuild("while fetching remote data")
    if isinstance(answer, PenstockError):
        raise answer
    return answer


def _start(read_contents: ReadContents, instead_of: str | None) -> None:
    with _lock:
        if _own.address != instead_of:
            return  # another thread has just started one
        if _own.crew is not None:
            _own.crew.close()
        crew = Crew(Fetcher(read_contents), "spawn", environment={}, warm_up=_nothing, otherwise="")
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

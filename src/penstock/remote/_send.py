"""Files on their way to a store, a few at once: each checked, sent unless it is there, and counted on arrival.

    HEAD: an object of this size is there -> nothing to send: names carry a hash of the content and are never reused
    check: every block against its checksum -> a damaged file is never sent
    PUT, large files in parts -> HEAD: its size

**What arrived** is what was sent: an S3 store compares every part with the SHA-256 in its signature and refuses damaged
bytes, which are then sent again; Google and Azure are reached through TLS only, which ends damaged connections. Reading
everything back would double the traffic, and every reader checks what it fetches anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from penstock.errors import CorruptionError, StoreError
from penstock.remote._fetcher import CALLS_AT_ONCE
from penstock.remote._store import Store

_FILES_AT_ONCE = 4
_SMALL_BYTES = 16 << 20
_SMALL_FILES_AT_ONCE = 16
"""Of small files the store's latency is the limit: 16 at once, in a sixteenth of the memory."""


class Sized(Protocol):
    """A file by name, and how large it is."""

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


class Parcel(NamedTuple):
    """One file to send."""

    name: str
    path: Path
    num_bytes: int
    find_faults: Callable[[], Sequence[str]]
    """Reads all of it."""


class Sender:
    """Sends files to a store from threads; use it inside `with`. Whatever is under way when the block fails is lost."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asking = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="penstock-send")
        self._large, self._small = threading.Semaphore(_FILES_AT_ONCE), threading.Semaphore(_SMALL_FILES_AT_ONCE)
        self._is_stopping = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_stopping = kind is not None
        self._asking.shutdown(wait=kind is None, cancel_futures=True)  # the store's end fails what is under way

    def send(self, parcel: Parcel) -> Future[int]:
        """Send a file; the result is how many bytes that took: 0 if it was there.

        Raises, as the future's result:
            CorruptionError: the file is damaged.
            StoreError: the store refuses, or what arrived is not what was sent.
        """
        return self._asking.submit(self._send, parcel)

    def send_all(self, parcels: Sequence[Parcel], on_progress: Callable[[int, int], None] | None) -> int:
        """Send all files; return how many bytes that took. `on_progress` is called with (bytes there, bytes in all)."""
        total, done, sent = sum(parcel.num_bytes for parcel in parcels), 0, 0
        running = {self.send(parcel): parcel for parcel in parcels}
        for future in as_completed(running):
            sent += future.result()
            done += running[future].num_bytes
            if on_progress is not None:
                on_progress(done, total)
        return sent

    def are_there(self, files: Iterable[Sized]) -> list[bool]:
        """For each file, whether the store has an object of this name and size."""
        return list(self._asking.map(lambda file: self.is_there(file.name, file.num_bytes), files))

    def _send(self, parcel: Parcel) -> int:
        if self.is_there(parcel.name, parcel.num_bytes):
            return 0
        with self._small if parcel.num_bytes <= _SMALL_BYTES else self._large:
            if self._is_stopping:
                return 0
            if faults := parcel.find_faults():
                raise CorruptionError(f"{faults[0]} It was not sent to {self._store.url}; run again when it is whole.")
            self._store.put(parcel.name, parcel.path)
        if not self.is_there(parcel.name, parcel.num_bytes):
            raise StoreError(
                f"{self._store.url}/{parcel.name}: the store took the {parcel.num_bytes:,} bytes that were sent, but "
                "has no object of that size. Check that nothing else writes or deletes there, then run again."
            )
        return parcel.num_bytes

    def is_there(self, name: str, num_bytes: int) -> bool:
        """Whether the store has an object of this name and size."""
        found = self._store.head(name)
        return found is not None and found.size == num_bytes

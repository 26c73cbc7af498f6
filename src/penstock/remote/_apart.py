"""A store whose client runs in a process of its own, so that this one may fork.

obstore's threads are not in a forked child, which waits for them for ever as soon as it uses obstore itself, even with
a new store; other children are unharmed (measured, 0.12). Whether a program will fork, or its forked workers use
obstore, is not ours to know. So a training script that pushes or stages asks a child of its own, which costs 0.3 s.

    a thread of this process                         the child
      store.put(name, path)  ---- what to call --->    a thread: Store.put, 32 at once
      the answer, or the error  <-----------------

File systems of fsspec have no such trouble, and may only exist in this process: they are asked here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.errors import StoreBusy
from penstock.remote._download import Downloader, Span
from penstock.remote._store import Head, Store, check_url, is_of_obstore, open_store
from penstock.workers import Channel, Crew, SentError, fail_setup, guard_life_line

CALLS_AT_ONCE = 32
_RANGES_AT_ONCE = 8
"""Of one file."""
_CLOSE_SECONDS = 5.0


@contextlib.contextmanager
def connect(url: str) -> Iterator[Store]:
    """The store behind `url` for any process and from any thread, until the end of the block.

    Raises:
        ValueError, MissingExtra, StoreError: as `open_store`; the latter two only when it is first used.
    """
    if not is_of_obstore(check_url(url)):
        yield open_store(url)
        return
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
        store.download(name, spans, path)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        asyncio.run(Downloader(_RANGES_AT_ONCE).fetch(store, name, spans, descriptor))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The child's program: does what it is asked, several at once."""

    url: str

    def run(self, channel: Channel, life_line: int) -> NoReturn:
        guard_life_line(life_line)
        try:
            store = open_store(self.url)
        except Exception as error:  # noqa: BLE001 - whatever it is, the owner raises it
            fail_setup(channel, error)
        pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="penstock-store")
        while True:
            (number, method, arguments, options), _ = channel.receive()
            pool.submit(_answer, channel, store, number, method, arguments, options)


def _answer(channel: Channel, store: Store, number: int, method: str, arguments: Any, options: Any) -> None:
    try:
        ask = functools.partial(download, store) if method == "download" else getattr(store, method)
        answer = ask(*arguments, **options)
        answer = bytes(answer) if isinstance(answer, memoryview) else answer
    except BaseException as error:  # noqa: BLE001 - as above
        answer = SentError.pack(error)
    with contextlib.suppress(ConnectionError):  # the owner is gone
        channel.send((number, answer))


class _StoreApart:
    """The owner's side."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._crew = Crew(_Answer(url), "spawn", environment={}, warm_up=_warm_up, otherwise="")
        self._worker = self._crew.start()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._end: BaseException | None = None
        self._reader = threading.Thread(target=self._read, name="penstock-store", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End the child, whatever it is doing."""
        self._worker.channel.finish()
        self._reader.join(_CLOSE_SECONDS)
        self._crew.close()

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

    def download(self, name: str, spans: Sequence[Span], path: Path) -> None:
        """As the function of this name."""
        self._ask("download", name, spans, path)

    def names(self) -> list[str]:
        found: list[str] = self._ask("names")
        return found

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        if self._end is not None:
            raise self._end
        self._worker.send((number, method, arguments, options))
        return answer.result()

    def _read(self) -> None:
        """Hand over the child's answers until it ends."""
        try:
            while True:
                number, answer = self._worker.receive()
                asked = self._asked.pop(number)
                if isinstance(answer, SentError):
                    asked.set_exception(answer.rebuild(f"in the process that talks to {self.url}"))
                else:
                    asked.set_result(answer)
        except BaseException as error:  # noqa: BLE001 - it could not be set up: whoever asks is told why
            self._end = error
            if type(error) in (EOFError, OSError):
                self._end = StoreBusy(f"{self.url}: the process that talks to the store has ended. Run it again.")
        for asked in list(self._asked.values()):
            if not asked.done():
                asked.set_exception(self._end)


def _warm_up() -> None:
    """Nothing: the child is not forked."""

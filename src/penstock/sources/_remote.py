"""Bytes from other machines, through fsspec, by URLs that can be shown.

Each request asks for a range and has a time limit; one that fails, stalls, or returns too little is
repeated, with growing pauses in between. Nothing is kept between requests, so a retry cannot deliver a byte twice. A
file on a web server that does not support ranges is read from start to end, and after a failure from the start again,
skipping what was already delivered. The time limit applies to fsspec's asynchronous file systems (HTTP, S3, GCS,
Azure); others have their own.

A presigned URL is a password, and a source's path ends up in manifests, provenance, logs and errors. So what this room
calls a path is the URL without its query, user name and password; what opens the file travels with it, in memory and
to workers, as an attribute that is never printed. The path also identifies a file from run to run, while a signature
is different each time. Parameters that are not part of a signature may select the file (`?id=7`): a digest of them is
kept, as the fragment of the path.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from penstock.errors import MissingExtra, PenstockError, StorageError
from penstock.identity import digest
from penstock.sources._options import SourceOptions

PLAIN_SCHEMES = ("file", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "http", "https")
"""Schemes that store plain files. fsspec has more, some of which open whatever a file or another URL tells them to."""
_INDIRECT_SCHEMES = ("data", "generic", "reference")
_WEB = re.compile(r"(?:https?|ftp)://")
_QUERY = re.compile(r"((?:https?|ftp)://[^\s?'\"]+)\?[^\s'\")>]+")
_OF_SIGNATURES = re.compile(
    r"x-amz-.*|x-goog-.*|x-oss-.*|awsaccesskeyid|googleaccessid|ossaccesskeyid|signature|expires|security-token"
    r"|key-pair-id|policy|hmac|(?:access_?|auth_?)?token|api_?key|sig",
    re.IGNORECASE,
)
_OF_AZURE = re.compile(r"s[etrpvdks]|spr|sip|srt|sk(?:oid|tid|t|e|s|v)")  # beside its "sig"


class Url(str):
    """A URL that is safe to show; `address` is what opens it.

    >>> url = Url.of("https://host/a.parquet?X-Amz-Signature=123")
    >>> url, url.address
    ('https://host/a.parquet', 'https://host/a.parquet?X-Amz-Signature=123')
    """

    address: str

    @classmethod
    def of(cls, address: str) -> Self:
        """The URL for an address with all its secrets."""
        url = cls(without_secrets(address))
        url.address = address
        return url


def address_of(path: str) -> str:
    """What opens a path, signature included."""
    return path.address if isinstance(path, Url) else path


def is_remote(path: str) -> bool:
    """Whether `path` is a URL that fsspec opens."""
    return "://" in path and not path.startswith("file://")


def check_plain(url: str) -> None:
    """Raise `ValueError` for a URL that makes fsspec open others.

    Otherwise a name in a web server's listing could lead to `reference://`, which old versions let run code.
    """
    if "::" in address_of(url) or url.split(":", 1)[0] in _INDIRECT_SCHEMES:
        raise ValueError(
            f"{url}: URLs that are chained (::), or begin with {', '.join(_INDIRECT_SCHEMES)}, are not followed. "
            "Give the path or URL of the files themselves."
        )


def refused_url(sources: Iterable[str], schemes: Collection[str]) -> str | None:
    """The first URL among `sources` that is chained or has none of these schemes; None if there is none."""
    urls = (source for source in sources if "::" in source or "://" in source)
    return next((url for url in urls if "::" in url or url.split("://", 1)[0] not in schemes), None)


def without_secrets(text: str) -> str:
    """A web address reduced to what identifies its file; any other path or URL unchanged.

    >>> without_secrets("https://me:secret@host/get.csv?id=7&sig=abc")
    'https://host/get.csv#2d8df1a3'
    """
    if not _WEB.match(text):
        return text
    parts = urlsplit(text)
    chosen = sorted(pair for pair in parse_qsl(parts.query, True) if not _is_of_signature(pair[0], parts.query))
    fragment = digest(urlencode(chosen), 4) if chosen else parts.fragment
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", fragment))


def _is_of_signature(name: str, query: str) -> bool:
    return bool(_OF_SIGNATURES.fullmatch(name) or ("sig=" in query and _OF_AZURE.fullmatch(name)))


def hide_queries(text: str) -> str:
    """Another library's message, without the queries of web addresses in it."""
    return _QUERY.sub(r"\1?…", text)


_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_SKIP_BYTES = 1 << 20
_PARTIAL_CONTENT = 206
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 20.0
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, PenstockError)


class RemoteStore:
    """The file system behind a URL, with retries.

    Raises:
        MissingExtra: fsspec, or its driver for this kind of URL, is not installed.
        ValueError: fsspec does not know this kind of URL, or it leads to other URLs.
    """

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url = Url.of(address_of(url))
        """The URL without secrets, for people and for identifying the file."""
        self.options = options
        self._gives_ranges: bool | None = None
        protocol = url.split("://", 1)[0]
        check_plain(self.url)
        try:
            core = importlib.import_module("fsspec.core")
            self.filesystem, self.path = core.url_to_fs(self.url.address, **_connection_options(protocol, options))
        except ImportError as error:
            raise MissingExtra(
                f"{self.url}: {protocol}:// needs its fsspec driver ({error}). "
                "pip install 'penstock-data[s3]' brings those of s3:// and http://."
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}. Give a path, or a URL that fsspec supports.") from error

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the file system, and retry if it fails."""
        return retry(self.url, self.options, lambda: self.ask_once(method, *arguments, **named))

    def ask_once(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the file system, within the time limit if it is asynchronous."""
        if getattr(self.filesystem, "async_impl", False) and hasattr(self.filesystem, f"_{method}"):
            return self.run_in_time(getattr(self.filesystem, f"_{method}"), *arguments, **named)
        return getattr(self.filesystem, method)(*arguments, **named)

    def run_in_time(self, coroutine: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What a coroutine of the driver returns; one that stalls is cancelled."""
        sync = importlib.import_module("fsspec.asyn").sync
        return sync(self.filesystem.loop, coroutine, *arguments, timeout=self.options.timeout_seconds, **named)

    def info(self) -> dict[str, Any]:
        """What the store says about the file."""
        answer: dict[str, Any] = self.ask("info", self.path)
        return answer

    def open(self) -> RangeFile | ForwardFile:
        """The file, by ranges if the store supports them."""
        info = self.info()
        if self.has_ranges(self.path, info):
            return RangeFile(self, int(info["size"]))
        return ForwardFile(self, info.get("size"))

    def has_ranges(self, path: str, info: dict[str, Any]) -> bool:
        """Whether the store serves ranges. Only web servers may not, and what they claim about it is unreliable."""
        if not info.get("size") or info.get("partial") is False:
            return False
        if not self.url.startswith("http"):
            return True
        if self._gives_ranges is None:  # the same for all files of a server
            self._gives_ranges = retry(self.url, self.options, lambda: self.run_in_time(self._ask_for_a_byte, path))
        return self._gives_ranges

    async def _ask_for_a_byte(self, path: str) -> bool:
        session, settings = await self.filesystem.set_session(), dict(self.filesystem.kwargs)
        headers = {**settings.pop("headers", {}), "Range": "bytes=0-0"}
        async with session.get(self.filesystem.encode_url(path), headers=headers, **settings) as answer:
            return bool(answer.status == _PARTIAL_CONTENT)


def _connection_options(protocol: str, options: SourceOptions) -> dict[str, Any]:
    chosen = dict(options.storage_options)
    if protocol in ("s3", "s3a"):  # botocore's own retries would multiply ours
        limits = {"connect_timeout": options.timeout_seconds, "read_timeout": options.timeout_seconds}
        chosen["config_kwargs"] = {**limits, "retries": {"total_max_attempts": 1}, **chosen.get("config_kwargs", {})}
    return chosen


class _RemoteFile:
    """What pyarrow needs from a file object besides its bytes."""

    closed = False

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class RangeFile(_RemoteFile):
    """A remote file by ranges, from any offset."""

    def __init__(self, store: RemoteStore, size: int) -> None:
        self.path: str = store.url
        self.size = size
        self._store = store
        self._position = 0

    def read(self, num_bytes: int = -1, /) -> bytes:
        """The next `num_bytes`, fewer only at the end."""
        begin = self._position
        self._position = self.size if num_bytes < 0 else min(begin + num_bytes, self.size)
        if begin >= self._position:
            return b""
        return retry(self.path, self._store.options, lambda: self._fetch(begin, self._position))

    def _fetch(self, begin: int, end: int) -> bytes:
        data: bytes = self._store.ask_once("cat_file", self._store.path, start=begin, end=end)
        if len(data) != end - begin:
            raise ConnectionError(f"asked for bytes {begin:,} to {end:,}, got {len(data):,} bytes")
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go on from `offset`, counted from the start, from here, or from the end."""
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True


class ForwardFile(_RemoteFile):
    """A remote file from start to end, on a web server that does not support ranges."""

    def __init__(self, store: RemoteStore, size: int | None) -> None:
        self.path: str = store.url
        self.size = size
        self._store = store
        self._response: Any = None
        self._position = 0

    def read(self, num_bytes: int = -1, /) -> bytes:
        data = retry(self.path, self._store.options, lambda: self._receive(num_bytes))
        self._position += len(data)
        return data

    def _receive(self, num_bytes: int) -> bytes:
        try:
            if self._response is None:
                self._response = self._store.filesystem.open(self._store.path, "rb", block_size=0, cache_type="none")
                self._skip(self._position)
            data: bytes = self._store.run_in_time(self._response._read, num_bytes)
            if not data and num_bytes and self.size is not None and self._position < self.size:
                raise ConnectionError(f"the answer ended at byte {self._position:,} of {self.size:,}")
        except Exception:  # drivers raise anything; it is raised again, and the caller decides whether to retry
            self._hang_up()  # the next attempt starts over
            raise
        return data

    def _skip(self, num_bytes: int) -> None:
        while num_bytes:
            data = self._store.run_in_time(self._response._read, min(num_bytes, _SKIP_BYTES))
            if not data:
                raise ConnectionError(f"the answer ended {num_bytes:,} bytes before where reading should resume")
            num_bytes -= len(data)

    def _hang_up(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            with contextlib.suppress(Exception):
                response.close()

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self._hang_up()
        super().close()


def retry(url: str, options: SourceOptions, call: Callable[[], _Answer]) -> _Answer:
    """What `call` returns, tried up to `max_attempts` times with pauses that double.

    Raises:
        FileNotFoundError, PermissionError: at once; a retry would not help.
        StorageError: it never worked.
    """
    for attempt in range(1, options.max_attempts + 1):
        try:
            return call()
        except Exception as error:  # drivers raise whatever their HTTP libraries do: no common class
            if isinstance(error, _FINAL) and not _hides_a_failure(error):
                raise
            if not _is_transient(error) or attempt == options.max_attempts:
                raise _failure(url, error, attempt) from error
            _log.info("%s: attempt %d failed (%s), trying again", url, attempt, _describe(error))
        time.sleep(_pause_seconds(attempt))
    raise AssertionError("the last attempt returns or raises")


def _pause_seconds(attempt: int) -> float:
    # Random, or workers that failed together would come back together.
    longest = min(_FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def _is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: a client error stays one, a busy server does not stay busy."""
    status = getattr(error, "status", None)
    return not isinstance(status, int) or status >= 500 or status in (408, 425, 429)


def _hides_a_failure(error: Exception) -> bool:
    """Whether "not found" hides a failed connection, as in fsspec's HTTP driver."""
    cause = error.__cause__
    is_connection = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return isinstance(error, FileNotFoundError) and is_connection and _is_transient(cause)


def _failure(url: str, error: Exception, attempts: int) -> StorageError:
    tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return StorageError(
        f"{url}: reading failed after {tries}; the last error was: {_describe(error)}. "
        "Check the address, the credentials and the network, then run again."
    )


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"no answer in time ({type(error).__name__})"
    text = hide_queries(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

"""One prefix of an object store: whole objects and ranges of them, and errors that say what to do.

S3, GCS, Azure and web servers are reached through obstore, everything else through fsspec. Settings and credentials
come from where each service's own tools find them (variables, `~/.aws`, the machine's role), never from the URL, which
ends up in plan files and logs.

obstore keeps threads, and hangs in a forked child, even with a new store (measured, 0.12). So it is used only in
processes that never fork: the fetcher, the pusher, a verb of the command line.

`fetch` asks once. The rest ask again after failures that may pass, with random pauses that double.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from penstock.errors import MissingExtra, ObjectMissing, StorageError, StoreBusy, StoreError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential

_OF_OBSTORE = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")
_OTHER_NAMES = {"gcs": "gs", "s3n": "s3"}
_CONNECT_SECONDS = 5
_SILENCE_SECONDS = 10
"""A connection that delivers nothing for so long is given up; a slow one is not."""
_REQUEST_SECONDS = 300
_ATTEMPTS = 6
_FIRST_PAUSE_SECONDS = 0.2
_PART_BYTES, _PARTS_AT_ONCE = 8 << 20, 8
"""Of one file: with four files at once, 256 MB are in memory and on their way."""
_SENT_SECONDS = 120
"""A part must have arrived in this time: the client's clock for silence runs while it is being sent, too."""
_CREDENTIAL_SECONDS = 600
"""After so long they are looked up again, so that a run outlives them."""

_Answer = TypeVar("_Answer")


class Head(NamedTuple):
    """What a store says about an object."""

    size: int
    etag: str | None


class Store(Protocol):
    """Objects under one URL, by name.

    Raises:
        ObjectMissing: there is no such object.
        StoreBusy: it failed, but may work later.
        StoreError: it refuses, for the reason that the message gives.
    """

    url: str

    async def fetch(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of an object, in one attempt."""
        ...

    def get(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of an object."""
        ...

    def get_whole(self, name: str, *, if_none_match: str | None = None) -> tuple[bytes, str | None] | None:
        """An object and its ETag; None if it still has the ETag `if_none_match`."""
        ...

    def put(self, name: str, content: Path | bytes) -> str | None:
        """Write an object, large files in parts, several at once; return its ETag. It is there whole or not at all."""
        ...

    def replace(self, name: str, content: bytes, etag: str | None) -> bool:
        """Write an object in place of the version `etag` (None: there is none); False if another one is there now."""
        ...

    def head(self, name: str) -> Head | None:
        """Size and ETag of an object; None if there is none."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        ...

    def names(self) -> list[str]:
        """All objects directly under the URL, listed: nothing that reads a dataset needs this."""
        ...


def check_url(url: str) -> str:
    """The URL of a prefix as it is written everywhere: without a slash at its end.

    Raises:
        ValueError: it carries credentials or a query, is chained, or names no bucket.
    """
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ValueError(
            f"{shown}: give the URL without user name, password and query: it is written into plan files and logs. "
            "Credentials come from the environment or the service's own settings (AWS_PROFILE, ~/.aws, a role)."
        )
    if "::" in url:
        raise ValueError(f"{url}: chained URLs (::) are not followed. Give the URL of the dataset itself.")
    if not parts.netloc:
        raise ValueError(f"{url}: names no bucket or server. Write it as s3://bucket/folder.")
    return url.rstrip("/")


def is_of_obstore(url: str) -> bool:
    """Whether obstore reaches this URL, and not fsspec."""
    scheme = url.partition("://")[0]
    return _OTHER_NAMES.get(scheme, scheme) in _OF_OBSTORE


def open_store(url: str) -> Store:
    """The store behind `url`; nothing is asked of it yet.

    Raises:
        MissingExtra: the client for this kind of URL is not installed.
        StoreError: the service needs settings that are not there.
        ValueError: the URL carries credentials, or nothing opens this kind of URL.
    """
    url = check_url(url)
    return _ObjectStore(url) if is_of_obstore(url) else _FsspecStore(url)


class _ObjectStore:
    """A store that obstore reaches."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._obstore = importlib.import_module("obstore")
        except ImportError as error:
            raise MissingExtra(f"{url}: object stores need obstore: pip install 'penstock-data[s3]'") from error
        scheme, _, rest = url.partition("://")
        scheme = _OTHER_NAMES.get(scheme, scheme)
        from_url = importlib.import_module("obstore.store").from_url
        with self._translated("opening"):
            options, settings = _client_options(scheme), _profile_settings() if scheme.startswith("s3") else {}
            self._store, self._writer = (
                from_url(
                    f"{scheme}://{rest}",
                    client_options={**options, "read_timeout": timedelta(seconds=silence)},
                    retry_config={"max_retries": retries},
                    **settings,
                )
                for silence, retries in ((_SILENCE_SECONDS, 0), (_SENT_SECONDS, _ATTEMPTS))
            )  # the writer asks again by itself: for one part, not for the whole file

    async def fetch(self, name: str, begin: int, end: int) -> memoryview:
        with self._translated(name):
            return memoryview(await self._obstore.get_range_async(self._store, name, start=begin, end=end))

    def get(self, name: str, begin: int, end: int) -> memoryview:
        def ask() -> memoryview:
            return memoryview(self._obstore.get_range(self._store, name, start=begin, end=end))

        return self._ask(name, ask)

    def get_whole(self, name: str, *, if_none_match: str | None = None) -> tuple[bytes, str | None] | None:
        def ask() -> tuple[bytes, str | None] | None:
            options = {} if if_none_match is None else {"if_none_match": if_none_match}
            try:
                answer = self._obstore.get(self._store, name, options=options)
                return bytes(answer.bytes()), answer.meta.get("e_tag")
            except self._obstore.exceptions.NotModifiedError:
                return None

        return self._ask(name, ask)

    def put(self, name: str, content: Path | bytes) -> str | None:
        settings: dict[str, Any] = {"chunk_size": _PART_BYTES, "max_concurrency": _PARTS_AT_ONCE}
        answer = self._ask(name, lambda: self._obstore.put(self._writer, name, content, **settings))
        etag: str | None = answer["e_tag"]
        return etag

    def replace(self, name: str, content: bytes, etag: str | None) -> bool:
        errors, mode = self._obstore.exceptions, "create" if etag is None else {"e_tag": etag}

        def ask() -> bool:
            try:
                self._obstore.put(self._store, name, content, mode=mode)
            except (errors.AlreadyExistsError, errors.PreconditionError):
                found = self.get_whole(name)  # our own, if only the answer was lost
                return found is not None and found[0] == content
            except (errors.NotSupportedError, NotImplementedError):
                self._obstore.put(self._store, name, content)
            return True

        return self._ask(name, ask)

    def head(self, name: str) -> Head | None:
        try:
            found = self._ask(name, lambda: self._obstore.head(self._store, name))
        except ObjectMissing:
            return None
        except StoreBusy:
            raise
        except StoreError:
            self.get(name, 0, 1)  # the answer to HEAD has no body; the one to GET says why
            raise
        return Head(found["size"], found["e_tag"])

    def delete(self, name: str) -> None:
        try:
            self._ask(name, lambda: self._obstore.delete(self._store, name))
        except ObjectMissing:
            return

    def names(self) -> list[str]:
        found = self._ask("", lambda: self._obstore.list_with_delimiter(self._store))
        return [str(each["path"]).rpartition("/")[2] for each in found["objects"]]

    def _ask(self, name: str, call: Callable[[], _Answer]) -> _Answer:
        def once() -> _Answer:
            with self._translated(name):
                return call()

        return persist(once)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise explain(error, f"{self.url}/{name}") from error


def _client_options(scheme: str) -> ClientConfig:
    endpoints = [os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")]
    is_plain = scheme == "http" or next((each for each in endpoints if each), "").startswith("http:")
    allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    return {
        "allow_http": is_plain or allowed,
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=_SILENCE_SECONDS),
        "timeout": timedelta(seconds=_REQUEST_SECONDS),
    }


def _profile_settings() -> dict[str, Any]:
    """What `~/.aws` and single sign-on say, which obstore does not read; botocore comes with the extra s3."""
    if any(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")):
        return {}
    folder = Path("~/.aws").expanduser()
    if not (os.environ.get("AWS_PROFILE") or (folder / "credentials").exists() or (folder / "config").exists()):
        return {}
    try:
        session = importlib.import_module("botocore.session").get_session()
        found = session.get_credentials()
    except ImportError:
        return {}
    except Exception as error:  # botocore's errors have no class of their own below Exception
        raise StoreError(f"The settings in ~/.aws cannot be used: {error}. Correct them or AWS_PROFILE.") from error
    if found is None:
        return {}

    def credentials() -> S3Credential:
        frozen = found.get_frozen_credentials()
        ends = datetime.now(UTC) + timedelta(seconds=_CREDENTIAL_SECONDS)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": ends,
        }

    region = session.get_config_variable("region")
    return {"credential_provider": credentials, **({"region": region} if region else {})}


class _FsspecStore:
    """A store that fsspec has a file system for."""

    def __init__(self, url: str) -> None:
        self.url = url
        scheme = url.partition("://")[0]
        try:
            self._files, self._path = importlib.import_module("fsspec.core").url_to_fs(url)
        except ImportError as error:
            raise MissingExtra(f"{url}: {scheme}:// needs its fsspec driver ({error}).") from error
        except ValueError as error:
            raise ValueError(f"{url}: {error}. Give a path, or a URL that fsspec supports.") from error
        except Exception as error:  # drivers may connect at once
            raise explain(error, url) from error

    async def fetch(self, name: str, begin: int, end: int) -> memoryview:
        return await asyncio.to_thread(self._once, name, lambda path: self._range(path, begin, end))

    def get(self, name: str, begin: int, end: int) -> memoryview:
        return self._ask(name, lambda path: self._range(path, begin, end))

    def get_whole(self, name: str, *, if_none_match: str | None = None) -> tuple[bytes, str | None] | None:
        etag = self._etag(self._ask(name, self._files.info))
        if etag is not None and etag == if_none_match:
            return None
        return self._ask(name, self._files.cat_file), etag

    def put(self, name: str, content: Path | bytes) -> str | None:
        if isinstance(content, Path):
            self._ask(name, lambda path: self._files.put_file(str(content), path))
        else:
            self._ask(name, lambda path: self._files.pipe_file(path, content))
        return self._etag(self._ask(name, self._files.info))

    def head(self, name: str) -> Head | None:
        self._files.invalidate_cache()  # of listings, which others may have changed
        try:
            found = self._ask(name, self._files.info)
        except ObjectMissing:
            return None
        return Head(int(found["size"]), self._etag(found))

    def delete(self, name: str) -> None:
        try:
            self._ask(name, self._files.rm_file)
        except ObjectMissing:
            return

    def replace(self, name: str, content: bytes, etag: str | None) -> bool:
        found = self.head(name)
        if (found.etag if found else None) != etag:
            return False
        self.put(name, content)
        return True

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        return [str(path).rpartition("/")[2] for path in self._ask("", lambda path: self._files.ls(path, detail=False))]

    def _range(self, path: str, begin: int, end: int) -> memoryview:
        data = self._files.cat_file(path, start=begin, end=end)
        if len(data) != end - begin:
            raise ConnectionError(f"asked for bytes {begin:,} to {end:,}, got {len(data):,} bytes")
        return memoryview(data)

    def _etag(self, found: dict[str, Any]) -> str | None:
        """Something that differs when the content does."""
        names = ("ETag", "etag", "blob_id", "md5Hash", "mtime", "created")
        return next((str(found[name]) for name in names if found.get(name)), None)

    def _ask(self, name: str, call: Callable[[str], _Answer]) -> _Answer:
        return persist(lambda: self._once(name, call))

    def _once(self, name: str, call: Callable[[str], _Answer]) -> _Answer:
        try:
            return call(f"{self._path}/{name}")
        except Exception as error:  # drivers raise whatever their HTTP libraries do: no common class
            raise explain(error, f"{self.url}/{name}") from error


def persist(call: Callable[[], _Answer], attempts: int = _ATTEMPTS) -> _Answer:
    """What `call` returns, asked again while the store is busy."""
    for attempt in range(attempts):
        try:
            return call()
        except StoreBusy:
            if attempt == attempts - 1:
                raise
            time.sleep(pause_seconds(attempt))
    raise AssertionError("the last attempt returns or raises")


def pause_seconds(attempt: int) -> float:
    """How long to wait after so many attempts failed: random, or clients that failed together would return together."""
    return min(_FIRST_PAUSE_SECONDS * 2.0**attempt, 20.0) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


_REASONS: tuple[tuple[str, type[StoreError], str], ...] = (
    (
        "NoSuchBucket|ContainerNotFound|bucket does not exist",
        StoreError,
        "there is no such bucket. Check its name, the account and the endpoint",
    ),
    (
        "RequestTimeTooSkewed",
        StoreError,
        "this machine's clock is wrong, and the store refuses requests that are minutes off. Set the clock (NTP)",
    ),
    (
        "ExpiredToken|TokenRefreshRequired|[Tt]oken (included in the request is|has) expired",
        StoreError,
        "the credentials have expired. Renew them; a role or a profile in ~/.aws is renewed during the run",
    ),
    (
        "InvalidAccessKeyId|InvalidToken|UnrecognizedClient",
        StoreError,
        "the store does not know these credentials. Check the access key, and that it is for this endpoint",
    ),
    (
        "SignatureDoesNotMatch|AuthenticationFailed",
        StoreError,
        "the secret key does not belong to the access key. Check the credentials",
    ),
    (
        r"169\.254\.(169\.254|170\.2)|metadata\.google|NoCredentials|Account must be specified|UnauthenticatedError",
        StoreError,
        "no credentials were found. Set the service's variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        "AWS_PROFILE), or give the machine a role; for a public bucket set AWS_SKIP_SIGNATURE=true",
    ),
    ("FileNotFoundError|NotFoundError|NoSuchKey", ObjectMissing, "there is no such object. Check the URL"),
    (
        "PermissionDeniedError|PermissionError|AccessDenied|403 Forbidden",
        StoreError,
        "access is denied. Check the credentials, and that they may read here, and write where something is written",
    ),
    (
        "redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed",
        StoreError,
        "the bucket is in another region. Set AWS_REGION",
    ),
    (
        "non-partial response",
        StoreError,
        "the server ignores Range, so files cannot be read in parts. Copy the dataset to a server that serves ranges",
    ),
    (
        "BadScheme|URL scheme is not allowed",
        StoreError,
        "the endpoint is http, without encryption. Set AWS_ALLOW_HTTP=true if that is meant",
    ),
    (
        "[Cc]onnection ?[Rr]efused",
        StoreBusy,
        "the connection was refused. Check the endpoint (AWS_ENDPOINT_URL), and that the server runs",
    ),
    (
        "dns error|Name or service not known|failed to lookup address|Name resolution",
        StoreBusy,
        "the server's name is not known. Check the URL, the endpoint (AWS_ENDPOINT_URL) and the network",
    ),
    (
        "[Cc]ertificate",
        StoreError,
        "the server's certificate is not trusted. Check the endpoint, and SSL_CERT_FILE",
    ),
    ("kind: Timeout|[Tt]imed ?[Oo]ut|TimeoutError", StoreBusy, "no answer in time. Check the network"),
    (
        "XAmzContentSHA256Mismatch|BadDigest|InvalidDigest",
        StoreBusy,
        "bytes were damaged on their way to the store, which refused them. Check the network",
    ),
    ("405 Method Not Allowed|501 Not Implemented", StoreError, "the server does not take what is written to it"),
    ("400 Bad Request", StoreError, "the store refuses the request. Check the credentials and AWS_REGION"),
)
"""What is found in a client's message, in this order; else it may pass."""


def explain(error: Exception, where: str) -> StoreError | StorageError:
    """The error to raise for what a client raised: what, where, and the next step."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, StorageError):
        return error
    for pattern, kind, reason in _REASONS:
        if re.search(pattern, text):
            return kind(f"{where}: {reason}.")
    first = str(error).partition("Debug source")[0].strip() or type(error).__name__
    kind = StoreError if isinstance(error, ValueError | NotImplementedError) else StoreBusy
    return kind(f"{where}: the store does not deliver: {first}. Check the network and the store, then run again.")

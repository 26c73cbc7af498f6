"""URLs without their secrets, and which of them are followed.

A presigned URL is a password, and a source's path ends up in manifests, provenance, logs and errors. So what this room
calls a path is the URL without its query, user name and password; what opens the file travels with it, in memory and
to workers, as an attribute that is never printed. The path also identifies a file from run to run, while a signature
is different each time.

Parameters that are not part of a signature may select the file (`?id=7`): a digest of them is kept, as the fragment
of the path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from penstock.identity import digest

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

"""Paths as people type them: expand `~`, refuse URLs, and guess what a mistyped one meant."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from penstock.errors import nearest_name

_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/+")  # one slash: a Path has already lost the second
_GLOB = re.compile(r"[*?\[]")
_MOST_SIBLINGS = 10_000
"""How many names in a folder to compare: a message must not wait for a folder of millions."""


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """The path, with `~` and `~user` expanded.

    Args:
        path: As the user gave it.
        what: What should be there, for the message, such as "a dataset".

    Raises:
        ValueError: it is a URL. Without this check, a folder called `s3:` would silently be made or looked for.
    """
    text = os.fspath(path).removeprefix("file://")
    if scheme := _URL.match(text):
        url = f"{scheme[0].rstrip('/')}//{text[scheme.end() :]}"
        raise ValueError(
            f"{url} is a URL, but {what} must be local for now. Use a path on this machine or on a mounted "
            "file system, and copy from or to the store."
        )
    return Path(os.path.expanduser(text))


def similar_path(path: str | os.PathLike[str]) -> str:
    """A question to end a message with, if nothing is at `path` but something has a similar name; otherwise nothing.

    Compares the first part of the path that does not exist with the names beside it.
    """
    parent = Path()
    for part in Path(path).parts:
        if not os.path.lexists(parent / part):
            near = None if _GLOB.search(part) else nearest_name(part, _names_in(parent))
            return "" if near is None else f" Did you mean {str(parent / near)!r}?"
        parent /= part
    return ""


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in itertools.islice(entries, _MOST_SIBLINGS)]
    except OSError:
        return []

"""Paths as people give them."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from penstock.errors import nearest_name

_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has lost the second slash already
_GLOB = re.compile(r"[*?\[]")
_MOST_SIBLINGS = 10_000
"""Names of a folder that are compared: a message must not wait for a folder of millions."""


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """The path, with `~` and `~user` expanded.

    Args:
        path: As it was given.
        what: What should be there, for the message, as in "a dataset".

    Raises:
        ValueError: it is a URL. A folder called `s3:` would be made, or looked for, without a word.
    """
    text = os.fspath(path).removeprefix("file://")
    if _URL.match(text):
        raise ValueError(
            f"{text}: a URL, and {what} is a local path for now. Use a path of this machine, or of a mounted file "
            "system, and copy from or to the store."
        )
    return Path(os.path.expanduser(text))


def similar_path(path: str | os.PathLike[str]) -> str:
    """A question to end a message with, when something of a similar name is where nothing is at `path`; else nothing.

    The first part of the path that is not there is compared with what is beside it.
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

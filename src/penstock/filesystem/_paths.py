"""Paths as people give them."""

from __future__ import annotations

import os
import re
from pathlib import Path

_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has lost the second slash already


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

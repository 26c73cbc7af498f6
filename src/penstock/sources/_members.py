"""Members of WebDataset tars as values: a class number, an array, text; and names that columns can have.

    .cls .index .id     a decimal number              an integer
    .npy                numpy's format, no objects    an array
    all others          bytes, as they are: decoding an image or JSON is a transform's work

Names lose their dots (`seg.png` is the column `seg_png`), and the key of a sample is the column `key`.
"""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np

_NUMBERS = frozenset({"cls", "index", "id"})
_INTEGER = re.compile(rb"\s*[+-]?[0-9]{1,18}\s*")
KEY = "key"


def column_of(extension: str) -> str:
    """The column that members with this extension become.

    >>> column_of("seg.png")
    'seg_png'
    """
    return extension.replace(".", "_")


def value_of(extension: str, content: bytes) -> Any:
    """What a member holds.

    Raises:
        ValueError: it is not what its extension says.
    """
    kind = extension.rpartition(".")[2]
    if kind in _NUMBERS:
        if not _INTEGER.fullmatch(content):
            raise ValueError(f"{content!r:.40} is no decimal number")
        return int(content)
    if kind == "npy":
        try:
            return np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError, OSError, SyntaxError, MemoryError) as error:
            raise ValueError(f"it is no .npy file of numbers: {error}") from None
    return content

"""The mark that a text file may begin with, which is no part of what it says."""

from __future__ import annotations

from penstock.errors import FormatError

_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def without_mark(data: bytes, path: str) -> bytes:
    """The start of a file without its byte-order mark.

    Raises:
        FormatError: the mark says that the file is UTF-16.
    """
    if data.startswith(_UTF16_MARKS):
        raise FormatError(f"{path}: the file is UTF-16. Convert it first: iconv -f utf-16 -t utf-8.")
    return data.removeprefix(_UTF8_MARK)

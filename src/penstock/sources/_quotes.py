"""Where a CSV record ends when quoted fields may hold newlines, looking from the start of a record.

A quote opens a field only where the field begins; anywhere else outside of quotes it is a character. In data
that keeps to that, a newline is outside exactly when the number of quotes before it is even, which numpy
counts at once. Only data with stray quotes is gone through field by field.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_NEWLINE, _RETURN = b"\n\r"


def last_quoted_border(data: bytes, quote: bytes, delimiter: bytes) -> int:
    """Where the last whole record of `data` ends, which begins with a record; 0 when none does."""
    if quote not in data:
        return data.rfind(b"\n") + 1
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
    outside = newlines[np.searchsorted(_edges(data, quote, delimiter), newlines) % 2 == 0]
    return int(outside[-1]) + 1 if len(outside) else 0


def ends_in_quotes(data: bytes, quote: bytes, delimiter: bytes) -> bool:
    """Whether a quote is still open at the end of `data`, in a record that has taken newlines with it."""
    is_open = len(_edges(data, quote, delimiter)) % 2 == 1
    return is_open and b"\n" in data[last_quoted_border(data, quote, delimiter) :]


def _edges(data: bytes, quote: bytes, delimiter: bytes) -> NDArray[np.int64]:
    """Quotes that open and close a field, in turns; within a field two in a row may close and open it."""
    values = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(values == quote[0])
    opening = quotes[::2]
    before = values[opening[opening > 0] - 1]
    if np.isin(before, (delimiter[0], _NEWLINE, _RETURN, quote[0])).all():
        return quotes
    return np.fromiter(_edges_one_by_one(data, quote, delimiter), np.int64)


def _edges_one_by_one(data: bytes, quote: bytes, delimiter: bytes) -> Iterator[int]:
    for match in _pattern(quote, delimiter).finditer(data):
        yield match.start()
        if match[1]:
            yield match.start(1)


@functools.lru_cache(maxsize=8)
def _pattern(quote: bytes, delimiter: bytes) -> re.Pattern[bytes]:
    """A quoted field, and the quote that closes it, if any does."""
    mark, other = re.escape(quote), re.escape(delimiter)
    return re.compile(rb"(?:\A|(?<=[%b\r\n]))%b(?:[^%b]++|%b%b)*+(%b|\Z)" % (other, mark, mark, mark, mark, mark))

"""Where records end: after a separator, or for CSV after a newline outside of quotes.

Separators are found from left to right, each after the end of the one before, as `bytes.split` does. A separator
such as a blank line ("\\n\\n") overlaps itself, so in a run of newlines it matters where the search starts. A *safe
point* is a place that no occurrence straddles, overlapping ones included: searching from there finds exactly what
searching from the start of the file finds. A *border* is where a record ends.

A quote opens a CSV field only at the beginning of the field; anywhere else outside of quotes it is a character. In data
that follows this rule, a newline is outside of quotes if and only if the number of quotes before it is even, which
numpy counts in one go. Only data with stray quotes is scanned field by field.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_NEWLINE, _RETURN = b"\n\r"


class RecordEnds(Protocol):
    """Finds where records end in data that begins with one."""

    @property
    def reach(self) -> int:
        """How many bytes before a chunk may belong to a border inside it."""
        ...

    def may_be_in(self, data: bytes) -> bool:
        """Whether a record may end in `data`: a cheap test before chunks are joined."""
        ...

    def last(self, data: bytes) -> int:
        """The last border in `data`, which begins with a record; 0 if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Separated:
    """Every record ends with `separator`."""

    separator: bytes

    @property
    def reach(self) -> int:
        return len(self.separator) - 1

    def may_be_in(self, data: bytes) -> bool:
        return self.separator in data

    def last(self, data: bytes) -> int:
        place = data.rfind(self.separator)
        if place < 0 or len(self.separator) == 1:
            return place + 1
        border = 0
        place = safe_point(data, self.separator, place)
        while (place := data.find(self.separator, place)) >= 0:
            place = border = place + len(self.separator)
        return border


@dataclass(frozen=True, slots=True)
class Quoted:
    """Every CSV record ends with a newline outside of quotes."""

    quote: bytes
    delimiter: bytes

    @property
    def reach(self) -> int:
        return 0

    def may_be_in(self, data: bytes) -> bool:
        return True

    def last(self, data: bytes) -> int:
        if self.quote not in data:
            return data.rfind(b"\n") + 1
        newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
        outside = newlines[np.searchsorted(_edges(data, self.quote, self.delimiter), newlines) % 2 == 0]
        return int(outside[-1]) + 1 if len(outside) else 0

    def are_open_after(self, data: bytes) -> bool:
        """Whether a quote is still open at the end of `data`, in a record that has swallowed newlines."""
        is_open = len(_edges(data, self.quote, self.delimiter)) % 2 == 1
        return is_open and b"\n" in data[self.last(data) :]


def safe_point(data: bytes, separator: bytes, place: int) -> int:
    """The last safe point at or before `place`; `data` begins at one."""
    reach = len(separator) - 1
    while place > 0 and separator in data[max(place - reach, 0) : place + reach]:
        place -= 1
    return place


def first_border(data: bytes, separator: bytes, minimum: int) -> int | None:
    """The first border at or after `minimum`; `data` begins at a safe point."""
    border = safe_point(data, separator, max(minimum - len(separator), 0))
    while True:
        found = data.find(separator, border)
        if found < 0:
            return None
        border = found + len(separator)
        if border >= minimum:
            return border


def _edges(data: bytes, quote: bytes, delimiter: bytes) -> NDArray[np.int64]:
    """Quotes that open and close a field, alternating; two in a row within a field may close and reopen it."""
    values = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(values == quote[0])
    opening = quotes[::2]
    before = values[opening[opening > 0] - 1]
    if np.isin(before, (delimiter[0], _NEWLINE, _RETURN, quote[0])).all():
        return quotes
    return np.fromiter(_edges_one_by_one(data, quote, delimiter), np.int64)


def _edges_one_by_one(data: bytes, quote: bytes, delimiter: bytes) -> Iterator[int]:
    for match in _quoted_field(quote, delimiter).finditer(data):
        yield match.start()
        if match[1]:
            yield match.start(1)


@functools.lru_cache(maxsize=8)
def _quoted_field(quote: bytes, delimiter: bytes) -> re.Pattern[bytes]:
    """A quoted field, and the quote that closes it, if any does."""
    mark, other = re.escape(quote), re.escape(delimiter)
    return re.compile(rb"(?:\A|(?<=[%b\r\n]))%b(?:[^%b]++|%b%b)*+(%b|\Z)" % (other, mark, mark, mark, mark, mark))

"""Where records end, when one separator may overlap the next.

Separators are found from left to right, each after the end of the one before, as `bytes.split` does. A
separator such as a blank line ("\\n\\n") overlaps itself, so in a run of newlines it matters where one starts to
look. A *safe point* is a place that no occurrence straddles, overlapping ones included: looking from there
finds exactly what looking from the start of the file finds. A *border* is where a separator ends.
"""

from __future__ import annotations


def safe_point(data: bytes, separator: bytes, place: int) -> int:
    """The last safe point at `place` or before; `data` begins at one."""
    reach = len(separator) - 1
    while place > 0 and separator in data[max(place - reach, 0) : place + reach]:
        place -= 1
    return place


def first_border(data: bytes, separator: bytes, minimum: int) -> int | None:
    """The first border at `minimum` or after it; `data` begins at a safe point."""
    border = safe_point(data, separator, max(minimum - len(separator), 0))
    while True:
        found = data.find(separator, border)
        if found < 0:
            return None
        border = found + len(separator)
        if border >= minimum:
            return border


def last_border(data: bytes, separator: bytes) -> int:
    """The last border, or 0 when there is none; `data` begins at a safe point."""
    place = data.rfind(separator)
    border = 0
    if place >= 0:
        place = safe_point(data, separator, place)
        while (place := data.find(separator, place)) >= 0:
            place = border = place + len(separator)
    return border

"""Numbers as people read them."""

from __future__ import annotations

_STEPS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def format_bytes(count: float) -> str:
    """Bytes with a decimal unit: 1 GB is 10^9, as disks and networks count.

    >>> format_bytes(2_530_000_000)
    '2.53 GB'
    """
    for unit, size in _STEPS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def format_count(count: int) -> str:
    """A count with thousands set apart.

    >>> format_count(1234567)
    '1,234,567'
    """
    return f"{count:,}"

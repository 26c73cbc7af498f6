"""Cutting by size: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def runs(sizes: Sequence[int], target: int) -> Iterator[tuple[int, int]]:
    """Consecutive pieces [begin, end), each as many as fit into `target`, and at least one.

    >>> list(runs([5, 5, 5, 20, 1], 10))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    begin = total = 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > target:
            yield begin, number
            begin, total = number, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)


def byte_ranges(num_bytes: int, target: int) -> Iterator[tuple[int, int]]:
    """Ranges of equal size, to a byte, that are about `target` long.

    >>> list(byte_ranges(10, 4))
    [(0, 5), (5, 10)]
    """
    count = max(1, round(num_bytes / target))
    for number in range(count if num_bytes else 0):
        begin, end = num_bytes * number // count, num_bytes * (number + 1) // count
        if begin < end:
            yield begin, end

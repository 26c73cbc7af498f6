"""CRC32C over blocks of 512 KiB.

Small enough to pin down a flipped bit to half a megabyte, large enough that the table takes 8 bytes
per MiB and the checksum runs at 14 GB/s without the GIL. Each tensor has its own blocks, counted from
its first byte, so reading one column never checks another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import crc32c
import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 512 << 10


def checksum(data: bytes | bytearray | memoryview | NDArray[np.uint8], before: int = 0) -> int:
    """CRC32C of `data`; with `before`, the checksum of earlier bytes, that of those bytes followed by `data`."""
    return int(crc32c.crc32c(data.data if isinstance(data, np.ndarray) else data, before))


def num_blocks(num_bytes: int) -> int:
    """Blocks that `num_bytes` bytes fill; the last may be short."""
    return -(-num_bytes // BLOCK_BYTES)


def block_checksums(data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """CRC32C of each block of `data`."""
    starts = range(0, len(data), BLOCK_BYTES)
    return np.array([checksum(data[start : start + BLOCK_BYTES]) for start in starts], np.uint32)


def join_checksums(checksums: Iterable[int]) -> int:
    """CRC32C of whole blocks side by side, from the CRC32C of each, so that one call can check many blocks."""
    low, second, third, high = _moves()
    joined = 0
    for value in checksums:
        moved = low[joined & 255] ^ second[joined >> 8 & 255] ^ third[joined >> 16 & 255] ^ high[joined >> 24]
        joined = moved ^ value
    return joined


@functools.cache
def _moves() -> list[list[int]]:
    """What each byte of a checksum becomes if a block follows: crc(a + b) = move(crc(a)) ^ crc(b), with linear move.

    Measured on the library itself, bit by bit (1 ms, once).
    """
    zeros = bytes(BLOCK_BYTES)
    nothing = crc32c.crc32c(zeros)
    bits = [crc32c.crc32c(zeros, 1 << bit) ^ nothing for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0]
        for bit in bits[8 * byte : 8 * byte + 8]:
            table += [entry ^ bit for entry in table]
        tables.append(table)
    return tables

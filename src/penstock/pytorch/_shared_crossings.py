"""What the workers of a stream read at the borders of their parts, told to each other through common memory.

A table of slots that any process may write at any time, without locks. An entry has a checksum over all of it,
so one that is half written, or half overwritten, is none; its reader then reads the file. It is good for one pass
over the files, which workers count alike, so that a file that is written again between two passes is read again.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

from penstock.pytorch._shared_pages import SharedPages
from penstock.sources import Crossing

_NUM_SLOTS = 512
_SLOT_BYTES = 64 << 10
_NUM_TRIED = 8
"""Slots that an entry may be in, one after the other: none is overwritten before all of them are used."""
_HEADER = struct.Struct("<16sqqqI")  # key, pass, first, bytes of data, checksum of all others


class SharedCrossings:
    """Entries of all passes."""

    def __init__(self) -> None:
        self._pages = SharedPages(_NUM_SLOTS * _SLOT_BYTES)

    def of_pass(self, number: int) -> PassCrossings:
        """Entries of one pass."""
        return PassCrossings(self._pages, number)


class PassCrossings:
    """A `Crossings` that all processes with the same pages have in common."""

    def __init__(self, pages: SharedPages, number: int) -> None:
        self._pages = pages
        self._number = number

    def get(self, path: str, border: int) -> Crossing | None:
        """What was put for this byte of a file, unless it was overwritten."""
        key = _key(path, border)
        for slot in _slots(key):
            found, number, first, num_bytes, checksum = _HEADER.unpack_from(self._pages.view, slot)
            if (found, number) == (key, self._number) and 0 <= num_bytes <= _SLOT_BYTES - _HEADER.size:
                begin = slot + _HEADER.size
                data = bytes(self._pages.view[begin : begin + num_bytes])
                if checksum == self._checksum(key, first, data):
                    return Crossing(first, data)
        return None

    def put(self, path: str, border: int, crossing: Crossing) -> None:
        """Keep it in a slot that is free, or of another pass; what is longer than a slot is not kept."""
        first, data = crossing
        if len(data) > _SLOT_BYTES - _HEADER.size:
            return
        key = _key(path, border)
        slots = _slots(key)
        slot = next(filter(self._is_free, slots), slots[0])
        begin = slot + _HEADER.size
        self._pages.view[begin : begin + len(data)] = data
        checksum = self._checksum(key, first, data)
        _HEADER.pack_into(self._pages.view, slot, key, self._number, first, len(data), checksum)

    def _is_free(self, slot: int) -> bool:
        _, number, *_ = _HEADER.unpack_from(self._pages.view, slot)
        return bool(number != self._number)  # passes count from 1

    def _checksum(self, key: bytes, first: int, data: bytes) -> int:
        return zlib.crc32(data, zlib.crc32(_HEADER.pack(key, self._number, first, len(data), 0)))


def _key(path: str, border: int) -> bytes:
    return hashlib.blake2b(f"{border} {path}".encode(errors="surrogateescape"), digest_size=16).digest()


def _slots(key: bytes) -> list[int]:
    """Where the slots begin that may hold an entry."""
    first = int.from_bytes(key[:8], "little")
    return [(first + number) % _NUM_SLOTS * _SLOT_BYTES for number in range(_NUM_TRIED)]

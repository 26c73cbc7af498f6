"""The members of a tar: where each one's bytes are, from headers alone; and what WebDataset makes of their names.

Headers are read by position, 8 KB at a time, and bodies are skipped. Nothing is extracted, so no name can reach the
disk. Every number is compared with the file's size before it is used. What describes a member (long names, pax records)
may take 1 MB. The archive must end with its end mark: a writer that was killed leaves a tar that ends between two
members, which every tar reader takes for a shorter one.

    ustar, GNU         names to 256 bytes in the header, longer ones in a member `L` before it; sizes as octal or binary
    pax                records in a member `x` before it: `path`, `size`, `GNU.sparse.*` and others, which do not matter
    links, devices, folders, sparse files    are members without bytes of their own, or with other bytes than their file

`a/b.seg.png` is the member "seg.png" of the sample "a/b".
"""

from __future__ import annotations

import posixpath
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import FormatError
from penstock.filesystem import PositionedFile

NUMBER_MEMBERS = frozenset({"cls", "index", "id"})
"""Members that are a decimal number."""
_INTEGER = re.compile(rb"\s*[+-]?[0-9]{1,20}\s*")
"""What may fit 64 bits; Python would read a number of any length."""
_BLOCK = 512
_AT_ONCE = 8192
_MOST_HEADER_BYTES = 1 << 20
_ZEROS = bytes(_BLOCK)
_DRAIN_BYTES = 1 << 20
_MODULUS = 65521
_FILES, _WITHOUT_BYTES = b"0\0" + b"7", b"123456"
_DESCRIPTIONS = b"LKxXg"
_SPARSE = (b"GNU.sparse.major", b"GNU.sparse.size", b"GNU.sparse.map")
"""Records of the three formats of sparse files in pax archives."""


class Member(NamedTuple):
    """A member that is not a folder."""

    name: str
    begin: int
    size: int
    is_file: bool
    """Whether these are the bytes of a file: not of a link, a device or a sparse file."""


def key_and_extension(name: str) -> tuple[str, str]:
    """ "a/b.seg.png" is the sample "a/b" and its member "seg.png"."""
    folder, base = posixpath.split(name)
    stem, _, extension = base.partition(".")
    return posixpath.join(folder, stem), extension.lower()


def describes_archive(name: str) -> bool:
    """Whether a member describes the archive (WebDataset's `__name__` convention)."""
    base = posixpath.basename(name)
    return base.startswith("__") and base.endswith("__")


def is_unsafe_name(name: str) -> bool:
    """Whether a name would escape a folder if someone used it as a path later."""
    return name.startswith("/") or ".." in name.split("/") or "\x00" in name or "\\" in name


def is_decimal(content: bytes) -> bool:
    """Whether the content of a member is a decimal number of at most 20 digits."""
    return _INTEGER.fullmatch(content) is not None


class Members:
    """The members of an archive, in order.

    Raises:
        FormatError: it is truncated, damaged, or no tar.
    """

    def __init__(self, file: PositionedFile) -> None:
        self.checksum = 0
        """CRC-32 of all headers so far."""
        self._file = file
        self._chunk, self._chunk_at = b"", 0

    def __iter__(self) -> Iterator[Member]:
        at = 0
        while (header := self.read(at, _BLOCK)) != _ZEROS:
            try:
                member, at = self._read_member(header, at)
            except (ValueError, OverflowError) as error:
                raise FormatError(
                    f"{self._file.path}: the archive is truncated or damaged at byte {at:,}: {error}. Write or fetch "
                    "it again."
                ) from None
            if member is not None:
                yield member
        self._check_nothing_follows(at)

    def read(self, begin: int, size: int) -> bytes:
        """Bytes of the archive; those of small members were often read with their headers."""
        if not self._chunk_at <= begin <= begin + size <= self._chunk_at + len(self._chunk):
            end = min(begin + max(size, _AT_ONCE), self._file.size)
            self._chunk, self._chunk_at = self._file.read(begin, max(begin, end)).tobytes(), begin
        return self._chunk[begin - self._chunk_at : begin - self._chunk_at + size]

    def _read_member(self, header: bytes, at: int) -> tuple[Member | None, int]:
        """(the member whose first header this is, where the next one begins); folders are none."""
        first, name, records = at, "", dict[bytes, bytes]()
        while True:
            size, kind = self._check(header)
            self.checksum = zlib.crc32(header, self.checksum)
            at += _BLOCK
            if kind not in _DESCRIPTIONS:
                break
            content = self._describe(at, size, first)
            if kind == b"L":
                name = _text(content)
            elif kind != b"K":
                records |= _parse_records(content, is_global=kind == b"g")
            at += -(-size // _BLOCK) * _BLOCK
            header = self.read(at, _BLOCK)
        return self._finish(header, kind, size, at, name, records)

    def _finish(
        self, header: bytes, kind: bytes, size: int, at: int, name: str, records: dict[bytes, bytes]
    ) -> tuple[Member | None, int]:
        if b"size" in records:
            if not records[b"size"].isdigit() or len(records[b"size"]) > 20:
                raise ValueError(f"the size {records[b'size']!r:.40}")
            size = int(records[b"size"])
        name = records[b"path"].decode("utf-8", "surrogateescape") if b"path" in records else name or _name_in(header)
        is_folder = kind == b"5" or (kind in b"0\0" and name.endswith("/"))
        is_file = kind in _FILES and not is_folder and records.keys().isdisjoint(_SPARSE)
        if kind == b"S":
            at = self._after_sparse(header, at)
        if kind == b"M":
            raise ValueError("a member continues in another volume")
        num_bytes = 0 if kind in _WITHOUT_BYTES or is_folder else size
        if num_bytes > self._file.size - at:
            raise ValueError(f"a member of {num_bytes:,} bytes, of which {self._file.size - at:,} are there")
        member = None if is_folder or kind == b"V" else Member(name, at, num_bytes, is_file)
        return member, at + -(-num_bytes // _BLOCK) * _BLOCK

    def _check(self, header: bytes) -> tuple[int, bytes]:
        """(size, type) of a header whose checksum is right."""
        if len(header) < _BLOCK:
            raise ValueError("no end mark")
        stored = _octal(header[148:156])
        # Adler-32's lower half is the sum of all bytes, in a tenth of the time.
        if zlib.adler32(header[:148] + b"        " + header[156:]) % 65536 != (stored + 1) % _MODULUS:
            signed = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:]) + 256
            if stored != signed:  # as some old programs have it
                raise ValueError("a header's checksum is wrong")
        return _size_in(header[124:136]), header[156:157]

    def _describe(self, at: int, size: int, first: int) -> bytes:
        """What describes the next member."""
        if at + size - first > _MOST_HEADER_BYTES:
            raise ValueError(f"a header has more than {_MOST_HEADER_BYTES:,} bytes")
        content = self.read(at, size)
        if len(content) < size:
            raise ValueError("a header is cut off")
        self.checksum = zlib.crc32(content, self.checksum)
        return content

    def _after_sparse(self, header: bytes, at: int) -> int:
        """Where the bytes of an old GNU sparse file begin: maps that do not fit its header follow it."""
        goes_on, first = header[482:483] > b"\0", at
        while goes_on:
            if at - first > _MOST_HEADER_BYTES:
                raise ValueError(f"a header has more than {_MOST_HEADER_BYTES:,} bytes")
            goes_on, at = self.read(at, _BLOCK)[504:505] > b"\0", at + _BLOCK
        return at

    def _check_nothing_follows(self, at: int) -> None:
        while at < self._file.size:
            data = self._file.read(at, min(at + _DRAIN_BYTES, self._file.size))
            if data.any():
                raise FormatError(
                    f"{self._file.path}: more data follows its end mark, as in tars joined by `cat`; give them one by "
                    "one."
                )
            at += len(data)


def _parse_records(content: bytes, *, is_global: bool) -> dict[bytes, bytes]:
    """The records of a pax header, "27 path=..." each with its length in front."""
    records, at = dict[bytes, bytes](), 0
    while at < len(content):
        space = content.find(b" ", at, at + 20)
        digits = content[at : max(at, space)]
        if not digits.isdigit() or not space < at + int(digits) <= len(content):
            if not content[at:].strip(b"\0"):
                break
            raise ValueError("a pax header is damaged")
        key, _, value = content[space + 1 : at + int(digits) - 1].partition(b"=")
        records[key], at = value, at + int(digits)
    if is_global:
        if b"path" in records or b"size" in records:
            raise ValueError("one name or size for all members")
        return {}
    return records


def _name_in(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _size_in(field: bytes) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if field[0] > 0x80:
        raise ValueError("a negative size")
    return _octal(field)


def _octal(field: bytes) -> int:
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits and not digits.isdigit():
        raise ValueError(f"{digits!r:.40} is not a number")
    return int(digits or b"0", 8)

"""Whole records out of a stream of bytes, for formats whose records end with a separator.

A byte range owns the records that begin in it, so ranges are cut anywhere, without reading the file,
and every record still belongs to exactly one. A reader of [begin, end) looks for its first record from a safe
point (see `_borders`) before `begin`, and reads past `end` until its last record is complete.

Memory is one block and the rest of its last record: a record of n bytes takes n while it arrives and
n joined. One longer than `max_record_bytes` (and a block) is dropped as it arrives, and reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.errors import StorageError
from penstock.sources._borders import first_border, last_border, safe_point

_STEP_BYTES = 64 << 10
_LOOK_BACK_BYTES = 256  # and eight times as much when a run of separators is longer
_MOST_BYTES_AT_ONCE = 16 << 20  # a read takes a buffer of the size asked for, however little arrives


class ByteStream(Protocol):
    """Bytes in order."""

    def read(self, num_bytes: int, /) -> bytes:
        """At most `num_bytes`, and none only at the end."""
        ...


class SeekableBytes(ByteStream, Protocol):
    """Bytes in order, from anywhere."""

    path: str
    size: int

    def seek(self, offset: int, /) -> int:
        """Go on from byte `offset`."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records with their separators; the last of a file may lack one."""

    offset: int
    """Where the block begins in the (uncompressed) file."""
    data: bytes
    dropped_bytes: int = 0
    """Not 0 when the block stands for one record that was too long to keep; `data` is empty then."""


def range_blocks(
    file: SeekableBytes, begin: int, end: int, separator: bytes, *, block_bytes: int, max_record_bytes: int
) -> Iterator[Block]:
    """Blocks of the records that begin in bytes [begin, end) of `file`."""
    if file.size < end:
        raise StorageError(
            f"{file.path}: the file has {file.size:,} bytes, and had at least {end:,} when it was listed. "
            "Something cut it since; restore it, then list the sources again."
        )
    found = find_first_record(file, begin, end, separator) if begin else FirstRecord(0, b"", 0)
    if found is not None:
        start = found.place + found.border
        file.seek(start)
        yield from stream_blocks(
            file, separator, offset=start, end=end, block_bytes=block_bytes, max_record_bytes=max_record_bytes
        )


def stream_blocks(
    stream: ByteStream,
    separator: bytes,
    *,
    block_bytes: int,
    max_record_bytes: int,
    offset: int = 0,
    end: int | None = None,
) -> Iterator[Block]:
    """Blocks of the records from here on that begin before `end`; `stream` stands at a record, at `offset`."""
    collector = _Collector(offset, separator, max_record_bytes)
    while end is None or collector.offset < end:
        chunk = stream.read(block_bytes)
        blocks = collector.add(chunk) if chunk else collector.rest()
        for block in blocks:
            if end is None or block.offset < end:
                yield _before(block, separator, end)
        if not chunk:
            return


def _before(block: Block, separator: bytes, end: int | None) -> Block:
    """The block without records that begin at `end` or after it."""
    if end is None or block.offset + len(block.data) <= end:
        return block
    return Block(
        block.offset, block.data[: first_border(block.data, separator, end - block.offset)], block.dropped_bytes
    )


class _Collector:
    """Joins chunks into blocks that end where a record ends."""

    def __init__(self, offset: int, separator: bytes, max_record_bytes: int) -> None:
        self.offset = offset
        """Where the record begins that is being collected."""
        self._separator = separator
        self._max_record_bytes = max_record_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._tail = b""
        """The last bytes seen, in which a separator may have begun."""
        self._is_dropping = False

    def add(self, chunk: bytes) -> Iterator[Block]:
        """Take a chunk, and give the records that it completes."""
        if self._separator not in self._tail + chunk:  # joining at each chunk would be quadratic in a long record
            self._keep(chunk)
            return
        if self._is_dropping:
            chunk = self._drop_until_border(chunk)
            yield self._dropped()
        if len(self._separator) == 1:
            border = chunk.rfind(self._separator) + 1
            data = b"".join([*self._pieces, memoryview(chunk)[:border]])  # one copy, not two
            rest = chunk[border:]
        else:
            joined = b"".join([*self._pieces, chunk])
            border = last_border(joined, self._separator)
            data, rest = joined[:border], joined[border:]
        block = Block(self.offset, data)
        self._restart(self.offset + len(data), rest)
        if data:
            del chunk, data  # what was joined is not kept while the caller works on it
            yield block

    def rest(self) -> Iterator[Block]:
        """What is left at the end of the file."""
        if self._is_dropping:
            yield self._dropped()
        elif self._num_bytes:
            yield Block(self.offset, b"".join(self._pieces))

    def _keep(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        self._tail = self._end_of(self._tail + chunk)
        if not self._is_dropping:
            self._pieces.append(chunk)
        if self._num_bytes > self._max_record_bytes:
            self._is_dropping = True
            self._pieces.clear()

    def _drop_until_border(self, chunk: bytes) -> bytes:
        border = (self._tail + chunk).index(self._separator) + len(self._separator) - len(self._tail)
        self._num_bytes += border
        return chunk[border:]

    def _dropped(self) -> Block:
        block = Block(self.offset, b"", self._num_bytes)
        self._is_dropping = False
        self._restart(self.offset + self._num_bytes, b"")
        return block

    def _restart(self, offset: int, rest: bytes) -> None:
        self.offset = offset
        self._pieces = [rest] if rest else []
        self._num_bytes = len(rest)
        self._tail = self._end_of(rest)

    def _end_of(self, data: bytes) -> bytes:
        return data[max(0, len(data) - len(self._separator) + 1) :]


class FirstRecord(NamedTuple):
    """Where a range's first record begins: at `border` of `data`, which was read from byte `place` of the file on."""

    place: int
    data: bytes
    border: int


def find_first_record(
    file: SeekableBytes, begin: int, end: int, separator: bytes, step_bytes: int = _STEP_BYTES
) -> FirstRecord | None:
    """The first record that begins in bytes [begin, end); None when none does. `file` stands behind what was read."""
    place, data = _safe_window(file, begin, separator)
    while True:
        border = first_border(data, separator, max(begin - place, 0))
        if border is not None:
            return FirstRecord(place, data, border) if place + border < end else None
        # No border from `begin` on, so what can still matter is a separator that has only begun.
        keep = max(0, len(data) - len(separator) + 1)
        num_left = end - 1 - place - len(data)
        chunk = file.read(min(step_bytes, num_left)) if num_left > 0 else b""
        if not chunk:
            return None
        place, data = place + keep, data[keep:] + chunk


def _safe_window(file: SeekableBytes, begin: int, separator: bytes) -> tuple[int, bytes]:
    """A safe point before the separators that can end at `begin`, and bytes from there on that were read to find it."""
    reach = len(separator) - 1
    if not reach:
        return file.seek(begin - 1), b""
    window = _LOOK_BACK_BYTES
    while True:
        start = max(begin - len(separator) - window, 0)
        file.seek(start)
        data = read_exactly(file, begin + reach - start)
        place = safe_point(data, separator, max(begin - len(separator) - start, 0))
        if place >= reach or start == 0:
            return start + place, data[place:]
        window *= 8


def read_exactly(stream: ByteStream, num_bytes: int) -> bytes:
    """`num_bytes` bytes, or what is left."""
    pieces = []
    while num_bytes > 0 and (piece := stream.read(min(num_bytes, _MOST_BYTES_AT_ONCE))):
        pieces.append(piece)
        num_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

"""Blocks of whole records from the bytes of a file, for `read_split` and `read_rows` alike.

    split -> record_blocks -> Block, Block, ...     each begins where the one before it ended

A byte range owns the records that begin in it, so a file can be cut anywhere without reading it, and every record still
belongs to exactly one range. A reader of [begin, end) looks for its first record from `begin` on, reads up to `end`,
then in small steps until its last record is complete: the end of a record at a border is read twice. A block's
offset is all it takes to resume there later.

A *border* is where a record ends. Separators are found from left to right, each after the end of the one before, as
`bytes.split` does. A separator such as a blank line ("\\n\\n") overlaps itself, so in a run of newlines it matters
where the search starts. A *safe point* is a place that no occurrence straddles, overlapping ones included: searching
from there finds exactly what searching from the start of the file finds.

Memory is one block and the rest of its last record: a record of n bytes takes n while it arrives and n once joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.errors import DatasetChanged, FormatError, StorageError
from penstock.sources._files import ByteStream, SeekableBytes, as_seekable, open_stream, read_exactly, skip_to
from penstock.sources._model import Records, RowError, Split
from penstock.sources._options import SourceOptions
from penstock.sources._remote import is_remote

OnLong = Literal["drop", "raise"]
"""What happens to a record longer than `max_record_bytes` (and a block): it is dropped as it arrives, leaving a block
that says so, or raises `FormatError` as soon as it is too long."""

_LOOK_BACK_BYTES = 256  # eight times as much if a run of separators is longer
_ENTER_BYTES = 4 << 10
_STEP_BYTES = 512
_REMOTE_STEP_BYTES = 4 << 10  # each step is a request


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


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records with their separators; the last of a file may lack one."""

    offset: int
    """Where the block begins in the (uncompressed) file."""
    data: bytes
    dropped_bytes: int = 0
    """Not 0 if the block stands for one record that was too long to keep; `data` is empty then."""

    def too_long(self, path: str, row: int, noun: str) -> Records:
        """What stands for the one record of this block: why it was dropped."""
        message = f"the {noun} at byte {self.offset:,} has {self.dropped_bytes:,} bytes, more than max_record_bytes."
        return Records({}, row, 0, (RowError(path, row, "too_long", message),), num_bytes=self.dropped_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """A record's first byte, and what was already read from there on: the file is positioned after that."""

    offset: int
    data: bytes = b""


def record_blocks(
    split: Split, options: SourceOptions, separator: bytes, place: int | None, on_long: OnLong
) -> Iterator[Block]:
    """Blocks of the records of a split, from the one at `place` on, or from the first.

    Raises:
        FormatError: a record is too long, and `on_long` is "raise".
        StorageError: the file is shorter than when it was listed.
        DatasetChanged: no record begins at `place`.
    """
    with open_stream(split.path, options) as stream:
        file = as_seekable(stream)
        if file is None or split.end < 0:
            skip_to(stream, split.path, place or 0)
            yield from blocks_to_end(stream, split.path, options, Entry(place or 0), Separated(separator), on_long)
        else:
            chosen = ByteRange(file, split.begin, split.end, separator)
            yield from chosen.blocks(options, place, on_long)


def blocks_to_end(
    stream: ByteStream, path: str, options: SourceOptions, entry: Entry, ends: RecordEnds, on_long: OnLong
) -> Iterator[Block]:
    """Blocks from an entry to the end of a file."""
    collector = _Collector(path, entry.offset, ends, options.max_record_bytes, on_long)
    chunk = entry.data or stream.read(options.batch_bytes)
    while chunk:
        yield from collector.add(chunk)
        chunk = stream.read(options.batch_bytes)
    yield from collector.flush()


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Records that begin in bytes [begin, end) of a file, each of which ends with `separator`."""

    file: SeekableBytes
    begin: int
    end: int
    separator: bytes

    def blocks(
        self, options: SourceOptions, place: int | None, on_long: OnLong, known: Entry | None = None
    ) -> Iterator[Block]:
        """Blocks from the record at `place` on, or from the first one, which may already be known."""
        self._check_size()
        if max(self.begin, place or 0) >= self.end:
            return
        entry = known or (
            self._enter(min(_ENTER_BYTES, options.batch_bytes)) if place is None else self._enter_again(place)
        )
        if entry is not None:
            ends = Separated(self.separator)
            collector = _Collector(self.file.path, entry.offset, ends, options.max_record_bytes, on_long)
            yield from self._collect(collector, entry, options)

    def _collect(self, collector: _Collector, entry: Entry, options: SourceOptions) -> Iterator[Block]:
        position, chunk = entry.offset + len(entry.data), entry.data
        while collector.offset < self.end:
            if 2 * len(chunk) <= options.batch_bytes and position < self.end:  # `entry.data` may already be a block
                more = self.file.read(min(options.batch_bytes - len(chunk), self.end - position))
                position, chunk = position + len(more), chunk + more
            if position >= self.end:
                chunk = self._complete(chunk, options)
            if not chunk:
                yield from collector.flush()
                return
            for block in collector.add(chunk):
                if block.offset < self.end:
                    yield self._before_end(block)
            chunk = b""

    def _complete(self, chunk: bytes, options: SourceOptions) -> bytes:
        """The last bytes of the range, and in small steps what its last record has beyond the end: one block."""
        pieces, num_bytes = [chunk], 0
        step_bytes = _REMOTE_STEP_BYTES if is_remote(self.file.path) else _STEP_BYTES
        tail = chunk[-len(self.separator) :]
        while self.separator not in tail and num_bytes <= options.max_record_bytes:
            piece = self.file.read(step_bytes)
            if not piece:
                break
            pieces.append(piece)
            num_bytes += len(piece)
            tail = tail[1 - len(self.separator) :] + piece if len(self.separator) > 1 else piece
            step_bytes = min(2 * step_bytes, max(options.batch_bytes, step_bytes))
        return b"".join(pieces) if num_bytes else chunk

    def _before_end(self, block: Block) -> Block:
        """The block without records that begin at or after the end of the range."""
        if block.dropped_bytes or block.offset + len(block.data) <= self.end:
            return block
        return Block(block.offset, block.data[: first_border(block.data, self.separator, self.end - block.offset)])

    def _enter(self, step_bytes: int) -> Entry | None:
        """Where the first record begins, and what was read from there on; None if no record begins in the range."""
        if self.begin == 0:
            self.file.seek(0)
            return Entry(0)
        place, data = self._look_back()
        while True:
            border = first_border(data, self.separator, max(self.begin - place, 0))
            if border is not None:
                return Entry(place + border, data[border:]) if place + border < self.end else None
            # No border from `begin` on, so all that still matters is a separator that is incomplete.
            keep = max(0, len(data) - len(self.separator) + 1)
            num_left = self.end - 1 - place - len(data)
            chunk = self.file.read(min(step_bytes, num_left)) if num_left > 0 else b""
            if not chunk:
                return None
            place, data = place + keep, data[keep:] + chunk

    def _look_back(self) -> tuple[int, bytes]:
        """A safe point before any separator that may end at `begin`, and the bytes that were read from there on."""
        file, begin, separator = self.file, self.begin, self.separator
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

    def _enter_again(self, place: int) -> Entry:
        """Go to a place where a record began when the file was last read."""
        file, separator = self.file, self.separator
        file.seek(max(place - len(separator), 0))
        # "\r" alone may end the header of a CSV file.
        if place and read_exactly(file, len(separator)) not in (separator, b"\r"):
            raise DatasetChanged(
                f"{file.path}: no record begins at byte {place:,} any more. The file was rewritten since the state was "
                "saved; start the epoch again, or restore the file."
            )
        return Entry(place)

    def _check_size(self) -> None:
        if self.file.size < self.end:
            raise StorageError(
                f"{self.file.path}: the file has {self.file.size:,} bytes, but had at least {self.end:,} when it was "
                "listed. Something truncated it since; restore it, then list the sources again."
            )


class _Collector:
    """Joins chunks into blocks that end where a record ends."""

    def __init__(self, path: str, offset: int, ends: RecordEnds, max_record_bytes: int, on_long: OnLong) -> None:
        self.offset = offset
        """Where the record being collected begins."""
        self._path = path
        self._ends = ends
        self._max_record_bytes = max_record_bytes
        self._on_long = on_long
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._next_look = 0
        """How many bytes must arrive before they are joined again to look for a border."""
        self._tail = b""
        """The last bytes seen, which may be the beginning of a separator."""
        self._is_dropping = False

    def add(self, chunk: bytes) -> Iterator[Block]:
        """Add a chunk, and give the records that it completes."""
        num_bytes = self._num_bytes + len(chunk)
        # Joining at each chunk would be quadratic in the length of a record.
        is_too_soon = num_bytes < min(self._next_look, self._max_record_bytes)
        if is_too_soon or not self._ends.may_be_in(self._tail + chunk):
            self._keep(chunk)
            return
        if self._is_dropping:
            chunk = self._drop_until_border(chunk)
            yield self._dropped()
        block = self._take(chunk)
        if block is not None:
            del chunk  # do not keep it alive while the caller works on the block
            yield block

    def flush(self) -> Iterator[Block]:
        """What is left at the end of the file."""
        if self._is_dropping:
            yield self._dropped()
        elif self._num_bytes:
            yield Block(self.offset, b"".join(self._pieces))

    def _take(self, chunk: bytes) -> Block | None:
        """The block that a chunk completes, if any."""
        if isinstance(self._ends, Separated) and not self._ends.reach:
            border = self._ends.last(chunk)
            data, rest = b"".join([*self._pieces, memoryview(chunk)[:border]]), chunk[border:]  # one copy, not two
        else:
            joined = b"".join([*self._pieces, chunk])
            border = self._ends.last(joined)
            data, rest = joined[:border], joined[border:]
        if not data:
            if not isinstance(self._ends, Separated):
                self._next_look = 2 * (self._num_bytes + len(chunk))
            self._keep(chunk)
            return None
        block = Block(self.offset, data)
        self._restart(self.offset + len(data), rest)
        return block

    def _keep(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        self._tail = self._end_of(self._tail + chunk)
        if not self._is_dropping:
            self._pieces.append(chunk)
        if self._num_bytes > self._max_record_bytes:
            if self._on_long == "raise":
                raise FormatError(
                    f"{self._path}: the record at byte {self.offset:,} does not end within max_record_bytes="
                    f"{self._max_record_bytes:,}. Repair the file, or raise the limit."
                )
            self._is_dropping = True
            self._pieces.clear()

    def _drop_until_border(self, chunk: bytes) -> bytes:
        assert isinstance(self._ends, Separated), "records in quotes are never dropped"
        separator = self._ends.separator
        border = (self._tail + chunk).index(separator) + len(separator) - len(self._tail)
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
        self._next_look = 0
        self._tail = self._end_of(rest)

    def _end_of(self, data: bytes) -> bytes:
        return data[max(0, len(data) - self._ends.reach) :]

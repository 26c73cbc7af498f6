"""Blocks of whole records that can be entered again: each begins where the one before it ended.

`_blocks` reads a range once, as fast as it can. A stream also stops and goes on later, so here a block's
offset is enough to go on from, and no byte is read that is not needed: a range is entered at its own first
byte, read up to its end, then by small steps until its last record is complete.

The end of a record that crosses the border of two ranges is read by both, in steps of 512 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.errors import DatasetChanged, FormatError, StorageError
from penstock.sources._blocks import Block, ByteStream, SeekableBytes, find_first_record, read_exactly
from penstock.sources._borders import first_border, last_border
from penstock.sources._options import SourceOptions
from penstock.sources._remote import is_remote

LastBorder = Callable[[bytes], int]
"""Where the last whole record of some data ends, which begins with a record; 0 when none does."""

_STEP_BYTES = 512
_REMOTE_STEP_BYTES = 4 << 10  # each step is a request
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Records that begin in bytes [begin, end) of a file, each of which ends with `separator`."""

    file: SeekableBytes
    begin: int
    end: int
    separator: bytes

    @property
    def is_last(self) -> bool:
        """Whether the file ends where the range does."""
        return self.end >= self.file.size

    @property
    def last_bytes(self) -> int:
        """Where the bytes begin that decide, with those behind `end`, where the last record ends."""
        return self.end if self.is_last else self.end - len(self.separator)

    def enter(self, step_bytes: int) -> tuple[int, bytes] | None:
        """Where the first record begins and what was read from there on; None when there is none."""
        file = self.file
        if self.begin == 0:
            file.seek(0)
            return 0, b""
        found = find_first_record(file, self.begin, self.end, self.separator, step_bytes)
        if found is None:
            return None
        place, data, border = found
        return place + border, data[border:]

    def enter_again(self, place: int) -> tuple[int, bytes]:
        """Go to a place at which a record began when it was last read."""
        file, separator = self.file, self.separator
        file.seek(max(place - len(separator), 0))
        # "\r" alone may end the header of a CSV file.
        if place and read_exactly(file, len(separator)) not in (separator, b"\r"):
            raise DatasetChanged(
                f"{file.path}: no record begins at byte {place:,} any more. The file was written again since the "
                "state was saved; start the epoch again, or restore the file."
            )
        return place, b""

    def complete(self, offset: int, data: bytes) -> bytes:
        """`data`, which begins with the record at `offset`, up to the first border at the end or behind it."""
        if self.is_last:
            return data
        file = self.file
        step = _REMOTE_STEP_BYTES if is_remote(file.path) else _STEP_BYTES
        while (border := first_border(data, self.separator, self.end - offset)) is None:
            more = file.read(step)
            if not more:
                return data
            data += more
            step *= 2
        return data[:border]


def blocks_to_end(
    stream: ByteStream, path: str, options: SourceOptions, offset: int, data: bytes, find_last: LastBorder
) -> Iterator[Block]:
    """Blocks from byte `offset` to the end of a file; `data` was read from there, and `stream` stands behind it."""
    return _chain(stream, path, options, offset, data, find_last, None)


def blocks_of_range(chosen: ByteRange, options: SourceOptions, place: int | None, data: bytes = b"") -> Iterator[Block]:
    """Blocks of the records of a range, from the one at `place` on; `data` was read from there already.

    Raises:
        StorageError: the file is shorter than when it was listed.
        DatasetChanged: no record begins at `place`.
    """
    file = chosen.file
    if file.size < chosen.end:
        raise StorageError(
            f"{file.path}: the file has {file.size:,} bytes, and had at least {chosen.end:,} when it was listed. "
            "Something cut it since; restore it, then make the stream again."
        )
    if place is None:
        entry = chosen.enter(options.batch_bytes)
    else:
        entry = (place, data) if data else chosen.enter_again(place)
    if entry is not None:
        yield from _chain(file, file.path, options, *entry, last_border_of(chosen.separator), chosen)


def last_border_of(separator: bytes) -> LastBorder:
    """Where the last record ends when each ends with `separator`."""
    if len(separator) == 1:
        return lambda data: data.rfind(separator) + 1
    return lambda data: last_border(data, separator)


def go_to(stream: ByteStream, path: str, place: int, here: int = 0) -> None:
    """Have a stream that stands at byte `here` stand at `place`, by reading up to there where it cannot be entered."""
    seek = getattr(stream, "seek", None)
    if seek is not None:
        seek(place)
        return
    num_left = place - here
    while num_left:
        skipped = len(stream.read(min(num_left, _SKIP_BYTES)))
        if not skipped:
            raise DatasetChanged(f"{path}: the file ends before the place to go on from. It changed; start again.")
        num_left -= skipped


def _chain(
    stream: ByteStream,
    path: str,
    options: SourceOptions,
    offset: int,
    data: bytes,
    find_last: LastBorder,
    chosen: ByteRange | None,
) -> Iterator[Block]:
    """Blocks from `offset` on; `data` was read already, and `stream` stands behind it."""
    size = options.batch_bytes
    while chosen is None or offset < chosen.end:
        wanted = (size if chosen is None else min(size, chosen.last_bytes - offset)) - len(data)
        wanted = max(wanted, 0) if 2 * len(data) <= size else 0  # what entering a range left is a block
        more = read_exactly(stream, wanted)
        data = data + more if data else more
        is_last = len(more) < wanted
        if not is_last and chosen is not None and offset + len(data) >= chosen.last_bytes:
            is_last, data = True, chosen.complete(offset, data)
        border = len(data) if is_last else find_last(data)
        if border:
            yield Block(offset, data[:border])
            offset, data, size = offset + border, data[border:], options.batch_bytes
        elif size > options.max_record_bytes:
            raise FormatError(
                f"{path}: the record at byte {offset:,} does not end within max_record_bytes="
                f"{options.max_record_bytes:,}. Repair the file, or raise the limit."
            )
        else:
            size *= 2
        if is_last:
            return

"""Blocks of whole records that can be entered again: each begins where the one before it ended.

`_blocks` reads a range once, as fast as it can. A stream also stops and goes on later, so here a block's
offset is enough to go on from, and no byte is read that is not needed: a range is read up to its end, then by
small steps until its last record is complete, and entered at its own first byte.

What is read twice is the record that crosses the border of two ranges, once by the range that owns it and
once by the other, to find where it ends; and what the last small step brings: 4 KB, or as much as the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.errors import DatasetChanged, FormatError, StorageError
from penstock.sources._blocks import Block, ByteStream, SeekableBytes, range_blocks, read_exactly
from penstock.sources._borders import first_border, last_border
from penstock.sources._options import SourceOptions

LastBorder = Callable[[bytes], int]
"""Where the last whole record of some data ends, which begins with a record; 0 when none does."""

_STEP_BYTES = 4 << 10
_SKIP_BYTES = 1 << 20


def blocks_to_end(
    stream: ByteStream, path: str, options: SourceOptions, place: int, find_last: LastBorder
) -> Iterator[Block]:
    """Blocks from byte `place`, where a record begins, to the end of a file."""
    go_to(stream, path, place)
    yield from _chain(stream, path, options, place, b"", find_last)


def blocks_of_range(
    file: SeekableBytes, options: SourceOptions, begin: int, end: int, separator: bytes, place: int | None
) -> Iterator[Block]:
    """Blocks of the records that begin in bytes [begin, end), from the one at `place` on.

    Raises:
        StorageError: the file is shorter than when it was listed.
        DatasetChanged: no record begins at `place`.
    """
    if file.size < end:
        raise StorageError(
            f"{file.path}: the file has {file.size:,} bytes, and had at least {end:,} when it was listed. "
            "Something cut it since; restore it, then make the stream again."
        )
    entry = _enter(file, options, begin, end, separator) if place is None else _return(file, place, separator)
    if entry is not None:
        offset, rest = entry
        yield from _chain(file, file.path, options, offset, rest, last_border_of(separator), end, separator)


def last_border_of(separator: bytes) -> LastBorder:
    """Where the last record ends when each ends with `separator`."""
    if len(separator) == 1:
        return lambda data: data.rfind(separator) + 1
    return lambda data: last_border(data, separator)


def go_to(stream: ByteStream, path: str, place: int) -> None:
    """Have a stream stand at byte `place`, by reading up to there where it cannot be entered elsewhere."""
    seek = getattr(stream, "seek", None)
    if seek is not None:
        seek(place)
        return
    while place:
        skipped = len(stream.read(min(place, _SKIP_BYTES)))
        if not skipped:
            raise DatasetChanged(f"{path}: the file ends before the place to go on from. It changed; start again.")
        place -= skipped


def _enter(
    file: SeekableBytes, options: SourceOptions, begin: int, end: int, separator: bytes
) -> tuple[int, bytes] | None:
    """Where the first record of a range begins and what was read behind that; None when none begins there."""
    if begin == 0:
        file.seek(0)
        return 0, b""
    if len(separator) > 1:  # a longer one may overlap itself: `_blocks` knows
        sizes = {"block_bytes": _SKIP_BYTES, "max_record_bytes": options.max_record_bytes}
        first = next(range_blocks(file, begin, end, separator, **sizes), None)
        return None if first is None else _return(file, first.offset, separator)
    place = begin - 1
    file.seek(place)
    while place < end - 1:
        data = file.read(min(options.batch_bytes, end - 1 - place))
        if not data:
            return None
        found = data.find(separator)
        if found >= 0:
            return place + found + 1, data[found + 1 :]
        place += len(data)
    return None


def _return(file: SeekableBytes, place: int, separator: bytes) -> tuple[int, bytes]:
    """Go to a place at which a record began when it was last read."""
    if place:
        file.seek(place - len(separator))
        if read_exactly(file, len(separator)) not in (separator, b"\r"):  # "\r" alone may end the header of a CSV file
            raise DatasetChanged(
                f"{file.path}: no record begins at byte {place:,} any more. The file was written again since the "
                "state was saved; start the epoch again, or restore the file."
            )
    else:
        file.seek(0)
    return place, b""


def _chain(
    stream: ByteStream,
    path: str,
    options: SourceOptions,
    offset: int,
    data: bytes,
    find_last: LastBorder,
    end: int | None = None,
    separator: bytes = b"",
) -> Iterator[Block]:
    """Blocks from `offset` on; `data` was read already, and `stream` stands behind it."""
    size = options.batch_bytes
    while end is None or offset < end:
        wanted = (size if end is None else min(size, end - offset)) - len(data)
        wanted = wanted if 2 * len(data) <= size else 0  # what entering a range left is a block
        more = read_exactly(stream, wanted)
        data = data + more if data else more
        is_last = len(more) < wanted
        if not is_last and end is not None and offset + len(data) >= end:
            is_last, data = True, _complete(stream, data, end - offset, separator)
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


def _complete(stream: ByteStream, data: bytes, minimum: int, separator: bytes) -> bytes:
    """`data` up to the first border at `minimum` or after it."""
    step = _STEP_BYTES
    while (border := first_border(data, separator, minimum)) is None:
        more = stream.read(step)
        if not more:
            return data
        data += more
        step = max(step, len(data) - minimum)
    return data[:border]

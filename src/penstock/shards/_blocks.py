"""Which blocks of a shard were checked, and checking them.

A block is checked once, before its first use, outside the gather. Where blocks are met in order, the
rest of a window of eight (4 MiB) is checked with it, by one call over all of it; where they are met at
random only the block itself is, so that a sample pulls half a megabyte from disk and not a shard. Once
windows follow each other, the next ones are checked ahead of the reader (`_look_ahead`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptionError, PenstockError
from penstock.filesystem import FileReader
from penstock.shards._checksums import BLOCK_BYTES, checksum, join_checksums, num_blocks
from penstock.shards._layout import CHECKSUMS, Layout, Tensor
from penstock.shards._look_ahead import LOOK_AHEAD, Stretch

WINDOW_BYTES = 4 << 20
_WINDOW = WINDOW_BYTES // BLOCK_BYTES
_FIRST_STRETCH, _LONGEST_STRETCH = 8 * _WINDOW, 32 * _WINDOW  # each is twice as long as the one before
_SHORTEST_RUN = 2  # windows in order, from which on a reader is taken to go on


class Checks:
    """What was checked of one shard. Outlives the open file, and is dropped when the file changed."""

    def __init__(self, identity: tuple[int, ...]) -> None:
        self.identity = identity
        self.flags: dict[str, NDArray[np.bool_]] = {}
        """For each tensor, which of its blocks were checked."""


class ChecksumBlocks:
    """The blocks of one open shard; `data_start` is where its tensors begin in the file."""

    def __init__(self, file: FileReader, data_start: int, layout: Layout, table_checksum: int) -> None:
        self.checks = Checks(file.identity)
        self._file = file
        self._data_start = data_start
        self._layout = layout
        self._table_checksum = table_checksum
        self._table: list[int] | None = None
        self._ahead: dict[str, Stretch] = {}
        self._through: dict[str, int] = {}
        """Tensors that were checked ahead to their end, and how long the next stretch would have been."""
        self._runs: dict[str, tuple[int, int]] = {}
        """For each tensor, the block that would go on with the last check, and how many checks did so before it."""

    def flags(self, tensor: Tensor) -> NDArray[np.bool_]:
        """Which blocks of a tensor were checked."""
        flags = self.checks.flags.get(tensor.name)
        if flags is None:
            flags = self.checks.flags.setdefault(tensor.name, np.zeros(num_blocks(tensor.num_bytes), np.bool_))
        return flags

    def read(self, tensor: Tensor, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes `begin` to `end` of a tensor."""
        start = self._data_start + tensor.begin
        return self._file.read(start + begin, start + end)

    def check_block(self, tensor: Tensor, block: int) -> None:
        """Check one block of a tensor, whatever was checked before."""
        begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, tensor.num_bytes)
        if checksum(self.read(tensor, begin, end)) != self._checksums()[tensor.first_block + block]:
            start = self._data_start + tensor.begin
            raise CorruptionError(
                f"{self._file.path}: block {block} of tensor {tensor.name!r} (bytes {start + begin:,} to "
                f"{start + end:,} of the file) does not match its checksum. Restore the file from a copy; "
                f"`penstock verify {self._file.path.parent}` lists all that is damaged."
            )

    def check_bytes(self, tensor: Tensor, begin: int, end: int) -> None:
        """Check the blocks that hold bytes `begin` to `end` of a tensor, as far as they were not yet.

        Raises:
            CorruptionError: a block differs from its checksum; the message names it.
        """
        flags = self.flags(tensor)
        first, last = begin // BLOCK_BYTES, num_blocks(end)
        if flags[first:last].all() or self._were_checked_ahead(tensor, first, last):
            return
        window = last
        if first == 0 or flags[first - 1]:
            window = max(last, min(first + _WINDOW, len(flags)))
        if window == last or not self._are_sound(tensor, first, window):
            window = last  # damage behind what is wanted waits for its own reader
            self._check(tensor, first, last)
        flags[first:window] = True
        if self._length_of_run(tensor, first, window) >= _SHORTEST_RUN:
            # The window between keeps the reader busy meanwhile.
            self.look_ahead(tensor, window + _WINDOW, _FIRST_STRETCH)

    def take_through(self) -> dict[str, int]:
        """Tensors whose reader will go on in the next shard, each told once, with the length of its next stretch."""
        through, self._through = self._through, {}
        return through

    def look_ahead(self, tensor: Tensor, first: int, length: int) -> None:
        """Begin to check about `length` blocks from `first` on in the background, if that can be done now."""
        earlier = self._ahead.get(tensor.name)
        end = num_blocks(tensor.num_bytes)
        last = end if first + length + length // 2 > end else first + length  # no short stretch at the end
        if first >= last:
            self._through[tensor.name] = length
            return
        if earlier is not None and (earlier.last > first or not earlier.job.done()):
            return
        trip = (first + last) // 2
        job = LOOK_AHEAD.start(lambda: self._check_ahead(tensor, first, last, trip))
        if job is not None:
            self._ahead[tensor.name] = Stretch(first, last, trip, length, job)

    def _check(self, tensor: Tensor, first: int, last: int) -> None:
        """Check blocks `first` to `last`, a window at a time."""
        flags, start = self.flags(tensor), self._data_start + tensor.begin
        for begin in range(first, last, _WINDOW):
            end = min(begin + _WINDOW, last)
            self._file.populate(start + begin * BLOCK_BYTES, start + min(end * BLOCK_BYTES, tensor.num_bytes))
            if flags[begin:end].any() or not self._match(tensor, begin, end):
                for block in (begin + np.flatnonzero(~flags[begin:end])).tolist():
                    self.check_block(tensor, block)

    def _match(self, tensor: Tensor, first: int, last: int) -> bool:
        """Whether whole blocks match their checksums, by one call that holds no GIL; False when one is not whole."""
        if last * BLOCK_BYTES > tensor.num_bytes:
            return False
        expected = self._checksums()[tensor.first_block + first : tensor.first_block + last]
        found = checksum(self.read(tensor, first * BLOCK_BYTES, last * BLOCK_BYTES))
        return found == join_checksums(expected)

    def _length_of_run(self, tensor: Tensor, first: int, last: int) -> int:
        """How many checks, the one of blocks `first` to `last` included, began where the one before ended."""
        expected, length = self._runs.get(tensor.name, (0, 0))
        length = length + 1 if first == expected else 1
        self._runs[tensor.name] = (last, length)
        return length

    def _were_checked_ahead(self, tensor: Tensor, first: int, last: int) -> bool:
        """Whether blocks `first` to `last` were checked ahead; once all of a stretch were, the next one is begun."""
        stretch = self._ahead.get(tensor.name)
        if stretch is None or not stretch.overlaps(first, last):
            return False
        is_mine = stretch.is_over_by_now() and self._ahead.pop(tensor.name, None) is stretch
        if is_mine and stretch.job.result():
            self.flags(tensor)[stretch.trip] = True
            self.look_ahead(tensor, stretch.last, min(2 * stretch.length, _LONGEST_STRETCH))
        return bool(self.flags(tensor)[first:last].all())

    def _check_ahead(self, tensor: Tensor, first: int, last: int, trip: int) -> bool:
        """Check and flag blocks `first` to `last`, all but `trip`: NOTE [nothing is lost ahead]."""
        flags = self.flags(tensor)
        for begin in range(first, last, _WINDOW):
            end = min(begin + _WINDOW, last)
            if LOOK_AHEAD.is_stopping or not self._are_sound(tensor, begin, end):
                return False
            flags[begin : min(trip, end)] = True
            flags[max(begin, trip + 1) : end] = True
        return True

    def _are_sound(self, tensor: Tensor, first: int, last: int) -> bool:
        try:
            self._check(tensor, first, last)
        except (PenstockError, OSError, MemoryError):
            return False
        return True

    def _checksums(self) -> list[int]:
        if self._table is None:
            tensor = self._layout.tensors[CHECKSUMS]
            start = self._data_start + tensor.begin
            self._file.populate(start, start + tensor.num_bytes)
            raw = self.read(tensor, 0, tensor.num_bytes)
            if checksum(raw) != self._table_checksum:
                raise CorruptionError(
                    f"{self._file.path}: tensor {CHECKSUMS!r}, the table of checksums, is damaged. Restore the file."
                )
            self._table = raw.view("<u4").tolist()
        return self._table

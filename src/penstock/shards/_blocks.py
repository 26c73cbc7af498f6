"""Check the blocks of a shard, and remember which were checked.

    reader needs a block -> already checked? -> go on
                          | no
                          v
                         check it, and the rest of its window if blocks are read in order
                          | the two windows before it were checked, too
                          v
                         a second thread checks the next blocks meanwhile (`ChecksumAhead`)

A block is checked once, before its first use, outside the gather. If blocks are read in order, a window of eight
(4 MiB) is checked by one call; if they are read at random, only the block itself is, so that a sample pulls half a
megabyte from disk and not a whole shard.

**Ahead of the reader.** Checking waits for memory, copying for its own writes. The bare copy and the bare checksums of
1 GB in two threads on two idle cores took 1.1 times as long as the copy alone; `benchmarks/bench_read.py` prints how
much of that a reader gains. It saves no CPU time: without an idle core nothing is gained.

At most one job runs in the whole process: a second reader checks for itself, which scales with the readers,
while a queue would not. A process with one CPU never starts the thread.

# NOTE [damage found ahead]
#   A window that is damaged or cannot be read simply stays unchecked. The reader that gets to it checks it again and
#   raises there, so the error names file and block, and comes only with their first use. A reader that gets there
#   before the thread checks for itself. The last block of a tensor is always left to a reader, which then records
#   that all of the tensor was checked.

# NOTE [fork and exit]
#   The thread takes no lock, is ended before a fork and forgotten in the child, and is joined by the
#   interpreter at exit, after which `start` does nothing. Its job refers to the shard, so a map that is dropped
#   meanwhile stays until the job is done. Like a reader, it checks the size of the file and faults the pages in
#   window by window; a file truncated at that very moment is as bad for it as for a reader.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptionError, PenstockError
from penstock.filesystem import FileReader
from penstock.shards._layout import BLOCK_BYTES, CHECKSUMS, Layout, Tensor, checksum, join_checksums, num_blocks

WINDOW_BYTES = 4 << 20
_WINDOW = WINDOW_BYTES // BLOCK_BYTES
_AHEAD = 16 * _WINDOW  # a reader checks one window in 17; if it stops, at most 64 MiB of checking were wasted


class ChecksumAhead:
    """One background thread for the whole process, started by its first job."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the thread (in a forked child)."""
        self._lock = threading.Lock()
        self.is_stopping = False
        """Jobs check this now and then, and end when it is set."""
        self._executor: ThreadPoolExecutor | None = None
        self._job: Future[object] | None = None

    def start(self, job: Callable[[], object]) -> bool:
        """Run `job` in the background; False if the thread is busy, has no CPU of its own, or cannot be started."""
        with self._lock:
            if self._job is not None and not self._job.done():
                return False
            if self._executor is None:
                if len(os.sched_getaffinity(0)) < 2:
                    return False
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="penstock-look-ahead")
            try:
                self._job = self._executor.submit(job)
            except RuntimeError:  # no more threads, or the interpreter is shutting down
                return False
            return True

    def stop(self) -> None:
        """End the thread as soon as its job allows; the next `start` makes another."""
        with self._lock:
            executor, self._executor = self._executor, None
            if executor is not None:
                self.is_stopping = True
                executor.shutdown()
                self.is_stopping = False


CHECKSUM_AHEAD = ChecksumAhead()

os.register_at_fork(before=CHECKSUM_AHEAD.stop, after_in_child=CHECKSUM_AHEAD.reset)


class Checks:
    """Which blocks of one shard were checked. Outlives the open file, and is dropped if the file changes."""

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
        """Check one block of a tensor, even if it was checked before."""
        begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, tensor.num_bytes)
        if checksum(self.read(tensor, begin, end)) != self.checksums()[tensor.first_block + block]:
            start = self._data_start + tensor.begin
            raise CorruptionError(
                f"{self._file.path}: block {block} of tensor {tensor.name!r} (bytes {start + begin:,} to "
                f"{start + end:,} of the file) does not match its checksum. Restore the file from a copy; "
                f"`penstock verify {self._file.path.parent}` lists all damage."
            )

    def check_bytes(self, tensor: Tensor, begin: int, end: int) -> None:
        """Check the blocks that hold bytes `begin` to `end` of a tensor, unless that was done before.

        Raises:
            CorruptionError: a block differs from its checksum; the message names it.
        """
        flags = self.flags(tensor)
        first, last = begin // BLOCK_BYTES, num_blocks(end)
        if flags[first:last].all():
            return
        window = last
        if first == 0 or flags[first - 1]:
            window = max(last, min(first + _WINDOW, len(flags)))
        if window == last or not self._are_valid(tensor, first, window):
            window = last  # damage beyond the requested bytes waits for its own reader
            self._check(tensor, first, last)
        flags[first:window] = True
        if first >= 2 * _WINDOW and flags[first - 2 * _WINDOW : first].all():
            self._look_ahead(tensor, window)

    def _look_ahead(self, tensor: Tensor, first: int) -> None:
        last = min(first + _AHEAD, num_blocks(tensor.num_bytes) - 1)
        if first < last:
            CHECKSUM_AHEAD.start(lambda: self._check_ahead(tensor, first, last))

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
        """Whether whole blocks match their checksums, in one call without the GIL; False if the last is not whole."""
        if last * BLOCK_BYTES > tensor.num_bytes:
            return False
        expected = self.checksums()[tensor.first_block + first : tensor.first_block + last]
        found = checksum(self.read(tensor, first * BLOCK_BYTES, last * BLOCK_BYTES))
        return found == join_checksums(expected)

    def _check_ahead(self, tensor: Tensor, first: int, last: int) -> None:
        """Check and flag blocks `first` to `last`, up to the first damage: NOTE [damage found ahead]."""
        flags = self.flags(tensor)
        for begin in range(first, last, _WINDOW):
            end = min(begin + _WINDOW, last)
            if CHECKSUM_AHEAD.is_stopping or not self._are_valid(tensor, begin, end):
                return
            flags[begin:end] = True

    def _are_valid(self, tensor: Tensor, first: int, last: int) -> bool:
        try:
            self._check(tensor, first, last)
        except (PenstockError, OSError, MemoryError):
            return False
        return True

    def checksums(self) -> list[int]:
        """The checksum of each block, tensor by tensor; `CorruptionError` if they are damaged themselves."""
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

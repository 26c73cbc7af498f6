"""New files written past the page cache, by a thread, from a few aligned blocks.

Nobody reads a finished shard soon, so a copy of it in the page cache is work for nothing, and pushes out what is read:
writing 1 GB took 2 to 3 s of processor time through the cache and 0.15 s past it, and fsync finds nothing left to do.
The kernel takes such writes from aligned memory only, so data is copied into blocks; while a thread writes them the
caller goes on, at most `NUM_BLOCKS` ahead. The end of a file that fills no page, and file systems without direct
writes, take the ordinary way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from penstock.filesystem import storage_errors

BLOCK_BYTES = 4 << 20
NUM_BLOCKS = 8
_PAGE_BYTES = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # only where the system has it
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Blocks:
    """Aligned memory that is used again and again; taken when there is a first file."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._num_made = 0

    def take(self) -> mmap.mmap:
        """A block that nobody uses; waits until there is one."""
        if self._free.empty() and self._num_made < NUM_BLOCKS:
            self._num_made += 1
            return mmap.mmap(-1, BLOCK_BYTES)
        return self._free.get()

    def give(self, block: mmap.mmap) -> None:
        """Give a block back."""
        self._free.put(block)


class DirectFile:
    """One new file: `write` what belongs in it, then `sync`, which a second thread may do.

    Raises:
        StorageError: the file system refused: at once when the file is made, from `sync` when it is written.
    """

    def __init__(self, path: Path, num_bytes: int, blocks: Blocks) -> None:
        self._path = path
        self._needed = num_bytes
        self._blocks = blocks
        self._block: mmap.mmap | None = None
        self._filled = 0
        self._written = 0
        self._is_broken = False
        self._writes: list[Future[None]] = []
        self._descriptor = self._open()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-writer")

    def write(self, data: memoryview) -> None:
        """Add bytes to the file; they are copied, and need not stay as they are."""
        while data:
            if self._block is None:
                self._block = self._blocks.take()
            count = min(len(data), BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if self._filled == BLOCK_BYTES:
                self._pass_on()

    def end(self) -> None:
        """There is no more to write."""
        if self._block is not None:
            self._pass_on()
        self._thread.shutdown(wait=False)

    def sync(self) -> None:
        """Wait until all is written, make it durable, and close the file."""
        try:
            for write in self._writes:
                write.result()
            os.fsync(self._descriptor)
        except OSError as error:
            with storage_errors(self._path, doing=f"wrote {self._written:,} of {self._needed:,} bytes"):
                raise error
        finally:
            self.close()

    def close(self) -> None:
        """Close the file once nobody writes to it; a second time does nothing."""
        if self._descriptor < 0:
            return
        self._thread.shutdown()
        if self._block is not None:
            self._blocks.give(self._block)
        os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> int:
        with storage_errors(self._path, doing="created"):
            try:
                return os.open(self._path, _FLAGS | _DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self._path.unlink(missing_ok=True)  # some file systems make the file and then refuse
            return os.open(self._path, _FLAGS, 0o644)

    def _pass_on(self) -> None:
        block, filled = self._block, self._filled
        assert block is not None
        self._block, self._filled = None, 0
        self._writes.append(self._thread.submit(self._write_block, block, filled))

    def _write_block(self, block: mmap.mmap, filled: int) -> None:
        whole = filled - filled % _PAGE_BYTES
        try:
            if not self._is_broken:
                self._write_all(memoryview(block)[:whole])
                if whole < filled:
                    self._go_through_cache()
                    self._write_all(memoryview(block)[whole:filled])
        except OSError:
            self._is_broken = True
            raise
        finally:
            self._blocks.give(block)

    def _write_all(self, data: memoryview) -> None:
        while data:
            try:
                count = os.write(self._descriptor, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._go_through_cache():
                    raise
                continue
            self._written, data = self._written + count, data[count:]

    def _go_through_cache(self) -> bool:
        """Write the ordinary way from here on; False when that is so already."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return bool(flags & _DIRECT)

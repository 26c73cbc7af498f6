"""Writing so that a crash at any instant leaves the old file or the new one, never a part.

    create_file -> rename -> sync_directory, each with the file or the directory synced before the next

A failed fsync is final: the kernel may have dropped the dirty pages, so the file is written again
from the start or not at all, never synced again.

Shards are written past the page cache, by a DirectFile: in a thread, from a few aligned buffers.

    write() copies -> buffer fills -> thread writes it with O_DIRECT -> buffer is free again
    end() -> sync() waits for the thread, then fsync, then close

A finished shard is not read again soon, so caching it is wasted work and evicts pages that are in use: writing 1 GB
took 2 to 3 s of CPU time through the cache and 0.15 s past it, and leaves fsync nothing to do. The kernel takes such
writes from aligned memory only, so data is copied into buffers; the caller goes on while a thread writes them, at most
`NUM_BUFFERS` ahead. A tail shorter than a page, and file systems without direct writes, go through the cache.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from penstock.errors import StorageError

# One write(2) transfers at most 2 GiB - 4 KiB; smaller pieces also let a signal in between.
_WRITE_BYTES = 64 << 20
# The umask says who else may read and write: a group that shares a folder sets its own.
NEW_FILE_MODE = 0o666
LOCKED = "locked"


def create_file(path: Path, chunks: Iterable[memoryview | bytes], *, within: int | None = None) -> int:
    """Write `chunks` to the new file `path`, sync it, and return its size.

    With `within`, a descriptor of a folder, the file is made in that folder, wherever `path` leads.

    Raises:
        StorageError: the file system refused, and nothing new is left; or `path` existed, and was left alone.
    """
    pieces = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    needed = sum(len(piece) for piece in pieces)
    written = 0
    name = name_within(path, within)
    with storage_errors(path, doing="created"):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE_MODE, dir_fd=within)
    try:
        try:
            for piece in pieces:
                while piece:
                    count = os.write(descriptor, piece[:_WRITE_BYTES])
                    written, piece = written + count, piece[count:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=within)
        raise explain_os_error(error, path, doing=f"wrote {written:,} of {needed:,} bytes") from error
    return written


def rename(working: Path, final: Path) -> None:
    """Give a synced file its final name; `sync_directory` makes that durable."""
    with storage_errors(final, doing="renamed into place"):
        os.replace(working, final)


def put_in_place(path: Path, text: str) -> None:
    """Replace a file that people read, at once: nobody reads half of it.

    In a shared folder nobody else can have laid a link or a pipe for it, or keep the file open. A user's own links,
    pipes and devices (`/dev/stdout`) are written to.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if status.st_uid in (0, os.geteuid()) and not stat.S_ISREG(status.st_mode):
            path.write_text(text, encoding="utf-8")
            return
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = os.fspath(path)
        beside.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with storage_errors(path, doing="synced"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_descriptor(descriptor)
        finally:
            os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Make the names in an open directory durable."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for directories; their renames are durable by themselves.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def name_within(path: Path, within: int | None) -> str:
    """How to refer to the file at `path`: by its name alone if a descriptor says where it is."""
    return os.fspath(path) if within is None else path.name


def make_directory(path: Path) -> bool:
    """Make a directory, durably, unless there is one; return whether it was made."""
    with storage_errors(path, doing="creating the folder"):
        try:
            os.mkdir(path)
        except FileExistsError:
            if path.is_dir():
                return False
            raise
    try:
        sync_directory(path.parent)
    except StorageError:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise
    return True


def remove_if_present(path: Path) -> None:
    """Unlink `path`, if it exists."""
    with storage_errors(path, doing="removed"), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it."""
    with storage_errors(path, doing="removed"):
        shutil.rmtree(path)


@contextlib.contextmanager
def storage_errors(path: Path, *, doing: str) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `StorageError` that names `path`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise explain_os_error(error, path, doing=doing) from error


def explain_os_error(error: OSError, path: Path, *, doing: str) -> StorageError:
    """The error to raise instead of `error`: path, progress, free space, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"{_free_bytes(path):,} bytes are free there; make room or write elsewhere, then run again."
    elif error.errno == errno.EFBIG:
        advice = "A limit on file size is set (`ulimit -f`); raise it or use a smaller shard_bytes."
    elif error.errno in (errno.ENOLCK, errno.EOPNOTSUPP) and doing == LOCKED:
        advice = (
            "This file system does not support locks, or has none left. On NFS, start the lock service, or mount with "
            "`local_lock=flock` if only one machine writes; or write to a local disk and copy the folder."
        )
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "Close some, or raise the limit (`ulimit -n`)."
    elif error.errno == errno.ESTALE:
        advice = "The server replaced or removed the file; open the dataset again, or mount the share again."
    else:
        advice = "Check the path and the disk, then run again."
    return StorageError(error.errno, f"{path}: {reason} ({doing}). {advice}")


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return 0


BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 8
_PAGE_BYTES = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # only where the system has it
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class AlignedBuffers:
    """Aligned memory, allocated when first needed and reused from file to file."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._num_made = 0

    def take(self) -> mmap.mmap:
        """A free buffer; waits until there is one."""
        if self._free.empty() and self._num_made < NUM_BUFFERS:
            self._num_made += 1
            return mmap.mmap(-1, BUFFER_BYTES)
        return self._free.get()

    def give(self, buffer: mmap.mmap) -> None:
        """Give a buffer back."""
        self._free.put(buffer)


class DirectFile:
    """One new file: `write` its bytes, `end`, then `sync`, from any thread.

    With `within`, a descriptor of a folder, the file is made in that folder, wherever `path` leads.

    Raises:
        StorageError: the file system refused to create the file (at once) or to write it (from `sync`).
    """

    def __init__(self, path: Path, num_bytes: int, buffers: AlignedBuffers, *, within: int | None = None) -> None:
        self._path = path
        self._needed = num_bytes
        self._buffers = buffers
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._written = 0
        self._is_broken = False
        self._writes: list[Future[None]] = []
        self._descriptor = self._open(name_within(path, within), within)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-writer")

    def write(self, data: memoryview) -> None:
        """Add bytes to the file. They are copied, so the caller may reuse the memory at once."""
        while data:
            if self._buffer is None:
                self._buffer = self._buffers.take()
            count = min(len(data), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if self._filled == BUFFER_BYTES:
                self._pass_on()

    def end(self) -> None:
        """Hand the last buffer to the thread; nothing more may be written."""
        if self._buffer is not None:
            self._pass_on()
        self._thread.shutdown(wait=False)

    def sync(self) -> None:
        """Wait until everything is written, make it durable, and close the file."""
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
        """Wait for the thread and close the file; does nothing the second time."""
        if self._descriptor < 0:
            return
        self._thread.shutdown()
        if self._buffer is not None:
            self._buffers.give(self._buffer)
        descriptor, self._descriptor = self._descriptor, -1
        with storage_errors(self._path, doing="closed"):
            os.close(descriptor)

    def _open(self, name: str, within: int | None) -> int:
        with storage_errors(self._path, doing="created"):
            try:
                return os.open(name, _FLAGS | _DIRECT, NEW_FILE_MODE, dir_fd=within)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            with contextlib.suppress(FileNotFoundError):  # some file systems make the file and then refuse
                os.unlink(name, dir_fd=within)
            return os.open(name, _FLAGS, NEW_FILE_MODE, dir_fd=within)

    def _pass_on(self) -> None:
        buffer, filled = self._buffer, self._filled
        assert buffer is not None
        self._buffer, self._filled = None, 0
        self._writes.append(self._thread.submit(self._write_buffer, buffer, filled))

    def _write_buffer(self, buffer: mmap.mmap, filled: int) -> None:
        whole = filled - filled % _PAGE_BYTES
        try:
            if not self._is_broken:
                self._write_all(memoryview(buffer)[:whole])
                if whole < filled:
                    self._go_through_cache()
                    self._write_all(memoryview(buffer)[whole:filled])
        except OSError:
            self._is_broken = True
            raise
        finally:
            self._buffers.give(buffer)

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
        """Write through the page cache from here on; False if that was already the case."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return bool(flags & _DIRECT)

"""One read-only file, by memory map or by positioned reads.

Both refuse links, pipes and devices, and both notice a file that shrank: the map because its size is checked before it
is touched and its pages are faulted in by `MADV_POPULATE_READ`, which reports a missing page where a plain access would
be killed by SIGBUS; the reads because a short read is an error. What `pread` returns is a private copy, which cannot
change under the reader.
"""

import ctypes
import errno
import mmap
import os
import stat
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, StorageError
from penstock.filesystem._durable import explain_os_error, name_within

_LARGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; older kernels answer EINVAL

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


class FileReader(Protocol):
    """Bytes of one file, whose size was fixed when it was opened."""

    path: Path
    size: int
    identity: tuple[int, ...]
    """Changes when the file does: device, inode, modification time, size."""

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes `begin` to `end`: read-only, either a view or a copy."""
        ...

    def check_size(self) -> None:
        """Raise `StorageError` if the file's size has changed."""
        ...

    def populate(self, begin: int, end: int) -> None:
        """Bring these bytes into memory, or raise `StorageError`."""
        ...

    def will_need(self, begin: int, end: int) -> None:
        """Tell the kernel that these bytes are needed soon."""
        ...

    def dont_need(self, begin: int, end: int) -> None:
        """Tell the kernel that this process no longer needs these bytes."""
        ...


def _drop(descriptor: int, begin: int, end: int) -> None:
    """Drop bytes from the page cache, with whatever shares a large page with them and is mapped by nobody."""
    first, last = begin - begin % _LARGE_PAGE_BYTES, end + -end % _LARGE_PAGE_BYTES
    os.posix_fadvise(descriptor, first, last - first, os.POSIX_FADV_DONTNEED)


def open_regular(path: Path, *, within: int | None = None) -> int:
    """Descriptor of a regular file; with `within`, a descriptor of a folder, it is looked up there by name.

    Raises:
        FileNotFoundError, NotADirectoryError: `path` does not exist.
        FormatError: it is a link, pipe, socket, device or directory.
        StorageError: the file system refused.
    """
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name_within(path, within), flags, dir_fd=within)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(
                f"{path} is a symbolic link; datasets consist of regular files (`cp -rL` copies a folder that way)."
            ) from error
        if error.errno == errno.ENXIO:  # a socket
            raise FormatError(f"{path} is not a regular file; the files of a dataset must be.") from error
        raise explain_os_error(error, path, doing="opened") from error
    if not stat.S_ISREG(_status(descriptor, path).st_mode):
        os.close(descriptor)
        raise FormatError(f"{path} is not a regular file; the files of a dataset must be.")
    return descriptor


def read_small(path: Path, max_bytes: int) -> bytes:
    """All of a small file that the user named. Links are followed; pipes and devices, which may never end, are refused.

    Raises:
        OSError: there is none, or it cannot be read.
        FormatError: it is not a regular file, or longer than `max_bytes`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file.")
        if status.st_size > max_bytes:
            raise FormatError(f"{path} has {status.st_size:,} bytes; {max_bytes:,} is the limit for such a file.")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)  # Python takes as much memory as it is told to read
    finally:
        os.close(descriptor)


def _status(descriptor: int, path: Path) -> os.stat_result:
    try:
        return os.fstat(descriptor)
    except OSError as error:
        raise explain_os_error(error, path, doing="asked for its size") from error


class _OpenFile:
    """Owns the descriptor, which is closed when the last reference to the object is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = open_regular(path)
        status = _status(self.descriptor, path)
        self.size = status.st_size
        self.identity: tuple[int, ...] = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def check_size(self) -> None:
        size = _status(self.descriptor, self.path).st_size
        if size != self.size:
            raise self._shrunk(size)

    def _shrunk(self, size: int) -> StorageError:
        return StorageError(
            errno.EIO,
            f"{self.path}: the file has {size:,} bytes; it had {self.size:,} when it was opened. "
            "Something changed it in place; restore it, then open the dataset again.",
        )


class _Map:
    """Read-only pages of a file, unmapped when the last array over them is gone.

    Not Python's `mmap`, which duplicates the descriptor: there may be thousands of shards, and the usual
    limit is 1,024.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        address = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._pages = (address, size)
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if (pages := getattr(self, "_pages", None)) is not None:
            _munmap(*pages)


class MappedFile(_OpenFile):
    """A file as memory, which begins at `address` and stays valid as long as this object lives."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bytes: NDArray[np.uint8] = np.asarray(self._map()) if self.size else np.empty(0, np.uint8)
        self.address: int = self.bytes.ctypes.data

    def _map(self) -> _Map:
        try:
            return _Map(self.descriptor, self.size)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"{self.path}: mapping failed: {error.strerror}. Raise the limit (`ulimit -v` for memory), or open the "
                "dataset with io='pread'.",
            ) from error

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        return self.bytes[begin:end]

    def populate(self, begin: int, end: int) -> None:
        self.check_size()
        try:
            self._advise(_MADV_POPULATE_READ, begin, end)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return
            self.check_size()
            raise StorageError(
                error.errno,
                f"{self.path}: bytes {begin:,} to {end:,} cannot be read: {error.strerror}. Check the disk; `penstock "
                "verify` lists what must be restored.",
            ) from error

    def will_need(self, begin: int, end: int) -> None:
        self._advise(mmap.MADV_WILLNEED, begin, end)

    def dont_need(self, begin: int, end: int) -> None:
        self._advise(mmap.MADV_DONTNEED, begin, end)  # the kernel keeps pages that anybody has mapped
        _drop(self.descriptor, begin, end)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        first, last = begin - begin % mmap.PAGESIZE, min(end, self.size)
        # Not `mmap.madvise`: it holds the GIL, and so stops all threads, while the disk reads.
        if begin < last and _madvise(self.address + first, last - first, advice):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(self.path))


class PositionedFile(_OpenFile):
    """A file by `pread`: slower than a map, but every failure is an error that can be caught."""

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        buffer = np.empty(end - begin, np.uint8)
        self.read_into(begin, buffer)
        buffer.flags.writeable = False
        return buffer

    def read_into(self, begin: int, buffer: NDArray[np.uint8]) -> None:
        """Fill `buffer` with the bytes that start at `begin`."""
        view = buffer.data if buffer.size else memoryview(b"")
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise explain_os_error(error, self.path, doing="read") from error
            if count == 0:
                raise self._shrunk(_status(self.descriptor, self.path).st_size)
            done += count

    def populate(self, begin: int, end: int) -> None:
        self.check_size()

    def will_need(self, begin: int, end: int) -> None:
        os.posix_fadvise(self.descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def dont_need(self, begin: int, end: int) -> None:
        _drop(self.descriptor, begin, end)

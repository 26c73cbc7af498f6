"""Open one file, wherever it is: for reads at any offset, or as a decompressed stream.

Also what every reader of bytes needs: reading exactly so many, skipping ahead, and dropping a byte-order mark.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Protocol, cast

from penstock.errors import DatasetChanged, FormatError, StorageError
from penstock.sources._arrow import arrow, check_memory
from penstock.sources._options import SourceOptions, compression_of
from penstock.sources._remote import ForwardFile, RangeFile, RemoteStore, is_remote

_SPOOL_BYTES = 4 << 20
_SKIP_BYTES = 1 << 20
_MOST_BYTES_AT_ONCE = 16 << 20  # a read allocates a buffer of the requested size, however little arrives
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class ByteStream(Protocol):
    """Bytes in order."""

    def read(self, num_bytes: int, /) -> bytes:
        """At most `num_bytes`, and none only at the end."""
        ...


class SeekableBytes(ByteStream, Protocol):
    """Bytes in order, from any offset."""

    path: str
    size: int

    def seek(self, offset: int, /) -> int:
        """Go on from byte `offset`."""
        ...


def as_seekable(stream: ByteStream) -> SeekableBytes | None:
    """The stream, if it can seek."""
    return cast(SeekableBytes, stream) if hasattr(stream, "seek") else None


def read_exactly(stream: ByteStream, num_bytes: int) -> bytes:
    """`num_bytes` bytes, or what is left."""
    pieces = []
    while num_bytes > 0 and (piece := stream.read(min(num_bytes, _MOST_BYTES_AT_ONCE))):
        pieces.append(piece)
        num_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def skip_to(stream: ByteStream, path: str, place: int, here: int = 0) -> None:
    """Move a stream from byte `here` to `place`, by reading up to there if it cannot seek."""
    file = as_seekable(stream)
    if file is not None:
        file.seek(place)
        return
    num_left = place - here
    while num_left:
        skipped = len(stream.read(min(num_left, _SKIP_BYTES)))
        if not skipped:
            raise DatasetChanged(f"{path}: the file ends before the place to resume at. It changed; start again.")
        num_left -= skipped


def without_mark(data: bytes, path: str) -> bytes:
    """The start of a file without its byte-order mark.

    Raises:
        FormatError: the mark says that the file is UTF-16.
    """
    if data.startswith(_UTF16_MARKS):
        raise FormatError(f"{path}: the file is UTF-16. Convert it first: iconv -f utf-16 -t utf-8.")
    return data.removeprefix(_UTF8_MARK)


class LocalFile:
    """A file on this machine, whose disk failures are raised as `StorageError`."""

    def __init__(self, path: str) -> None:
        self.path = path
        with _disk_errors(path):
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, num_bytes: int = -1, /) -> bytes:
        most = self.size + 1  # Python allocates what is requested; one byte more reveals a file that has grown
        with _disk_errors(self.path):
            return self._file.read(min(num_bytes, most) if num_bytes >= 0 else num_bytes) or b""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def close(self) -> None:
        """Close the descriptor."""
        self._file.close()


@contextlib.contextmanager
def open_anywhere(path: str, options: SourceOptions) -> Iterator[SeekableBytes]:
    """The stored bytes of a file, from any offset."""
    with contextlib.closing(_open(path, options)) as file:
        if isinstance(file, ForwardFile):
            with contextlib.closing(_spool(file)) as copy:
                yield copy
        else:
            yield file


@contextlib.contextmanager
def open_stream(path: str, options: SourceOptions) -> Iterator[ByteStream]:
    """The bytes of a file in order, decompressed if its name says that it is compressed.

    Raises:
        FormatError: while reading, if the compressed data is truncated or damaged.
    """
    with contextlib.closing(_open(path, options)) as file:
        compression = compression_of(path)
        yield file if compression is None else _Decompressed(path, file, compression)


def read_file(path: str, num_bytes: int) -> bytes:
    """The first bytes of a file or URL, all of them if it has no more."""
    with open_stream(path, SourceOptions()) as stream:
        return read_exactly(stream, num_bytes)


def arrow_file(file: Any) -> Any:
    """One of our files as one of pyarrow's."""
    if isinstance(file, LocalFile):
        with _disk_errors(file.path):
            return arrow().OSFile(file.path, "rb")
    return arrow().PythonFile(file, "r")


def _open(path: str, options: SourceOptions) -> LocalFile | RangeFile | ForwardFile:
    if is_remote(path):
        return RemoteStore(path, options).open()
    return LocalFile(path)


class _Decompressed:
    """The contents of a gzip, zstd or bz2 file; consecutive members are read as one."""

    def __init__(self, path: str, file: Any, compression: str) -> None:
        self._path = path
        self._compression = compression
        if file.size == 0:
            raise FormatError(f"{path}: the file is empty, not {compression} data. Fetch or write it again.")
        self._stream = arrow().CompressedInputStream(arrow_file(file), compression)

    def read(self, num_bytes: int, /) -> bytes:
        try:
            data: bytes = self._stream.read(num_bytes)
        except StorageError:
            raise
        except (OSError, ValueError, MemoryError) as error:
            check_memory(error, self._path)
            raise FormatError(
                f"{self._path}: the {self._compression} data is truncated or damaged ({error}). "
                "Fetch or write the file again."
            ) from error
        return data


class _Spooled:
    """An unnamed temporary copy of a file that cannot seek."""

    closed = False

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.read = self._file.read
        self.seek = self._file.seek
        self.tell = self._file.tell
        self.readable = self.seekable = lambda: True

    def add(self, data: bytes) -> None:
        """Append to the copy."""
        self.size += self._file.write(data)

    def close(self) -> None:
        """Free the disk space."""
        self._file.close()
        self.closed = True


def _spool(source: ForwardFile) -> _Spooled:
    copy = _Spooled(source.path)
    while data := source.read(_SPOOL_BYTES):
        copy.add(data)
    copy.seek(0)
    return copy


@contextlib.contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(
            error.errno, f"{path}: the file was removed since it was listed. List the sources again."
        ) from error
    except OSError as error:
        raise StorageError(
            error.errno, f"{path}: reading failed: {error.strerror}. Check the path and the disk, then run again."
        ) from error

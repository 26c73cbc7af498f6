"""WebDataset tars, streamed: consecutive members that share a key are one sample.

Nothing is extracted, so no name in an archive can reach the disk; names that would escape a folder if someone used
them as paths later are refused anyway, and so are links, devices and sparse members. The archive must end with its end
mark: a writer that was killed leaves a tar that ends between two members, which every tar reader takes for a shorter
one (12 of 12 WebDataset outputs were read that way).

What describes a member (long names, pax records, maps of sparse files, any number of them before one member) may take
1 MB: `tarfile` reads all of it into memory, whatever its size, before the caller sees the member.

With `typed_members`, members become values, and their names column names:

    .cls .index .id     a decimal number              an integer
    .npy                numpy's format, no objects    an array
    all others          bytes, as they are: decoding an image or JSON is a transform's job

Names lose their dots (`seg.png` is the column `seg_png`), and the key of a sample is the column `key`.
"""

import io
import posixpath
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from penstock.errors import FormatError
from penstock.shards import NUMBER_MEMBERS
from penstock.sources._files import ByteStream, open_stream
from penstock.sources._model import Records, RowError, Split
from penstock.sources._options import SourceOptions

_DRAIN_BYTES = 1 << 20
_MOST_HEADER_BYTES = 1 << 20
_INTEGER = re.compile(rb"\s*[+-]?[0-9]{1,20}\s*")
"""What may fit 64 bits; Python would read a number of any length."""


def read_webdataset(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Samples of a tar archive, about `batch_bytes` at a time."""
    batch = _Batch(split.path, 0, options)
    with open_stream(split.path, options) as stream:
        for sample in _samples(stream, split.path, options):
            batch.add(sample)
            if batch.num_bytes >= options.batch_bytes:
                yield batch.records()
                batch = _Batch(split.path, batch.next_row, options)
    if batch.next_row > batch.first_row:
        yield batch.records()


@dataclass(slots=True)
class _Sample:
    """Members with one key, and what is wrong with them."""

    key: str
    values: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    reason: str = ""
    problem: str = ""

    def blame(self, reason: str, problem: str) -> None:
        """Remember the first thing that is wrong."""
        if not self.reason:
            self.reason, self.problem = reason, problem


class _Batch:
    """Samples that become one `Records`."""

    def __init__(self, path: str, first_row: int, options: SourceOptions) -> None:
        self.first_row = self.next_row = first_row
        self.num_bytes = 0
        self._path = path
        self._names = options.columns
        self._is_typed = options.typed_members
        self._samples: list[_Sample] = []
        self._errors: list[RowError] = []

    def add(self, sample: _Sample) -> None:
        """Add the next sample, good or bad."""
        if sample.reason:
            message = f"sample {sample.key!r} (row {self.next_row}) {sample.problem}."
            self._errors.append(RowError(self._path, self.next_row, sample.reason, message))
        else:
            self._samples.append(sample)
        self.num_bytes += sample.num_bytes
        self.next_row += 1

    def records(self) -> Records:
        """The batch, with None where a sample lacks a member."""
        key = "key" if self._is_typed else "__key__"
        names = self._names or (key, *dict.fromkeys(name for each in self._samples for name in each.values))
        columns: dict[str, Any] = {name: [each.values.get(name) for each in self._samples] for name in names}
        if key in names:
            columns[key] = [each.key for each in self._samples]
        return Records(columns, self.first_row, len(self._samples), tuple(self._errors), self.num_bytes)


def _samples(stream: ByteStream, path: str, options: SourceOptions) -> Iterator[_Sample]:
    """Runs of members with the same key, from an archive that must be complete."""
    metered = _Metered(stream)
    header = type("_Header", (_StrictHeader,), {"metered": metered})
    try:
        with tarfile.open(fileobj=metered, mode="r|", tarinfo=header) as archive:  # type: ignore[call-overload]
            yield from _group_members(archive, options)
            _check_nothing_follows(archive)
    except (tarfile.TarError, EOFError) as error:
        raise FormatError(f"{path}: the archive is truncated or damaged: {error}. Write or fetch it again.") from error


class _Metered:
    """A stream of which a header may read only a limited amount."""

    def __init__(self, stream: ByteStream) -> None:
        self.num_left: int | None = None
        """How much may still be read; None is any amount."""
        self._stream = stream

    def read(self, num_bytes: int, /) -> bytes:
        data = self._stream.read(num_bytes)
        if self.num_left is not None:
            self.num_left -= len(data)
            if self.num_left < 0:
                raise tarfile.ReadError(f"a header has more than {_MOST_HEADER_BYTES:,} bytes")
        return data


def _group_members(archive: tarfile.TarFile, options: SourceOptions) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for member in archive:
        vars(archive)["members"] = []  # tarfile keeps every header otherwise
        _check_global_records(archive)
        if member.isdir() or _describes_archive(member.name):
            continue
        key, extension = _key_and_extension(member.name)
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        _read_member(archive, member, extension, sample, options)
    if sample is not None:
        yield sample


class _StrictHeader(tarfile.TarInfo):
    """A complete header, or an error: tarfile takes a damaged one for the end of the archive."""

    metered: _Metered

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """The next header, with the long names and records that may precede it."""
        is_outermost = cls.metered.num_left is None
        if is_outermost:
            cls.metered.num_left = _MOST_HEADER_BYTES
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"no end mark after {archive.offset:,} bytes") from error
        except (tarfile.HeaderError, RecursionError) as error:
            raise tarfile.ReadError(f"at byte {archive.offset:,}: {error}") from error
        finally:
            if is_outermost:
                cls.metered.num_left = None


def _check_nothing_follows(archive: Any) -> None:
    """Raise if anything but zeros follows the end mark."""
    while data := archive.fileobj.read(_DRAIN_BYTES):
        if data.strip(b"\x00"):
            raise tarfile.ReadError("more data follows its end mark, as in tars joined by `cat`; give them one by one")


def _check_global_records(archive: Any) -> None:
    """Raise if the global pax records, which tarfile collects, are too large."""
    if sum(len(name) + len(value) for name, value in archive.pax_headers.items()) > _MOST_HEADER_BYTES:
        raise tarfile.ReadError(f"its global headers have more than {_MOST_HEADER_BYTES:,} bytes")


def _read_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, extension: str, sample: _Sample, options: SourceOptions
) -> None:
    column = extension.replace(".", "_") if options.typed_members else extension
    fault = _find_fault(member, column, sample, options)
    if fault is not None:
        sample.blame(*fault)
    elif options.columns is None or column in options.columns:
        content = _content_of(archive, member)
        sample.num_bytes += len(content)
        try:
            sample.values[column] = _value_of(extension, content) if options.typed_members else content
        except ValueError as error:
            sample.blame("wrong_type", f"has the member {member.name!r}, but {error}")


def _find_fault(
    member: tarfile.TarInfo, column: str, sample: _Sample, options: SourceOptions
) -> tuple[str, str] | None:
    """Why a member is not read: one word to count by, and a sentence about the sample; None if it is read."""
    name = member.name
    if _is_unsafe_name(name):
        return "unsafe_name", f"has the member {name!r}, which would escape any folder it is extracted to"
    if not member.isreg() or member.issparse():
        return "not_a_file", f"has the member {name!r}, which is a link or a device, not a file"
    if member.size > options.max_record_bytes:
        return "too_long", f"has {member.size:,} bytes in {name!r}, more than max_record_bytes"
    if column in sample.values:
        return "duplicate", f"has the member {name!r} twice"
    if options.typed_members and column == "key":
        return "duplicate", f"has the member {name!r}, but the column 'key' is for the keys of samples"
    return None


def _value_of(extension: str, content: bytes) -> Any:
    """The value of a typed member.

    Raises:
        ValueError: it is not what its extension says.
    """
    kind = extension.rpartition(".")[2]
    if kind in NUMBER_MEMBERS:
        if not _is_decimal(content):
            raise ValueError(f"{content!r:.40} is not a decimal number of 64 bits")
        return int(content)
    if kind == "npy":
        try:
            return np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError, OSError, SyntaxError, MemoryError) as error:
            raise ValueError(f"it is not a .npy file of numbers: {error}") from None
    return content


def _content_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    content = file.read()
    if len(content) != member.size:
        raise EOFError(f"{member.name!r} has {len(content):,} of its {member.size:,} bytes")
    return content


def _key_and_extension(name: str) -> tuple[str, str]:
    """ "a/b.seg.png" is the sample "a/b" and its member "seg.png"."""
    folder, base = posixpath.split(name)
    stem, _, extension = base.partition(".")
    return posixpath.join(folder, stem), extension.lower()


def _describes_archive(name: str) -> bool:
    """Whether a member describes the archive (WebDataset's `__name__` convention)."""
    base = posixpath.basename(name)
    return base.startswith("__") and base.endswith("__")


def _is_unsafe_name(name: str) -> bool:
    """Whether a name would escape a folder if someone used it as a path later."""
    return name.startswith("/") or ".." in name.split("/") or "\x00" in name or "\\" in name


def _is_decimal(content: bytes) -> bool:
    """Whether the content of a member is a decimal number of at most 20 digits."""
    return _INTEGER.fullmatch(content) is not None

"""What one tar holds: its members grouped by key into samples, with where each member's bytes are.

    headers -> one row per member, in C (`_tar_kernels.c`) -> grouped here, in arrays -> where each sample's members are

Nothing is extracted, so no name can reach the disk. Every number is compared with the file's size before it is used.
The archive must end with its end mark: a writer that was killed leaves a tar that ends between two members, which every
tar reader takes for a shorter one.

`a/b.seg.png` is the member "seg.png" of the sample "a/b". Members with the same key are one sample if they follow each
other. A key that comes again later, a member that comes twice, one that is no file, or has an unsafe name, is a fault
of its sample.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.filesystem import PositionedFile
from penstock.schema import Column
from penstock.shards import _kernels

Int64 = NDArray[np.int64]
NUMBER_MEMBERS = frozenset({"cls", "index", "id"})
"""Members that are a decimal number."""
FAULTS = ("", "duplicate", "not_a_file", "unsafe_name", "out_of_order")
"""What may be wrong with a sample; the index holds the place."""
MISSING = -1
_MOST_CELLS = 16
"""Members that a sample of average size may lack, for each that it has: names full of dots are mistaken for members."""
_AT_ONCE, _DRAIN_BYTES = 4096, 1 << 20
_SCRATCH_BYTES = (1 << 20) + 2048
"""What one member's headers may take, as in `_tar_kernels.c`, where these numbers and names are from."""
_AT, _STATUS, _DETAIL, _NUM_HEADER_BYTES, _NUM_IGNORED = range(5)
_IS_NEW, _IS_FILE, _IS_UNSAFE, _IS_NUMBER = 1, 2, 4, 8
_ENDED, _UNREADABLE = 1, 2
_PROBLEMS = {
    3: "no end mark",
    4: "a header's checksum is wrong",
    5: "a number in a header is none",
    6: "a negative size",
    7: "a header has more than 1,048,576 bytes",
    8: "a header is cut off",
    9: "a pax header is damaged",
    10: "one name or size for all members",
    11: "a member continues in another volume",
    12: "a member of {:,} bytes, which are not all there",
}


class Tar(NamedTuple):
    """An indexed tar."""

    name: str
    num_bytes: int
    modified: int
    num_samples: int
    checksum: int
    """CRC-32 of all headers."""
    num_ignored: int
    """Members without an extension."""


class Found(NamedTuple):
    """Where a member of each sample is."""

    begins: Int64
    sizes: Int64
    numbers: Int64 | None = None
    are_numbers: NDArray[np.bool_] | None = None


@dataclass(slots=True)
class Scan:
    """The samples of one tar."""

    tar: Tar
    keys: list[Any]
    faults: NDArray[np.uint8]
    members: dict[str, Found] = field(default_factory=dict)


def scan_tar(file: PositionedFile, tar: Tar) -> Scan:
    """Read the headers of a tar.

    Raises:
        FormatError: it is truncated or damaged, or its names have dots where no extension begins.
    """
    headers, keys, extensions = _Headers(file), _Numbering(), _Numbering()
    tables, samples, kinds = [np.empty((0, 6), np.int64)], list[int](), list[int]()
    for table, names in headers:
        key_ends, name_ends, flags = table[:, 0].tolist(), table[:, 1].tolist(), table[:, 4]
        kinds += [extensions[names[begin:end]] for begin, end in zip(key_ends, name_ends, strict=True)]
        firsts = np.flatnonzero(flags & _IS_NEW)
        begins = [0, *name_ends]
        numbers = [keys[names[begins[place] : key_ends[place]]] for place in firsts.tolist()]
        samples += np.repeat(numbers, np.diff(firsts, append=len(table))).tolist()
        tables.append(table)
    described = tar._replace(num_samples=len(keys), checksum=headers.checksum, num_ignored=headers.num_ignored)
    return _group(file.path, described, np.concatenate(tables), keys, np.array(samples, np.int64), extensions, kinds)


class _Numbering(dict[bytes, int]):
    """Texts by the order in which they first came."""

    def __missing__(self, text: bytes) -> int:
        self[text] = len(self)
        return len(self) - 1


class _Headers:
    """The members of an archive, some thousand at a time: (rows, the names that they refer to).

    Raises:
        FormatError: it is truncated, damaged, or no tar.
    """

    def __init__(self, file: PositionedFile) -> None:
        self.checksum = self.num_ignored = 0
        self._file = file

    def __iter__(self) -> Iterator[tuple[Int64, bytes]]:
        file, state = self._file, np.zeros(5, np.int64)
        members = np.empty((_AT_ONCE, 6), np.int64)
        names, headers, chunk = (np.empty(times * _SCRATCH_BYTES, np.uint8) for times in (2, 2, 1))
        while state[_STATUS] != _ENDED:
            count = _kernels.scan_tar(file.descriptor, file.size, state, members, names, headers, chunk)
            at, status, detail, num_header_bytes, self.num_ignored = state.tolist()
            self.checksum = zlib.crc32(headers[:num_header_bytes].data, self.checksum)
            if count:
                yield members[:count].copy(), names[: int(members[count - 1, 1])].tobytes()
            if status in _PROBLEMS:
                raise FormatError(
                    f"{file.path}: the archive is truncated or damaged at byte {at:,}: "
                    f"{_PROBLEMS[status].format(detail)}. Write or fetch it again."
                )
            if status == _UNREADABLE:
                file.read(detail, min(detail + _DRAIN_BYTES, file.size))  # raises, or succeeds after all
        self._check_nothing_follows(int(state[_AT]))

    def _check_nothing_follows(self, at: int) -> None:
        for begin in range(at, self._file.size, _DRAIN_BYTES):
            if self._file.read(begin, min(begin + _DRAIN_BYTES, self._file.size)).any():
                raise FormatError(
                    f"{self._file.path}: more data follows its end mark, as in tars joined by `cat`; give them one by "
                    "one."
                )


def _group(
    path: Path, tar: Tar, table: Int64, keys: _Numbering, samples: Int64, extensions: _Numbering, kinds: list[int]
) -> Scan:
    """The samples that the members in `table` make up; member k is of sample `samples[k]` and of kind `kinds[k]`."""
    names = [each.decode("utf-8", "surrogateescape").lower() for each in extensions]
    columns = [_column_name(name) for name in names]
    numbers = {name: number for number, name in enumerate(sorted(set(columns)))}
    column_of = np.array([numbers[name] for name in columns], np.int64)[np.array(kinds, np.int64)]
    begins, sizes, flags, values = table[:, 2:].T
    order = np.lexsort((samples, column_of))
    in_order = column_of[order], samples[order]
    is_again = np.zeros(len(table), bool)
    is_again[order[1:]] = (in_order[0][1:] == in_order[0][:-1]) & (in_order[1][1:] == in_order[1][:-1])
    codes = np.where(flags & _IS_FILE, 0, FAULTS.index("not_a_file")).astype(np.uint8)
    codes[(flags & _IS_UNSAFE > 0) | (column_of == numbers.get("", -1))] = FAULTS.index("unsafe_name")
    codes[is_again] = FAULTS.index("duplicate")
    is_good = codes == 0
    if len(keys) * len(numbers) > _MOST_CELLS * int(is_good.sum()) + (1 << 20):
        shown = ", ".join(itertools.islice(map(repr, numbers), 5))
        raise FormatError(
            f"{path}: {len(numbers):,} kinds of members ({shown}, …) for {len(keys):,} samples. A sample's key ends at "
            "the first dot of a name; `penstock prepare` can read these with a function."
        )
    newest = np.maximum.accumulate(samples)
    is_old = np.diff(newest, prepend=-1) == 0
    codes[is_old & (np.diff(samples, prepend=-1) != 0)] = FAULTS.index("out_of_order")
    faults, bad = np.zeros(len(keys), np.uint8), np.flatnonzero(codes)[::-1]
    faults[samples[bad]] = codes[bad]  # backwards, so that the first fault of a sample remains
    scan, edges = Scan(tar, list(keys), faults), np.searchsorted(in_order[0], np.arange(len(numbers) + 1))
    holds_number = {column: _holds_number(name) for column, name in reversed(list(zip(columns, names, strict=True)))}
    for number, name in enumerate(numbers):
        own = order[edges[number] : edges[number + 1]]
        own = own[is_good[own]]
        if name:
            place = functools.partial(_placed, samples[own], len(keys))
            found = Found(place(begins[own], MISSING), place(sizes[own], MISSING))
            if holds_number[name]:
                are_numbers = place(flags[own] & _IS_NUMBER, 0) > 0
                found = found._replace(numbers=place(values[own], 0), are_numbers=are_numbers)
            scan.members[name] = found
    return scan


def _placed(samples: Int64, num_samples: int, numbers: Int64, missing: int) -> Int64:
    """A number for every sample."""
    out = np.full(num_samples, missing, np.int64)
    out[samples] = numbers
    return out


def _column_name(extension: str) -> str:
    """What a kind of member is called as a column; nothing if no column can be called that."""
    name = extension.replace(".", "_")
    try:
        return Column.parse(name, "bytes").name
    except SchemaError:
        return ""


def _holds_number(extension: str) -> bool:
    return extension.rpartition(".")[2] in NUMBER_MEMBERS

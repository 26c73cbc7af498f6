"""What one tar holds: its members grouped by key into samples, with where each member's bytes are.

Members with the same key are one sample if they follow each other. A key that comes again later, a member that comes
twice, one that is no file, or has an unsafe name, is a fault of its sample.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.filesystem import PositionedFile
from penstock.schema import Column
from penstock.shards._tar_members import (
    NUMBER_MEMBERS,
    Member,
    Members,
    describes_archive,
    is_decimal,
    is_unsafe_name,
    key_and_extension,
)

Int64 = NDArray[np.int64]
FAULTS = ("", "duplicate", "not_a_file", "unsafe_name", "out_of_order")
"""What may be wrong with a sample; the index holds the place."""
MISSING = -1
_MOST_NUMBER_BYTES = 64
_MOST_CELLS = 16
"""Members that a sample of average size may lack, for each that it has: names full of dots are mistaken for members."""


class Tar(NamedTuple):
    """An indexed tar."""

    name: str
    num_bytes: int
    modified: int
    num_samples: int
    checksum: int
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


def scan_tar(folder: Path, tar: Tar) -> Scan:
    """Read the headers of a tar.

    Raises:
        FormatError: it is truncated or damaged, or its names have dots where no extension begins.
    """
    file = PositionedFile((folder / tar.name).resolve())
    archive, samples = Members(file), _Samples()
    for member in archive:
        if not describes_archive(member.name):
            key, extension = key_and_extension(member.name)
            if not extension:
                samples.num_ignored += 1
                continue
            content = None
            if member.is_file and _holds_number(extension) and member.size <= _MOST_NUMBER_BYTES:
                content = archive.read(member.begin, member.size)
            samples.add(key, extension, member, content)
    samples.check_cells(file.path)
    described = tar._replace(num_samples=len(samples.keys), checksum=archive.checksum, num_ignored=samples.num_ignored)
    return Scan(described, samples.keys, np.array(samples.faults, np.uint8), samples.found())


class _Samples:
    """Members of a tar as they come, grouped by their keys."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.faults: list[int] = []
        self.num_ignored = self._num_members = 0
        self._numbers: dict[str, int] = {}
        self._key: str | None = None
        self._current = -1
        self._members: dict[str, list[list[int]]] = {}
        self._columns: dict[str, str] = {}
        self._are_numbers: dict[str, bool] = {}

    def add(self, key: str, extension: str, member: Member, content: bytes | None) -> None:
        """Add the next member."""
        if key != self._key:
            self._begin(key)
        name = self._columns.get(extension)
        if name is None:
            name = self._columns[extension] = _column_name(extension)
            self._are_numbers.setdefault(name, _holds_number(extension))
        rows = self._members.setdefault(name, [])
        if rows and rows[-1][0] == self._current:
            self._blame("duplicate")
        elif is_unsafe_name(member.name) or not name:
            self._blame("unsafe_name")
        elif not member.is_file:
            self._blame("not_a_file")
        else:
            is_good = content is not None and is_decimal(content) and -(2**63) <= int(content) < 2**63
            rows.append([self._current, member.begin, member.size, int(content or 0) if is_good else 0, is_good])
            self._num_members += 1

    def check_cells(self, path: Path) -> None:
        """Refuse a tar whose samples have hardly any members in common."""
        if len(self.keys) * len(self._members) > _MOST_CELLS * self._num_members + (1 << 20):
            shown = ", ".join(itertools.islice(map(repr, self._members), 5))
            raise FormatError(
                f"{path}: {len(self._members):,} kinds of members ({shown}, …) for {len(self.keys):,} samples. A "
                "sample's key ends at the first dot of a name; `penstock prepare` can read these with a function."
            )

    def found(self) -> dict[str, Found]:
        """Where each kind of member is, of every sample."""
        members = {}
        for name, rows in sorted(self._members.items()):
            if not name:
                continue
            table = np.array(rows, np.int64).reshape(-1, 5)
            columns = np.full((2, len(self.keys)), MISSING), np.zeros((2, len(self.keys)), np.int64)
            columns[0][:, table[:, 0]], columns[1][:, table[:, 0]] = table[:, 1:3].T, table[:, 3:].T
            more = (columns[1][0], columns[1][1].astype(bool)) if self._are_numbers[name] else ()
            members[name] = Found(*columns[0], *more)
        return members

    def _begin(self, key: str) -> None:
        self._key, known = key, self._numbers.get(key)
        if known is not None:  # members of this key were before, and others in between
            self._current = known
            self._blame("out_of_order")
            return
        self._current = self._numbers[key] = len(self.keys)
        self.keys.append(key.encode("utf-8", "surrogateescape"))
        self.faults.append(0)

    def _blame(self, fault: str) -> None:
        self.faults[self._current] = self.faults[self._current] or FAULTS.index(fault)


def _column_name(extension: str) -> str:
    """What a kind of member is called as a column; nothing if no column can be called that."""
    name = extension.replace(".", "_")
    try:
        return Column.parse(name, "bytes").name
    except SchemaError:
        return ""


def _holds_number(extension: str) -> bool:
    return extension.rpartition(".")[2] in NUMBER_MEMBERS

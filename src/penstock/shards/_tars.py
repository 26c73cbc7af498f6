"""Samples of tars, read where they are: positions from the index, bytes by positioned reads.

    indices -> the index says tar, first byte and size, by kernels, from its map -> one kernel reads all into place

Nothing is mapped, so a tar that is cut off while it is read is an error and no signal. Every place is compared with the
size of its tar, and every tar with the size and time that it had when it was indexed, each time it is used.

Tars in a store are fetched as a whole into the node's cache when one of their samples is needed, or ahead of a loader.
"""

import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DatasetChanged, FormatError, SchemaError, counted
from penstock.filesystem import PositionedFile
from penstock.identity import digest
from penstock.schema import Column, Ragged, Schema, offsets_of
from penstock.shards import _kernels
from penstock.shards._open_shards import OPEN_FILES, RESET_IN_CHILD, watch_evictions
from penstock.shards._storage import Spans, check_span, from_front, ranges
from penstock.shards._tar_index import Member, RemoteTars, TarIndex, open_tar
from penstock.shards._tar_scan import FAULTS, MISSING, Tar

Int64 = NDArray[np.int64]
KEY = "__key__"
_SHOWN = 3


class TarStorage:
    """Random access to the samples of indexed tars.

    Args:
        index: Of these tars.
        paths: Where they are.
        columns: `{name: type}` of the members to open; an empty type is the usual one, None means all members.
        remote: The store that they are fetched from, if they are in one.

    Raises:
        SchemaError: there is no such member, or it cannot have that type.
    """

    def __init__(
        self,
        index: TarIndex,
        paths: Sequence[Path],
        columns: Mapping[str, str] | None,
        remote: RemoteTars | None = None,
    ) -> None:
        self.index, self.paths, self._remote = index, tuple(paths), remote
        self.supply = None if remote is None else remote.supply
        self.where = remote.url if remote is not None else os.fspath(self.paths[0].parent)
        self._places = {member.name: place for place, member in enumerate(index.members)}
        wanted = dict.fromkeys([KEY, *self._places], "") if columns is None else columns
        self.schema = Schema(tuple(self._column(name, spec) for name, spec in wanted.items()))
        self.num_samples = index.folder.num_samples
        self.starts = offsets_of([tar.num_samples for tar in index.tars])
        """Number of the first sample of each tar, and finally the number of samples."""
        self._sizes = np.array([tar.num_bytes for tar in index.tars], np.int64)
        self.reset()
        RESET_IN_CHILD.add(self)
        ignored = sum(tar.num_ignored for tar in index.tars)
        self.attributes: Mapping[str, Any] = {"ignored_members": ignored} if ignored else {}

    def reset(self) -> None:
        """Close every tar; the next read opens what it needs."""
        self._open: dict[int, PositionedFile] = {}
        self._watch: threading.Thread | None = None

    @property
    def files(self) -> Sequence[Tar]:
        """The tars, as a layer of shards numbers them."""
        return self.index.tars

    @property
    def path(self) -> Path:
        """The folder of the first tar."""
        return self.paths[0].parent

    @property
    def fingerprint(self) -> str:
        """Identity of the data: sizes and headers of the tars, and how they are read."""
        tars = [f"{tar.num_bytes} {tar.num_samples} {tar.checksum:08x}" for tar in self.index.tars]
        return digest("\n".join([repr(self.schema.to_json()), *tars]))

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns that are open."""
        return sum(self.num_elements(column) * column.item_bytes for column in self.schema.columns)

    def provenance(self) -> Mapping[str, Any]:
        """The tar of every sample, and its place among the samples there."""
        tars = self.index.tars
        splits = [[number, 0, tar.num_bytes, tar.num_samples, None] for number, tar in enumerate(tars)]
        files = [os.fspath(path) for path in self.paths]
        files = files if self._remote is None else [f"{self.where}/{tar.name}" for tar in tars]
        return {"origins": {"files": files, "splits": splits}}

    def whole_samples(self) -> tuple[NDArray[np.bool_] | None, dict[str, int]]:
        """(whether each sample can be read, how many cannot by reason); None and nothing if all can."""
        reasons = {reason: count for reason, count in self.index.faults.items() if count}
        lacking = {name: self.num_samples - self._member(name).num_samples for name in self.schema if name != KEY}
        wrong = {each.name: self._member(each.name).num_wrong for each in self.schema.columns if not each.is_ragged}
        if not reasons and not any(lacking.values()) and not any(wrong.values()):
            return None, {}
        everything = np.arange(self.num_samples)
        faults = self.index.read("fault", everything)
        is_whole = faults == 0
        reasons = {reason: int((faults == code).sum()) for code, reason in enumerate(FAULTS) if code}
        for name in lacking:
            is_there = self._numbers("size", name, everything) != MISSING
            reasons[f"no {name}"] = int((is_whole & ~is_there).sum())
            is_whole &= is_there
        for name in wrong:
            is_right = self._numbers("is_number", name, everything)
            reasons[f"{name} is no number"] = int((is_whole & ~is_right).sum())
            is_whole &= is_right
        return is_whole, {reason: count for reason, count in reasons.items() if count}

    def name_some(self, indices: Int64) -> str:
        """The keys of the first few of these samples, and where they are."""
        some = indices[:_SHOWN]
        keys = self.index.folder.read_ragged(self.index.column("key"), some)
        numbers = np.searchsorted(self.starts, some, side="right") - 1
        named = [
            f"{bytes(key).decode(errors='replace')!r:.200} in {self.index.tars[number].name}"
            for key, number in zip(keys, numbers.tolist(), strict=True)
        ]
        return ", ".join(named) + (", …" if len(indices) > _SHOWN else "")

    def read_fixed(self, column: Column, indices: Int64, out: NDArray[Any]) -> None:
        self.index.folder.read_fixed(self._stored(column), indices, out)

    def read_ragged(self, column: Column, indices: Int64) -> Ragged:
        if column.name == KEY:
            return self.index.folder.read_ragged(self._stored(column), indices)
        begins, sizes, tars = self._find(column, from_front(indices, self.num_samples))
        return Ragged(self._read(begins, sizes, tars), offsets_of(sizes), True)

    def _read(self, begins: Int64, sizes: Int64, tars: Int64) -> NDArray[np.uint8]:
        """Ranges of tars, side by side."""
        ends = offsets_of(sizes)
        values = np.empty(int(ends[-1]), np.uint8)
        asked, numbers = np.unique(tars, return_inverse=True)
        most = OPEN_FILES.limit // 4
        for first in range(0, len(asked), most):
            files = [self._file(number) for number in asked[first : first + most].tolist()]
            here = np.flatnonzero((numbers >= first) & (numbers < first + most))
            _fill(values, files, numbers[here] - first, begins[here], sizes[here], ends[here])
        return values

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        if column.name == KEY:
            self.index.folder.read_spans(self._stored(column), spans, out)
            return
        begins, lengths, tars = self._find(column, spans.indices)
        for first, size, length in zip(spans.firsts.tolist(), spans.sizes.tolist(), lengths.tolist(), strict=True):
            check_span(first, size, length)
        values, ends = self._read(begins + spans.firsts, spans.sizes, tars), offsets_of(spans.sizes)
        for (begin, end), target in zip(itertools.pairwise(ends.tolist()), spans.targets.tolist(), strict=True):
            out[target : target + end - begin] = values[begin:end]

    def lengths_of(self, column: Column, indices: Int64) -> Int64:
        if column.name == KEY:
            return self.index.folder.lengths_of(self._stored(column), indices)
        return self._find(column, indices)[1]

    def read_stream(self, column: Column, firsts: Int64, out: NDArray[Any]) -> None:
        self.index.folder.read_stream(self._stored(column), firsts, out)

    def num_elements(self, column: Column) -> int:
        if column.name == KEY:
            return self.index.folder.num_elements(self._stored(column))
        return self._member(column.name).num_bytes if column.is_ragged else self.num_samples

    def value(self, column: Column, index: int) -> NDArray[Any]:
        if not column.is_ragged or column.name == KEY:
            [index] = from_front(np.array([index]), self.num_samples).tolist()
            found: NDArray[Any] = self.index.folder.value(self._stored(column), index)
            return found
        read: NDArray[Any] = self.read_ragged(column, np.array([index])).values
        return read

    def lengths(self, column: Column, begin: int, end: int) -> Int64:
        return self.lengths_of(column, np.arange(begin, end))

    def will_need(self, column: Column, begin: int, end: int) -> None:
        for number, first, last in self._extents(column, begin, end):
            self._file(number).will_need(first, last)

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        for number, first, last in self._extents(column, begin, end):
            self._file(number).dont_need(first, last)

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Nothing to check: tars have no checksums."""

    def close_shards(self, numbers: set[int]) -> None:
        """Forget these tars; they close when the last reader is done with them."""
        for number in numbers:
            self._open.pop(number, None)

    def close_evicted(self) -> None:
        """Forget the tars that take the room of others."""
        if self.supply is not None:
            tars = self.index.tars
            self.close_shards({each for each in list(self._open) if self.supply.is_evicted(tars[each].name)})

    def _extents(self, column: Column, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(tar, first byte, last byte) of what neighbouring samples take."""
        if not column.is_ragged or column.name == KEY:
            return
        for number, first, last in ranges(self.starts, begin, end):
            if self.supply is None or number in self._open:  # else it would be fetched now
                begins, sizes, _ = self._find(column, self.starts[number] + np.array([first, last - 1]))
                yield number, int(begins[0]), int(begins[1] + sizes[1])

    def _find(self, column: Column, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """(first bytes, sizes, tars) of a member of samples; one that is missing has no bytes.

        Samples without it are not shown, but they are there when something is computed of all samples.

        Raises:
            FormatError: the index leads outside of a tar; it may be a stranger's.
        """
        begins, sizes = (self._numbers(what, column.name, indices) for what in ("begin", "size"))
        is_missing = (begins == MISSING) & (sizes == MISSING)
        begins[is_missing] = sizes[is_missing] = 0
        tars = np.searchsorted(self.starts, indices, side="right") - 1
        is_wrong = (begins < 0) | (sizes < 0) | (sizes > self._sizes[tars]) | (begins > self._sizes[tars] - sizes)
        if is_wrong.any():
            place = int(np.flatnonzero(is_wrong)[0])
            raise FormatError(
                f"{self.paths[tars[place]]}: its index says that {column.name!r} of sample {indices[place]:,} is "
                f"outside of the tar. Remove {self.index.folder.path}, and open the tars again."
            )
        return begins, sizes, tars

    def _file(self, number: int) -> PositionedFile:
        """A tar, which must be as it was when it was indexed.

        Raises:
            DatasetChanged: it is not.
        """
        file, tar = self._open.get(number), self.index.tars[number]
        if file is None:
            OPEN_FILES.make_room()
            if self.supply is not None:
                self._watch = self._watch or watch_evictions(self)
            file = self._open.setdefault(number, open_tar(self.paths[number], self._remote))
            OPEN_FILES.opened(self, number)
        status = os.fstat(file.descriptor)
        modified = status.st_mtime_ns if self._remote is None else tar.modified  # its folder is of one version
        if (status.st_size, modified) != (tar.num_bytes, tar.modified):
            raise DatasetChanged(f"{file.path}: the tar changed since it was indexed. Open the dataset again.")
        return file

    def _numbers(self, what: str, name: str, indices: Int64) -> NDArray[Any]:
        return self.index.read(f"{what}{self._places[name]}", indices)

    def _stored(self, column: Column) -> Column:
        """The column of the index that holds all of a column."""
        return self.index.column("key" if column.name == KEY else f"number{self._places[column.name]}")

    def _member(self, name: str) -> Member:
        return self.index.members[self._places[name]]

    def _column(self, name: str, spec: str) -> Column:
        if name == KEY and spec in ("", "bytes"):
            return Column.parse(KEY, "bytes")
        if name not in self._places:
            known = ", ".join(map(repr, [KEY, *self._places]))
            raise SchemaError(f"{self.where}: no member {name!r} in the tars; they have {known}.")
        usual = "int64" if self._member(name).is_number else "bytes"
        if spec not in ("", "bytes", usual):
            raise SchemaError(
                f"Column {name!r}: members of tars are 'bytes', {usual!r} here, not {spec!r}. Decode in a map."
            )
        return Column.parse(name, spec or usual)


def _fill(
    values: NDArray[np.uint8],
    files: Sequence[PositionedFile],
    numbers: Int64,
    begins: Int64,
    sizes: Int64,
    targets: Int64,
) -> None:
    """Read `sizes[k]` bytes from byte `begins[k]` of `files[numbers[k]]` to `values[targets[k]:]`, for every k.

    Raises:
        StorageError: they cannot be read.
    """
    descriptors, done = np.array([file.descriptor for file in files], np.int64)[numbers], 0
    while done < len(numbers):
        stopped = _kernels.read_files(descriptors[done:], begins[done:], sizes[done:], targets[done:], values)
        if stopped == _kernels.DONE:
            return
        done += stopped
        begin, size, target = (int(each[done]) for each in (begins, sizes, targets))
        values[target : target + size] = files[numbers[done]].read(begin, begin + size)  # raises, or succeeds after all
        done += 1


def describe_faults(storage: TarStorage, is_whole: NDArray[np.bool_], reasons: Mapping[str, int]) -> str:
    """What is wrong with samples, how often, and with which."""
    bad = np.flatnonzero(~is_whole)
    counts = ", ".join(f"{reason}: {count:,}" for reason, count in reasons.items())
    return (
        f"{counted(len(bad), 'sample')} of {storage.num_samples:,} cannot be read ({counts}): {storage.name_some(bad)}"
    )

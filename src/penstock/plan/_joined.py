"""Several datasets as one storage: one after the other, or side by side. Nothing is copied.

    concat   sample i is a sample of one part; every part has the same columns
    zip      sample i is sample i of every part; each column is one part's

Reads are handed on: each part gathers its own samples at its own speed, and where a batch touches several parts their
samples are put in order by one more copy. Batches are those of a storage that holds all the samples itself.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.identity import digest
from penstock.plan._sample_keys import By, SampleKeys
from penstock.plan._samples import Samples
from penstock.plan._tokens import token_stream
from penstock.schema import HASH_COLUMN, Column, Ragged, Schema, offsets_of
from penstock.shards import Spans

Int64 = NDArray[np.int64]
_SHARED = ("tokenizer", "classes")
"""What is known beside the data that still holds when datasets are joined."""


class AnyDataset(Protocol):
    """What is asked of a `Dataset`, which stands above this module."""

    samples: Samples
    schema: Schema

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What is known beside the data."""
        ...

    @property
    def tokenizers(self) -> dict[str, str]:
        """The tokenizer of its tokens, name by digest."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The dataset in a plan file."""
        ...

    def __len__(self) -> int: ...


class JoinedStorage(ABC):
    """What both kinds have in common: parts, and what is known of them."""

    def __init__(self, parts: Sequence[Samples], schema: Schema, num_samples: int) -> None:
        self.parts = tuple(parts)
        self.schema = schema
        self.num_samples = num_samples

    @property
    def fingerprint(self) -> str:
        """Identity of all parts, in order."""
        parts = [part.digest(repr(part.schema.to_json())) for part in self.parts]
        return digest("\n".join([type(self).__name__, *parts]))

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Tokenizer and classes of the first part that has them; who joins has compared them."""
        known = [part.storage.attributes for part in self.parts]
        return {key: each[key] for key in _SHARED for each in reversed(known) if key in each}

    def provenance(self) -> Mapping[str, Any]:
        """Empty: each part has its own, and `sample_keys` asks it."""
        return {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(self.num_elements(column) * column.item_bytes for column in self.schema.columns)

    @abstractmethod
    def num_elements(self, column: Column) -> int:
        """Elements of a column in all samples."""

    @abstractmethod
    def sample_keys(self) -> SampleKeys:
        """What tells samples apart: what their parts say."""

    def _checked(self, indices: Int64) -> Int64:
        """Indices from the front."""
        found = np.where(indices < 0, indices + self.num_samples, indices)
        wrong = (found < 0) | (found >= self.num_samples)
        if wrong.any():
            raise IndexError(f"Index {indices[wrong][0]} is out of range for {self.num_samples:,} samples.")
        return found


class ConcatStorage(JoinedStorage):
    """The samples of one part after those of another."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        are_hashed = all(HASH_COLUMN in part.storage.schema for part in parts)
        schema = parts[0].schema.with_hashes() if are_hashed else parts[0].schema
        self._starts = offsets_of([len(part) for part in parts])
        super().__init__(parts, schema, int(self._starts[-1]))

    def sample_keys(self) -> SampleKeys:
        """Those of the part that a sample is in."""
        return _ConcatKeys(self)

    def part_of(self, indices: Int64) -> NDArray[np.uint64]:
        """Number of the part that each sample is in."""
        return (np.searchsorted(self._starts, indices, side="right") - 1).astype(np.uint64)

    def shares(self, indices: Int64) -> Iterator[tuple[Samples, Int64, Int64]]:
        """(part, places in `indices`, its own indices) of every part that is asked for something."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            yield self.parts[number], places, indices[places] - self._starts[number]

    def read_fixed(self, column: Column, indices: Int64, out: NDArray[Any]) -> None:
        """Copy samples of a fixed column into `out`, converting to its dtype."""
        for part, places, own in self.shares(self._checked(indices)):
            if len(places) == len(indices):
                part.storage.read_fixed(column, part.locate(own), out)
            else:
                found = np.empty((len(own), *out.shape[1:]), out.dtype)
                part.storage.read_fixed(column, part.locate(own), found)
                out[places] = found

    def read_ragged(self, column: Column, indices: Int64) -> Ragged:
        """Samples of a ragged column, side by side."""
        shares = list(self.shares(self._checked(indices)))
        if not shares:
            return self.parts[0].storage.read_ragged(column, indices)
        found = Ragged.concatenate([part.storage.read_ragged(column, part.locate(own)) for part, _, own in shares])
        return found.take(np.argsort(np.concatenate([places for _, places, _ in shares])))

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        """Copy parts of samples of a ragged column into the flat array `out`, converting to its dtype."""
        for part, places, own in self.shares(spans.indices):
            rest = (spans.firsts[places], spans.sizes[places], spans.targets[places])
            part.storage.read_spans(column, Spans(part.locate(own), *rest), out)

    def lengths_of(self, column: Column, indices: Int64) -> Int64:
        """Lengths of samples of a ragged column; indices count from the front."""
        lengths = np.empty(len(indices), np.int64)
        for part, places, own in self.shares(indices):
            lengths[places] = part.storage.lengths_of(column, part.locate(own))
        return lengths

    def lengths(self, column: Column, begin: int, end: int) -> Int64:
        """Lengths of samples `begin` to `end` of a ragged column."""
        found = [part.lengths_between(column, first, last) for part, first, last in self._ranges(begin, end)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def read_stream(self, column: Column, firsts: Int64, out: NDArray[Any]) -> None:
        """Copy a row of consecutive elements from each of `firsts`, over the borders of samples and parts."""
        starts, length = self._element_starts(column), out.shape[1]
        begins = np.searchsorted(starts, firsts, side="right") - 1
        ends = np.searchsorted(starts, firsts + length, side="left") - 1
        for number in np.unique(begins).tolist():
            rows = np.flatnonzero((begins == number) & (ends <= number))
            if len(rows):
                found = np.empty((len(rows), length), out.dtype)
                token_stream(self.parts[number], column).read(firsts[rows] - starts[number], found)
                out[rows] = found
        for row in np.flatnonzero(ends > begins).tolist():
            self._read_over_borders(column, int(firsts[row]), out[row])

    def _read_over_borders(self, column: Column, first: int, out: NDArray[Any]) -> None:
        """One row that begins in one part and ends in another."""
        for part, (start, end) in zip(self.parts, itertools.pairwise(self._element_starts(column)), strict=True):
            low, high = max(first, int(start)), min(first + len(out), int(end))
            if low < high:
                piece = np.empty((1, high - low), out.dtype)
                token_stream(part, column).read(np.array([low - int(start)]), piece)
                out[low - first : high - first] = piece[0]

    def num_elements(self, column: Column) -> int:
        """Elements of a column in all samples."""
        return int(self._element_starts(column)[-1])

    def value(self, column: Column, index: int) -> NDArray[Any]:
        """One sample of a column, read-only, without a copy where that is possible."""
        [(part, _, own)] = self.shares(self._checked(np.array([index])))
        return part.storage.value(column, part.locate_one(int(own[0])))

    def announce(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are needed soon."""
        for part, first, last in self._ranges(begin, end):
            part.announce([column], first, last)

    def release(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are no longer needed."""
        for part, first, last in self._ranges(begin, end):
            part.release([column], first, last)

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check samples `begin` to `end` of a column now; those that were picked are checked when they are read."""
        for part, first, last in self._ranges(begin, end):
            if part.are_whole:
                part.storage.check_samples(column, first, last)

    def _ranges(self, begin: int, end: int) -> Iterator[tuple[Samples, int, int]]:
        for part, (start, stop) in zip(self.parts, itertools.pairwise(self._starts.tolist()), strict=True):
            first, last = max(begin, start), min(end, stop)
            if first < last:
                yield part, first - start, last - start

    def _element_starts(self, column: Column) -> Int64:
        if column.name not in self._elements:
            counts = [count_elements(part, column) for part in self.parts]
            self._elements[column.name] = offsets_of(counts)
        return self._elements[column.name]

    @functools.cached_property
    def _elements(self) -> dict[str, Int64]:
        return {}


class ZipStorage(JoinedStorage):
    """Columns of several parts that have the same samples."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        owners = {name: part for part in reversed(parts) for name in part.schema}
        columns = {name: owner.schema[name] for part in parts for name in part.schema if (owner := owners[name])}
        schema = Schema(tuple(columns.values()))
        super().__init__(parts, schema, len(parts[0]))
        self.owners: dict[str, Samples] = owners

    def sample_keys(self) -> SampleKeys:
        """Those of the first part: more columns make no other sample."""
        return _ZipKeys(self)

    def read_fixed(self, column: Column, indices: Int64, out: NDArray[Any]) -> None:
        """Copy samples of a fixed column into `out`, converting to its dtype."""
        part = self.owners[column.name]
        part.storage.read_fixed(column, part.locate(self._checked(indices)), out)

    def read_ragged(self, column: Column, indices: Int64) -> Ragged:
        """Samples of a ragged column, side by side."""
        part = self.owners[column.name]
        return part.storage.read_ragged(column, part.locate(self._checked(indices)))

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        """Copy parts of samples of a ragged column into the flat array `out`, converting to its dtype."""
        part = self.owners[column.name]
        own = Spans(part.locate(spans.indices), spans.firsts, spans.sizes, spans.targets)
        part.storage.read_spans(column, own, out)

    def lengths_of(self, column: Column, indices: Int64) -> Int64:
        """Lengths of samples of a ragged column; indices count from the front."""
        part = self.owners[column.name]
        return part.storage.lengths_of(column, part.locate(indices))

    def lengths(self, column: Column, begin: int, end: int) -> Int64:
        """Lengths of samples `begin` to `end` of a ragged column."""
        return self.owners[column.name].lengths_between(column, begin, end)

    def read_stream(self, column: Column, firsts: Int64, out: NDArray[Any]) -> None:
        """Copy a row of consecutive elements from each of `firsts`, over the borders of samples."""
        token_stream(self.owners[column.name], column).read(firsts, out)

    def num_elements(self, column: Column) -> int:
        """Elements of a column in all samples."""
        return count_elements(self.owners[column.name], column)

    def value(self, column: Column, index: int) -> NDArray[Any]:
        """One sample of a column, read-only, without a copy where that is possible."""
        part = self.owners[column.name]
        return part.storage.value(column, part.locate_one(index))

    def announce(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are needed soon."""
        self.owners[column.name].announce([column], begin, end)

    def release(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are no longer needed."""
        self.owners[column.name].release([column], begin, end)

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check samples `begin` to `end` of a column now; those that were picked are checked when they are read."""
        part = self.owners[column.name]
        if part.are_whole:
            part.storage.check_samples(column, begin, end)


def count_elements(part: Samples, column: Column) -> int:
    """Elements of a column in all samples of a part."""
    if part.are_whole:
        return part.storage.num_elements(column)
    return int(part.lengths(column).sum()) if column.is_ragged else len(part)


class _ConcatKeys(SampleKeys):
    """Keys that each part has for its own samples: the same as before they were joined."""

    def __init__(self, storage: ConcatStorage) -> None:
        super().__init__(storage)
        self._joined = storage

    def of(self, by: By, indices: Int64) -> NDArray[np.uint64]:
        """Keys of stored samples."""
        keys = np.empty(len(indices), np.uint64)
        for part, places, own in self._joined.shares(indices):
            keys[places] = part.keys.of(by, part.locate(own))
        return keys

    def check(self, by: By) -> None:
        """Refuse what a part has no keys by."""
        for part in self._joined.parts:
            part.keys.check(by)

    def origin(self, index: int) -> str | None:
        """File and row that a stored sample was prepared from."""
        [(part, _, own)] = self._joined.shares(np.array([index]))
        return part.origin(int(own[0]))


class _ZipKeys(SampleKeys):
    """Keys of the first part; by columns of others, those that can be computed from the joined samples."""

    def __init__(self, storage: ZipStorage) -> None:
        super().__init__(storage)
        self._first = storage.parts[0]

    def of(self, by: By, indices: Int64) -> NDArray[np.uint64]:
        """Keys of stored samples."""
        return self._first.keys.of(by, self._first.locate(indices)) if self._is_first(by) else super().of(by, indices)

    def check(self, by: By) -> None:
        """Refuse what there are no keys by."""
        if self._is_first(by):
            self._first.keys.check(by)
        else:
            super().check(by)

    def origin(self, index: int) -> str | None:
        """File and row that a stored sample was prepared from."""
        return self._first.origin(index)

    def _is_first(self, by: By) -> bool:
        return isinstance(by, str) or all(name in self._first.schema for name in by)

"""Datasets one after the other: each part reads its own samples, and they are put in the order that was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset._joined import AnyDataset, Int64, JoinedStorage, count_elements
from penstock.dataset._samples import By, SampleKeys, Samples
from penstock.dataset._tokens import token_stream
from penstock.errors import SchemaError
from penstock.schema import HASH_COLUMN, Column, Ragged, offsets_of
from penstock.shards import Spans, from_front


class ConcatStorage(JoinedStorage):
    """The samples of one part after those of another."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        are_hashed = all(HASH_COLUMN in part.storage.schema for part in parts)
        schema = parts[0].schema.with_hashes() if are_hashed else parts[0].schema
        self._starts = offsets_of([len(part) for part in parts])
        self._elements: dict[str, Int64] = {}
        super().__init__(parts, schema, int(self._starts[-1]))

    def sample_keys(self) -> SampleKeys:
        """Those of the part that a sample is in."""
        return _ConcatKeys(self)

    def part_of(self, indices: Int64) -> NDArray[np.uint64]:
        """Number of the part that each sample is in."""
        return (np.searchsorted(self._starts, indices, side="right") - 1).astype(np.uint64)

    def shares(self, indices: Int64) -> Iterator[tuple[Samples, Int64, Int64]]:
        """(part, places in `indices`, its own indices) of every part that has some of them."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        places = np.argsort(numbers, kind="stable")
        asked, firsts = np.unique(numbers[places], return_index=True)
        for number, begin, end in zip(asked.tolist(), firsts, [*firsts[1:], len(places)], strict=False):
            own = places[begin:end]
            yield self.parts[number], own, indices[own] - self._starts[number]

    def read_fixed(self, column: Column, indices: Int64, out: NDArray[Any]) -> None:
        """Copy samples of a fixed column into `out`, converting to its dtype."""
        for part, places, own in self.shares(from_front(indices, self.num_samples)):
            if len(places) == len(indices):
                part.storage.read_fixed(column, part.locate(own), out)
            else:
                found = np.empty((len(own), *out.shape[1:]), out.dtype)
                part.storage.read_fixed(column, part.locate(own), found)
                out[places] = found

    def read_ragged(self, column: Column, indices: Int64) -> Ragged:
        """Samples of a ragged column, side by side."""
        shares = list(self.shares(from_front(indices, self.num_samples)))
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
        """Lengths of samples of a ragged column; indices must not be negative."""
        lengths = np.empty(len(indices), np.int64)
        for part, places, own in self.shares(indices):
            lengths[places] = part.storage.lengths_of(column, part.locate(own))
        return lengths

    def lengths(self, column: Column, begin: int, end: int) -> Int64:
        """Lengths of samples `begin` to `end` of a ragged column."""
        found = [part.lengths_between(column, first, last) for part, first, last in self._ranges(begin, end)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def read_stream(self, column: Column, firsts: Int64, out: NDArray[Any]) -> None:
        """Copy a row of consecutive elements from each of `firsts`, across samples and parts."""
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
        [(part, _, own)] = self.shares(from_front(np.array([index]), self.num_samples))
        return part.storage.value(column, part.locate_one(int(own[0])))

    def will_need(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are needed soon."""
        for part, first, last in self._ranges(begin, end):
            part.will_need([column], first, last)

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are no longer needed."""
        for part, first, last in self._ranges(begin, end):
            part.dont_need([column], first, last)

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
        """Refuse a `by` for which a part has no keys."""
        for part in self._joined.parts:
            part.keys.check(by)

    def origin(self, index: int) -> str | None:
        """File and row that a stored sample was prepared from."""
        [(part, _, own)] = self._joined.shares(np.array([index]))
        return part.origin(int(own[0]))


def check_concat(parts: Sequence[AnyDataset], different_tokenizers: bool) -> None:
    """Refuse datasets whose samples do not mean the same.

    Raises:
        SchemaError: they have different columns.
        ValueError: there is none, or their tokens or labels mean different things.
    """
    if not parts:
        raise ValueError("concat() needs at least one dataset.")
    first = parts[0].schema.to_json()
    for number, part in enumerate(parts):
        if part.schema.to_json() != first:
            raise SchemaError(
                f"concat(): dataset 0 has the columns {parts[0].schema}; dataset {number} has {part.schema}. Choose "
                "the same columns in the same order with select_columns(), or prepare them with the same types."
            )
    tokenizers = {key: name for part in parts for key, name in part.tokenizers.items()}
    if len(tokenizers) > 1 and not different_tokenizers:
        made = ", ".join(f"{name} ({key[:8]})" for key, name in tokenizers.items())
        raise ValueError(
            "concat(): the datasets were made with different tokenizers, so one token id means different things: "
            f"{made}. Prepare them with one tokenizer, or pass different_tokenizers=True if that is what you want."
        )
    check_classes("concat", (part.classes for part in parts))


def check_classes(verb: str, lists: Iterable[tuple[str, ...]]) -> None:
    """Refuse datasets whose labels mean different classes; an empty list says nothing about them."""
    classes = {names for names in lists if names}
    if len(classes) > 1:
        one, other, *_ = sorted(classes)
        raise ValueError(
            f"{verb}(): labels mean different classes: {list(one)[:5]} in one dataset, {list(other)[:5]} in another. "
            "Prepare them with one list of classes: classes=, --classes."
        )

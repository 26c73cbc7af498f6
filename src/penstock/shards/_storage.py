"""What a dataset needs from wherever its samples are: a folder of shards, arrays in RAM, or a foreign file.

Where columns are in memory: one row of numbers per shard, which kernels can read.

    row of a shard:  FILE SIZE | VALUES OFFSETS COUNT STATE VALUE_FLAGS OFFSET_FLAGS | the same for the next column
                                 ^ slot of the first column                            ^ slot of the second

`FILE` is the file's descriptor, or -1 if there is no file; `SIZE` is the length it must still have. `VALUES` and
`OFFSETS` are addresses, `COUNT` is the number of elements. `STATE` is ABSENT (not open), OPEN (the flags say which
blocks were checked) or READY (all of them were). Mapped shards and arrays in RAM both provide such a table.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.schema import Column, Ragged, Schema, join_parts


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Parts of samples, and where each goes, as packing asks for them.

    `sizes[k]` elements from element `firsts[k]` of sample `indices[k]` go to place `targets[k]`.
    """

    indices: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    targets: NDArray[np.int64]


def check_span(first: int, size: int, length: int) -> None:
    """Refuse a span that exceeds its sample."""
    if first < 0 or size < 0 or first + size > length:
        raise IndexError(f"Elements {first:,} to {first + size:,} were requested of a sample that has {length:,}.")


def from_front(indices: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """Indices as non-negative ones; negative ones count from the end.

    Raises:
        IndexError: naming the first that is out of range.
    """
    if not indices.size or (indices.min() >= 0 and indices.max() < num_samples):
        return indices
    found = np.where(indices < 0, indices + num_samples, indices)
    is_wrong = (found < 0) | (found >= num_samples)
    if is_wrong.any():
        raise IndexError(f"Index {indices[is_wrong][0]} is out of range for {num_samples:,} samples.")
    return found


def ranges(starts: NDArray[np.int64], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(part, first, last) of each part that holds some of the samples `begin` to `end`, counted from its own first.

    `starts` are the first samples of the parts, and finally the number of samples.
    """
    number = int(np.searchsorted(starts, begin, side="right")) - 1
    while begin < end:
        start, stop = starts[number : number + 2].tolist()
        if stop > begin:
            yield number, begin - start, min(end, stop) - start
            begin = min(end, stop)
        number += 1


class Storage(Protocol):
    """Random access to samples."""

    schema: Schema
    num_samples: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        ...

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What else is known about the data: tokenizer, packing, what was skipped."""
        ...

    def provenance(self) -> Mapping[str, Any]:
        """Where the samples came from, read from disk each time; empty if that was not recorded."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of the data."""
        ...

    def read_fixed(self, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy samples of a fixed column into `out`, converting to its dtype."""
        ...

    def read_ragged(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        """Samples of a ragged column, side by side."""
        ...

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        """Copy parts of samples of a ragged column into the flat array `out`, converting to its dtype."""
        ...

    def lengths_of(self, column: Column, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths of samples of a ragged column; indices must not be negative."""
        ...

    def read_stream(self, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy a row of consecutive elements from each of `firsts`, across samples and shards."""
        ...

    def num_elements(self, column: Column) -> int:
        """Elements of a column in all samples; of several byte strings, their bytes."""
        ...

    def value(self, column: Column, index: int) -> Any:
        """One sample of a column, read-only, without a copy if possible; several byte strings are a `Ragged`."""
        ...

    def lengths(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of samples `begin` to `end` of a ragged column."""
        ...

    def will_need(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are needed soon."""
        ...

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` of a column are no longer needed."""
        ...

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Check samples `begin` to `end` of a column now, so that no read has to."""
        ...


def read_samples(storage: Storage, column: Column, indices: NDArray[np.int64]) -> Ragged | NDArray[Any]:
    """Samples of a column, fixed or ragged."""
    if column.is_ragged:
        return storage.read_ragged(column, indices)
    out = np.empty((len(indices), *column.shape), column.dtype)
    storage.read_fixed(column, indices, out)
    return out


def column_bytes(storage: Storage, columns: Iterable[Column]) -> int:
    """Bytes of all samples of these columns."""
    return sum(storage.num_elements(column) * column.item_bytes for column in columns)


def samples_per_chunk(storage: Storage, columns: Iterable[Column], chunk_bytes: int) -> int:
    """How many samples of these columns take about so many bytes, on average; at least one."""
    return max(1, chunk_bytes * storage.num_samples // max(1, column_bytes(storage, columns)))


class StoredFile(io.RawIOBase):
    """One byte string as a file: a read copies, and checks, only the bytes that it gives."""

    def __init__(self, storage: Storage, column: Column, index: int, size: int) -> None:
        self._storage, self._column, self._index = storage, column, index
        self._place = 0
        self.size = size
        self.num_read = 0
        """Bytes given so far."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, counted from the beginning, from here, or from the end."""
        self._place = max(0, offset + (0, self._place, self.size)[whence])
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill as much of a buffer as there are bytes left."""
        size = max(0, min(len(buffer), self.size - self._place))
        spans = Spans(*(np.array([number]) for number in (self._index, self._place, size, 0)))
        self._storage.read_spans(self._column, spans, np.frombuffer(buffer, np.uint8, size))
        self._place += size
        self.num_read += size
        return size


FILE, SIZE, FIRST_COLUMN = 0, 1, 2
VALUES, OFFSETS, COUNT, STATE, VALUE_FLAGS, OFFSET_FLAGS, COLUMN_WIDTH = 0, 1, 2, 3, 4, 5, 6
ABSENT, OPEN, READY = 0, 1, 2


class Table:
    """Addresses of every column of every shard, and the objects that keep them valid."""

    __slots__ = ("held", "rows")

    def __init__(self, rows: NDArray[np.int64], held: dict[int, object]) -> None:
        self.rows = rows
        self.held = held

    @classmethod
    def empty(cls, num_shards: int, num_columns: int) -> Table:
        """A table in which no shard is open."""
        return cls(np.zeros((num_shards, FIRST_COLUMN + COLUMN_WIDTH * num_columns), np.int64), {})


class InMemory(Protocol):
    """Columns that have addresses."""

    slots: dict[str, int]
    starts: NDArray[np.int64]
    """Index of the first sample of each shard, and finally the number of samples."""
    value_starts: dict[str, NDArray[np.int64]]
    """The same for the elements of each column."""

    @property
    def table(self) -> Table:
        """Where the columns are now; a reader keeps a reference, as it may be replaced by the next time."""
        ...

    def prepare(self, column: Column, index: int, part: tuple[int, int] | None = None) -> None:
        """Open and check what one sample needs, or only some of its elements; or raise if something is wrong."""
        ...

    def prepare_elements(self, column: Column, begin: int, end: int) -> None:
        """The same for elements `begin` to `end` of a column, whatever samples they belong to."""
        ...

    def sample_length(self, column: Column, index: int) -> int:
        """Elements of one ragged sample."""
        ...


def column_slots(schema: Schema) -> dict[str, int]:
    """Where the numbers of each column begin in a row of a table."""
    return {name: FIRST_COLUMN + COLUMN_WIDTH * place for place, name in enumerate(schema.stored)}


def nest(column: Column, parts: Iterable[Ragged], where: object) -> Ragged:
    """A ragged column from what is stored of it.

    Raises:
        FormatError: what is stored does not fit together.
    """
    stored = tuple(parts)
    if len(stored) == 1:
        return stored[0]
    try:
        return join_parts(*stored)
    except ValueError as error:
        raise FormatError(
            f"{where}: column {column.name!r}: {error}. The data was not written by Penstock, or was changed; prepare "
            "it again."
        ) from None

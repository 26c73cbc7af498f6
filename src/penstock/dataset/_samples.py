"""The samples that a dataset shows, where they are stored: what row sources read from.

A dataset shows all samples of a storage in order, or those that its selections pick. This module knows the
difference, so that row sources need not: index in the dataset in, bytes of the storage out. Whole datasets cost
nothing; picked samples cost 8 bytes each, those of a split 4, computed when first needed. Single samples and whole
columns are read here too.

A selection is a small recipe that any process can apply again: a list of indices, or a part of a split (`_selections`).

What identifies a sample wherever it is stored: a 64-bit key, equal for samples that belong together.

    by="content"     the hash of what it holds, as `prepare` stores it; computed where none is stored
    by="file"        the hash of the path of the file that it was prepared from
    by=(names, …)    the hash of these columns

Keys never depend on the index, on other samples or on shards. Stored hashes are read as they are needed; what is
computed is kept, 8 bytes a sample, as long as a dataset of this storage is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import SchemaError
from penstock.identity import digest
from penstock.schema import HASH_COLUMN, Column, Ragged, Schema
from penstock.shards import (
    Provenance,
    Storage,
    column_bytes,
    content_columns,
    from_front,
    hash_samples,
    hash_texts,
    read_samples,
    samples_per_chunk,
)

By = Literal["content", "index", "file"] | tuple[str, ...]
"""What a split goes by; names are columns, and an index is not a key."""

# Read once, at a few GB/s: half a minute or so. With more, the user should choose.
MAX_HASHED_BYTES = 64 << 30
_CHUNK_BYTES = 64 << 20
_WORTH_LOGGING = 1 << 30

_log = logging.getLogger(__name__)


@runtime_checkable
class KeyedStorage(Protocol):
    """A storage that has its own keys for its samples."""

    def sample_keys(self) -> SampleKeys:
        """The keys of its samples."""
        ...


class SampleKeys:
    """Keys of the samples of one storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._computed: dict[By, NDArray[np.uint64]] = {}

    @functools.cached_property
    def provenance(self) -> Provenance:
        """Where the samples came from."""
        return Provenance(self._storage)

    def of(self, by: By, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Keys of stored samples."""
        assert by != "index"
        schema = self._storage.schema
        if by == "file":
            return self._of_files[self.provenance.files_of(indices)]
        if by == "content" and HASH_COLUMN in schema:
            keys = np.empty(len(indices), np.uint64)
            self._storage.read_fixed(schema[HASH_COLUMN], indices, keys)
            return keys
        if by not in self._computed:
            self._computed[by] = self._hash(content_columns(schema) if by == "content" else by)
        return self._computed[by][indices]

    def origin(self, index: int) -> str | None:
        """File and row that a stored sample was prepared from; None when the dataset does not say."""
        return self.provenance.origin(index)

    def check(self, by: By) -> None:
        """Refuse a `by` for which there are no keys, before anything is read.

        Raises:
            SchemaError: there is no such column.
            ValueError: nothing says which file a sample is from, or too much would have to be read.
        """
        if by == "file":
            self.provenance.check_complete()
        elif isinstance(by, tuple):
            self._storage.schema.shown.select(by)
        elif by == "content" and HASH_COLUMN not in self._storage.schema and self._content_bytes > MAX_HASHED_BYTES:
            raise ValueError(
                f"split() would have to read all {self._content_bytes >> 30:,} GiB: no hashes of samples are stored. "
                "Prepare the data again, which stores them, or name columns to split by: by='user'. by='index' goes by "
                "a sample's place, and moves samples to other parts whenever one before them is removed."
            )

    @functools.cached_property
    def _of_files(self) -> NDArray[np.uint64]:
        return hash_texts(self.provenance.files)

    @property
    def _content_bytes(self) -> int:
        schema = self._storage.schema
        return column_bytes(self._storage, [schema[name] for name in content_columns(schema)])

    def _hash(self, names: tuple[str, ...]) -> NDArray[np.uint64]:
        """Hashes of all samples, some megabytes at a time."""
        storage, columns = self._storage, [self._storage.schema[name] for name in names]
        num_bytes = column_bytes(storage, columns)
        if num_bytes > _WORTH_LOGGING:
            _log.info("Hashing %d MB of %s to tell samples apart", num_bytes >> 20, ", ".join(names))
        step = samples_per_chunk(storage, columns, _CHUNK_BYTES)
        hashes = np.empty(storage.num_samples, np.uint64)
        for begin in range(0, len(hashes), step):
            indices = np.arange(begin, min(begin + step, len(hashes)))
            hashes[begin : begin + step] = hash_samples([read_samples(storage, each, indices) for each in columns])
        return hashes


def keys_of(storage: Storage) -> SampleKeys:
    """The keys of a storage's samples."""
    return storage.sample_keys() if isinstance(storage, KeyedStorage) else SampleKeys(storage)


Sample = dict[str, Any]
Columns = dict[str, NDArray[Any] | Ragged]

# A copy of this size costs about a microsecond; a view keeps the whole map alive.
_COPY_BYTES = 16 << 10


class Selection(Protocol):
    """A recipe that picks samples out of those before it."""

    def indices(self, before: Samples) -> NDArray[np.integer[Any]]:
        """Which of the samples before it remain, in order."""
        ...

    @property
    def identity(self) -> str:
        """What distinguishes this recipe from another."""
        ...

    def to_json(self) -> list[Any]:
        """The recipe for a plan file; `ValueError` when a file cannot hold it."""
        ...


@dataclass(frozen=True, eq=False)
class Take:
    """These samples, in this order."""

    chosen: NDArray[np.int64]

    def indices(self, before: Samples) -> NDArray[np.int64]:
        return from_front(self.chosen, len(before))

    @functools.cached_property
    def identity(self) -> str:
        return "take " + digest(self.chosen.view(np.uint8).data)  # 1 GB/s, so only once

    def to_json(self) -> list[Any]:
        raise ValueError(
            "A plan over take() or filter() holds a list of indices; write the samples as a dataset first."
        )


class Samples:
    """Samples of a storage, numbered as a dataset shows them."""

    def __init__(
        self, storage: Storage, selections: tuple[Selection, ...], schema: Schema, keys: SampleKeys | None = None
    ) -> None:
        self.storage = storage
        self.selections = selections
        self.schema = schema
        """The columns that the dataset shows."""
        self.keys = keys if keys is not None else keys_of(storage)
        """Keys of stored samples; shared by all datasets over one storage."""
        self.table: tuple[Any, Any] | None = None
        """What the last sample() or balance() made of all samples, for the stages that follow it."""

    def __len__(self) -> int:
        return self.storage.num_samples if self.chosen is None else len(self.chosen)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the samples and their order, whichever columns are shown."""
        return self.digest()

    def digest(self, *more: str) -> str:
        """Identity of the samples, their order, and `more` about them."""
        parts = [self.storage.fingerprint, *(selection.identity for selection in self.selections), *more]
        return digest("\n".join(parts))

    @property
    def are_whole(self) -> bool:
        """Whether every stored sample is here, in stored order."""
        return self.chosen is None

    def locate(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index in the storage of each sample; the indices are trusted."""
        return indices if self.chosen is None else self.chosen[indices].astype(np.int64, copy=False)

    def locate_checked(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Index in the storage of each sample that a caller asks for; negative ones count from the end.

        Raises:
            IndexError: an index is out of range. For a whole storage, the read that follows raises it.
            TypeError: not a list of integers.
        """
        wanted = as_indices(indices)
        try:
            return self.locate(wanted)
        except IndexError:
            raise IndexError(f"An index is out of range for {len(self):,} samples.") from None

    def locate_one(self, index: int) -> int:
        """Index of one sample in the storage; negative indices count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"Index {index} is out of range for {len(self):,} samples.")
        return index % len(self) if self.chosen is None else int(self.chosen[index])

    def origin(self, index: int) -> str | None:
        """File and row that a sample was prepared from; None when the dataset does not say."""
        return self.keys.origin(self.locate_one(index))

    def describe(self, row: int, index: int) -> str:
        """A row that is a sample, in words, for errors."""
        origin = self.origin(index)
        return f"row {row:,} (sample {index:,}{f', from {origin}' if origin else ''})"

    def lengths(self, column: Column) -> NDArray[np.int64]:
        """Lengths of all samples of a ragged column."""
        lengths = self.storage.lengths(column, 0, self.storage.num_samples)
        return lengths if self.chosen is None else lengths[self.chosen]

    def lengths_between(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of samples `begin` to `end` of a ragged column."""
        if self.chosen is None:
            return self.storage.lengths(column, begin, end)
        return self.storage.lengths_of(column, self.locate(np.arange(begin, end)))

    def will_need(self, columns: Iterable[Column], begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` are needed soon; picked samples are left to it."""
        if self.chosen is None:
            for column in columns:
                self.storage.will_need(column, begin, end)

    def dont_need(self, columns: Iterable[Column], begin: int, end: int) -> None:
        """Tell the kernel that samples `begin` to `end` are no longer needed; picked samples are left to it."""
        if self.chosen is None:
            for column in columns:
                self.storage.dont_need(column, begin, end)

    @functools.cached_property
    def chosen(self) -> NDArray[np.integer[Any]] | None:
        """Index in the storage of each sample; None when all of them are shown in order."""
        if not self.selections:
            return None
        before = Samples(self.storage, self.selections[:-1], self.schema, self.keys)
        picked = self.selections[-1].indices(before)
        return picked if before.chosen is None else before.chosen[picked]


def as_indices(indices: ArrayLike) -> NDArray[np.int64]:
    """A caller's indices, as one contiguous list.

    Raises:
        TypeError: not a list of integers.
        IndexError: a number too large for any index.
    """
    array = np.asarray(indices)
    if array.dtype == np.int64 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(
            f"Indices must be a list of integers; these are {array.dtype} of shape {list(array.shape)}.{_hint(array)}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise IndexError(f"Index {array.max()} is out of range.")
    return np.ascontiguousarray(array, np.int64)


def _hint(array: NDArray[np.generic]) -> str:
    if array.dtype == np.bool_:
        return " Use ds.filter(mask) for a mask."
    if array.dtype.kind in "iu" and not array.ndim:
        return f" The first {array} are range({array})."
    if array.dtype.kind != "U" or array.ndim:
        return ""
    name = str(array)
    return f" A whole column is ds.select_columns([{name!r}])[:][{name!r}]."


def read_sample(samples: Samples, index: int) -> Sample:
    """One sample; a negative index counts from the end."""
    stored = samples.locate_one(index)
    columns = samples.schema.columns
    return {column.name: _present(column, samples.storage.value(column, stored)) for column in columns}


def read_columns(samples: Samples, indices: ArrayLike, out: Mapping[str, NDArray[Any]] | None) -> Columns:
    """Many samples; fixed columns that `out` offers an array for are read into it.

    Raises:
        IndexError: an index is out of range.
        SchemaError: an array in `out` does not fit its column, or there is no such column.
    """
    wanted = samples.locate_checked(indices)
    for name in out or {}:
        samples.schema[name]
    columns: Columns = {}
    for column in samples.schema.columns:
        given = out.get(column.name) if out is not None else None
        if not column.is_ragged:
            columns[column.name] = filled = _output(column, len(wanted), given)
            samples.storage.read_fixed(column, wanted, filled)
        elif given is None:
            columns[column.name] = samples.storage.read_ragged(column, wanted)
        else:
            raise SchemaError(f"Column {column.name!r} is ragged; its size is not known beforehand.")
    return columns


def _output(column: Column, num_samples: int, given: NDArray[Any] | None) -> NDArray[Any]:
    """What a fixed column is read into: the array that is given for it, or a new one."""
    shape = (num_samples, *column.shape)
    if given is None:
        return np.empty(shape, column.dtype)
    if given.shape != shape or not _can_hold(column.dtype, given.dtype) or not given.flags.writeable:
        access = "" if given.flags.writeable else "read-only "
        raise SchemaError(
            f"Column {column.name!r}: out is {access}{given.dtype} of shape {list(given.shape)}; "
            f"writeable {column.dtype} (or wider) of shape {list(shape)} is needed."
        )
    return given


def _present(column: Column, value: Any) -> Any:
    """What a caller gets for one value: bytes, a list of them, a number, a small copy, or a large view."""
    if column.kind == "byte_strings":
        return list(value)
    if column.kind == "bytes":
        return value.tobytes()
    if value.ndim == 0:
        return value[()]
    return value.copy() if value.nbytes <= _COPY_BYTES else value


@functools.cache
def _can_hold(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    return np.can_cast(stored, wanted, "safe")

"""What identifies a sample wherever it is stored: a 64-bit key, equal for samples that belong together.

    by="content"     the hash of what it holds, as `prepare` stores it; computed where none is stored
    by="file"        the hash of the path of the file that it was prepared from
    by=(names, …)    the hash of these columns

Keys never depend on the index, on other samples or on shards. Stored hashes are read as they are needed; what is
computed is kept, 8 bytes a sample, as long as a dataset of this storage is.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.schema import HASH_COLUMN
from penstock.shards import (
    Provenance,
    Storage,
    column_bytes,
    content_columns,
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

"""Dataset: random access to samples by index, whatever they are stored in.

A dataset is an origin (where the data is), a few selections (which of its samples), and columns. It
opens nothing that is not asked for, pickles as that description, and gives whole batches by one
vectorised read per column. It works as a map-style dataset in torch's `DataLoader` by duck typing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import SchemaError
from penstock.plan._origin import ArraysOrigin, Origin
from penstock.plan._provenance import Provenance
from penstock.plan._selection import Selection, Take, split_parts
from penstock.plan._staged import Staged
from penstock.plan._stages import Stage
from penstock.plan._stream import SelectedStream, StorageStream, Stream
from penstock.schema import Column, Ragged, Schema
from penstock.shards import Storage

if TYPE_CHECKING:
    from penstock.plan._plan import Plan

Sample = dict[str, Any]
Columns = dict[str, NDArray[Any] | Ragged]

# A copy of this size costs about a microsecond; a view keeps the whole map alive.
_COPY_BYTES = 16 << 10


class Dataset(Staged):
    """Samples by index. `penstock.open` and `penstock.from_arrays` make one.

    >>> import numpy as np, penstock
    >>> ds = penstock.from_arrays({"x": np.arange(10), "y": np.arange(10) * 2})
    >>> len(ds), int(ds[3]["y"]), ds[[5, 1, 1]]["x"].tolist()
    (10, 6, [5, 1, 1])
    """

    def __init__(
        self,
        origin: Origin,
        selections: tuple[Selection, ...] = (),
        columns: tuple[str, ...] | None = None,
        *,
        fingerprint: str | None = None,
        storage: Storage | None = None,
    ) -> None:
        self._origin = origin
        self._selections = selections
        self.storage = storage if storage is not None else origin.open(fingerprint)
        self.schema: Schema = self.storage.schema.select(columns) if columns is not None else self.storage.schema

    def __len__(self) -> int:
        return self.storage.num_samples if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sample: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> Columns: ...
    def __getitem__(self, index: SupportsIndex | slice | Sequence[int] | NDArray[Any]) -> Sample | Columns:
        """One sample as a dict, or a dict of columns for a slice or several indices.

        Small values are copies; large ones are read-only views of the file.
        """
        if isinstance(index, slice):
            return self.read(np.arange(*index.indices(len(self))))
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self._sample(index.__index__())
        return self.read(np.asarray(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """A list of samples by one vectorised read: what torch's `DataLoader` asks for."""
        columns = self.read(indices)
        return [{name: values[place] for name, values in columns.items()} for place in range(len(indices))]

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def read(self, indices: ArrayLike, out: Mapping[str, NDArray[Any]] | None = None) -> Columns:
        """Samples `indices` as a dict of columns, by one gather per column.

        Args:
            indices: In any order, repeated as you like; negative ones count from the end.
            out: Arrays to fill, for some or all fixed columns. Their dtype may be wider than the stored one.

        Raises:
            IndexError: an index is out of range.
            SchemaError: an array in `out` does not fit its column, or there is no such column.
        """
        wanted = self._resolve(indices)
        for name in out or {}:
            self.schema[name]
        columns: Columns = {}
        for column in self.schema.columns:
            given = out.get(column.name) if out is not None else None
            if column.is_ragged:
                if given is not None:
                    raise SchemaError(f"Column {column.name!r} is ragged; how much it takes is not known beforehand.")
                columns[column.name] = self.storage.read_ragged(column, wanted)
            else:
                columns[column.name] = self._read_fixed(column, wanted, given)
        return columns

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Length of every sample of a ragged column, read from the index alone."""
        found = self.schema[column]
        if not found.is_ragged:
            raise SchemaError(f"Column {column!r} is {found.spec}: every sample has the same shape.")
        lengths = self.storage.lengths(found, 0, self.storage.num_samples)
        return lengths if self._chosen is None else lengths[self._chosen]

    def select_columns(self, names: Iterable[str]) -> Dataset:
        """The same samples with only these columns."""
        return self._derive(columns=tuple(self.schema.select(names)))

    def take(self, indices: ArrayLike) -> Dataset:
        """Only these samples, in this order. It keeps 8 bytes per sample, and so does its pickle."""
        taken = self._derive(selection=Take(_as_indices(indices).copy()))  # the caller may change theirs
        len(taken)  # an index out of range is an error here, not at the first read
        return taken

    def filter(self, mask: ArrayLike) -> Dataset:
        """Only the samples for which `mask`, one bool per sample, is true."""
        kept = np.asarray(mask)
        if kept.dtype != np.bool_ or kept.shape != (len(self),):
            raise ValueError(f"The mask must be {len(self):,} bools; it is {kept.dtype} of shape {list(kept.shape)}.")
        return self._derive(selection=Take(np.flatnonzero(kept)))

    def split(self, fractions: Mapping[str, float], *, seed: int) -> dict[str, Dataset]:
        """Cut into parts by chance: about these fractions, every sample in exactly one.

        A sample's part depends on its index and `seed` alone, so appending data moves no sample.
        """
        parts = split_parts(fractions, seed)
        return {name: self._derive(selection=part) for name, part in parts.items()}

    def in_memory(self) -> Dataset:
        """The same samples, loaded into RAM now."""
        arrays = self.read(np.arange(len(self)))
        return Dataset(ArraysOrigin(arrays))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the data: which storage, which samples, which columns."""
        parts = [
            self.storage.fingerprint,
            *(s.identity for s in self._selections),
            repr(self.schema.to_json()),
        ]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def rows_fingerprint(self) -> str:
        """Identity of the samples and their order, whichever columns are shown."""
        parts = [self.storage.fingerprint, *(selection.identity for selection in self._selections)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    @property
    def described_origin(self) -> Origin:
        """Where the data is, as it was opened."""
        return self._origin

    @property
    def selections(self) -> tuple[Selection, ...]:
        """Which of the stored samples are here, as recipes."""
        return self._selections

    def select(self, selection: Selection) -> Dataset:
        """The samples that a recipe picks."""
        return self._derive(selection=selection)

    @property
    def is_whole(self) -> bool:
        """Whether every stored sample is here, in stored order."""
        return self._chosen is None

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What is known beside the data: tokenizer, packing, what was skipped."""
        return self.storage.attributes

    def origin(self, index: int) -> str | None:
        """File and row that a sample was prepared from; None when the dataset does not say."""
        stored = self.storage_indices(np.array([index]))
        return self._provenance.origin(int(stored[0]))

    def storage_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where samples are in the storage."""
        return indices if self._chosen is None else self._chosen[indices]

    def lengths_between(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of samples `begin` to `end` of a ragged column."""
        if self._chosen is None:
            return self.storage.lengths(column, begin, end)
        return self.storage.lengths_of(column, self._chosen[begin:end])

    def announce(self, begin: int, end: int, columns: tuple[str, ...]) -> None:
        """Tell the kernel that samples `begin` to `end` are needed soon; chosen samples are left to it."""
        if self._chosen is None:
            for name in columns:
                self.storage.announce(self.schema[name], begin, end)

    def release(self, begin: int, end: int, columns: tuple[str, ...]) -> None:
        """Tell the kernel that samples `begin` to `end` are done with; chosen samples are left to it."""
        if self._chosen is None:
            for name in columns:
                self.storage.release(self.schema[name], begin, end)

    def stream(self, column: Column) -> Stream:
        """A column's samples, one behind the other."""
        if self._chosen is None:
            return StorageStream(self.storage, column)
        return SelectedStream(self.storage, column, self._chosen)

    def as_plan(self) -> Plan:
        """A plan with no stages yet."""
        from penstock.plan._plan import Plan  # the one place where a dataset knows of plans

        return Plan(self)

    def _add(self, stage: Stage) -> Plan:
        return self.as_plan()._add(stage)

    @functools.cached_property
    def _provenance(self) -> Provenance:
        return Provenance(self.storage)

    def __reduce__(self) -> tuple[Any, ...]:
        columns = tuple(self.schema)
        return _restore, (self._origin, self._selections, columns, self.storage.fingerprint)

    def __repr__(self) -> str:
        return f"Dataset({self._origin}: {len(self):,} samples; {self.schema})"

    @functools.cached_property
    def _chosen(self) -> NDArray[np.int64] | None:
        """Index in the storage of each sample, or None when they are all there in order."""
        chosen: NDArray[np.int64] | None = None
        for selection in self._selections:
            num_samples = self.storage.num_samples if chosen is None else len(chosen)
            picked = selection.indices(num_samples)
            chosen = picked if chosen is None else chosen[picked]
        return chosen

    def _resolve(self, indices: ArrayLike) -> NDArray[np.int64]:
        wanted = _as_indices(indices)
        if self._chosen is None:
            return wanted
        try:
            return self._chosen[wanted]
        except IndexError:
            raise IndexError(f"An index is out of range for {len(self):,} samples.") from None

    def _sample(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Index {index} is out of range for {len(self):,} samples.")
        place = index % len(self) if self._chosen is None else int(self._chosen[index])
        return {column.name: _present(column, self.storage.value(column, place)) for column in self.schema.columns}

    def _read_fixed(self, column: Column, wanted: NDArray[np.int64], out: NDArray[Any] | None) -> NDArray[Any]:
        shape = (len(wanted), *column.shape)
        if out is None:
            out = np.empty(shape, column.dtype)
        elif out.shape != shape or not _can_hold(column.dtype, out.dtype) or not out.flags.writeable:
            access = "" if out.flags.writeable else "read-only "
            raise SchemaError(
                f"Column {column.name!r}: out is {access}{out.dtype} of shape {list(out.shape)}; "
                f"writeable {column.dtype} (or wider) of shape {list(shape)} is needed."
            )
        self.storage.read_fixed(column, wanted, out)
        return out

    def _derive(self, *, selection: Selection | None = None, columns: tuple[str, ...] | None = None) -> Dataset:
        selections = self._selections if selection is None else (*self._selections, selection)
        names = tuple(self.schema) if columns is None else columns
        return Dataset(self._origin, selections, names, storage=self.storage)


def _restore(origin: Origin, selections: tuple[Selection, ...], columns: tuple[str, ...], fingerprint: str) -> Dataset:
    return Dataset(origin, selections, columns, fingerprint=fingerprint)


def _as_indices(indices: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(indices)
    if array.dtype == np.int64 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        hint = " Use ds.filter(mask) for a mask." if array.dtype == np.bool_ else ""
        raise TypeError(
            f"Indices must be a list of integers; these are {array.dtype} of shape {list(array.shape)}.{hint}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise IndexError(f"Index {array.max()} is out of range.")
    return np.ascontiguousarray(array, np.int64)


def _present(column: Column, value: NDArray[Any]) -> Any:
    """What a person gets for one value: bytes, a number, a small copy, or a large view."""
    if column.kind == "bytes":
        return value.tobytes()
    if value.ndim == 0:
        return value[()]
    return value.copy() if value.nbytes <= _COPY_BYTES else value


@functools.cache
def _can_hold(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    return np.can_cast(stored, wanted, "safe")

"""Columns that already are arrays: in RAM, or a foreign file mapped in place.

The same interface as a dataset folder, over one shard that is always open.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.filesystem import MappedFile
from penstock.schema import Column, Ragged, Schema, common_dtype, exact_array
from penstock.shards._checksums import checksum
from penstock.shards._convert import convert_batch
from penstock.shards._gather import gather_fixed, gather_lengths, gather_ragged, gather_spans, gather_stream
from penstock.shards._storage import Spans
from penstock.shards._table import COUNT, FILE, OFFSETS, READY, SIZE, STATE, VALUES, Table, column_slots


class ArrayStorage:
    """Random access to columns held in memory.

    `file` is what they are mapped from, if anything; `identity` identifies the data without reading all of it.
    """

    def __init__(
        self,
        schema: Schema,
        columns: Mapping[str, Ragged | NDArray[Any]],
        *,
        file: MappedFile | None = None,
        identity: Callable[[], str] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.schema = schema
        self._columns = dict(columns)
        self._file = file
        self._identity = identity
        self.attributes: Mapping[str, Any] = attributes or {}
        """Attributes that the caller gave with the arrays."""
        self.num_samples = len(next(iter(self._columns.values())))
        self.starts: NDArray[np.int64] = np.array([0, self.num_samples], np.int64)
        self.slots = column_slots(schema)
        self.value_starts = {name: np.array([0, _num_elements(part)]) for name, part in self._columns.items()}
        self.table = self._build_table()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the data: schema and checksums of the contents."""
        digest = hashlib.blake2b(repr(self.schema.to_json()).encode(), digest_size=16)
        if self._identity is not None:
            digest.update(self._identity().encode())
            return digest.hexdigest()
        for values in self._columns.values():
            parts = [values.values, values.offsets] if isinstance(values, Ragged) else [values]
            for part in parts:
                digest.update(f"{part.shape} {checksum(part.reshape(-1).view(np.uint8)):08x}".encode())
        return digest.hexdigest()

    def read_fixed(self, column: Column, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy samples of a fixed column into `out`, converting to its dtype."""
        gather_fixed(self, column, indices, out)

    def read_ragged(self, column: Column, indices: NDArray[np.int64]) -> Ragged:
        """Samples of a ragged column, side by side."""
        return gather_ragged(self, column, indices)

    def read_spans(self, column: Column, spans: Spans, out: NDArray[Any]) -> None:
        """Copy parts of samples of a ragged column into the flat array `out`, converting to its dtype."""
        gather_spans(self, column, spans, out)

    def lengths_of(self, column: Column, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths of samples of a ragged column; indices must not be negative."""
        return gather_lengths(self, column, indices)

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        parts = (part.values if isinstance(part, Ragged) else part for part in self._columns.values())
        return sum(part.nbytes for part in parts)

    def provenance(self) -> Mapping[str, Any]:
        """Empty: arrays have no source files."""
        return {}

    def read_stream(self, column: Column, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy a row of consecutive elements from each of `firsts`, over the borders of samples."""
        gather_stream(self, column, firsts, out)

    def num_elements(self, column: Column) -> int:
        """Elements of a column in all samples."""
        return int(self.value_starts[column.name][-1])

    def value(self, column: Column, index: int) -> NDArray[Any]:
        """One sample of a column, read-only."""
        self._check_size()
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"Index {index} is out of range for {self.num_samples:,} samples.")
        stored = self._columns[column.name]
        if isinstance(stored, Ragged):
            index %= self.num_samples
            view = stored.values[stored.offsets[index] : stored.offsets[index + 1]]
        else:
            view = np.asarray(stored[index])
        view = view.view()
        view.flags.writeable = False
        return view

    def lengths(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of samples `begin` to `end` of a ragged column."""
        stored = self._columns[column.name]
        assert isinstance(stored, Ragged)
        return np.diff(stored.offsets[begin : end + 1])

    def announce(self, column: Column, begin: int, end: int) -> None:
        """Nothing to announce: arrays in RAM are here, and foreign files are left to the kernel."""

    def release(self, column: Column, begin: int, end: int) -> None:
        """Nothing to release: arrays stay in RAM."""

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Nothing to check: neither RAM nor foreign files carry checksums."""

    def prepare(self, column: Column, index: int) -> None:
        """Raise if the file shrank, or if a sample's offsets point outside it."""
        self._check_size()
        stored = self._columns[column.name]
        if isinstance(stored, Ragged):
            begin, end = stored.offsets[index : index + 2].tolist()
            if not 0 <= begin <= end <= len(stored.values):
                raise FormatError(f"Column {column.name!r}: the offsets of sample {index:,} point outside its values.")

    def prepare_elements(self, column: Column, begin: int, end: int) -> None:
        """Raise if the file shrank."""
        self._check_size()

    def sample_length(self, column: Column, index: int) -> int:
        """Elements of one ragged sample."""
        return int(self.lengths(column, index, index + 1)[0])

    def _check_size(self) -> None:
        if self._file is not None:
            self._file.check_size()

    def _build_table(self) -> Table:
        table = Table.empty(1, len(self.schema))
        row = table.rows[0]
        row[FILE], row[SIZE] = (-1, 0) if self._file is None else (self._file.descriptor, self._file.size)
        for column in self.schema.columns:
            slot, stored = self.slots[column.name], self._columns[column.name]
            row[slot + STATE] = READY
            if isinstance(stored, Ragged):
                row[slot + VALUES], row[slot + OFFSETS] = (
                    stored.values.ctypes.data,
                    stored.offsets.ctypes.data,
                )
                row[slot + COUNT] = len(stored.values)
            else:
                row[slot + VALUES] = stored.ctypes.data
        return table


def _num_elements(stored: Ragged | NDArray[Any]) -> int:
    return len(stored.values) if isinstance(stored, Ragged) else len(stored)


def storage_of_arrays(arrays: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> ArrayStorage:
    """Storage of columns given as arrays, `Ragged`, or lists of arrays or byte strings, with optional attributes.

    Raises:
        SchemaError: the columns differ in length, or one cannot be stored.
    """
    if not arrays:
        raise SchemaError("A dataset needs at least one column.")
    schema = Schema.parse({name: _spec(name, value) for name, value in arrays.items()})
    columns = {column.name: _own(column, arrays[column.name]) for column in schema.columns}
    counts = {name: len(value) for name, value in columns.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(f"Every column must have the same number of samples; these have {counts}.")
    return ArrayStorage(schema, columns, attributes=attributes)


def _own(column: Column, value: Any) -> Ragged | NDArray[Any]:
    """`value` as contiguous arrays, which kernels can read by address."""
    stored = convert_batch(column, value)
    if isinstance(stored, Ragged):
        values, offsets = np.ascontiguousarray(stored.values), np.ascontiguousarray(stored.offsets)
        return Ragged(values, offsets, stored.is_bytes)
    return np.ascontiguousarray(stored)


def _spec(name: str, value: Any) -> str:
    """Type of the column that can hold `value`."""
    if isinstance(value, Ragged):
        values = value.values
        return "bytes" if value.is_bytes else Column(name, values.dtype, values.shape[1:], "ragged").spec
    if isinstance(value, (list, tuple)) and len(value):
        if all(isinstance(sample, bytes) for sample in value):
            return "bytes"
        samples = [_as_array(name, sample) for sample in value]
        if samples[0].ndim and len({sample.shape for sample in samples}) > 1:
            # An empty list is an array of float64, which says nothing about the column.
            telling = [sample for sample in samples if sample.size] or samples
            return Column(name, common_dtype(telling), samples[0].shape[1:], "ragged").spec
    array = _as_array(name, value)
    if array.ndim == 0:
        raise SchemaError(f"Column {name!r} is a single value; a column has one per sample.")
    return Column(name, array.dtype, array.shape[1:]).spec


def _as_array(name: str, value: Any) -> NDArray[Any]:
    try:
        return exact_array(value)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"Column {name!r}: this value cannot be converted to an array: {error}") from None

"""Rows that are samples: what a plan reads without window() and pack()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.plan._accounts import DocumentTrace, Mixing, trace_document
from penstock.plan._epochs import Epochs, ReadAhead, even_windows
from penstock.plan._mixing import measure_mixing
from penstock.plan._rows import Batch, OutputArrays, Rows, RowSource, offered
from penstock.plan._samples import Samples
from penstock.plan._stages import Cast, Shuffle
from penstock.schema import Schema, dtype_from_name, dtype_name
from penstock.shards import Storage

_LARGE_SAMPLE_BYTES = 64 << 10
_SMALL_BYTES = 16 << 30


class SampleRows(RowSource):
    """Each sample is a row; keys and dtypes are the columns'."""

    makes_labels = False

    def __init__(self, samples: Samples, casts: tuple[Cast, ...], shuffle: Shuffle | None) -> None:
        self.samples = samples
        dtypes = _cast_dtypes(samples.schema, casts)
        columns = samples.schema.columns
        self._columns = [(column, dtypes.get(column.name, column.dtype)) for column in columns]
        self.epochs = Epochs(even_windows(len(samples), _sample_bytes(samples.storage)), shuffle)
        self._read_ahead = ReadAhead(self.epochs, samples, columns, self.epochs.row_starts)
        self.num_rows = self.epochs.num_rows
        self.is_rectangular = not any(column.is_ragged for column in columns)

    @property
    def order_identity(self) -> Any:
        """Samples of this dataset in this order."""
        return ["samples", self.samples.fingerprint, self.epochs.identity]

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """Samples by one gather per column."""
        stored = self.samples.locate(self.epochs.find(rows))
        storage = self.samples.storage
        batch: Batch = {}
        for column, dtype in self._columns:
            if column.is_ragged:
                if out is not None and column.name in out:
                    raise SchemaError(f"out[{column.name!r}]: the column is ragged; its size is not known beforehand.")
                batch[column.name] = storage.read_ragged(column, stored)
            else:
                batch[column.name] = offered(out, column.name, (len(rows), *column.shape), dtype)
                storage.read_fixed(column, stored, batch[column.name])
        return batch

    def output_arrays(self, num_rows: int) -> OutputArrays:
        """The fixed columns."""
        fixed = [(column, dtype) for column, dtype in self._columns if not column.is_ragged]
        return {column.name: ((num_rows, *column.shape), dtype_name(dtype)) for column, dtype in fixed}

    def announce(self, row: int) -> None:
        """The storage windows of the row's group, and of the next."""
        self._read_ahead.announce(row)

    def release(self, row: int) -> None:
        """The storage windows of the groups before the row's."""
        self._read_ahead.release(row)

    def mixing(self) -> list[Mixing]:
        """Of samples."""
        return measure_mixing(self.samples, self.epochs, self.epochs.row_starts)

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The sample behind each row."""
        found = self.epochs.find(rows).tolist()
        return [trace_document(self.samples, source, row, 0, sample, 0, 1) for row, sample in enumerate(found)]

    def describe(self, row: int) -> str:
        """Which sample a row is, and what it was prepared from."""
        (sample,) = self.epochs.find(np.array([row])).tolist()
        origin = self.samples.origin(sample)
        return f"row {row:,} (sample {sample:,}{f', from {origin}' if origin else ''})"


def is_cheap_at_random(storage: Storage) -> bool:
    """Whether a full shuffle costs little: samples are large enough to be read alone, or all fit into memory.

    It depends on the data alone, so that every machine gets the same order.
    """
    sample_bytes = _sample_bytes(storage)
    return sample_bytes >= _LARGE_SAMPLE_BYTES or sample_bytes * storage.num_samples <= _SMALL_BYTES


def _sample_bytes(storage: Storage) -> int:
    """Mean size of a sample, from the data alone: files hold padding that depends on how it was cut into shards."""
    columns = storage.schema.shown.columns
    fixed = sum(column.item_bytes for column in columns if not column.is_ragged)
    ragged = sum(storage.num_elements(column) * column.item_bytes for column in columns if column.is_ragged)
    return max(1, fixed + ragged // max(1, storage.num_samples))


def _cast_dtypes(schema: Schema, casts: tuple[Cast, ...]) -> dict[str, np.dtype[Any]]:
    dtypes: dict[str, np.dtype[Any]] = {}
    for name, text in [item for cast in casts for item in cast.dtypes]:
        column, dtype = schema[name], dtype_from_name(text)
        if column.is_ragged:
            raise SchemaError(f"cast({name}={text!r}): {name!r} is ragged; only fixed columns are cast in the gather.")
        if not np.can_cast(column.dtype, dtype, "safe"):
            raise SchemaError(f"cast({name}={text!r}): {column.dtype} does not fit; cast to a wider dtype.")
        dtypes[name] = dtype
    return dtypes

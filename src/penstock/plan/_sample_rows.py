"""Rows that are samples: what a plan reads without window() and pack()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.plan._dataset import Dataset
from penstock.plan._epochs import Epochs, even_windows
from penstock.plan._read_ahead import ReadAhead
from penstock.plan._rows import Batch, Rows, offered
from penstock.plan._stages import Cast, Shuffle
from penstock.schema import dtype_from_name, dtype_name
from penstock.shards import Storage


class SampleRows:
    """Each sample is a row; keys and dtypes are the columns'."""

    makes_labels = False

    def __init__(self, dataset: Dataset, casts: tuple[Cast, ...], shuffle: Shuffle | None) -> None:
        self.dataset = dataset
        dtypes = _cast_dtypes(dataset, casts)
        self._columns = [(column, dtypes.get(column.name, column.dtype)) for column in dataset.schema.columns]
        self.epochs = Epochs(even_windows(len(dataset), _sample_bytes(dataset.storage)), shuffle)
        self._read_ahead = ReadAhead(self.epochs, dataset.stored, dataset.schema.columns, self.epochs.row_starts)
        self.num_rows = self.epochs.num_rows
        self.is_rectangular = not any(column.is_ragged for column in dataset.schema.columns)

    @property
    def order_identity(self) -> Any:
        """Samples of this dataset in this order."""
        return ["samples", self.dataset.rows_fingerprint, self.epochs.identity]

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """Samples by one gather per column."""
        stored = self.dataset.stored.locate(self.epochs.find(rows))
        storage = self.dataset.storage
        batch: Batch = {}
        for column, dtype in self._columns:
            if column.is_ragged:
                if out is not None and column.name in out:
                    raise SchemaError(f"out[{column.name!r}]: the column is ragged; what it takes is not known before.")
                batch[column.name] = storage.read_ragged(column, stored)
            else:
                batch[column.name] = offered(out, column.name, (len(rows), *column.shape), dtype)
                storage.read_fixed(column, stored, batch[column.name])
        return batch

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """The fixed columns."""
        fixed = [(column, dtype) for column, dtype in self._columns if not column.is_ragged]
        return {column.name: ((num_rows, *column.shape), dtype_name(dtype)) for column, dtype in fixed}

    def announce(self, row: int) -> None:
        """The storage windows of the row's group, and of the next."""
        self._read_ahead.announce(row)

    def release(self, row: int) -> None:
        """The storage windows of the groups before the row's."""
        self._read_ahead.release(row)

    def sample_indices(self, rows: Rows) -> NDArray[np.int64]:
        """The sample behind each row."""
        return self.epochs.find(rows)


def _sample_bytes(storage: Storage) -> int:
    """Mean size of a sample, from the data alone: files hold padding that depends on how it was cut into shards."""
    columns = storage.schema.columns
    fixed = sum(column.item_bytes for column in columns if not column.is_ragged)
    ragged = sum(storage.num_elements(column) * column.item_bytes for column in columns if column.is_ragged)
    return max(1, fixed + ragged // max(1, storage.num_samples))


def _cast_dtypes(dataset: Dataset, casts: tuple[Cast, ...]) -> dict[str, np.dtype[Any]]:
    dtypes: dict[str, np.dtype[Any]] = {}
    for name, text in [item for cast in casts for item in cast.dtypes]:
        column, dtype = dataset.schema[name], dtype_from_name(text)
        if column.is_ragged:
            raise SchemaError(f"cast({name}={text!r}): {name!r} is ragged; only fixed columns are cast in the gather.")
        if not np.can_cast(column.dtype, dtype, "safe"):
            raise SchemaError(f"cast({name}={text!r}): {column.dtype} does not fit; cast to a wider dtype.")
        dtypes[name] = dtype
    return dtypes

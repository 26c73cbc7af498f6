"""Rows that are samples: what a plan reads without window() and pack()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.rows._accounts import DocumentTrace, Drawn, Ledger, Mixing, trace_document
from penstock.rows._rows import BatchArrays, OutputArrays, Rows, RowSource, offered
from penstock.rows._sample_orders import SampleOrder, sample_bytes
from penstock.samples import Samples
from penstock.schema import Schema, dtype_from_name, dtype_name
from penstock.shards import Storage
from penstock.stages import Cast

_LARGE_SAMPLE_BYTES = 64 << 10
_SMALL_BYTES = 16 << 30


class OrderedRows(RowSource):
    """Rows of one sample each; the order knows which one is row i, and which data comes next."""

    def __init__(self, samples: Samples, order: SampleOrder) -> None:
        self.samples, self.order, self.num_rows = samples, order, order.num_rows

    @property
    def order_identity(self) -> Any:
        """Samples of this dataset in this order."""
        return ["samples", self.samples.fingerprint, self.order.identity]

    def announce(self, row: int) -> None:
        """What the order knows."""
        self.order.announce(row)

    def release(self, row: int) -> None:
        """What the order knows."""
        self.order.release(row)

    def mixing(self) -> list[Mixing]:
        """Of samples."""
        return self.order.mixing()

    def describe(self, row: int) -> str:
        """Which sample a row is, and what it was prepared from."""
        return self.samples.describe(row, int(self.order.find(np.array([row]))[0]))


class SampleRows(OrderedRows):
    """Each sample is a row; keys and dtypes are the columns'."""

    makes_labels = False

    def __init__(self, samples: Samples, casts: tuple[Cast, ...], order: SampleOrder) -> None:
        super().__init__(samples, order)
        dtypes = _cast_dtypes(samples.schema, casts)
        columns = samples.schema.columns
        self._columns = [(column, dtypes.get(column.name, column.dtype)) for column in columns]
        self.is_rectangular = not any(column.is_ragged for column in columns)

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """Samples by one gather per column."""
        stored = self.samples.locate(self.order.find(rows))
        storage = self.samples.storage
        batch: BatchArrays = {}
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

    def ledger(self, epoch: int) -> Ledger:
        """How often samples come, where that is not once."""
        drawn = None if self.order.is_once else Drawn.of(self.order.count(epoch))
        return Ledger(num_rows=self.num_rows, drawn=drawn)

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The sample behind each row."""
        found = self.order.find(rows).tolist()
        return [trace_document(self.samples, source, row, 0, sample, 0, 1) for row, sample in enumerate(found)]


def is_cheap_at_random(storage: Storage) -> bool:
    """Whether a full shuffle costs little: samples are large enough to be read alone, or all fit into memory.

    It depends on the data alone, so that every machine gets the same order.
    """
    num_bytes = sample_bytes(storage)
    return num_bytes >= _LARGE_SAMPLE_BYTES or num_bytes * storage.num_samples <= _SMALL_BYTES


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

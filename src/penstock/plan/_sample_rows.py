"""Rows of one sample each: as it is stored, or a document padded to the longest of its batch.

What a plan reads without window() and pack(). Which sample is row i is decided by the order (`_sample_orders.py`); how
many tokens a padded row has depends on the batch that it is in. Padding is for fine-tuning and evaluation.

With `bucket`, rows of like length come together, so that padding wastes little, in an order that any row number opens.
Rows of an epoch are taken `bucket` at a time, sorted by length, cut into runs, and the runs are put in an order drawn
from the seed. A batch of as many rows as a run then holds rows of like length, and batches still come long and short by
turns. Which rows share a bucket is the order's own business: under a shuffle, other ones in each epoch. Price: the
lengths of a bucket are looked up and sorted when its first row is read; a few buckets are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples
from penstock.errors import SchemaError
from penstock.order import Permutation, derive_key
from penstock.plan._accounts import DocumentTrace, Drawn, Ledger, Mixing, trace_document
from penstock.plan._compose import DocumentRows
from penstock.plan._rows import BatchArrays, OutputArrays, Pieces, Rows, RowSource, offered
from penstock.plan._sample_orders import SampleOrder, sample_bytes
from penstock.plan._stages import Cast, Pad
from penstock.schema import Column, Schema, dtype_from_name, dtype_name, offsets_of
from penstock.shards import Storage

_LARGE_SAMPLE_BYTES = 64 << 10
_SMALL_BYTES = 16 << 30
_KEPT_BUCKETS = 16


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


class BucketedOrder(SampleOrder):
    """Another order with the rows of each bucket put in runs of like length."""

    def __init__(self, inner: SampleOrder, samples: Samples, column: Column, stage: Pad) -> None:
        assert stage.bucket is not None
        self._inner, self._samples, self._column = inner, samples, column
        self._bucket, self._run = stage.bucket, stage.run
        self.num_rows, self.num_samples, self.seed = inner.num_rows, inner.num_samples, inner.seed
        self.is_once = inner.is_once
        self._sorted = functools.lru_cache(_KEPT_BUCKETS)(self._sort)

    @property
    def identity(self) -> Any:
        """Of the inner order, and how it is bucketed."""
        return ["bucket", self._column.name, self._bucket, self._run, self._inner.identity]

    def find(self, rows: Rows) -> NDArray[np.int64]:
        """By bucket."""
        found = np.empty(len(rows), np.int64)
        epochs, places = np.divmod(rows, max(1, self.num_rows))
        buckets = places // self._bucket
        firsts = epochs * self.num_rows + buckets * self._bucket
        for first in np.unique(firsts).tolist():
            here = np.flatnonzero(firsts == first)
            found[here] = self._sorted(first)[rows[here] - first]
        return found

    def announce(self, row: int) -> None:
        """What the inner order needs."""
        self._inner.announce(row)

    def release(self, row: int) -> None:
        """What is behind the bucket."""
        self._inner.release(row - row % max(1, self.num_rows) % self._bucket)

    def mixing(self) -> list[Mixing]:
        """Of the inner order."""
        return self._inner.mixing()

    def _sort(self, first: int) -> NDArray[np.int64]:
        """The samples of the bucket that begins at a row."""
        epoch, place = divmod(first, self.num_rows)
        size = min(self._bucket, self.num_rows - place)
        samples = self._inner.find(np.arange(first, first + size))
        lengths = self._samples.storage.lengths_of(self._column, self._samples.locate(samples))
        by_length = np.argsort(lengths, kind="stable")
        num_runs = -(-size // self._run)
        key = derive_key(self.seed or 0, "bucket", epoch if self.seed is not None else 0, place)
        runs = Permutation(num_runs, key)(np.arange(num_runs))
        starts = offsets_of(np.minimum(self._run, size - runs * self._run))
        places = np.repeat(runs * self._run - starts[:-1], np.diff(starts)) + np.arange(size)
        return samples[by_length[places]]


class PaddedRows(OrderedRows, DocumentRows):
    """Each document is a row."""

    stage: Pad

    def __init__(self, samples: Samples, stage: Pad, order: SampleOrder) -> None:
        DocumentRows.__init__(self, samples, stage)
        is_bucketed = stage.bucket is not None
        OrderedRows.__init__(self, samples, BucketedOrder(order, samples, self.column, stage) if is_bucketed else order)

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The document of each row; where padding is on the left, its place depends on the batch, and 0 is given."""
        pieces = self._pieces(rows)
        found = zip(pieces.documents.tolist(), pieces.sizes.tolist(), strict=True)
        return [trace_document(self.samples, source, row, 0, one, 0, size) for row, (one, size) in enumerate(found)]

    def ledger(self, epoch: int) -> Ledger:
        """What is cut off, and how often documents come where that is not once."""
        counts = np.ones(len(self.samples), np.int64) if self.order.is_once else self.order.count(epoch)
        cut = 0
        if self.stage.length is not None:
            over = np.maximum(self.samples.lengths(self.column) - self.stage.length, 0)
            cut = int((over * counts).sum())
        drawn = None if self.order.is_once else Drawn.of(counts)
        return Ledger(num_rows=self.num_rows, tokens_truncated=cut, drawn=drawn)

    def _pieces(self, rows: Rows) -> Pieces:
        documents = self.order.find(rows)
        stored = self.samples.locate(documents)
        sizes = self.samples.storage.lengths_of(self.column, stored)
        if self.stage.length is not None:
            sizes = np.minimum(sizes, self.stage.length)
        return Pieces(np.arange(len(rows) + 1), documents, stored, np.zeros(len(rows), np.int64), sizes)

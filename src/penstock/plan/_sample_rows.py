"""Rows of one sample each: as it is stored, or a document padded to the longest of its batch.

What a plan reads without window() and pack(). Which sample is row i is decided by the order (`_sample_orders.py`); how
many tokens a padded row has depends on the batch that it is in. Padding is for fine-tuning and evaluation.

With `bucket`, rows of like length come together, so that padding wastes little, in an order that any row number opens.
Rows of an epoch are taken `bucket` at a time, sorted by length, cut into runs, and the runs are put in an order drawn
from the seed. A batch of as many rows as a run then holds rows of like length, and batches still come long and short by
turns. Which rows share a bucket is the order's own business: under a shuffle, other ones in each epoch. Price: the
lengths of a bucket are looked up and sorted when its first row is read; a few buckets are kept.

Rows that are windows of one long stream of tokens: all documents, one after the other.

Row i of the data is tokens i * length to (i + 1) * length, whatever documents they belong to, so nothing is stored to
find it. Tokens after the last whole window are in no row; the ledger counts them. The price of that comes with `trace`:
which document a token is in takes the lengths of all documents before it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples, TokenStream, mask_column, mask_stream, token_stream, windowed_column
from penstock.errors import SchemaError
from penstock.order import Permutation, derive_key
from penstock.plan._accounts import DocumentTrace, Drawn, Ledger, Mixing, trace_document
from penstock.plan._compose import DocumentRows
from penstock.plan._epochs import Epochs, even_windows, measure_mixing
from penstock.plan._rows import BatchArrays, OutputArrays, Pieces, Rows, RowSource, offered
from penstock.plan._sample_orders import SampleOrder, sample_bytes
from penstock.plan._stages import IGNORED, Cast, Pad, Shuffle, Window
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

    def will_need(self, row: int) -> None:
        """What the order knows."""
        self.order.will_need(row)

    def dont_need(self, row: int) -> None:
        """What the order knows."""
        self.order.dont_need(row)

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

    def will_need(self, row: int) -> None:
        """What the inner order needs."""
        self._inner.will_need(row)

    def dont_need(self, row: int) -> None:
        """What is behind the bucket."""
        self._inner.dont_need(row - row % max(1, self.num_rows) % self._bucket)

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


_CHUNK = 1 << 20


class TokenWindowRows(RowSource):
    """Rows are `length` tokens of the concatenated documents; the last label is read from the next row."""

    makes_labels = True
    is_rectangular = True

    def __init__(self, samples: Samples, stage: Window, shuffle: Shuffle | None) -> None:
        self.samples, self.stage = samples, stage
        self.column = windowed_column(samples.schema, stage.column)
        mask = mask_column(samples.schema, self.column)
        self._mask = None if mask is None else mask_stream(samples, self.column, mask)
        self._stream = token_stream(samples, self.column)
        self.num_tokens = self._stream.num_elements
        row_bytes = stage.length * self.column.dtype.itemsize
        self.epochs = Epochs(even_windows(self.num_tokens // stage.length, row_bytes), shuffle)
        self.num_rows = self.epochs.num_rows

    @property
    def order_identity(self) -> Any:
        """Windows of this stream in this order."""
        stage = self.stage
        return ["window", self.samples.fingerprint, stage.column, stage.length, self.epochs.identity]

    @property
    def row_length(self) -> int:
        """As many as window() says."""
        return self.stage.length

    def output_arrays(self, num_rows: int) -> OutputArrays:
        """Tokens and labels."""
        return dict.fromkeys(("input_ids", "labels"), ((num_rows, self.stage.length), "int64"))

    def mixing(self) -> list[Mixing]:
        """Of documents, as if all had the same length."""
        shares = self.epochs.row_starts / max(1, self.num_rows)
        return measure_mixing(self.samples, self.epochs, (shares * len(self.samples)).astype(np.int64))

    def will_need(self, row: int) -> None:
        """Left to the kernel's own read-ahead: windows of a stream are read in long runs."""

    def dont_need(self, row: int) -> None:
        """Left to the kernel as well."""

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """`input_ids` and `labels`, int64 [rows, length]; the stream's very last label and masked ones are -100."""
        length = self.stage.length
        firsts = self.epochs.find(rows) * length
        input_ids, labels = (offered(out, key, (len(rows), length), np.int64) for key in ("input_ids", "labels"))
        self._stream.read(firsts, input_ids)
        labels[:, -1] = IGNORED
        self._read_following(self._stream, firsts, input_ids, labels)
        if self._mask is not None:
            mask = np.empty((len(rows), length), np.uint8)
            self._mask.read(firsts, mask)
            self._read_following(self._mask, firsts, mask.copy(), mask)
            labels[mask == 0] = IGNORED
        return {"input_ids": input_ids, "labels": labels}

    def _read_following(self, stream: TokenStream, firsts: Rows, here: NDArray[Any], out: NDArray[Any]) -> None:
        """Fill `out` with the element after each of those `here`; nothing comes after the stream's very last."""
        length = self.stage.length
        out[:, :-1] = here[:, 1:]
        has_next = firsts + length < self.num_tokens
        following = np.empty((int(has_next.sum()), 1), out.dtype)
        stream.read(firsts[has_next] + length, following)
        out[has_next, -1] = following[:, 0]

    def ledger(self, epoch: int) -> Ledger:
        """What is left over after the last whole window."""
        return Ledger(num_rows=self.num_rows, tokens_left_over=self.num_tokens % self.stage.length)

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The documents that each window touches; of a fixed column, its first token."""
        length = self.stage.length
        firsts = (self.epochs.find(rows) * length).tolist()
        if not self.column.is_ragged:
            return [trace_document(self.samples, source, row, 0, first, 0, length) for row, first in enumerate(firsts)]
        found: list[list[DocumentTrace]] = [[] for _ in firsts]
        for first_document, starts in self._document_starts(end=max(firsts, default=0) + length):
            for row, first in enumerate(firsts):
                begin = max(0, int(np.searchsorted(starts, first, side="right")) - 1)
                end = min(len(starts) - 1, int(np.searchsorted(starts, first + length, side="left")))
                for number in range(begin, end):
                    low, high = max(first, int(starts[number])), min(first + length, int(starts[number + 1]))
                    if high > low:
                        piece = (low - first, first_document + number, low - int(starts[number]), high - low)
                        found[row].append(trace_document(self.samples, source, row, *piece))
        return [trace for traces in found for trace in traces]

    def _document_starts(self, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(first document, token at which each begins and the last one ends), chunk by chunk, up to a token.

        Only the lengths of all documents before it say which document a token is in: about 100 M are read per second.
        """
        num_documents, tokens = len(self.samples), 0
        for begin in range(0, num_documents, _CHUNK):
            lengths = self.samples.lengths_between(self.column, begin, min(begin + _CHUNK, num_documents))
            starts = tokens + offsets_of(lengths)
            yield begin, starts
            tokens = int(starts[-1])
            if tokens >= end:
                return

"""Rows of one sample each, and rows that are windows of the tokens of all samples.

SampleRows and PaddedRows: a sample as it is stored, or a document padded to the longest of its batch. Which sample is
row i is decided by the order (`_orders.py`); how many tokens a padded row has depends on the batch that it is in.

TokenWindowRows: all documents, one after the other, are one long stream of tokens. Row i of the data is tokens
i * length to (i + 1) * length, whatever documents they belong to, so nothing is stored to find it. Tokens after the
last whole window are in no row; the ledger counts them. `trace` pays for that: which document a token is in takes the
lengths of all documents before it.
"""

import functools
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import (
    Samples,
    ShardLayer,
    TokenStream,
    element_layers,
    mask_column,
    mask_stream,
    sample_layers,
    token_stream,
    windowed_column,
)
from penstock.errors import SchemaError
from penstock.plan._accounts import DocumentTrace, Drawn, Ledger, Mixing, trace_document
from penstock.plan._compose import DocumentRows
from penstock.plan._epochs import Epochs, PageHints, even_windows, lane_edges
from penstock.plan._orders import BucketedOrder, SampleOrder, sample_bytes
from penstock.plan._rows import BatchArrays, OutputArrays, Pieces, RowSource, costs_of_documents, offered
from penstock.plan._stages import ATTENTION, IGNORED, TOKENS, Cast, Pad, Shuffle, Window
from penstock.plan._uses import Reads, RowRange, Rows
from penstock.schema import Column, Schema, dtype_from_name, dtype_name, offsets_of
from penstock.shards import Storage, StoredFile

_LARGE_SAMPLE_BYTES = 64 << 10
_SMALL_BYTES = 16 << 30


class OrderedRows(RowSource):
    """Rows of one sample each; the order knows which one is row i, and which data comes next."""

    def __init__(self, samples: Samples, order: SampleOrder) -> None:
        self.samples, self.order, self.num_rows = samples, order, order.num_rows

    @property
    @abstractmethod
    def layers(self) -> tuple[ShardLayer, ...]:
        """The shards of the columns that are read."""

    def reads(self, rows: RowRange) -> list[Reads]:
        return [Reads(self.order.spans(rows), self.layers)]

    @property
    def order_identity(self) -> Any:
        return ["samples", self.samples.fingerprint, self.order.identity]

    def page_hints(self, row: int) -> list[tuple[PageHints, int]]:
        return self.order.page_hints(row)

    def mixing(self) -> list[Mixing]:
        return self.order.mixing()

    def stored_at(self, rows: Rows) -> NDArray[np.float64]:
        return self.order.find_roughly(rows) / self.order.num_samples

    def describe(self, row: int) -> str:
        return self.samples.describe(row, int(self.order.find(np.array([row]))[0]))


class SampleRows(OrderedRows):
    """Each sample is a row; keys and dtypes are the columns'."""

    makes_labels = False

    def __init__(
        self, samples: Samples, casts: tuple[Cast, ...], order: SampleOrder, files: Collection[str] = ()
    ) -> None:
        super().__init__(samples, order)
        self._files = frozenset(files)
        """Columns of byte strings that maps read as files, and only in part."""
        dtypes = _cast_dtypes(samples.schema, casts)
        columns = samples.schema.columns
        self._columns = [(column, dtypes.get(column.name, column.dtype)) for column in columns]
        self.is_rectangular = not any(column.is_ragged for column in columns)

    @functools.cached_property
    def layers(self) -> tuple[ShardLayer, ...]:
        return sample_layers(self.samples, [column.name for column, _ in self._columns])

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        stored = self.samples.locate(self.order.find(rows))
        storage = self.samples.storage
        batch: BatchArrays = {}
        for column, dtype in self._columns:
            if column.name in self._files:
                sizes = storage.lengths_of(column, stored).tolist()
                rows_of_files = zip(stored.tolist(), sizes, strict=True)
                batch[column.name] = [StoredFile(storage, column, index, size) for index, size in rows_of_files]
            elif column.is_ragged:
                if out is not None and column.name in out:
                    raise SchemaError(f"out[{column.name!r}]: the column is ragged; its size is not known beforehand.")
                batch[column.name] = storage.read_ragged(column, stored)
            else:
                batch[column.name] = offered(out, column.name, (len(rows), *column.shape), dtype)
                storage.read_fixed(column, stored, batch[column.name])
        return batch

    def output_arrays(self, num_rows: int) -> OutputArrays:
        fixed = [(column, dtype) for column, dtype in self._columns if not column.is_ragged]
        return {column.name: ((num_rows, *column.shape), dtype_name(dtype)) for column, dtype in fixed}

    def costs(self, rows: Rows, measure: str) -> NDArray[np.float64]:
        stored = self.samples.locate(self.order.find(rows))
        columns = {column.name: column for column, _ in self._columns}
        is_length = measure in (TOKENS, ATTENTION)
        sizes = self.samples.storage.lengths_of(self._counted, stored) if is_length else stored
        return costs_of_documents(self.samples, columns, measure, stored, sizes)

    @property
    def _counted(self) -> Column:
        """The column whose lengths are what a sample has of tokens: "tokens", or the only ragged one.

        Raises:
            SchemaError: there is none, or more than one.
        """
        ragged = [column for column, _ in self._columns if column.kind == "ragged"]
        counted = [column for column in ragged if column.name == TOKENS] or ragged
        if len(counted) != 1:
            found = ", ".join(repr(column.name) for column in counted) or "none"
            raise SchemaError(
                f"batch(): rows that differ in length need a ragged column 'tokens', or only one; there is {found}."
            )
        return counted[0]

    def ledger(self, epoch: int) -> Ledger:
        drawn = None if self.order.is_once else Drawn.of(self.order.count(epoch))
        return Ledger(num_rows=self.num_rows, drawn=drawn)

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
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


class PaddedRows(OrderedRows, DocumentRows):
    """Each document is a row."""

    stage: Pad

    def __init__(self, samples: Samples, stage: Pad, order: SampleOrder) -> None:
        DocumentRows.__init__(self, samples, stage)
        is_bucketed = stage.bucket is not None
        OrderedRows.__init__(self, samples, BucketedOrder(order, samples, self.column, stage) if is_bucketed else order)

    @functools.cached_property
    def layers(self) -> tuple[ShardLayer, ...]:
        return self.document_layers()

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The document of each row; where padding is on the left, its place depends on the batch, and 0 is given."""
        pieces = self._pieces(rows)
        found = zip(pieces.documents.tolist(), pieces.sizes.tolist(), strict=True)
        return [trace_document(self.samples, source, row, 0, one, 0, size) for row, (one, size) in enumerate(found)]

    def ledger(self, epoch: int) -> Ledger:
        counts = np.ones(len(self.samples), np.int64) if self.order.is_once else self.order.count(epoch)
        cut = 0
        if self.stage.length is not None:
            over = np.maximum(self.samples.lengths(self.column) - self.stage.length, 0)
            cut = int((over * counts).sum())
        drawn = None if self.order.is_once else Drawn.of(counts)
        return Ledger(num_rows=self.num_rows, tokens_truncated=cut, drawn=drawn)

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        if self.mask is not None:
            return super().count_targets(rows)
        return np.maximum(self._sizes(self.samples.locate(self.order.find(rows))) - 1, 0)

    def _pieces(self, rows: Rows) -> Pieces:
        documents = self.order.find(rows)
        stored = self.samples.locate(documents)
        nothing = np.zeros(len(rows), np.int64)
        return Pieces(np.arange(len(rows) + 1), documents, stored, nothing, self._sizes(stored))

    def _sizes(self, stored: NDArray[np.int64]) -> NDArray[np.int64]:
        sizes = self.samples.storage.lengths_of(self.column, stored)
        return sizes if self.stage.length is None else np.minimum(sizes, self.stage.length)


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
        layers = () if shuffle is None or shuffle.lanes == 1 else element_layers(samples, self.column, self._stream)
        self._edges = lane_edges(shuffle, layers, self.num_tokens)
        """With lanes, the first token of each shard: no row goes on in the next shard, not even its last label."""
        if self._edges is None:
            sizes = even_windows(self.num_tokens // stage.length, row_bytes)
        else:
            sizes = np.maximum(np.diff(self._edges) - 1, 0) // stage.length
        self.epochs = Epochs(sizes, shuffle)
        self.num_rows = self.epochs.num_rows
        starts = np.append(self.epochs.row_starts[:-1] * stage.length, len(samples))
        # A cold group of windows is 1 GB that the disk has to give before batches come from memory, and the kernel
        # reads ahead of each row that is missed: with `read_ahead_kb` at 8 MiB, a batch of 32 rows waits for 180 MB.
        # Which documents a window holds takes all lengths: where columns are ragged, it is left to the kernel.
        self.hints = None if self.column.is_ragged else PageHints(self.epochs, samples, (self.column,), starts)

    @property
    def order_identity(self) -> Any:
        stage = self.stage
        return ["window", self.samples.fingerprint, stage.column, stage.length, self.epochs.identity]

    @property
    def row_length(self) -> int:
        return self.stage.length

    def output_arrays(self, num_rows: int) -> OutputArrays:
        return dict.fromkeys(("input_ids", "labels"), ((num_rows, self.stage.length), "int64"))

    def mixing(self) -> list[Mixing]:
        """Of documents, as if all had the same length."""
        shares = self.epochs.row_starts / max(1, self.num_rows)
        return self.epochs.mixing(self.samples, (shares * len(self.samples)).astype(np.int64))

    def stored_at(self, rows: Rows) -> NDArray[np.float64]:
        return self.epochs.find(rows) / self.num_rows

    def reads(self, rows: RowRange) -> list[Reads]:
        """The tokens of the storage windows, and of each the one after, which is the last label."""
        if self._edges is not None:
            return [Reads(self.epochs.spans(rows).of_windows(self._edges), self._layers)]
        spans = self.epochs.spans(rows).of_windows(self.epochs.row_starts * self.stage.length)
        return [Reads(spans._replace(ends=np.minimum(spans.ends + 1, self.num_tokens)), self._layers)]

    @functools.cached_property
    def _layers(self) -> tuple[ShardLayer, ...]:
        mask = mask_column(self.samples.schema, self.column)
        masked = () if mask is None or self._mask is None else element_layers(self.samples, mask, self._mask)
        return (*element_layers(self.samples, self.column, self._stream), *masked)

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """`input_ids` and `labels`, int64 [rows, length]; the stream's very last label and masked ones are -100."""
        length = self.stage.length
        firsts = self._firsts(rows)
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
        """What is left over after the last whole window; with lanes, after that of each shard."""
        return Ledger(num_rows=self.num_rows, tokens_left_over=self.num_tokens - self.num_rows * self.stage.length)

    def _firsts(self, rows: Rows) -> NDArray[np.int64]:
        """The first token of each row."""
        found = self.epochs.find(rows)
        if self._edges is None:
            return found * self.stage.length
        windows = np.searchsorted(self.epochs.row_starts, found, side="right") - 1
        return self._edges[windows] + (found - self.epochs.row_starts[windows]) * self.stage.length

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The documents that each window touches; of a fixed column, its first token."""
        length = self.stage.length
        firsts = self._firsts(rows).tolist()
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

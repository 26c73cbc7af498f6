"""Rows that are windows of one long stream of tokens: all documents, one after the other.

Row i of the data is tokens i * length to (i + 1) * length, whatever documents they belong to, so nothing is stored to
find it. Tokens after the last whole window are in no row; the ledger counts them. The price of that comes with `trace`:
which document a token is in takes the lengths of all documents before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples, TokenStream, mask_column, mask_stream, token_stream, windowed_column
from penstock.plan._accounts import DocumentTrace, Ledger, Mixing, trace_document
from penstock.plan._epochs import Epochs, even_windows
from penstock.plan._mixing import measure_mixing
from penstock.plan._rows import BatchArrays, OutputArrays, Rows, RowSource, offered
from penstock.plan._stages import IGNORED, Shuffle, Window
from penstock.schema import offsets_of

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

    def announce(self, row: int) -> None:
        """Left to the kernel's own read-ahead: windows of a stream are read in long runs."""

    def release(self, row: int) -> None:
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

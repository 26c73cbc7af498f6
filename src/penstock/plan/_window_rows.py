"""Rows that are windows of one long line of tokens: all documents, one behind the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.plan._dataset import Dataset
from penstock.plan._epochs import Epochs, even_windows
from penstock.plan._rows import IGNORED, Batch, Rows, offered
from penstock.plan._stages import Shuffle, Window
from penstock.plan._stream import Stream
from penstock.plan._token_columns import check_mask_lengths, mask_column, windowed_column
from penstock.schema import Column

_CHUNK = 1 << 20


class WindowRows:
    """Rows are `length` tokens of the concatenated documents; the label after the last is read from the next row."""

    makes_labels = True
    is_rectangular = True

    def __init__(self, dataset: Dataset, stage: Window, shuffle: Shuffle | None) -> None:
        self.dataset, self.stage = dataset, stage
        self.column = windowed_column(dataset, stage.column)
        mask = mask_column(dataset, self.column)
        self._mask = None if mask is None else _mask_stream(dataset, self.column, mask)
        self._stream = dataset.stored.stream(self.column)
        self.num_tokens = self._stream.num_elements
        row_bytes = stage.length * self.column.dtype.itemsize
        self.epochs = Epochs(even_windows(self.num_tokens // stage.length, row_bytes), shuffle)
        self.num_rows = self.epochs.num_rows

    @property
    def order_identity(self) -> Any:
        """Windows of this stream in this order."""
        stage = self.stage
        return ["window", self.dataset.rows_fingerprint, stage.column, stage.length, self.epochs.identity]

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Tokens and labels."""
        return dict.fromkeys(("input_ids", "labels"), ((num_rows, self.stage.length), "int64"))

    def announce(self, row: int) -> None:
        """Left to the kernel's own read-ahead: windows of a stream are read in long runs."""

    def release(self, row: int) -> None:
        """Left to the kernel as well."""

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
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

    def _read_following(self, stream: Stream, firsts: Rows, here: NDArray[Any], out: NDArray[Any]) -> None:
        """Fill `out` with the element behind each of those `here`; nothing lies behind the stream's very last."""
        length = self.stage.length
        out[:, :-1] = here[:, 1:]
        has_next = firsts + length < self.num_tokens
        behind = np.empty((int(has_next.sum()), 1), out.dtype)
        stream.read(firsts[has_next] + length, behind)
        out[has_next, -1] = behind[:, 0]


def _mask_stream(dataset: Dataset, tokens: Column, mask: Column) -> Stream:
    """The loss mask, one byte per token. Checking that documents and masks are as long reads all lengths once."""
    for begin in range(0, len(dataset), _CHUNK) if tokens.is_ragged else ():
        end = min(begin + _CHUNK, len(dataset))
        sizes, mask_sizes = (dataset.stored.lengths_between(column, begin, end) for column in (tokens, mask))
        check_mask_lengths(sizes, mask_sizes, np.arange(begin, end))
    return dataset.stored.stream(mask)

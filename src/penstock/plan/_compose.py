"""From pieces of documents to a packed batch.

The pieces may come from several sources (a mixture): each source copies its own tokens to where they
belong, then one pass writes labels, positions, ids and borders for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.plan._compiled import kernels
from penstock.plan._dataset import Dataset
from penstock.plan._rows import Batch, offered
from penstock.plan._stages import Pack
from penstock.plan._token_columns import check_mask_lengths
from penstock.schema import Column, offsets_of
from penstock.shards import Spans

ROW_TARGETS = "row_targets"
"""Targets in each row; the plan turns them into the counts of the rank and of the whole step."""

_NO_MASK = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What rows are made of: row r is pieces `row_offsets[r]` to `row_offsets[r + 1]`, side by side."""

    row_offsets: NDArray[np.int64]
    documents: NDArray[np.int64]
    """Index of each piece's document in its dataset."""
    stored: NDArray[np.int64]
    """Index of each piece's document in its storage."""
    starts: NDArray[np.int64]
    """Where each piece begins in its document."""
    sizes: NDArray[np.int64]

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row of each piece."""
        return np.repeat(np.arange(len(self.row_offsets) - 1), np.diff(self.row_offsets))

    @property
    def columns(self) -> NDArray[np.int64]:
        """Place of each piece's first token in its row."""
        ends = np.cumsum(self.sizes)
        before_row = np.concatenate([np.zeros(1, np.int64), ends])[self.row_offsets[:-1]]
        columns: NDArray[np.int64] = ends - self.sizes - np.repeat(before_row, np.diff(self.row_offsets))
        return columns


class TokenSource(Protocol):
    """Where the tokens of pieces are, and the mask of those that may be predicted, if there is one."""

    dataset: Dataset
    column: Column
    mask_column: Column | None


Placed = tuple[TokenSource, NDArray[np.int64], Pieces]
"""A source, the rows of the batch that it fills, and what it fills them with."""


def compose(placed: Sequence[Placed], num_rows: int, stage: Pack, out: Mapping[str, NDArray[Any]] | None) -> Batch:
    """A packed batch of `num_rows` rows."""
    shape = (num_rows, stage.settings.length)
    arrays = {key: offered(out, key, shape, np.int64) for key in ("input_ids", "labels", "position_ids")}
    document_ids = offered(out, "document_ids", shape, np.int32)
    mask = _read_tokens(placed, arrays["input_ids"])
    row_offsets, sizes, starts = _in_row_order(placed, num_rows)
    borders = np.empty(len(sizes) + num_rows + 1, np.int32)
    bases = starts if stage.positions == "continue" else np.zeros(len(sizes), np.int64)
    row_targets = np.empty(num_rows, np.int64)
    layout = (row_offsets, sizes, bases, mask, stage.labels == "next", stage.pad)
    num_segments, longest = kernels().lay_out(*layout, *arrays.values(), document_ids, borders, row_targets)
    max_documents = stage.settings.max_documents
    return {
        **arrays,
        "document_ids": document_ids,
        "cu_seqlens": _pad_borders(borders[: num_segments + 1], num_rows, max_documents),
        "max_seqlen": int(longest),
        "num_documents": len(sizes),
        ROW_TARGETS: row_targets,
    }


def count_targets(source: TokenSource, pieces: Pieces, num_rows: int) -> NDArray[np.int64]:
    """Tokens of each row that are predicted: all but the first of each piece, less what a loss mask hides."""
    per_piece = np.maximum(pieces.sizes - 1, 0)
    if source.mask_column is not None:
        _check_mask_lengths(source, source.mask_column, pieces)
        flat = _read_flat(source, pieces, source.mask_column, np.zeros(int(pieces.sizes.sum()), np.uint8))
        begins = np.cumsum(pieces.sizes) - pieces.sizes
        flat[begins[pieces.sizes > 0]] = 0
        totals = offsets_of(flat != 0)
        per_piece = totals[begins + pieces.sizes] - totals[begins]
    return np.bincount(pieces.rows, weights=per_piece, minlength=num_rows).astype(np.int64)


def _read_tokens(placed: Sequence[Placed], input_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Copy every piece's tokens to its place; return the loss mask of the batch, empty when there is none."""
    num_rows, length = input_ids.shape
    has_mask = any(source.mask_column is not None for source, _, _ in placed)
    mask = np.ones(num_rows * length, np.uint8) if has_mask else _NO_MASK
    for source, rows, pieces in placed:
        targets = kernels().find_targets(pieces.row_offsets, pieces.sizes, rows, length)
        spans = Spans(pieces.stored, pieces.starts, pieces.sizes, targets)
        source.dataset.storage.read_spans(source.column, spans, input_ids.reshape(-1))
        if source.mask_column is not None:
            _check_mask_lengths(source, source.mask_column, pieces)
            source.dataset.storage.read_spans(source.mask_column, spans, mask)
    return mask


def _read_flat(source: TokenSource, pieces: Pieces, column: Column, out: NDArray[Any]) -> NDArray[Any]:
    targets = np.cumsum(pieces.sizes) - pieces.sizes
    source.dataset.storage.read_spans(column, Spans(pieces.stored, pieces.starts, pieces.sizes, targets), out)
    return out


def _check_mask_lengths(source: TokenSource, mask: Column, pieces: Pieces) -> None:
    storage = source.dataset.storage
    tokens, masked = (storage.lengths_of(column, pieces.stored) for column in (source.column, mask))
    check_mask_lengths(tokens, masked, pieces.documents)


def _in_row_order(placed: Sequence[Placed], num_rows: int) -> tuple[NDArray[np.int64], ...]:
    """(row offsets, sizes, starts) of all pieces, row by row, whichever source they come from."""
    if len(placed) == 1:
        pieces = placed[0][2]
        return pieces.row_offsets, pieces.sizes, pieces.starts
    if not placed:
        return np.zeros(num_rows + 1, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    rows = np.concatenate([rows[pieces.rows] for _, rows, pieces in placed])
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=num_rows)
    sizes, starts = (np.concatenate([getattr(p, name) for _, _, p in placed])[order] for name in ("sizes", "starts"))
    return offsets_of(counts), sizes, starts


def _pad_borders(borders: NDArray[np.int32], num_rows: int, max_documents: int | None) -> NDArray[np.int32]:
    """With a bound on documents per row, always as many borders: the last repeats, which no kernel minds."""
    if max_documents is None:
        return borders
    padded = np.full(num_rows * (max_documents + 1) + 1, borders[-1], np.int32)
    padded[: len(borders)] = borders
    return padded

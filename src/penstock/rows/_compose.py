"""From pieces of documents to a batch, packed or padded.

The pieces may come from several sources (a mixture): each source copies its own tokens to where they
belong, then one pass writes labels, positions, ids and borders for all of them. Every array of a padded batch is as
wide as its longest row needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.rows._beside import compose_beside, kept_columns
from penstock.rows._rows import BatchArrays, Filling, Pieces, PieceSource, Rows, TokenColumns, kernels, offered
from penstock.samples import Samples, check_mask_lengths, mask_column, packed_column
from penstock.schema import Column, offsets_of
from penstock.shards import Spans
from penstock.stages import IGNORED, Pack, Pad

ROW_TARGETS = "row_targets"
"""Targets in each row; the plan turns them into the counts of the rank and of the whole step."""

_NO_MASK = np.empty(0, np.uint8)


class DocumentRows(PieceSource):
    """Rows made of pieces of one dataset's documents."""

    def __init__(self, samples: Samples, stage: Pack | Pad) -> None:
        self.samples, self.stage = samples, stage
        self.column = packed_column(samples.schema, stage.column, verb=stage.verb)
        self.mask = mask_column(samples.schema, self.column)
        kept = kept_columns(samples.schema, stage, self.column)
        self._columns = TokenColumns(samples, self.column, self.mask, kept)

    @abstractmethod
    def _pieces(self, rows: Rows) -> Pieces:
        """What these rows are made of."""

    @property
    def kept(self) -> Mapping[str, Column]:
        """As the stage says."""
        return self._columns.kept

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """A batch of these rows."""
        return compose(self.fill(rows, np.arange(len(rows))), len(rows), self.stage, out)

    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        """The pieces of these rows."""
        return [Filling(self._columns, batch_rows, self._pieces(rows))]

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Targets in each row: tokens that the loss is taken over."""
        return _count_targets(self._columns, self._pieces(rows), len(rows))


def compose(
    fillings: Sequence[Filling], num_rows: int, stage: Pack | Pad, out: Mapping[str, NDArray[Any]] | None
) -> BatchArrays:
    """A batch of `num_rows` rows.

    Raises:
        SchemaError: an array is offered for a padded batch: how wide it is follows from its rows.
    """
    if isinstance(stage, Pad):
        return _compose_padded(fillings, num_rows, stage, out)
    return _compose_packed(fillings, num_rows, stage, out)


def _compose_packed(
    fillings: Sequence[Filling], num_rows: int, stage: Pack, out: Mapping[str, NDArray[Any]] | None
) -> BatchArrays:
    shape = (num_rows, stage.settings.length)
    arrays = {key: offered(out, key, shape, np.int64) for key in ("input_ids", "labels", "position_ids")}
    document_ids = offered(out, "document_ids", shape, np.int32)
    spans = [_spans(filling, stage.settings.length) for filling in fillings]
    mask = _read_packed(fillings, spans, arrays["input_ids"])
    row_offsets, sizes, starts = _in_row_order(fillings, num_rows)
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
        **compose_beside(fillings, spans, shape, out),
        ROW_TARGETS: row_targets,
    }


def _count_targets(columns: TokenColumns, pieces: Pieces, num_rows: int) -> NDArray[np.int64]:
    """Tokens of each row that are predicted: all but the first of each piece, less what a loss mask hides."""
    per_piece = np.maximum(pieces.sizes - 1, 0)
    if columns.mask is not None:
        _check_mask(columns, columns.mask, pieces)
        flat = np.zeros(int(pieces.sizes.sum()), np.uint8)
        begins = np.cumsum(pieces.sizes) - pieces.sizes
        columns.samples.storage.read_spans(
            columns.mask, Spans(pieces.stored, pieces.starts, pieces.sizes, begins), flat
        )
        flat[begins[pieces.sizes > 0]] = 0
        totals = offsets_of(flat != 0)
        per_piece = totals[begins + pieces.sizes] - totals[begins]
    return np.bincount(pieces.rows, weights=per_piece, minlength=num_rows).astype(np.int64)


def _spans(filling: Filling, length: int) -> Spans:
    """Where each piece of a source goes in the flat batch."""
    _, rows, pieces = filling
    targets = kernels().find_targets(pieces.row_offsets, pieces.sizes, rows, length)
    return Spans(pieces.stored, pieces.starts, pieces.sizes, targets)


def _read_packed(
    fillings: Sequence[Filling], spans: Sequence[Spans], input_ids: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Copy every piece's tokens to its place; return the loss mask of the batch, empty if there is none."""
    has_mask = any(columns.mask is not None for columns, _, _ in fillings)
    mask = np.ones(input_ids.size, np.uint8) if has_mask else _NO_MASK
    for (columns, _, pieces), where in zip(fillings, spans, strict=True):
        columns.samples.storage.read_spans(columns.tokens, where, input_ids.reshape(-1))
        if columns.mask is not None:
            _check_mask(columns, columns.mask, pieces)
            columns.samples.storage.read_spans(columns.mask, where, mask)
    return mask


def _check_mask(columns: TokenColumns, mask: Column, pieces: Pieces) -> None:
    """Refuse documents whose loss mask differs in length."""
    storage = columns.samples.storage
    tokens, masked = (storage.lengths_of(column, pieces.stored) for column in (columns.tokens, mask))
    check_mask_lengths(tokens, masked, pieces.documents)


def _in_row_order(fillings: Sequence[Filling], num_rows: int) -> tuple[NDArray[np.int64], ...]:
    """(row offsets, sizes, starts) of all pieces, row by row, whichever source they come from."""
    if len(fillings) == 1:
        pieces = fillings[0].pieces
        return pieces.row_offsets, pieces.sizes, pieces.starts
    rows = np.concatenate([rows[pieces.rows] for _, rows, pieces in fillings])
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=num_rows)
    sizes = np.concatenate([pieces.sizes for _, _, pieces in fillings])[order]
    starts = np.concatenate([pieces.starts for _, _, pieces in fillings])[order]
    return offsets_of(counts), sizes, starts


def _pad_borders(borders: NDArray[np.int32], num_rows: int, max_documents: int | None) -> NDArray[np.int32]:
    """With a bound on documents per row, always the same number of borders: the last repeats, which kernels allow."""
    if max_documents is None:
        return borders
    padded = np.full(num_rows * (max_documents + 1) + 1, borders[-1], np.int32)
    padded[: len(borders)] = borders
    return padded


def _compose_padded(
    fillings: Sequence[Filling], num_rows: int, stage: Pad, out: Mapping[str, NDArray[Any]] | None
) -> BatchArrays:
    if out:
        raise SchemaError(f"out[{next(iter(out))!r}]: padded rows are as wide as the longest of them.")
    sizes = np.zeros(num_rows, np.int64)
    for _, rows, pieces in fillings:
        sizes[rows] = pieces.sizes
    width = -(-max(1, int(sizes.max(initial=0))) // stage.multiple) * stage.multiple
    begins = width - sizes if stage.side == "left" else np.zeros(num_rows, np.int64)
    places = np.arange(width) - begins[:, None]
    is_token = (places >= 0) & (places < sizes[:, None])
    input_ids = np.full((num_rows, width), stage.pad, np.int64)
    is_target = is_token & (places > 0)
    spans = [_read_padded(filling, begins, input_ids, is_target) for filling in fillings]
    return {
        "input_ids": input_ids,
        "labels": _labels(input_ids, is_target, stage),
        "attention_mask": is_token.astype(np.int64),
        "position_ids": np.where(is_token, places, 0),
        "lengths": sizes,
        **compose_beside(fillings, spans, (num_rows, width), None),
        ROW_TARGETS: is_target.sum(axis=1),
    }


def _read_padded(
    filling: Filling, begins: NDArray[np.int64], input_ids: NDArray[np.int64], is_target: NDArray[np.bool_]
) -> Spans:
    """Copy the tokens of a source to their places, and take from the targets what its loss mask hides."""
    columns, rows, pieces = filling
    width = input_ids.shape[1]
    spans = Spans(pieces.stored, pieces.starts, pieces.sizes, rows * width + begins[rows])
    columns.samples.storage.read_spans(columns.tokens, spans, input_ids.reshape(-1))
    if columns.mask is not None:
        _check_mask(columns, columns.mask, pieces)
        mask = np.ones(input_ids.size, np.uint8)
        columns.samples.storage.read_spans(columns.mask, spans, mask)
        is_target &= mask.reshape(input_ids.shape) != 0
    return spans


def _labels(input_ids: NDArray[np.int64], is_target: NDArray[np.bool_], stage: Pad) -> NDArray[np.int64]:
    labels = np.where(is_target, input_ids, IGNORED)
    if stage.labels == "same":
        return labels
    labels[:, :-1] = labels[:, 1:]
    labels[:, -1] = IGNORED
    return labels

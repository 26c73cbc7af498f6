"""From pieces of documents to a batch, packed or padded.

The pieces may come from several sources (a mixture): each source copies its own tokens to where they
belong, then one pass writes labels, positions, ids and borders for all of them. Every array of a padded batch is as
wide as its longest row needs.

Columns beside the tokens say what a document is, what its tokens weigh, what it says:

    one value per sample       `domain`: [documents], row by row; `document_ids` says which one a token belongs to
    one value per token        `weight`: [rows, length], place by place like the tokens, 0 on padding
    byte strings               `text`: a `Ragged` of the documents' own, for looking at

In padded batches every row is one document, so the first and the third are row by row.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples, ShardLayer, check_mask_lengths, mask_column, packed_column, sample_layers
from penstock.errors import FormatError, SchemaError
from penstock.plan import _kernels
from penstock.plan._rows import (
    BatchArrays,
    Filling,
    Pieces,
    PieceSource,
    TokenColumns,
    costs_of_documents,
    offered,
)
from penstock.plan._stages import ATTENTION, IGNORED, TOKENS, Pack, Pad
from penstock.plan._uses import Rows
from penstock.schema import Column, Schema, join_samples, offsets_of, take_samples
from penstock.shards import Spans, read_samples

ROW_TARGETS = "row_targets"
"""Targets in each row; the plan turns them into the counts of the rank and of the whole step."""

_NO_MASK = np.empty(0, np.uint8)
RESERVED = frozenset(
    {"input_ids", "labels", "position_ids", "document_ids", "cu_seqlens", "max_seqlen", "num_documents"}
    | {"attention_mask", "lengths", "num_targets", "num_targets_global", "is_repeated", "source_ids"}
)
"""Names that batches use themselves."""


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

    def document_layers(self) -> tuple[ShardLayer, ...]:
        """The shards of the columns that are read."""
        columns = (self.column, *self.kept.values(), *(() if self.mask is None else (self.mask,)))
        counted = self.stage.counted if isinstance(self.stage, Pack) else ()
        return sample_layers(self.samples, list(dict.fromkeys([*(column.name for column in columns), *counted])))

    @property
    def counts_ahead(self) -> bool:
        return self.mask is None

    @property
    def kept(self) -> Mapping[str, Column]:
        return self._columns.kept

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        return compose(self.fill(rows, np.arange(len(rows))), len(rows), self.stage, out)

    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        return [Filling(self._columns, batch_rows, self._pieces(rows))]

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        return _count_targets(self._columns, self._pieces(rows))

    def costs(self, rows: Rows, measure: str) -> NDArray[np.float64]:
        """Of all documents in a row; what a column says of a split one counts where its first part is."""
        pieces = self._pieces(rows)
        costs = costs_of_documents(self.samples, self.kept, measure, pieces.stored, pieces.sizes)
        if measure not in (TOKENS, ATTENTION):
            costs[pieces.starts > 0] = 0
        return np.bincount(pieces.rows, weights=costs, minlength=len(rows)).astype(np.float64, copy=False)


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
    tokens = (arrays["input_ids"], arrays["labels"], arrays["position_ids"])
    num_segments, longest = _kernels.lay_out(*layout, *tokens, document_ids, borders, row_targets)
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


def _count_targets(columns: TokenColumns, pieces: Pieces) -> NDArray[np.int64]:
    """Tokens of each row that are predicted: all but the first of each piece, less what a loss mask hides."""
    if columns.mask is None:
        return np.diff(offsets_of(np.maximum(pieces.sizes - 1, 0))[pieces.row_offsets])
    _check_mask(columns, columns.mask, pieces)
    edges = offsets_of(pieces.sizes)
    flat, begins = np.empty(edges[-1], np.uint8), edges[:-1]
    columns.samples.storage.read_spans(columns.mask, Spans(pieces.stored, pieces.starts, pieces.sizes, begins), flat)
    flat[begins[pieces.sizes > 0]] = 0
    return _kernels.count_set(flat, edges[pieces.row_offsets])


def _spans(filling: Filling, length: int) -> Spans:
    """Where each piece of a source goes in the flat batch."""
    _, rows, pieces = filling
    targets = _kernels.find_targets(pieces.row_offsets, pieces.sizes, rows, length)
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


def kept_columns(schema: Schema, stage: Pack | Pad, tokens: Column) -> dict[str, Column]:
    """The columns that a stage keeps beside the tokens.

    Raises:
        SchemaError: there is no such column, or its name is taken.
    """
    found = {}
    for name in stage.keep:
        column = schema[name]
        if name in RESERVED or name == tokens.name:
            raise SchemaError(f"{stage.verb}(keep={name!r}): a batch has something of this name already.")
        found[name] = column
    return found


def compose_beside(
    fillings: Sequence[Filling],
    spans: Sequence[Spans],
    shape: tuple[int, int],
    out: Mapping[str, NDArray[Any]] | None,
) -> dict[str, Any]:
    """The kept columns of a batch of this shape, whose tokens of each filling went where its spans say."""
    if not fillings[0].columns.kept:
        return {}
    rows = np.concatenate([rows[pieces.rows] for _, rows, pieces in fillings])
    order = None if len(fillings) == 1 else np.argsort(rows, kind="stable")
    kept: dict[str, Any] = {}
    for name, column in fillings[0].columns.kept.items():
        if column.is_per_token:
            kept[name] = _per_token(name, fillings, spans, offered(out, name, shape, column.dtype))
        else:
            kept[name] = _per_document(name, fillings, order)
    return kept


def _per_token(name: str, fillings: Sequence[Filling], spans: Sequence[Spans], out: NDArray[Any]) -> NDArray[Any]:
    out[...] = 0
    for (columns, _, pieces), where in zip(fillings, spans, strict=True):
        column, storage = columns.kept[name], columns.samples.storage
        lengths, tokens = (storage.lengths_of(each, pieces.stored) for each in (column, columns.tokens))
        if not np.array_equal(lengths, tokens):
            first = int(np.flatnonzero(lengths != tokens)[0])
            raise FormatError(
                f"Sample {pieces.documents[first]:,} has {tokens[first]:,} tokens and {lengths[first]:,} values of "
                f"{name!r}; a column of numbers that is kept beside tokens has one for each of them."
            )
        storage.read_spans(column, where, out.reshape(-1))
    return out


def _per_document(name: str, fillings: Sequence[Filling], order: NDArray[np.int64] | None) -> Any:
    found = [
        read_samples(columns.samples.storage, columns.kept[name], pieces.stored) for columns, _, pieces in fillings
    ]
    joined = join_samples(found)
    return joined if order is None else take_samples(joined, order)

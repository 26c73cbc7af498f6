"""Columns beside the tokens of a batch: what a document is, what its tokens weigh, what it says.

    one value per sample       `domain`: [documents], row by row; `document_ids` says which one a token belongs to
    one value per token        `weight`: [rows, length], place by place like the tokens, 0 on padding
    byte strings               `text`: a `Ragged` of the documents' own, for looking at

In padded batches every row is one document, so the first and the third are row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.rows._rows import Filling, offered
from penstock.schema import Column, Ragged, Schema, join_samples, take_samples
from penstock.shards import Spans, read_samples
from penstock.stages import Pack, Pad

RESERVED = frozenset(
    {"input_ids", "labels", "position_ids", "document_ids", "cu_seqlens", "max_seqlen", "num_documents"}
    | {"attention_mask", "lengths", "num_targets", "num_targets_global", "is_repeated", "source_ids"}
)
"""Names that batches use themselves."""


def kept_columns(schema: Schema, stage: Pack | Pad, tokens: Column) -> dict[str, Column]:
    """The columns that a stage keeps beside the tokens.

    Raises:
        SchemaError: there is no such column, its name is taken, or its values belong to neither documents nor tokens.
    """
    found = {}
    for name in stage.keep:
        column = schema[name]
        if name in RESERVED or name == tokens.name:
            raise SchemaError(f"{stage.verb}(keep={name!r}): a batch has something of this name already.")
        if column.kind == "ragged" and column.shape:
            raise SchemaError(
                f"{stage.verb}(keep={name!r}): column {name!r} is {column.spec}; one value per document or per token "
                "is needed."
            )
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
        if column.kind == "ragged":
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


def _per_document(name: str, fillings: Sequence[Filling], order: NDArray[np.int64] | None) -> NDArray[Any] | Ragged:
    found = [
        read_samples(columns.samples.storage, columns.kept[name], pieces.stored) for columns, _, pieces in fillings
    ]
    joined = join_samples(found)
    return joined if order is None else take_samples(joined, order)

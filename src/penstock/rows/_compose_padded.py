"""From one piece of a document per row to a padded batch: every array as wide as the longest row needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.rows._beside import compose_beside
from penstock.rows._compose import ROW_TARGETS, check_mask
from penstock.rows._rows import BatchArrays, Filling
from penstock.shards import Spans
from penstock.stages import IGNORED, Pad


def compose_padded(
    fillings: Sequence[Filling], num_rows: int, stage: Pad, out: Mapping[str, NDArray[Any]] | None
) -> BatchArrays:
    """A padded batch of `num_rows` rows.

    Raises:
        SchemaError: an array is offered for it: how wide it is follows from its rows.
    """
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
    spans = [_read_tokens(filling, begins, input_ids, is_target) for filling in fillings]
    return {
        "input_ids": input_ids,
        "labels": _labels(input_ids, is_target, stage),
        "attention_mask": is_token.astype(np.int64),
        "position_ids": np.where(is_token, places, 0),
        "lengths": sizes,
        **compose_beside(fillings, spans, (num_rows, width), None),
        ROW_TARGETS: is_target.sum(axis=1),
    }


def _read_tokens(
    filling: Filling, begins: NDArray[np.int64], input_ids: NDArray[np.int64], is_target: NDArray[np.bool_]
) -> Spans:
    """Copy the tokens of a source to their places, and take from the targets what its loss mask hides."""
    columns, rows, pieces = filling
    width = input_ids.shape[1]
    spans = Spans(pieces.stored, pieces.starts, pieces.sizes, rows * width + begins[rows])
    columns.samples.storage.read_spans(columns.tokens, spans, input_ids.reshape(-1))
    if columns.mask is not None:
        check_mask(columns, columns.mask, pieces)
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

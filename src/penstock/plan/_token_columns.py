"""The columns that rows of tokens are made of: the tokens, and which of them the loss is taken over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.plan._dataset import Dataset
from penstock.schema import Column

LOSS_MASK = "loss_mask"


def packed_column(dataset: Dataset, name: str) -> Column:
    """The column that pack() takes documents from."""
    column = dataset.schema[name]
    if column.kind == "ragged" and _holds_tokens(column):
        return column
    hint = "Name the token column with column=."
    if column.kind == "fixed" and len(column.shape) == 1:
        hint = "Its documents are all of one length: batch() alone takes them as they are, a Ragged makes them uneven."
    raise SchemaError(
        f"pack() takes documents of uneven length, as in 'uint16[*]'; column {name!r} is {column.spec}. {hint}"
    )


def windowed_column(dataset: Dataset, name: str) -> Column:
    """The column that window() cuts."""
    column = dataset.schema[name]
    if column.kind == "bytes" or not _holds_tokens(column):
        raise SchemaError(
            f"window() cuts a stream of integers; column {name!r} is {column.spec}. Name the token column with column=."
        )
    return column


def mask_column(dataset: Dataset, tokens: Column) -> Column | None:
    """The column that says which tokens are predicted, if the dataset has one."""
    if LOSS_MASK not in dataset.schema or tokens.name == LOSS_MASK:
        return None
    mask = dataset.schema[LOSS_MASK]
    if mask.kind != tokens.kind or mask.shape or mask.dtype.kind not in "bu" or mask.dtype.itemsize != 1:
        stars = "[*]" if tokens.is_ragged else ""
        raise SchemaError(f"Column {LOSS_MASK!r} is {mask.spec}; a loss mask is 'bool{stars}' or 'uint8{stars}'.")
    return mask


def check_mask_lengths(tokens: NDArray[np.int64], mask: NDArray[np.int64], documents: NDArray[np.int64]) -> None:
    """Refuse documents whose mask is not as long as they are; `documents` are their indices in the dataset.

    Raises:
        FormatError: the lengths differ.
    """
    if not np.array_equal(tokens, mask):
        place = int(np.flatnonzero(tokens != mask)[0])
        raise FormatError(
            f"Sample {documents[place]:,} has {tokens[place]:,} tokens and a loss mask of {mask[place]:,}; "
            "both must be as long. Prepare the dataset again."
        )


def _holds_tokens(column: Column) -> bool:
    return not column.shape and column.dtype.kind in "iu"

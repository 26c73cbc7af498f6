"""Columns of tokens: which column is meant, which tokens are predicted, and all documents as one stream of tokens."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.dataset._samples import Samples
from penstock.errors import FormatError, SchemaError
from penstock.schema import Column, Schema, offsets_of
from penstock.shards import Spans, Storage

LOSS_MASK = "loss_mask"
_CHUNK = 1 << 20


def packed_column(schema: Schema, name: str, *, verb: str = "pack") -> Column:
    """The column that pack() or pad() takes documents from."""
    column = schema[name]
    if column.kind == "ragged" and _holds_tokens(column):
        return column
    raise SchemaError(
        f"{verb}() takes documents of uneven length, as in 'uint16[*]'; column {name!r} is {column.spec}. "
        f"{_advise(column)}"
    )


def _advise(column: Column) -> str:
    if column.kind == "fixed" and len(column.shape) == 1:
        return "Its documents are all of one length: batch() alone takes them as they are, a Ragged makes them uneven."
    return "Name the token column with column=."


def windowed_column(schema: Schema, name: str) -> Column:
    """The column that window() cuts."""
    column = schema[name]
    if column.kind == "bytes" or not _holds_tokens(column):
        raise SchemaError(f"window() cuts a stream of integers; column {name!r} is {column.spec}. {_advise(column)}")
    return column


def mask_column(schema: Schema, tokens: Column) -> Column | None:
    """The column that says which tokens are predicted, if the dataset has one.

    For `chosen`, which `prepare` makes from preferences, that is `chosen_loss_mask`.
    """
    own = f"{tokens.name}_{LOSS_MASK}"
    mask: Column | None = schema.get(own if own in schema else LOSS_MASK)
    if mask is None or mask.name == tokens.name:
        return None
    if mask.kind != tokens.kind or mask.shape or mask.dtype.kind not in "bu" or mask.dtype.itemsize != 1:
        stars = "[*]" if tokens.is_ragged else ""
        raise SchemaError(f"Column {mask.name!r} is {mask.spec}; a loss mask is 'bool{stars}' or 'uint8{stars}'.")
    return mask


def check_mask_lengths(tokens: NDArray[np.int64], mask: NDArray[np.int64], documents: NDArray[np.int64]) -> None:
    """Refuse documents whose mask differs in length; `documents` are their indices in the dataset.

    Raises:
        FormatError: the lengths differ.
    """
    if not np.array_equal(tokens, mask):
        first = int(np.flatnonzero(tokens != mask)[0])
        raise FormatError(
            f"Sample {documents[first]:,} has {tokens[first]:,} tokens and a loss mask of {mask[first]:,}; "
            "both must have the same length. Prepare the dataset again."
        )


class TokenStream(Protocol):
    """Elements of all samples, one after the other."""

    num_elements: int
    starts: NDArray[np.int64] | None
    """Where each sample begins, and finally the number of elements; None if that is as stored."""

    def read(self, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill each row of `out` with consecutive elements, beginning at each of `firsts`."""
        ...


def token_stream(samples: Samples, column: Column) -> TokenStream:
    """A column's samples, one after the other."""
    if samples.chosen is None:
        return _StoredStream(samples.storage, column)
    return _ChosenStream(samples.storage, column, samples.chosen)


def mask_stream(samples: Samples, tokens: Column, mask: Column) -> TokenStream:
    """The loss mask, one byte per token. Comparing the lengths of documents and masks reads all of them once."""
    for begin in range(0, len(samples), _CHUNK) if tokens.is_ragged else ():
        end = min(begin + _CHUNK, len(samples))
        sizes, mask_sizes = (samples.lengths_between(column, begin, end) for column in (tokens, mask))
        check_mask_lengths(sizes, mask_sizes, np.arange(begin, end))
    return token_stream(samples, mask)


class _StoredStream:
    """All samples of a storage: they lie one after the other already, so borders cost nothing."""

    def __init__(self, storage: Storage, column: Column) -> None:
        self._storage, self._column = storage, column
        self.num_elements = storage.num_elements(column)
        self.starts: NDArray[np.int64] | None = None

    def read(self, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        self._storage.read_stream(self._column, firsts, out)


class _ChosenStream:
    """Chosen samples only: 8 bytes per sample say where each begins."""

    def __init__(self, storage: Storage, column: Column, chosen: NDArray[np.integer[Any]]) -> None:
        self._storage, self._column, self._chosen = storage, column, chosen
        if column.is_ragged:
            lengths = storage.lengths(column, 0, storage.num_samples)[chosen]
        else:
            lengths = np.ones(len(chosen), np.int64)
        self._edges = offsets_of(lengths)
        self.num_elements = int(self._edges[-1])
        self.starts: NDArray[np.int64] | None = self._edges

    def read(self, firsts: NDArray[np.int64], out: NDArray[Any]) -> None:
        length = out.shape[1]
        if not self._column.is_ragged:
            indices = self._chosen[(firsts[:, None] + np.arange(length)).reshape(-1)].astype(np.int64, copy=False)
            self._storage.read_fixed(self._column, indices, out.reshape(-1))
            return
        spans = [self._spans(first, length, row * length) for row, first in enumerate(firsts.tolist())]
        if spans:
            parts = (np.concatenate(part) for part in zip(*spans, strict=True))
            self._storage.read_spans(self._column, Spans(*parts), out.reshape(-1))

    def _spans(self, first: int, length: int, target: int) -> tuple[NDArray[np.int64], ...]:
        """(samples, first elements, sizes, targets) that make up one row."""
        begin = int(np.searchsorted(self._edges, first, side="right")) - 1
        end = int(np.searchsorted(self._edges, first + length, side="left"))
        edges = np.clip(self._edges[begin : end + 1], first, first + length)
        chosen = self._chosen[begin:end].astype(np.int64, copy=False)
        return chosen, edges[:-1] - self._edges[begin:end], np.diff(edges), target + edges[:-1] - first


def _holds_tokens(column: Column) -> bool:
    return not column.shape and column.dtype.kind in "iu"

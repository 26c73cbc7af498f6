"""Row sources: what row i of an endless run holds.

The run is one endless sequence of epochs of `num_rows` rows each; row numbers are absolute. A row
source answers any set of them, in any order, from nothing but the numbers. Which row of the data
stands at which position of an epoch is decided in `_epochs.py`; what the row holds, by the source:

    SampleRows        each sample (`_sample_rows.py`)
    TokenWindowRows   fixed windows of all tokens (`_token_window_rows.py`)
    PaddedRows        one document each, padded to the longest of a batch (`_sample_rows.py`)
    PackedRows        whole documents side by side (`_packed_rows.py`)
    MixedRows         rows of several of these (`_mixed_rows.py`)
    ResizedRows     another number of them in an epoch (`_stretched_rows.py`)
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.dataset import Samples
from penstock.plan._accounts import DocumentTrace, Ledger, Mixing
from penstock.plan._stages import Pack, Pad
from penstock.schema import Column, dtype_name, offsets_of

BatchArrays = dict[str, Any]
Rows = NDArray[np.int64]
"""Absolute row numbers."""
OutputArrays = dict[str, tuple[tuple[int, ...], str]]
"""(shape, dtype) of each array of a batch whose size is known beforehand."""


class RowSource(ABC):
    """Rows by absolute number."""

    num_rows: int
    """Rows in an epoch."""
    makes_labels: bool
    """Whether `labels` are targets that the source made, not a column that happens to have the name."""
    is_rectangular: bool
    """Whether a batch is nothing but its rows, side by side in the arrays that `output_arrays` names."""

    @property
    @abstractmethod
    def order_identity(self) -> Any:
        """JSON of everything that decides which data is row i."""

    @property
    def run_identity(self) -> Any:
        """JSON of everything that decides which data is row i of the run, epochs laid end to end."""
        return self.order_identity

    def earlier_orders(self, epoch_rows: int | None) -> Iterator[tuple[Any, int]]:
        """(order identity, row) of others that agree with this one in all rows of the run before that row.

        `epoch_rows` is how many rows their epochs have, where take(), skip() or repeat() said so.
        """
        return iter(())

    @property
    def row_length(self) -> int | None:
        """Places for tokens in a row; None where rows have any number."""
        return None

    @abstractmethod
    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """These rows, side by side; `out` offers arrays to fill."""

    @abstractmethod
    def output_arrays(self, num_rows: int) -> OutputArrays:
        """The arrays that `out` may offer for `num_rows` rows."""

    @abstractmethod
    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The documents behind these rows, row by row; `source` names this one in a mixture."""

    def describe(self, row: int) -> str:
        """A row in words, for errors."""
        return f"row {row:,}"

    def ledger(self, epoch: int) -> Ledger:
        """The account of an epoch, before rows are cut into batches."""
        return Ledger(num_rows=self.num_rows)

    def rows_of_sources(self, begin: int, end: int) -> Mapping[str, int]:
        """How many of rows `begin` to `end` each source of a mixture gives; nothing for other rows."""
        return {}

    def schedule_until(self, end: int) -> Mapping[int, Mapping[str, float]]:
        """Shares of a mixture's sources by the row from which on they hold, before row `end`; empty if they stay."""
        return {}

    @abstractmethod
    def will_need(self, row: int) -> None:
        """Tell the kernel which data this row and those after it need."""

    @abstractmethod
    def dont_need(self, row: int) -> None:
        """Tell the kernel which data is no longer needed once rows are read in order up to this one."""

    def mixing(self) -> list[Mixing]:
        """How batches are mixed, where that is known and may differ from a full shuffle."""
        return []

    @property
    def piece_source(self) -> PieceSource | None:
        """This source if its rows are made of pieces of documents, else None."""
        return None


class PieceSource(RowSource):
    """Rows made of pieces of documents, packed or padded. They can be mixed piece by piece, and count their targets."""

    makes_labels = True
    is_rectangular = False
    stage: Pack | Pad

    @property
    def row_length(self) -> int | None:
        """As many as pack() says; padded rows are as long as their batch needs."""
        return self.stage.settings.length if isinstance(self.stage, Pack) else None

    @property
    def piece_source(self) -> PieceSource:
        """Itself."""
        return self

    @abstractmethod
    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        """What these rows are made of, to be put into rows `batch_rows` of a batch."""

    @abstractmethod
    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Tokens in each row that the loss is taken over."""

    @property
    @abstractmethod
    def kept(self) -> Mapping[str, Column]:
        """The columns that a batch has beside the tokens, by name."""

    def output_arrays(self, num_rows: int) -> OutputArrays:
        """The arrays that have a place for every token, where it is known how many there are."""
        if self.row_length is None:
            return {}
        shape = (num_rows, self.row_length)
        per_token = {
            name: (shape, dtype_name(column.dtype)) for name, column in self.kept.items() if column.kind == "ragged"
        }
        return {
            **dict.fromkeys(("input_ids", "labels", "position_ids"), (shape, "int64")),
            "document_ids": (shape, "int32"),
            **per_token,
        }


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
        begins = offsets_of(self.sizes)
        columns: NDArray[np.int64] = begins[:-1] - np.repeat(begins[self.row_offsets[:-1]], np.diff(self.row_offsets))
        return columns


class TokenColumns(NamedTuple):
    """Where the tokens of pieces are, the mask of those that may be predicted, if there is one, and what is kept."""

    samples: Samples
    tokens: Column
    mask: Column | None
    kept: Mapping[str, Column]


class Filling(NamedTuple):
    """What one source puts into which rows of a batch."""

    columns: TokenColumns
    batch_rows: NDArray[np.int64]
    pieces: Pieces


def offered(out: Mapping[str, NDArray[Any]] | None, key: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """The array offered for `key`, or a new one.

    Raises:
        TypeError: what is offered is not an array.
        ValueError: the array offered has another shape or dtype, or cannot be written in one piece.
    """
    array = (out or {}).get(key)
    if array is None:
        return np.empty(shape, dtype)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"out[{key!r}] is {type(array).__name__}; a numpy array is needed.")
    if array.shape != shape or array.dtype != dtype or not (array.flags.c_contiguous and array.flags.writeable):
        kind = "" if array.flags.writeable else "read-only "
        kind += "" if array.flags.c_contiguous else "strided "
        raise ValueError(
            f"out[{key!r}] is {kind}{array.dtype} {list(array.shape)}; "
            f"writeable, contiguous {np.dtype(dtype)} {list(shape)} is needed."
        )
    return array


@functools.cache
def kernels() -> ModuleType:
    """The compiled loops of this room, imported with numba (0.4 s) when the first row is read."""
    from penstock.plan import _kernels

    return _kernels

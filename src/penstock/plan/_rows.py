"""Row sources: what row i of an endless run holds.

The run is one endless sequence of epochs of `num_rows` rows each; row numbers are absolute. A row
source answers any set of them, in any order, from nothing but the numbers. Which row of the data
stands at which position of an epoch is decided in `_epochs.py`; what the row holds, by the source:

    SampleRows        each sample (`_sample_rows.py`)
    TokenWindowRows   fixed windows of all tokens (`_sample_rows.py`)
    PaddedRows        one document each, padded to the longest of a batch (`_sample_rows.py`)
    PackedRows        whole documents side by side (`_packed_rows.py`)
    MixedRows         rows of several of these (`_mixed_rows.py`)
    ResizedRows       another number of any of these in an epoch

**Epochs of another length: take, skip and repeat.** The rows of the source stay as they are; only where an epoch
begins and ends changes. Every epoch covers a
period of whole passes over the source and consists of some consecutive rows of it:

    source      |  pass 0   |  pass 1   |  pass 2   |  pass 3   | ...
    skip(2)     |..x x x x x|..x x x x x|                            begin 2, period 1 pass
    take(4)     |x x x x....|x x x x....|                            period 1 pass
    take(9)     |x x x x x x x|x x......|x x x x x x x|x x ...       period 2 passes: more rows than a pass has
    repeat(2)   |x x x x x x x x x x x x x x|                        period 2 passes, all of them

So row i of epoch e is row `e * period + begin + i` of the source: two additions and a division per row, no memory.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.dataset import Samples
from penstock.errors import SchemaError, StageError
from penstock.order import MAX_ROWS
from penstock.plan._accounts import DocumentTrace, Ledger, Mixing
from penstock.plan._epochs import PageHints
from penstock.plan._stages import ATTENTION, TOKENS, Pack, Pad, Repeat, Skip, TakeRows
from penstock.plan._uses import Reads, RowRange, Rows
from penstock.schema import Column, dtype_name, offsets_of

BatchArrays = dict[str, Any]
OutputArrays = dict[str, tuple[tuple[int, ...], str]]
"""(shape, dtype) of each array of a batch whose size is known beforehand."""


class EarlierOrder(NamedTuple):
    """An order that agrees with another in all rows of the run before one."""

    identity: Any
    end: int
    epoch_rows: int
    """Rows in its epochs, by which a state's epoch and row become a row of the run."""


class RowSource(ABC):
    """Rows by absolute number."""

    num_rows: int
    """Rows in an epoch."""
    makes_labels: bool
    """Whether `labels` are targets that the source made, not a column that happens to have the name."""
    is_rectangular: bool
    """Whether a batch is nothing but its rows, side by side in the arrays that `output_arrays` names."""
    hints: PageHints | None = None

    @property
    @abstractmethod
    def order_identity(self) -> Any:
        """JSON of everything that decides which data is row i."""

    @property
    def run_identity(self) -> Any:
        """JSON of everything that decides which data is row i of the run, epochs laid end to end."""
        return self.order_identity

    def earlier_orders(self, epoch_rows: int | None) -> Iterator[EarlierOrder]:
        """Others that agree with this one up to some row of the run.

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

    def costs(self, rows: Rows, measure: str) -> NDArray[np.float64]:
        """What each row costs: its tokens, their attention, or the values of a column, by name.

        Raises:
            SchemaError: there is no such column of numbers.
            StageError: all rows cost the same.
        """
        raise StageError(f"batch(balance={measure!r}): rows of window() have no documents, so all cost the same.")

    def page_hints(self, row: int) -> list[tuple[PageHints, int]]:
        """What tells the kernel which data comes next, where that is known, each with its own number of the row."""
        return [] if self.hints is None else [(self.hints, row)]

    @abstractmethod
    def reads(self, rows: RowRange) -> list[Reads]:
        """What these rows read: at least that, and always the same shards' folders in the same order."""

    def mixing(self) -> list[Mixing]:
        """How batches are mixed, where that is known and may differ from a full shuffle."""
        return []

    def stored_at(self, rows: Rows) -> NDArray[np.float64] | None:
        """How much of the data is stored before what is behind each row, from 0 to 1; None for that of a mixture."""
        return None

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
    def piece_source(self) -> PieceSource | None:
        return self

    @abstractmethod
    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        """What these rows are made of, to be put into rows `batch_rows` of a batch."""

    @abstractmethod
    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Tokens in each row that the loss is taken over."""

    @property
    @abstractmethod
    def counts_ahead(self) -> bool:
        """Whether counting the targets of rows that nobody reads yet costs little: it takes lengths alone."""

    @property
    @abstractmethod
    def kept(self) -> Mapping[str, Column]:
        """The columns that a batch has beside the tokens, by name."""

    def output_arrays(self, num_rows: int) -> OutputArrays:
        if self.row_length is None:
            return {}
        shape = (num_rows, self.row_length)
        per_token = {
            name: (shape, dtype_name(column.dtype)) for name, column in self.kept.items() if column.is_per_token
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


def costs_of_documents(
    samples: Samples, columns: Mapping[str, Column], measure: str, stored: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """What documents, or pieces of them, cost; `sizes` are their tokens, and `columns` may be named as well.

    Raises:
        SchemaError: there is no such column, or it does not hold numbers.
    """
    if measure in (TOKENS, ATTENTION):
        tokens = sizes.astype(np.float64)
        return tokens if measure == TOKENS else tokens * tokens
    column = columns.get(measure)
    if column is None or column.is_ragged or column.shape or column.dtype.kind not in "biuf":
        found = "the rows have none of this name" if column is None else f"it is {column.spec}"
        raise SchemaError(
            f'batch(balance={measure!r}): "tokens", "attention" or a column of one number per sample is needed; '
            f"{found}. pack(keep=...) and pad(keep=...) carry columns."
        )
    values = np.empty(len(stored), column.dtype)
    samples.storage.read_fixed(column, stored, values)
    return values.astype(np.float64)


OneOrMany = TypeVar("OneOrMany", int, Rows)


class ResizedRows(PieceSource):
    """`num_rows` rows of every `num_passes` passes over a source, from row `begin` of them on; of pieces as its are."""

    def __init__(self, inner: RowSource, *, begin: int, num_rows: int, num_passes: int) -> None:
        self.inner, self.begin, self.num_rows, self.num_passes = inner, begin, num_rows, num_passes
        self._period = num_passes * inner.num_rows
        self.makes_labels, self.is_rectangular = inner.makes_labels, inner.is_rectangular
        if inner.piece_source is not None:
            self.stage = inner.piece_source.stage

    @property
    def row_length(self) -> int | None:
        return self.inner.row_length

    @property
    def piece_source(self) -> PieceSource | None:
        return None if self.inner.piece_source is None else self

    @property
    def counts_ahead(self) -> bool:
        return self._inner_pieces.counts_ahead

    @property
    def kept(self) -> Mapping[str, Column]:
        return self._inner_pieces.kept

    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        return self._inner_pieces.fill(self._find(rows), batch_rows)

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        return self._inner_pieces.count_targets(self._find(rows))

    @property
    def _inner_pieces(self) -> PieceSource:
        assert self.inner.piece_source is not None, "asked of rows that are made of pieces"
        return self.inner.piece_source

    @property
    def order_identity(self) -> Any:
        """Where epochs begin; where they end does not change which row is row i."""
        return self._order_with(self.num_passes)

    @property
    def run_identity(self) -> Any:
        return ["stretch", self.begin, self.num_passes, self.num_rows, self.inner.run_identity]

    def earlier_orders(self, epoch_rows: int | None) -> Iterator[EarlierOrder]:
        """The same with fewer passes, which ends earlier; and those of the source, if its epochs are as long."""
        num_passes = _passes_for(epoch_rows or self.inner.num_rows, self.inner)
        if self.begin == 0 and num_passes < self.num_passes:
            yield EarlierOrder(self._order_with(num_passes), num_passes * self.inner.num_rows, self.num_rows)
        if not isinstance(self.inner, ResizedRows):
            is_plain = self.begin == 0 and self.num_passes == 1
            for identity, row, inner_rows in self.inner.earlier_orders(epoch_rows):
                order = identity if is_plain else ["stretch", self.begin, self.num_passes, identity]
                if inner_rows == self.inner.num_rows:
                    yield EarlierOrder(order, self._num_rows_before(row), self.num_rows)

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        return self.inner.read(self._find(rows), out)

    def output_arrays(self, num_rows: int) -> OutputArrays:
        return self.inner.output_arrays(num_rows)

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        return self.inner.trace(self._find(rows), source)

    def describe(self, row: int) -> str:
        return self.inner.describe(self._find(row))

    def page_hints(self, row: int) -> list[tuple[PageHints, int]]:
        return self.inner.page_hints(self._find(row))

    def reads(self, rows: RowRange) -> list[Reads]:
        if self._period == self.num_rows or rows.begin >= rows.end:
            return self._inner_reads(rows)
        return [each for _, part in rows.epochs(self.num_rows) for each in self._inner_reads(part)]

    def _inner_reads(self, rows: RowRange) -> list[Reads]:
        """What rows of one epoch read, or of any number where the source's follow each other as well."""
        by = self._find(rows.begin) - rows.begin
        found = self.inner.reads(rows.shifted(by))
        return [Reads(spans.shifted(-by), layers) for spans, layers in found]

    def costs(self, rows: Rows, measure: str) -> NDArray[np.float64]:
        return self.inner.costs(self._find(rows), measure)

    def mixing(self) -> list[Mixing]:
        return self.inner.mixing()

    def stored_at(self, rows: Rows) -> NDArray[np.float64] | None:
        return self.inner.stored_at(self._find(rows))

    def ledger(self, epoch: int) -> Ledger:
        """The account of the passes that an epoch touches, and how many of their rows it leaves out."""
        inner = self.inner.ledger(epoch * self.num_passes)
        counts = self.rows_of_sources(epoch * self.num_rows, (epoch + 1) * self.num_rows)
        return dataclasses.replace(
            inner,
            num_rows=self.num_rows,
            num_passes=self.num_passes * inner.num_passes,
            rows_left_out=self.num_passes * inner.rows_left_out + self._period - self.num_rows,
            schedule=self.schedule_until((epoch + 1) * self.num_rows),
            sources={name: dataclasses.replace(one, num_rows=counts[name]) for name, one in inner.sources.items()},
        )

    def schedule_until(self, end: int) -> Mapping[int, Mapping[str, float]]:
        found = self.inner.schedule_until(self._find(end - 1) + 1) if end else {}
        return {self._num_rows_before(row): shares for row, shares in found.items()}

    def rows_of_sources(self, begin: int, end: int) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        while begin < end:
            stop = end if self._period == self.num_rows else min(end, (begin // self.num_rows + 1) * self.num_rows)
            first = self._find(begin)
            counts.update(self.inner.rows_of_sources(first, first + stop - begin))
            begin = stop
        return counts

    def _order_with(self, num_passes: int) -> Any:
        if self.begin == 0 and num_passes == 1:
            return self.inner.order_identity
        return ["stretch", self.begin, num_passes, self.inner.run_identity]

    def _find(self, rows: OneOrMany) -> OneOrMany:
        """The row of the source behind a row, or behind each of several."""
        return rows // self.num_rows * (self._period - self.num_rows) + rows + self.begin

    def _num_rows_before(self, row: int) -> int:
        """How many rows come before a row of the source."""
        epoch, place = divmod(row, self._period)
        return epoch * self.num_rows + min(max(place - self.begin, 0), self.num_rows)


def resize_epoch(inner: RowSource, stage: TakeRows | Skip | Repeat) -> ResizedRows:
    """The source with epochs as the stage says.

    Raises:
        StageError: tokens are given, and rows have no fixed number of them.
        ValueError: there would be no rows.
    """
    begin, num_rows, num_passes = 0, inner.num_rows, 1
    match stage:
        case Skip():
            begin, num_rows = stage.rows, inner.num_rows - stage.rows
        case Repeat():
            num_rows, num_passes = stage.times * inner.num_rows, stage.times
        case TakeRows():
            num_rows = _rows_taken(inner, stage)
            num_passes = _passes_for(num_rows, inner)
    if num_rows <= 0 or not inner.num_rows:
        raise ValueError(f"{stage.verb}(): nothing would be left; an epoch has {inner.num_rows:,} rows.")
    if num_passes * inner.num_rows > MAX_ROWS:
        raise ValueError(f"{stage.verb}(): an epoch would span more than 2**62 rows, which is all that a run has.")
    return ResizedRows(inner, begin=begin, num_rows=num_rows, num_passes=num_passes)


def _passes_for(num_rows: int, inner: RowSource) -> int:
    """The fewest passes over a source that hold this many rows."""
    return max(1, -(-num_rows // max(1, inner.num_rows)))


def _rows_taken(inner: RowSource, stage: TakeRows) -> int:
    if stage.rows is not None:
        return stage.rows
    tokens = int(stage.tokens or 0)
    if inner.row_length is None:
        raise StageError("take(tokens=...) needs rows of a fixed number of tokens: window() or pack() before it.")
    if tokens < inner.row_length:
        raise ValueError(f"take(tokens={tokens:,}): a single row has {inner.row_length:,}.")
    return tokens // inner.row_length

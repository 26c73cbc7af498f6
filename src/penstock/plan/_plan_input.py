"""What a plan is built on, and from stages to rows: the row source that a dataset's stages describe.

Epochs of another length over the same rows: take, skip and repeat.

The rows of the source stay as they are; only where an epoch begins and ends changes. Every epoch covers a
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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples, packed_column
from penstock.errors import StageError
from penstock.order import MAX_ROWS
from penstock.plan._accounts import DocumentTrace, Ledger, Mixing
from penstock.plan._packed_rows import PackedRows, find_pack_index
from penstock.plan._rows import BatchArrays, Filling, OutputArrays, PieceSource, Rows, RowSource
from penstock.plan._sample_orders import make_order
from penstock.plan._sample_rows import PaddedRows, SampleRows, TokenWindowRows
from penstock.plan._stages import (
    Balanced,
    Cast,
    Pack,
    Pad,
    Repeat,
    Shuffle,
    Skip,
    Stage,
    TakeRows,
    Weighted,
    Window,
    with_groups,
)
from penstock.schema import Column

Stages = tuple[Stage, ...]


class PlanInput(Protocol):
    """What a plan is built on: a `Dataset`, or the `Mix` of several plans."""

    @property
    def fingerprint(self) -> str:
        """Identity of the data."""
        ...

    @property
    def tokenizers(self) -> dict[str, str]:
        """The tokenizers whose tokens it holds, as far as it says: name by digest."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels, as far as it says."""
        ...

    def build_rows(self, stages: Stages) -> RowSource:
        """The rows that these stages make of it."""
        ...

    def check_stage(self, stage: Stage) -> None:
        """Raise `StageError` for a stage that cannot follow it."""
        ...

    def select_columns(self, names: Iterable[str]) -> PlanInput:
        """The same samples with only these columns."""
        ...

    def map_seed(self, stages: Stages) -> int:
        """What the generators of mapped functions derive from."""
        ...

    def order_facts(self, stages: Stages) -> dict[str, str]:
        """What decides the order of rows, fact by fact."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The source in a plan file; `ValueError` when a file cannot name it."""
        ...


def build_rows(samples: Samples, stages: Stages) -> RowSource:
    """The row source that stages describe.

    Raises:
        SchemaError: a column does not fit its stage.
        StageError: a stage that has no effect, or no meaning, before window(), pack() or pad().
    """
    stages = with_groups(stages)
    casts = tuple(stage for stage in stages if isinstance(stage, Cast))
    cut = next((stage for stage in stages if isinstance(stage, (Window, Pack, Pad))), None)
    if cut is None:
        return SampleRows(samples, casts, make_order(samples, samples.schema.columns, stages))
    if casts:
        raise StageError(f"cast() has no effect before {cut.verb}(): its rows are int64 already. Leave it out.")
    if isinstance(cut, Pad):
        return PaddedRows(samples, cut, make_order(samples, (samples.schema[cut.column],), stages))
    _refuse_draws(stages, cut)
    shuffle = _find_shuffle(stages)
    return TokenWindowRows(samples, cut, shuffle) if isinstance(cut, Window) else _pack(samples, cut, shuffle)


def map_seed(stages: Stages) -> int:
    """What the generators of mapped functions derive from: the seed of the shuffle, if there is one."""
    shuffle = _find_shuffle(stages)
    return 0 if shuffle is None else shuffle.seed


def _find_shuffle(stages: Stages) -> Shuffle | None:
    return next((stage for stage in stages if isinstance(stage, Shuffle)), None)


def _refuse_draws(stages: Stages, cut: Window | Pack) -> None:
    drawn = next((stage.verb for stage in stages if isinstance(stage, (Weighted, Balanced))), None)
    if drawn is not None:
        raise StageError(
            f"{cut.verb}() cannot follow {drawn}(): its rows, and how many there are, would differ between epochs. "
            "Use pad(), or give each kind of document its share with penstock.mix()."
        )


def _pack(samples: Samples, cut: Pack, shuffle: Shuffle | None) -> PackedRows:
    """Packed rows, whose number is looked up, or counted now."""
    column = packed_column(samples.schema, cut.column)
    index = find_pack_index(
        lambda begin, end: samples.lengths_between(column, begin, end),
        len(samples),
        cut.settings,
        column=cut.column,
        fingerprint=samples.fingerprint,
        attributes=samples.storage.attributes if samples.are_whole else {},
    )
    return PackedRows(samples, cut, shuffle, index)


OneOrMany = TypeVar("OneOrMany", int, Rows)


class ResizedRows(RowSource):
    """`num_rows` rows of every `num_passes` passes over a source, from row `begin` of them on."""

    def __init__(self, inner: RowSource, *, begin: int, num_rows: int, num_passes: int) -> None:
        self.inner, self.begin, self.num_rows, self.num_passes = inner, begin, num_rows, num_passes
        self._period = num_passes * inner.num_rows
        self.makes_labels, self.is_rectangular = inner.makes_labels, inner.is_rectangular

    @property
    def row_length(self) -> int | None:
        """The source's."""
        return self.inner.row_length

    @property
    def order_identity(self) -> Any:
        """Where epochs begin; where they end does not change which row is row i."""
        return self._order_with(self.num_passes)

    @property
    def run_identity(self) -> Any:
        """Where epochs begin and end."""
        return ["stretch", self.begin, self.num_passes, self.num_rows, self.inner.run_identity]

    def earlier_orders(self, epoch_rows: int | None) -> Iterator[tuple[Any, int]]:
        """The same with fewer passes, which ends earlier; and those of the source."""
        num_passes = _passes_for(epoch_rows or self.inner.num_rows, self.inner)
        if self.begin == 0 and num_passes < self.num_passes:
            yield self._order_with(num_passes), num_passes * self.inner.num_rows
        if not isinstance(self.inner, ResizedRows):
            is_plain = self.begin == 0 and self.num_passes == 1
            for identity, row in self.inner.earlier_orders(epoch_rows):
                order = identity if is_plain else ["stretch", self.begin, self.num_passes, identity]
                yield order, self._num_rows_before(row)

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """These rows of the source."""
        return self.inner.read(self._find(rows), out)

    def output_arrays(self, num_rows: int) -> OutputArrays:
        """The source's."""
        return self.inner.output_arrays(num_rows)

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The documents behind these rows."""
        return self.inner.trace(self._find(rows), source)

    def describe(self, row: int) -> str:
        """As the source describes it."""
        return self.inner.describe(self._find(row))

    def will_need(self, row: int) -> None:
        """What the source's row needs."""
        self.inner.will_need(self._find(row))

    def dont_need(self, row: int) -> None:
        """What is behind the source's row."""
        self.inner.dont_need(self._find(row))

    def mixing(self) -> list[Mixing]:
        """Of the source."""
        return self.inner.mixing()

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
        """The source's, in rows of this."""
        found = self.inner.schedule_until(self._find(end - 1) + 1) if end else {}
        return {self._num_rows_before(row): shares for row, shares in found.items()}

    def rows_of_sources(self, begin: int, end: int) -> Mapping[str, int]:
        """Counted epoch by epoch."""
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


class ResizedPieceRows(ResizedRows, PieceSource):
    """The same over rows made of pieces."""

    def __init__(self, inner: PieceSource, *, begin: int, num_rows: int, num_passes: int) -> None:
        super().__init__(inner, begin=begin, num_rows=num_rows, num_passes=num_passes)
        self._inner_pieces, self.stage = inner, inner.stage

    @property
    def kept(self) -> Mapping[str, Column]:
        """The source's."""
        return self._inner_pieces.kept

    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        """The pieces of these rows of the source."""
        return self._inner_pieces.fill(self._find(rows), batch_rows)

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Targets in each of these rows of the source."""
        return self._inner_pieces.count_targets(self._find(rows))


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
    if inner.piece_source is None:
        return ResizedRows(inner, begin=begin, num_rows=num_rows, num_passes=num_passes)
    return ResizedPieceRows(inner.piece_source, begin=begin, num_rows=num_rows, num_passes=num_passes)


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

"""The account of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.packing import PackingLedger
from penstock.plan._mixture import MixedRows
from penstock.plan._packed import PackedRows
from penstock.plan._rows import RowSource
from penstock.plan._steps import Steps, checked_epoch
from penstock.plan._window_rows import WindowRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What an epoch holds and what it leaves out."""

    num_rows: int
    """Rows in the epoch."""
    rows_dropped: int
    """Rows in no batch, by tail="drop"."""
    tokens_left_over: int
    """Tokens behind the last whole window, by window()."""
    packing: PackingLedger | None
    """Tokens, pieces, padding and cuts, by pack(). A mixture has those of its `sources`."""
    sources: Mapping[str, SourceLedger] = field(default_factory=dict)
    """What each source of a mixture gives."""

    @property
    def fill(self) -> float:
        """Share of places in rows that hold a token; of a mixture, if each source gave whole passes."""
        if self.sources:
            return sum(s.num_rows * s.one_pass.fill for s in self.sources.values()) / self.num_rows
        return self.packing.fill if self.packing is not None else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLedger:
    """What one source gives to an epoch of a mixture.

    Sources run through epochs of their own, which need not end where the mixture's do. The account of one
    pass is the same for all of them.
    """

    num_rows: int
    """Rows of the source in this epoch of the mixture."""
    one_pass: Ledger
    """The account of one pass over the source."""

    @property
    def num_passes(self) -> float:
        """Passes over the source that its rows are: with 2.5, half of them come a third time."""
        return self.num_rows / self.one_pass.num_rows


def make_plan_ledger(rows: RowSource, steps: Steps | None, epoch: int) -> Ledger:
    """The account of an epoch; packed windows are packed anew and checked piece by piece."""
    epoch = checked_epoch(epoch, verb="ledger")
    left_over = rows.num_tokens % rows.stage.length if isinstance(rows, WindowRows) else 0
    return Ledger(
        num_rows=rows.num_rows,
        rows_dropped=steps.num_dropped() if steps is not None else 0,
        tokens_left_over=left_over,
        packing=rows.ledger(epoch) if isinstance(rows, PackedRows) else None,
        sources=_source_ledgers(rows, epoch) if isinstance(rows, MixedRows) else {},
    )


def _source_ledgers(rows: MixedRows, epoch: int) -> dict[str, SourceLedger]:
    begins, ends = (rows.mixture.counts(edge * rows.num_rows).tolist() for edge in (epoch, epoch + 1))
    return {
        name: SourceLedger(num_rows=end - begin, one_pass=make_plan_ledger(source, None, begin // source.num_rows))
        for name, source, begin, end in zip(rows.names, rows.sources, begins, ends, strict=True)
    }

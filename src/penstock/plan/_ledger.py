"""The account of an epoch."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.packing import PackingLedger
from penstock.plan._mixture import MixedRows
from penstock.plan._packed import PackedRows
from penstock.plan._rows import RowSource, WindowRows
from penstock.plan._steps import Steps


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
    """Tokens, pieces, padding and cuts, by pack()."""

    @property
    def fill(self) -> float:
        """Share of places in rows that hold a token."""
        return self.packing.fill if self.packing is not None else 1.0


def make_plan_ledger(rows: RowSource, steps: Steps | None, epoch: int) -> Ledger:
    """The account of an epoch; packed windows are packed anew and checked piece by piece."""
    if epoch < 0:
        raise IndexError(f"Epoch {epoch} is asked for; epochs count from 0.")
    if isinstance(rows, MixedRows):
        raise ValueError("A mixture's sources run through epochs of their own: ask the plan of each for its ledger.")
    left_over = rows.num_tokens % rows.stage.length if isinstance(rows, WindowRows) else 0
    return Ledger(
        num_rows=rows.num_rows,
        rows_dropped=steps.num_dropped() if steps is not None else 0,
        tokens_left_over=left_over,
        packing=rows.ledger(epoch) if isinstance(rows, PackedRows) else None,
    )

"""What a plan reports about its batches: the documents in a batch, and the account of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples
from penstock.errors import counted, printable
from penstock.packing import PackingLedger

if TYPE_CHECKING:
    from penstock.report import FigureLine

COUNTED_BATCH = 256
"""Rows of a batch in which something is counted, where the plan has no batches of its own."""
_FAR = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTrace:
    """One document, or a part of it, in a batch."""

    row: int
    """Row of the batch."""
    column: int
    """Place in the row where it begins."""
    source: str
    """Name of the mixture's source, as in "web" or, in a mixture of mixtures, "web/news"; or ""."""
    document: int
    """Index of the document in its dataset."""
    start: int
    """First token of the document that is here."""
    size: int
    """Tokens of the document that are here."""
    origin: str
    """File and row that the document was prepared from, or "" when the dataset does not say."""


def trace_document(
    samples: Samples, source: str, row: int, column: int, document: int, start: int, size: int
) -> DocumentTrace:
    """The trace of one document, with its origin."""
    return DocumentTrace(
        row=row,
        column=column,
        source=source,
        document=document,
        start=start,
        size=size,
        origin=samples.origin(document) or "",
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """How often samples come in an epoch, where that is not once each."""

    num_samples: int
    """Different samples."""
    num_absent: int
    """Samples that do not come at all."""
    most: int
    """How often the most frequent one comes."""

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> Drawn:
        """From how often each sample comes."""
        return cls(int(np.count_nonzero(counts)), int(np.count_nonzero(counts == 0)), int(counts.max(initial=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What an epoch holds and what it leaves out."""

    num_rows: int
    """Rows in the epoch."""
    rows_dropped: int = 0
    """Rows in no batch, by tail="drop"."""
    num_passes: int = 1
    """Passes over the data that the epoch touches, by repeat() and take()."""
    rows_left_out: int = 0
    """Rows of these passes that are not in the epoch, by take() and skip()."""
    rows_replaced: int | None = 0
    """Rows that another stands in for, by map(on_error="skip"); None where the functions have not been tried."""
    tokens_left_over: int = 0
    """Tokens after the last whole window, by window()."""
    tokens_truncated: int = 0
    """Tokens cut off, by pad(length=...)."""
    drawn: Drawn | None = None
    """How often samples come in one pass, by sample() and balance()."""
    packing: PackingLedger | None = None
    """Tokens, pieces, padding and cuts of one pass, by pack(). A mixture has those of its `sources`."""
    sources: Mapping[str, SourceLedger] = field(default_factory=dict)
    """What each source of a mixture gives."""
    schedule: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """If they change: shares of the sources by the row of the run from which they hold, up to this epoch's end."""

    @property
    def fill(self) -> float:
        """Share of places in rows that hold a token; of a mixture, if each source gave whole passes."""
        if self.sources:
            return sum(s.num_rows * s.one_pass.fill for s in self.sources.values()) / self.num_rows
        return self.packing.fill if self.packing is not None else 1.0

    def __str__(self) -> str:
        from penstock.report import align_figures

        return align_figures(_ledger_lines(self))


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
        """Passes over the source that its rows amount to: with 2.5, half of them come a third time."""
        return self.num_rows / self.one_pass.num_rows


@dataclass(frozen=True, slots=True)
class Mixing:
    """How far batches are from those of a full shuffle."""

    what: str
    """What was counted: a column, or "source"."""
    num_classes: float
    """Classes in a batch of 256, on average."""
    variance: float
    """Variance of class counts per batch, as a multiple of that under a full shuffle."""

    @property
    def is_far(self) -> bool:
        """Whether that is worth mentioning."""
        return self.variance > _FAR

    def __str__(self) -> str:
        return (
            f"{self.what} comes in runs, and a shuffle of groups of storage windows cannot take them apart: the counts "
            f"per batch vary {self.variance:.1f} times as much as under a full shuffle ({self.num_classes:.0f} "
            f"different ones in a batch of {COUNTED_BATCH})"
        )


def _ledger_lines(ledger: Ledger) -> Iterator[FigureLine]:
    """What an epoch holds, and only those losses that there are."""
    one_pass = " of one pass" if ledger.num_passes > 1 else ""
    yield "rows", ledger.num_rows, f"from {ledger.num_passes:,} passes" if one_pass else ""
    yield from _losses(ledger)
    if ledger.drawn is not None:
        yield _drawn_line(ledger.drawn, one_pass)
    if ledger.packing is not None:
        yield from _packing_lines(ledger.packing, one_pass)
    for name, source in ledger.sources.items():
        yield _source_line(printable(name), source)
    for row, shares in ledger.schedule.items():
        yield "from row", row, ", ".join(f"{printable(name)} {100 * share:.1f} %" for name, share in shares.items())


def _losses(ledger: Ledger) -> Iterator[FigureLine]:
    found: tuple[FigureLine, ...] = (
        ("rows left out", ledger.rows_left_out, "by take() and skip()"),
        ("rows dropped", ledger.rows_dropped, 'in no batch, by tail="drop"'),
        ("rows replaced", ledger.rows_replaced or 0, 'by map(on_error="skip")'),
        ("tokens left over", ledger.tokens_left_over, "after the last whole window"),
        ("tokens cut off", ledger.tokens_truncated, "by pad(length=...)"),
    )
    yield from (line for line in found if line[1])
    if ledger.rows_replaced is None:
        yield "rows replaced", "?", 'by map(on_error="skip"): ledger(try_maps=True) counts them'


def _drawn_line(drawn: Drawn, one_pass: str) -> FigureLine:
    absent = f"{drawn.num_absent:,} never come, " if drawn.num_absent else ""
    return "different samples", drawn.num_samples, f"{absent}the most frequent {counted(drawn.most, 'time')}{one_pass}"


def _packing_lines(packing: PackingLedger, one_pass: str) -> Iterator[FigureLine]:
    split = f", {counted(packing.num_split, 'document')} split" if packing.num_split else ""
    yield "documents", packing.num_documents, f"in {counted(packing.num_pieces, 'piece')}{split}{one_pass}"
    yield "tokens", packing.num_tokens, ""
    yield "tokens placed", packing.tokens_placed, f"{100 * packing.fill:.2f} % of all places"
    found: tuple[FigureLine, ...] = (
        ("tokens cut off", packing.tokens_truncated, 'by long="truncate"'),
        ("tokens dropped", packing.tokens_dropped, f'{counted(packing.documents_dropped, "document")}, by long="drop"'),
        ("padding", packing.padding_tokens, "places without a token"),
        ("documents empty", packing.num_empty, "in no row"),
        ("targets lost", packing.targets_lost, "the token before a cut predicts nothing"),
    )
    yield from (line for line in found if line[1])


def _source_line(name: str, source: SourceLedger) -> FigureLine:
    passes = f"{source.num_passes:.2f} passes over {counted(source.one_pass.num_rows, 'row')}"
    return f"rows of {name}", source.num_rows, f"{passes}, {100 * source.one_pass.fill:.2f} % full"

"""What a plan reports about its batches: their documents, the account of an epoch, and how well they are mixed.

A windowed shuffle mixes `group` storage windows at a time. If samples of one class, or of one source, are stored next
to each other, a batch then holds the classes of those windows only. A loss curve shows it too late, so it is
measured: batches are drawn as the shuffle would draw them, and the variance of their class counts is
compared with that of batches drawn from everything. 1 is a full shuffle.

    what is counted    a column that labels have (`label`, `domain`, …); without one, the files that samples came from,
                       taken together when their paths differ in nothing but digits
    what it costs      64 samples of that column where nothing is stored in runs, some thousands where something is
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import ConcatStorage, Samples
from penstock.errors import counted, printable
from penstock.order import LaneOrder, WindowedOrder
from penstock.packing import PackingLedger
from penstock.schema import LABEL_COLUMNS, offsets_of
from penstock.shards import ORIGIN_COLUMN, Storage, hash_samples, read_samples

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
    place = {"row": row, "column": column, "document": document, "start": start, "size": size}
    return DocumentTrace(source=source, origin=samples.origin(document) or "", **place)


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
class BatchLedger:
    """The batches of batch(tokens=...) that begin in an epoch."""

    num_batches: int = 0
    num_tokens: int = 0
    """Tokens in them, of rows that are not too long."""
    num_places: int = 0
    """Places for tokens, if all ranks' rows are as wide as the longest of a batch."""
    rows_too_long: int = 0
    """Rows that others stand in for, by long="drop"."""
    tokens_too_long: int = 0
    """Tokens in those."""

    @property
    def fill(self) -> float:
        """Share of places that hold a token."""
        return self.num_tokens / max(1, self.num_places)

    def __add__(self, other: BatchLedger) -> BatchLedger:
        names = [field.name for field in dataclasses.fields(self)]
        return BatchLedger(**{name: getattr(self, name) + getattr(other, name) for name in names})


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
    limits: tuple[str, ...] = ()
    """The columns of the further budgets of `packing`."""
    batches: BatchLedger | None = None
    """What batches hold, by batch(tokens=...)."""
    sources: Mapping[str, SourceLedger] = field(default_factory=dict)
    """What each source of a mixture gives."""
    schedule: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """If they change: shares of the sources by the row of the run from which they hold, up to this epoch's end."""

    @property
    def fill(self) -> float:
        """Share of places in rows that hold a token; of a mixture, if each source gave whole passes."""
        if self.sources:
            return sum(s.num_rows * s.one_pass.fill for s in self.sources.values()) / self.num_rows
        if self.batches is not None:
            return self.batches.fill
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
        for name, placed, fill in zip(
            ledger.limits, ledger.packing.units_placed, ledger.packing.fills[1:], strict=False
        ):
            yield printable(name), placed, f"{100 * fill:.2f} % of what rows may have"
    if ledger.batches is not None:
        yield "batches", ledger.batches.num_batches, f"{100 * ledger.batches.fill:.2f} % of their places hold a token"
    for name, source in ledger.sources.items():
        yield _source_line(printable(name), source)
    for row, shares in ledger.schedule.items():
        yield "from row", row, ", ".join(f"{printable(name)} {100 * share:.1f} %" for name, share in shares.items())


def _losses(ledger: Ledger) -> Iterator[FigureLine]:
    batches = ledger.batches or BatchLedger()
    found: tuple[FigureLine, ...] = (
        ("rows left out", ledger.rows_left_out, "by take() and skip()"),
        ("rows dropped", ledger.rows_dropped, 'in no batch, by tail="drop"'),
        ("rows replaced", ledger.rows_replaced or 0, 'by map(on_error="skip")'),
        ("rows too long", batches.rows_too_long, f'{counted(batches.tokens_too_long, "token")}, by long="drop"'),
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


Classes = Callable[[NDArray[np.int64]], NDArray[np.uint64]]
"""The class of each stored sample, as a number."""

_PAIRS, _BATCHES = 32, 32
_IN_RUNS = 0.25
_MOST_FILES = 4096
_SEED = 0


def measure_mixing(
    samples: Samples, order: WindowedOrder | LaneOrder, window_starts: NDArray[np.int64]
) -> list[Mixing]:
    """How an order mixes samples; nothing when none are stored in runs.

    Args:
        samples: The samples.
        order: An epoch's order of storage windows.
        window_starts: The first sample of each storage window; the last entry is the number of samples.
    """
    found = _classes_of(samples)
    if found is None:
        return []
    what, classes = found
    rng = np.random.default_rng(_SEED)
    if not _comes_in_runs(samples, classes, window_starts, rng):
        return []
    if isinstance(order, LaneOrder):
        drawn = _draw_of_lanes(order, window_starts, rng)
    else:
        groups = np.linspace(0, order.num_groups - 1, _BATCHES).round().astype(np.int64).tolist()
        drawn = np.stack([_draw(order.windows_of_group(group), window_starts, rng) for group in groups])
    _, numbers = np.unique(classes(samples.locate(drawn.reshape(-1))), return_inverse=True)
    return [_compare(what, numbers.reshape(drawn.shape))]


def _compare(what: str, batches: NDArray[np.int64]) -> Mixing:
    counts = np.stack([np.bincount(batch, minlength=int(batches.max()) + 1) for batch in batches])
    shares = counts.mean(axis=0) / COUNTED_BATCH
    expected = float((COUNTED_BATCH * shares * (1 - shares)).sum())
    variance = float(counts.var(axis=0, ddof=1).sum()) / expected if expected else 1.0
    return Mixing(what, float((counts > 0).sum(axis=1).mean()), variance)


def _draw(windows: NDArray[np.int64], starts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A batch of samples from these windows, as a permutation of all of them gives it."""
    ends = np.cumsum(starts[windows + 1] - starts[windows])
    places = rng.integers(0, max(1, int(ends[-1])), COUNTED_BATCH)
    found = np.searchsorted(ends, places, side="right")
    return np.asarray(starts[windows[found] + 1] - (ends[found] - places), np.int64)


def _draw_of_lanes(order: LaneOrder, starts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Batches of lanes that follow each other: for each row a sample of its window."""
    firsts = rng.integers(0, max(1, order.num_rows - COUNTED_BATCH), _BATCHES)
    rows = order.rows((firsts[:, None] + np.arange(COUNTED_BATCH)) % order.num_rows)
    windows = np.searchsorted(offsets_of(order.rows_per_window), rows, side="right") - 1
    sizes = starts[windows + 1] - starts[windows]
    return np.asarray(starts[windows] + (rng.random(rows.shape) * sizes).astype(np.int64))


def _comes_in_runs(samples: Samples, classes: Classes, starts: NDArray[np.int64], rng: np.random.Generator) -> bool:
    """Whether two samples of one storage window are alike far more often than two of different ones."""
    windows = rng.integers(0, len(starts) - 1, _PAIRS)
    pairs = starts[windows, None] + (rng.random((_PAIRS, 2)) * (starts[windows + 1] - starts[windows])[:, None])
    indices = np.minimum(pairs.astype(np.int64), len(samples) - 1)
    one, other = classes(samples.locate(indices.reshape(-1))).reshape(_PAIRS, 2).T
    within, across = float((one == other).mean()), float((one[:, None] == other).mean())
    return within - across > _IN_RUNS


def _classes_of(samples: Samples) -> tuple[str, Classes] | None:
    """What to count, in words, and how to read it."""
    storage = samples.storage
    columns = (storage.schema[name] for name in LABEL_COLUMNS if name in storage.schema)
    label = next((each for each in columns if each.kind == "bytes" or (each.kind == "fixed" and not each.shape)), None)
    if label is not None:
        return f"column {label.name!r}", lambda indices: hash_samples([read_samples(storage, label, indices)])
    if isinstance(storage, ConcatStorage) and len(storage.parts) > 1:
        return "which dataset of concat() a sample is from", storage.part_of
    return _sources_of(samples) if _are_worth_reading(storage) else None


def _are_worth_reading(storage: Storage) -> bool:
    """Whether there are several files, and few enough to be sources; a shuffled dataset has mixed them."""
    preparation = storage.attributes.get("preparation")
    num_files = preparation.get("files") if isinstance(preparation, dict) else None
    return type(num_files) is int and 1 < num_files <= _MOST_FILES and ORIGIN_COLUMN not in storage.schema


def _sources_of(samples: Samples) -> tuple[str, Classes] | None:
    provenance = samples.keys.provenance
    names = [re.sub(r"\d+", "", path) for path in provenance.files]
    _, numbers = np.unique(names, return_inverse=True)
    if len(names) < 2 or numbers.max() == 0 or not provenance.is_complete:
        return None
    sources = numbers.astype(np.uint64)
    return "what is in one source file", lambda indices: sources[provenance.files_of(indices)]

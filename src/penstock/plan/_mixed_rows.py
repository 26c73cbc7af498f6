"""Rows from several sources, each in its exact share, in one sequence that any row number opens.

Every source runs through its own epochs, each exactly once, at its own pace; the mixture only says which source comes
next. `penstock.order.Mixture` decides that and bounds how far any consecutive rows are off; `ScheduledMixture` is one
whose weights change on the way. Rows that are made of pieces are mixed piece by piece: each source copies its own
tokens, and one pass writes the rest for all of them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.order import BLOCK, STRATUM, Mixture, ScheduledMixture
from penstock.plan._accounts import DocumentTrace, Ledger, Mixing, SourceLedger
from penstock.plan._compose import compose
from penstock.plan._epochs import PageHints
from penstock.plan._rows import BatchArrays, EarlierOrder, Filling, OutputArrays, PieceSource, RowSource, offered
from penstock.plan._stages import Pack
from penstock.plan._uses import Reads, RowRange, Rows, Spans
from penstock.schema import Column, Ragged

SOURCE_IDS = "source_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How the sources of a mixture are dealt."""

    weights: tuple[float, ...]
    seed: int
    epoch: int | str
    """Rows in an epoch, or the source whose pass is one."""
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(row, weights from there on)"""
    source_ids: bool = False
    """Whether a batch says which source each row is from."""

    def make(self, num_changes: int | None = None) -> Mixture | ScheduledMixture:
        """The mixture that says which source comes next, with all changes of weights or the first ones."""
        changes = dict(self.changes[:num_changes])
        return ScheduledMixture(self.weights, self.seed, changes) if changes else Mixture(self.weights, self.seed)


class MixedRows(PieceSource):
    """Rows of several sources by their shares; of pieces if those of all sources are.

    Raises:
        SchemaError: their rows are not alike.
    """

    def __init__(self, sources: Mapping[str, RowSource], deal: Deal) -> None:
        self.names = tuple(sources)
        self.sources = tuple(sources.values())
        self.deal, self.seed = deal, deal.seed
        self._pieces = tuple(source.piece_source for source in self.sources if source.piece_source is not None)
        if self._pieces:
            self.stage = self._pieces[0].stage
        if len(self._pieces) not in (0, len(sources)) or len({source.stage.verb for source in self._pieces}) > 1:
            raise SchemaError("mix(): either all sources are packed or none is, and padded likewise.")
        try:
            self.mixture = deal.make()
        except ValueError as error:
            raise ValueError(f"mix() of {', '.join(map(repr, self.names))}, in this order: {error}") from None
        for name, source in zip(self.names, self.sources, strict=True):
            if source.num_rows == 0:
                raise ValueError(f"mix(): {name!r} has no rows, so it has nothing to give.")
        self._check_alike()
        self.makes_labels = self.sources[0].makes_labels
        self.is_rectangular = all(source.is_rectangular for source in self.sources)
        self.num_rows = self._rows_per_epoch(len(deal.changes))

    @property
    def order_identity(self) -> Any:
        return self._order_with(len(self.deal.changes), self.num_rows)

    def earlier_orders(self, epoch_rows: int | None) -> Iterator[EarlierOrder]:
        """Orders with a shorter schedule, up to the row at which each first differs.

        Epochs that are a pass over a source used to be as long as by the first weights, however these changed; states
        of such runs still fit.
        """
        starts = [*self.schedule, 1 << 62][1:]
        for number, end in enumerate(starts):
            for num_rows in {self._rows_per_epoch(number): None, self._rows_per_epoch(0): None}:
                if number < len(starts) - 1 or num_rows != self.num_rows:
                    yield EarlierOrder(self._order_with(number, num_rows), end, num_rows)

    @property
    def schedule(self) -> Mapping[int, tuple[int, ...]]:
        """Quotas by the row from which on they hold."""
        mixture = self.mixture
        return mixture.schedule if isinstance(mixture, ScheduledMixture) else {0: mixture.quotas}

    def _order_with(self, num_changes: int, num_rows: int) -> Any:
        parts = [[name, source.run_identity] for name, source in zip(self.names, self.sources, strict=True)]
        identity = ["mix", parts, list(self.mixture.quotas), self.seed, num_rows]
        changes = list(self.schedule.items())[1 : num_changes + 1]
        if changes:
            identity.append([[row, list(quotas)] for row, quotas in changes])
        return identity

    @property
    def row_length(self) -> int | None:
        return self.sources[0].row_length

    @property
    def piece_source(self) -> PieceSource | None:
        return self if self._pieces else None

    @property
    def counts_ahead(self) -> bool:
        return all(source.counts_ahead for source in self._pieces)

    @property
    def kept(self) -> Mapping[str, Column]:
        return self._pieces[0].kept

    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        """Each source copies its own tokens; one pass writes the rest for all of them."""
        if not len(rows):
            return self._pieces[0].fill(rows, batch_rows)
        return [
            filling
            for number, places, own in self._turns(rows)
            for filling in self._pieces[number].fill(own, batch_rows[places])
        ]

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        counts = np.zeros(len(rows), np.int64)
        for number, places, own in self._turns(rows):
            counts[places] = self._pieces[number].count_targets(own)
        return counts

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        if self._pieces:
            fillings = self.fill(rows, np.arange(len(rows)))
            return compose(fillings, len(rows), self.stage, out) | self._source_ids(rows, None)
        parts = [(places, self.sources[number].read(own, None)) for number, places, own in self._turns(rows)]
        if not parts:
            return self.sources[0].read(rows, out) | self._source_ids(rows, out)
        columns = {key: [(places, part[key]) for places, part in parts] for key in parts[0][1]}
        batch = {key: _interleave(values, len(rows), key, out) for key, values in columns.items()}
        return batch | self._source_ids(rows, out)

    def _source_ids(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """Which source each row is from, if that is asked for."""
        if not self.deal.source_ids:
            return {}
        source_ids = offered(out, SOURCE_IDS, (len(rows),), np.int32)
        source_ids[:] = self.mixture.locate(rows)[0]
        return {SOURCE_IDS: source_ids}

    def output_arrays(self, num_rows: int) -> OutputArrays:
        if self._pieces:
            return super().output_arrays(num_rows)
        own: OutputArrays = {SOURCE_IDS: ((num_rows,), "int32")} if self.deal.source_ids else {}
        return self.sources[0].output_arrays(num_rows) | own

    def page_hints(self, row: int) -> list[tuple[PageHints, int]]:
        positions = zip(self.sources, self.mixture.counts(row).tolist(), strict=True)
        return [found for source, position in positions for found in source.page_hints(position)]

    def reads(self, rows: RowRange) -> list[Reads]:
        """What each source reads, whole strata at a time: inside one its rows come in any order."""
        first, last = rows.begin // STRATUM * STRATUM, -(-rows.end // STRATUM) * STRATUM
        counts = zip(self.mixture.counts(first).tolist(), self.mixture.counts(last).tolist(), strict=True)
        found = []
        for number, (begin, end) in enumerate(counts):
            for spans, layers in self.sources[number].reads(RowRange(begin, end)):
                least, _ = self.mixture.rows_near(number, spans.first_rows)
                _, greatest = self.mixture.rows_near(number, spans.last_rows)
                least, greatest = np.maximum(least, rows.begin), np.minimum(greatest, rows.end - 1)
                kept = least <= greatest
                ranges = Spans(least[kept], greatest[kept], spans.begins[kept], spans.ends[kept])
                found.append(Reads(ranges, layers))
        return found

    def costs(self, rows: Rows, measure: str) -> NDArray[np.float64]:
        found = np.zeros(len(rows))
        for number, places, own in self._turns(rows):
            found[places] = self.sources[number].costs(own, measure)
        return found

    def mixing(self) -> list[Mixing]:
        return [found for source in self.sources for found in source.mixing()]

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        found: list[DocumentTrace] = []
        prefix = f"{source}/" if source else ""
        turns, own = self.mixture.locate(rows)
        for row, (number, position) in enumerate(zip(turns.tolist(), own.tolist(), strict=True)):
            traces = self.sources[number].trace(np.array([position]), prefix + self.names[number])
            found += [dataclasses.replace(trace, row=row) for trace in traces]
        return found

    def describe(self, row: int) -> str:
        (number,), (own,) = (found.tolist() for found in self.mixture.locate(np.array([row])))
        return f"row {row:,}, which is {self.sources[number].describe(own)} of {self.names[number]!r}"

    def ledger(self, epoch: int) -> Ledger:
        begin, end = epoch * self.num_rows, (epoch + 1) * self.num_rows
        counts, positions = self.rows_of_sources(begin, end), self.mixture.counts(begin).tolist()
        sources = {
            name: SourceLedger(num_rows=counts[name], one_pass=source.ledger(position // source.num_rows))
            for name, source, position in zip(self.names, self.sources, positions, strict=True)
        }
        return Ledger(num_rows=self.num_rows, sources=sources, schedule=self.schedule_until(end))

    def schedule_until(self, end: int) -> Mapping[int, Mapping[str, float]]:
        """The shares as they are dealt, rounded to 1/65,536."""
        if len(self.schedule) == 1:
            return {}
        shares = {row: [quota / BLOCK for quota in quotas] for row, quotas in self.schedule.items() if row < end}
        return {row: dict(zip(self.names, found, strict=True)) for row, found in shares.items()}

    def rows_of_sources(self, begin: int, end: int) -> Mapping[str, int]:
        counts = self.mixture.counts(end) - self.mixture.counts(begin)
        return dict(zip(self.names, counts.tolist(), strict=True))

    def _turns(self, rows: Rows) -> list[tuple[int, NDArray[np.int64], Rows]]:
        """(source, places in `rows`, rows of that source) of each source that has a turn."""
        turn, own = self.mixture.locate(rows)
        return [(number, np.flatnonzero(turn == number), own[turn == number]) for number in np.unique(turn).tolist()]

    def _rows_per_epoch(self, num_changes: int) -> int:
        """Rows in an epoch, with the first changes of weights: a number, or the fewest that hold a pass over a source.

        Where a change leaves the source out before it was read once, its share before that counts as going on.
        """
        if isinstance(self.deal.epoch, int):
            return self.deal.epoch
        number, starts = self.names.index(self.deal.epoch), list(self.schedule)
        needed = self.sources[number].num_rows
        while num_changes and not self.deal.changes[num_changes - 1][1][number]:
            if self.mixture.counts(starts[num_changes])[number] >= needed:
                break
            num_changes -= 1
        mixture = self.deal.make(num_changes)
        low, high = 0, 1
        while mixture.counts(high)[number] < needed:
            high *= 2
        while low < high:
            middle = (low + high) // 2
            if mixture.counts(middle)[number] < needed:
                low = middle + 1
            else:
                high = middle
        return low

    def _check_alike(self) -> None:
        if self._pieces:
            self._check_same("pack settings", [_row_settings(source) for source in self._pieces])
            return
        first_rows = [source.read(np.arange(1), None) for source in self.sources]
        if self.deal.source_ids and SOURCE_IDS in first_rows[0]:
            raise SchemaError(f"mix(source_ids=True): the sources have a column {SOURCE_IDS!r} of their own.")
        self._check_same("columns", [{key: _spec(value) for key, value in row.items()} for row in first_rows])

    def _check_same(self, what: str, values: list[Any]) -> None:
        for name, value in zip(self.names[1:], values[1:], strict=True):
            if value != values[0]:
                raise SchemaError(
                    f"mix(): {self.names[0]!r} and {name!r} differ in {what}: {values[0]} and {value}. "
                    "Rows of a batch must be alike; use select_columns, cast, or the same pack settings."
                )


def _interleave(
    parts: list[tuple[NDArray[np.int64], Any]], num_rows: int, key: str, out: Mapping[str, NDArray[Any]] | None
) -> Any:
    """One column from the same column of several sources, each with the places its rows go to."""
    first = parts[0][1]
    if isinstance(first, Ragged):
        order = np.empty(num_rows, np.int64)
        order[np.concatenate([places for places, _ in parts])] = np.arange(num_rows)
        return Ragged.concatenate([part for _, part in parts]).take(order)
    whole = offered(out, key, (num_rows, *first.shape[1:]), first.dtype)
    for places, part in parts:
        whole[places] = part
    return whole


def _spec(value: Any) -> str:
    """A column of a batch, written as schemas are."""
    if isinstance(value, Ragged) and (value.is_bytes or value.is_nested):
        return "bytes" if value.is_bytes else "bytes[*]"
    array, first = (value.values, ["*"]) if isinstance(value, Ragged) else (value, [])
    sizes = [*first, *map(str, array.shape[1:])]
    return f"{array.dtype}[{','.join(sizes)}]" if sizes else str(array.dtype)


def _row_settings(source: PieceSource) -> dict[str, Any]:
    """What decides how a row looks, which the column's name and the treatment of long documents do not."""
    stage = source.stage
    settings: dict[str, Any] = {"labels": stage.labels, "pad": stage.pad}
    if isinstance(stage, Pack):
        settings |= {"length": stage.settings.length, "max_documents": stage.settings.max_documents}
        settings |= {"positions": stage.positions}
    else:
        settings |= {"multiple": stage.multiple, "side": stage.side}
    if source.kept:
        settings["keep"] = {name: column.spec for name, column in source.kept.items()}
    return settings

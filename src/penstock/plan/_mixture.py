"""Rows from several sources, each in its exact share, in one sequence that any row number opens.

Every source runs through its own epochs, each exactly once, at its own pace; the mixture only says
whose turn it is. `penstock.order.Mixture` decides that and bounds how far any stretch is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.order import Mixture
from penstock.plan._compose import Placed, compose
from penstock.plan._packed import PackedRows
from penstock.plan._rows import Batch, Rows, RowSource, offered
from penstock.plan._stages import Pack
from penstock.schema import Ragged


class MixedRows:
    """Rows of several sources by their shares."""

    def __init__(self, sources: Mapping[str, tuple[RowSource, float]], *, seed: int, epoch: int | str) -> None:
        self.names = tuple(sources)
        self.sources = tuple(source for source, _ in sources.values())
        self.weights = tuple(float(weight) for _, weight in sources.values())
        self.seed, self.epoch = seed, epoch
        try:
            self.mixture = Mixture(self.weights, seed)
        except ValueError as error:
            raise ValueError(f"mix() of {', '.join(map(repr, self.names))}, in this order: {error}") from None
        for name, source in zip(self.names, self.sources, strict=True):
            if source.num_rows == 0:
                raise ValueError(f"mix(): {name!r} has no rows, so it has nothing to give.")
        self._check_alike()
        self.pack_stage = _pack_stage(self.sources[0])
        self.makes_labels = self.sources[0].makes_labels
        self.is_rectangular = all(source.is_rectangular for source in self.sources)
        self.num_rows = epoch if isinstance(epoch, int) else self._rows_of_one_pass(epoch)

    @property
    def order_identity(self) -> Any:
        """The sources, their quotas, and the seed that deals them."""
        parts = [[name, source.order_identity] for name, source in zip(self.names, self.sources, strict=True)]
        return ["mix", parts, list(self.mixture.quotas), self.seed, self.num_rows]

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """These rows, each from the source whose turn it is."""
        if self.pack_stage is not None:
            return compose(self.placed(rows, np.arange(len(rows))), len(rows), self.pack_stage, out)
        parts = [(places, self.sources[number].read(own, None)) for number, places, own in self._turns(rows)]
        if not parts:
            return self.sources[0].read(rows, out)
        columns = {key: [(places, part[key]) for places, part in parts] for key in parts[0][1]}
        return {key: _interleave(values, len(rows), key, out) for key, values in columns.items()}

    def placed(self, rows: Rows, places: NDArray[np.int64]) -> list[Placed]:
        """Who fills which of `places`, one for each of `rows`, with what; sources may be mixtures themselves."""
        found: list[Placed] = []
        for number, mine, own in self._turns(rows):
            source = self.sources[number]
            assert isinstance(source, (PackedRows, MixedRows))
            found += source.placed(own, places[mine])
        return found

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """What any of the sources has: they are alike."""
        return self.sources[0].output_arrays(num_rows)

    def announce(self, row: int) -> None:
        """What each source's next row needs."""
        for source, position in zip(self.sources, self.mixture.counts(row).tolist(), strict=True):
            source.announce(position)

    def release(self, row: int) -> None:
        """What each source is done with."""
        for source, position in zip(self.sources, self.mixture.counts(row).tolist(), strict=True):
            source.release(position)

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Targets in each row of a packed mixture."""
        counts = np.zeros(len(rows), np.int64)
        for number, places, own in self._turns(rows):
            source = self.sources[number]
            assert isinstance(source, (PackedRows, MixedRows))
            counts[places] = source.count_targets(own)
        return counts

    def _turns(self, rows: Rows) -> list[tuple[int, NDArray[np.int64], Rows]]:
        """(source, places in `rows`, rows of that source) of each source that has a turn."""
        turn, own = self.mixture.locate(rows)
        return [(number, np.flatnonzero(turn == number), own[turn == number]) for number in np.unique(turn).tolist()]

    def _rows_of_one_pass(self, name: str) -> int:
        """The fewest rows that hold one epoch of a source."""
        number = self.names.index(name)
        needed = self.sources[number].num_rows
        low, high = 0, 1
        while self.mixture.counts(high)[number] < needed:
            high *= 2
        while low < high:
            middle = (low + high) // 2
            if self.mixture.counts(middle)[number] < needed:
                low = middle + 1
            else:
                high = middle
        return low

    def _check_alike(self) -> None:
        stages = [_pack_stage(source) for source in self.sources]
        if None not in stages:
            self._check_same("pack settings", [_row_settings(stage) for stage in stages if stage is not None])
            return
        if any(stage is not None for stage in stages):
            raise SchemaError("mix(): either all sources are packed or none is.")
        first_rows = [source.read(np.arange(1), None) for source in self.sources]
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
        samples: list[Any] = [None] * num_rows
        for places, part in parts:
            for place, sample in zip(places.tolist(), part, strict=True):
                samples[place] = np.frombuffer(sample, np.uint8) if part.is_bytes else sample
        return Ragged.from_lengths(np.concatenate(samples), [len(sample) for sample in samples], first.is_bytes)
    whole = offered(out, key, (num_rows, *first.shape[1:]), first.dtype)
    for places, part in parts:
        whole[places] = part
    return whole


def _pack_stage(source: RowSource) -> Pack | None:
    if isinstance(source, MixedRows):
        return source.pack_stage
    return source.stage if isinstance(source, PackedRows) else None


def _row_settings(stage: Pack) -> dict[str, Any]:
    """What decides how a packed row looks; which column it is and what becomes of long documents does not."""
    settings = {"length": stage.settings.length, "max_documents": stage.settings.max_documents}
    return settings | {"labels": stage.labels, "positions": stage.positions, "pad": stage.pad}


def _spec(value: Any) -> str:
    """A column of a batch, written as schemas are."""
    if isinstance(value, Ragged) and value.is_bytes:
        return "bytes"
    array, first = (value.values, ["*"]) if isinstance(value, Ragged) else (value, [])
    sizes = [*first, *map(str, array.shape[1:])]
    return f"{array.dtype}[{','.join(sizes)}]" if sizes else str(array.dtype)

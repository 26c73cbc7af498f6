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
from penstock.plan._compose import compose
from penstock.plan._packed import PackedRows
from penstock.plan._rows import Batch, Rows, RowSource, interleave


class MixedRows:
    """Rows of several sources by their shares."""

    def __init__(self, sources: Mapping[str, tuple[RowSource, float]], *, seed: int, epoch: int | str) -> None:
        self.names = tuple(sources)
        self.sources = tuple(source for source, _ in sources.values())
        self.weights = tuple(float(weight) for _, weight in sources.values())
        self.seed, self.epoch = seed, epoch
        self.mixture = Mixture(self.weights, seed)
        self._packed = [source for source in self.sources if isinstance(source, PackedRows)]
        self._check_alike()
        self.num_rows = epoch if isinstance(epoch, int) else self._rows_of_one_pass(epoch)

    @property
    def order_identity(self) -> Any:
        """The sources, their quotas, and the seed that deals them."""
        parts = [[name, source.order_identity] for name, source in zip(self.names, self.sources, strict=True)]
        return ["mix", parts, list(self.mixture.quotas), self.seed, self.num_rows]

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """These rows, each from the source whose turn it is."""
        turns = self._turns(rows)
        if self._packed:
            placed = [(self._packed[number], places, self._packed[number].place(own)) for number, places, own in turns]
            return compose(placed, len(rows), self._packed[0].stage, out)
        parts = [(places, self.sources[number].read(own, None)) for number, places, own in turns]
        if not parts:
            return self.sources[0].read(rows, None)
        keys = parts[0][1].keys()
        return {key: interleave([(places, part[key]) for places, part in parts], len(rows)) for key in keys}

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Targets in each row of a packed mixture."""
        counts = np.zeros(len(rows), np.int64)
        for number, places, own in self._turns(rows):
            counts[places] = self._packed[number].count_targets(own)
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
        if self._packed and len(self._packed) < len(self.sources):
            raise SchemaError("mix(): either all sources are packed or none is.")
        if self._packed:
            self._check_same(
                "stage settings",
                [
                    (
                        s.stage.settings.length,
                        s.stage.settings.max_documents,
                        s.stage.labels,
                        s.stage.positions,
                        s.stage.pad,
                    )
                    for s in self._packed
                ],
            )
            return
        shapes = [
            {key: _shape(value) for key, value in s.read(np.arange(min(1, s.num_rows)), None).items()}
            for s in self.sources
        ]
        self._check_same("columns", shapes)

    def _check_same(self, what: str, values: list[Any]) -> None:
        for name, value in zip(self.names[1:], values[1:], strict=True):
            if value != values[0]:
                raise SchemaError(
                    f"mix(): {self.names[0]!r} and {name!r} differ in {what}: {values[0]} and {value}. "
                    "Rows of a batch must be alike; use select_columns, cast, or the same pack settings."
                )


def _shape(value: Any) -> str:
    is_array = isinstance(value, np.ndarray)
    return f"{value.dtype}{list(value.shape[1:])}" if is_array else f"ragged {value.values.dtype}"

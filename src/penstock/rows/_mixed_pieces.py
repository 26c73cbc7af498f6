"""Mixtures of rows that are made of pieces: each source copies its own tokens, one pass writes the rest for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.rows._compose import compose
from penstock.rows._mixed_rows import Deal, MixedRows
from penstock.rows._rows import BatchArrays, Filling, OutputArrays, PieceSource, Rows, RowSource
from penstock.schema import Column
from penstock.stages import Pack


class MixedPieceRows(MixedRows, PieceSource):
    """Rows of pieces from several sources: each copies its own tokens, one pass writes the rest for all of them."""

    def __init__(self, sources: Mapping[str, PieceSource], deal: Deal) -> None:
        self._piece_sources = tuple(sources.values())
        self.stage = self._piece_sources[0].stage
        super().__init__(sources, deal)

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """A batch of these rows, packed or padded."""
        fillings = self.fill(rows, np.arange(len(rows)))
        return compose(fillings, len(rows), self.stage, out) | self._source_ids(rows, None)

    def output_arrays(self, num_rows: int) -> OutputArrays:
        """The arrays that have a place for every token."""
        return PieceSource.output_arrays(self, num_rows)

    @property
    def kept(self) -> Mapping[str, Column]:
        """What any of the sources has: they are alike."""
        return self._piece_sources[0].kept

    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        """The pieces of these rows, from each source that has a turn."""
        if not len(rows):
            return self._piece_sources[0].fill(rows, batch_rows)
        return [
            filling
            for number, places, own in self._turns(rows)
            for filling in self._piece_sources[number].fill(own, batch_rows[places])
        ]

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Targets in each row, counted by its source."""
        counts = np.zeros(len(rows), np.int64)
        for number, places, own in self._turns(rows):
            counts[places] = self._piece_sources[number].count_targets(own)
        return counts

    def _check_alike(self) -> None:
        self._check_same("pack settings", [_row_settings(source) for source in self._piece_sources])


def mix_rows(sources: Mapping[str, RowSource], deal: Deal) -> MixedRows:
    """The mixture of these sources.

    Raises:
        SchemaError: their rows are not alike.
    """
    pieces = {name: source.as_pieces for name, source in sources.items() if source.as_pieces is not None}
    kinds = {source.stage.verb for source in pieces.values()}
    if len(pieces) == len(sources) and len(kinds) == 1:
        return MixedPieceRows(pieces, deal)
    if pieces:
        raise SchemaError("mix(): either all sources are packed or none is, and padded likewise.")
    return MixedRows(sources, deal)


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

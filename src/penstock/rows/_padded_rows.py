"""Padded rows: one document each, as long as the longest of the batch. For fine-tuning and evaluation without packing.

Which document is row i is decided as for samples; only how many tokens a row has depends on the batch that it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.rows._accounts import DocumentTrace, Drawn, Ledger, Mixing, trace_document
from penstock.rows._beside import kept_columns
from penstock.rows._bucketed import BucketedOrder
from penstock.rows._compose import count_targets
from penstock.rows._compose_padded import compose_padded
from penstock.rows._rows import BatchArrays, Filling, Pieces, PieceSource, Rows, TokenColumns
from penstock.rows._sample_orders import SampleOrder
from penstock.samples import Samples, mask_column, packed_column
from penstock.schema import Column
from penstock.stages import Pad


class PaddedRows(PieceSource):
    """Each document is a row."""

    stage: Pad

    def __init__(self, samples: Samples, stage: Pad, order: SampleOrder) -> None:
        self.samples, self.stage = samples, stage
        self.column = packed_column(samples.schema, stage.column, verb="pad")
        mask = mask_column(samples.schema, self.column)
        kept = kept_columns(samples.schema, stage, self.column)
        self._columns = TokenColumns(samples, self.column, mask, kept)
        self.order = order if stage.bucket is None else BucketedOrder(order, samples, self.column, stage)
        self.num_rows = self.order.num_rows

    @property
    def order_identity(self) -> Any:
        """That of samples: the same documents in the same order."""
        return ["samples", self.samples.fingerprint, self.order.identity]

    @property
    def kept(self) -> Mapping[str, Column]:
        """As the stage says."""
        return self._columns.kept

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """A padded batch of these rows."""
        return compose_padded(self.fill(rows, np.arange(len(rows))), len(rows), self.stage, out)

    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        """One piece a row."""
        return [Filling(self._columns, batch_rows, self._pieces(rows))]

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Targets in each row: tokens that the loss is taken over."""
        return count_targets(self._columns, self._pieces(rows), len(rows))

    def announce(self, row: int) -> None:
        """What the order knows."""
        self.order.announce(row)

    def release(self, row: int) -> None:
        """What the order knows."""
        self.order.release(row)

    def mixing(self) -> list[Mixing]:
        """Of documents."""
        return self.order.mixing()

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The document of each row; where padding is on the left, its place depends on the batch, and 0 is said."""
        pieces = self._pieces(rows)
        found = zip(pieces.documents.tolist(), pieces.sizes.tolist(), strict=True)
        return [trace_document(self.samples, source, row, 0, one, 0, size) for row, (one, size) in enumerate(found)]

    def describe(self, row: int) -> str:
        """Which sample a row is, and what it was prepared from."""
        return self.samples.describe(row, int(self.order.find(np.array([row]))[0]))

    def ledger(self, epoch: int) -> Ledger:
        """What is cut off, and how often documents come where that is not once."""
        counts = np.ones(len(self.samples), np.int64) if self.order.is_once else self.order.count(epoch)
        cut = 0
        if self.stage.length is not None:
            over = np.maximum(self.samples.lengths(self.column) - self.stage.length, 0)
            cut = int((over * counts).sum())
        drawn = None if self.order.is_once else Drawn.of(counts)
        return Ledger(num_rows=self.num_rows, tokens_truncated=cut, drawn=drawn)

    def _pieces(self, rows: Rows) -> Pieces:
        documents = self.order.find(rows)
        stored = self.samples.locate(documents)
        sizes = self.samples.storage.lengths_of(self.column, stored)
        if self.stage.length is not None:
            sizes = np.minimum(sizes, self.stage.length)
        return Pieces(np.arange(len(rows) + 1), documents, stored, np.zeros(len(rows), np.int64), sizes)

"""Packed rows: whole documents side by side, found again from numbers alone.

A row of the run is (epoch, row of the data); the row of the data is (window, row in the window); the
window, packed with a key drawn from seed and epoch, says which pieces of which documents those are.
Packing a window takes a few milliseconds and is kept in a small form, 5 bytes per document; a batch
then costs a look-up per row, one gather for the tokens and one pass for the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.order import Permutation, derive_key
from penstock.packing import PACKING_VERSION, PackIndex, Packing, PackingLedger, make_ledger, pack
from penstock.rows._accounts import DocumentTrace, Ledger, Mixing, trace_document
from penstock.rows._beside import kept_columns
from penstock.rows._compose import compose, count_targets
from penstock.rows._epochs import Epochs, ReadAhead
from penstock.rows._mixing import measure_mixing
from penstock.rows._packed_blocks import PackedBlock, PackedBlocks, reorder
from penstock.rows._rows import BatchArrays, Filling, Pieces, PieceSource, Rows, TokenColumns
from penstock.samples import Samples, mask_column, packed_column
from penstock.schema import Column
from penstock.stages import Pack, Shuffle


class PackedRows(PieceSource):
    """Rows of packed documents."""

    stage: Pack

    def __init__(self, samples: Samples, stage: Pack, shuffle: Shuffle | None, index: PackIndex) -> None:
        self.samples, self.stage, self.index = samples, stage, index
        self.column = packed_column(samples.schema, stage.column)
        mask = mask_column(samples.schema, self.column)
        kept = kept_columns(samples.schema, stage, self.column)
        self._columns = TokenColumns(samples, self.column, mask, kept)
        self.epochs = Epochs(index.rows_per_window, shuffle)
        self.num_rows = self.epochs.num_rows
        columns = (self.column,) if mask is None else (self.column, mask)
        self._read_ahead = ReadAhead(self.epochs, samples, columns, index.window_starts)
        self._blocks = PackedBlocks(self._pack, stage.settings.length, num_kept=self.epochs.group)

    @property
    def order_identity(self) -> Any:
        """Documents of this dataset, packed and ordered so."""
        settings = self.stage.settings
        how = [self.stage.column, settings.length, settings.long, settings.max_documents, PACKING_VERSION]
        return ["pack", self.samples.fingerprint, how, self.epochs.identity]

    @property
    def kept(self) -> Mapping[str, Column]:
        """As the stage says."""
        return self._columns.kept

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> BatchArrays:
        """A packed batch of these rows."""
        return compose(self.fill(rows, np.arange(len(rows))), len(rows), self.stage, out)

    def fill(self, rows: Rows, batch_rows: NDArray[np.int64]) -> list[Filling]:
        """The pieces of these rows."""
        return [Filling(self._columns, batch_rows, self._pieces(rows))]

    def announce(self, row: int) -> None:
        """The storage windows of the row's group, and of the next."""
        self._read_ahead.announce(row)

    def release(self, row: int) -> None:
        """The storage windows of the groups before the row's."""
        self._read_ahead.release(row)

    def mixing(self) -> list[Mixing]:
        """Of documents."""
        return measure_mixing(self.samples, self.epochs, self.index.window_starts)

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Targets in each row: tokens that the loss is taken over."""
        return count_targets(self._columns, self._pieces(rows), len(rows))

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        """The pieces of documents that make up these rows."""
        pieces = self._pieces(rows)
        fields = (pieces.rows, pieces.columns, pieces.documents, pieces.starts, pieces.sizes)
        return [trace_document(self.samples, source, *map(int, values)) for values in zip(*fields, strict=True)]

    def _pieces(self, rows: Rows) -> Pieces:
        keys: list[tuple[int, int]] = [(0, 0)] * len(rows)
        inside = np.empty(len(rows), np.int64)
        for epoch, places, data_rows in self.epochs.locate(rows):
            numbers = np.searchsorted(self.epochs.row_starts, data_rows, side="right") - 1
            inside[places] = data_rows - self.epochs.row_starts[numbers]
            epoch = epoch if self.epochs.shuffle is not None else 0
            for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
                keys[place] = (epoch, number)
        row_offsets, documents, starts = self._blocks.collect(keys, inside)
        stored = self.samples.locate(documents)
        length = self.stage.settings.length
        sizes = np.minimum(self.samples.storage.lengths_of(self.column, stored) - starts, length)
        return Pieces(row_offsets, documents, stored, starts, sizes)

    def _pack(self, epoch: int, number: int) -> PackedBlock:
        packing = self.packing(epoch, number)
        if packing.num_rows != self.index.rows_per_window[number]:  # the number comes from a file
            raise FormatError(
                f"The index says that window {number:,} packs into {self.index.rows_per_window[number]:,} rows of "
                f"{self.stage.settings.length:,} tokens; it packs into {packing.num_rows:,}. "
                "The packing stored with the dataset is not of this data: prepare it again."
            )
        if self.epochs.shuffle is None:  # the packer sorts by length; without a shuffle nothing else would mix that
            order = Permutation(packing.num_rows, derive_key(0, "rows", number))(np.arange(packing.num_rows))
            packing = reorder(packing, order)
        return PackedBlock.of(packing, self.stage.settings.length, int(self.index.window_starts[number]))

    def packing(self, epoch: int, number: int) -> Packing:
        """The packing of one window in one epoch."""
        shuffle = self.epochs.shuffle
        seed, epoch = (shuffle.seed, epoch) if shuffle is not None else (0, 0)
        return pack(self.lengths(number), self.stage.settings, derive_key(seed, "pack", epoch, number))

    def lengths(self, number: int) -> NDArray[np.int64]:
        """Lengths of the documents of one window."""
        begin, end = self.index.window_starts[number : number + 2].tolist()
        return self.samples.lengths_between(self.column, begin, end)

    def ledger(self, epoch: int) -> Ledger:
        """Where every token of an epoch went, each window packed again and checked piece by piece."""
        ledgers = (self._ledger_of_window(epoch, number) for number in range(len(self.index.rows_per_window)))
        packing = functools.reduce(PackingLedger.__add__, ledgers, PackingLedger())
        return Ledger(num_rows=self.num_rows, packing=packing)

    def _ledger_of_window(self, epoch: int, number: int) -> PackingLedger:
        lengths, packing = self.lengths(number), self.packing(epoch, number)
        ledger = make_ledger(lengths, self.stage.settings)
        order = np.lexsort((packing.starts, packing.documents))
        documents, starts, sizes = packing.documents[order], packing.starts[order], packing.lengths[order]
        is_first = np.diff(documents, prepend=-1) != 0
        expected = np.where(is_first, 0, np.roll(starts + sizes, 1))
        # Pieces of a document follow each other without a gap or an overlap, from its first token on.
        assert np.array_equal(starts, expected)
        assert int(sizes.sum()) == ledger.tokens_placed
        assert packing.num_rows == ledger.num_rows == self.index.rows_per_window[number]
        return ledger

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
from penstock.plan._compose import Pieces, Placed, compose, count_targets
from penstock.plan._dataset import Dataset
from penstock.plan._epochs import Epochs
from penstock.plan._read_ahead import ReadAhead
from penstock.plan._rows import Batch, Rows
from penstock.plan._stages import Pack, Shuffle
from penstock.plan._token_columns import mask_column, packed_column
from penstock.plan._window_cache import PackedWindow, WindowCache, reorder


class PackedRows:
    """Rows of packed documents."""

    makes_labels = True
    is_rectangular = False

    def __init__(self, dataset: Dataset, stage: Pack, shuffle: Shuffle | None, index: PackIndex) -> None:
        self.dataset, self.stage, self.index = dataset, stage, index
        self.column = packed_column(dataset, stage.column)
        self.mask_column = mask_column(dataset, self.column)
        self.epochs = Epochs(index.rows_per_window, shuffle)
        self.num_rows = self.epochs.num_rows
        columns = (self.column,) if self.mask_column is None else (self.column, self.mask_column)
        self._read_ahead = ReadAhead(self.epochs, dataset.stored, columns, index.window_starts)
        group = shuffle.group if shuffle is not None and shuffle.mode == "windows" else 1
        self._windows = WindowCache(self._pack, stage.settings.length, num_kept=group)

    @property
    def order_identity(self) -> Any:
        """Documents of this dataset, packed and ordered so."""
        settings = self.stage.settings
        how = [self.stage.column, settings.length, settings.long, settings.max_documents, PACKING_VERSION]
        return ["pack", self.dataset.rows_fingerprint, how, self.epochs.identity]

    def read(self, rows: Rows, out: Mapping[str, NDArray[Any]] | None) -> Batch:
        """A packed batch of these rows."""
        return compose(self.placed(rows, np.arange(len(rows))), len(rows), self.stage, out)

    def placed(self, rows: Rows, places: NDArray[np.int64]) -> list[Placed]:
        """These rows, to be put at `places` of a batch."""
        return [(self, places, self.place(rows))]

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """The arrays that have a place for every token."""
        shape = (num_rows, self.stage.settings.length)
        return {
            **dict.fromkeys(("input_ids", "labels", "position_ids"), (shape, "int64")),
            "document_ids": (shape, "int32"),
        }

    def announce(self, row: int) -> None:
        """The storage windows of the row's group, and of the next."""
        self._read_ahead.announce(row)

    def release(self, row: int) -> None:
        """The storage windows of the groups before the row's."""
        self._read_ahead.release(row)

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        """Targets in each row: tokens that the loss is taken over."""
        return count_targets(self, self.place(rows), len(rows))

    def place(self, rows: Rows) -> Pieces:
        """The pieces of documents that make up these rows."""
        keys: list[tuple[int, int]] = [(0, 0)] * len(rows)
        inside = np.empty(len(rows), np.int64)
        for epoch, places, data_rows in self.epochs.locate(rows):
            numbers = np.searchsorted(self.epochs.row_starts, data_rows, side="right") - 1
            inside[places] = data_rows - self.epochs.row_starts[numbers]
            epoch = epoch if self.epochs.shuffle is not None else 0
            for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
                keys[place] = (epoch, number)
        row_offsets, documents, starts = self._windows.collect(keys, inside)
        stored = self.dataset.stored.locate(documents)
        length = self.stage.settings.length
        sizes = np.minimum(self.dataset.storage.lengths_of(self.column, stored) - starts, length)
        return Pieces(row_offsets, documents, stored, starts, sizes)

    def _pack(self, epoch: int, number: int) -> PackedWindow:
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
        return PackedWindow.of(packing, self.stage.settings.length, int(self.index.window_starts[number]))

    def packing(self, epoch: int, number: int) -> Packing:
        """The packing of one window in one epoch."""
        shuffle = self.epochs.shuffle
        seed, epoch = (shuffle.seed, epoch) if shuffle is not None else (0, 0)
        return pack(self.lengths(number), self.stage.settings, derive_key(seed, "pack", epoch, number))

    def lengths(self, number: int) -> NDArray[np.int64]:
        """Lengths of the documents of one window."""
        begin, end = self.index.window_starts[number : number + 2].tolist()
        return self.dataset.stored.lengths_between(self.column, begin, end)

    def ledger(self, epoch: int) -> PackingLedger:
        """Where every token of an epoch went, each window packed anew and checked piece by piece."""
        ledgers = (self._ledger_of_window(epoch, number) for number in range(len(self.index.rows_per_window)))
        return functools.reduce(PackingLedger.__add__, ledgers, PackingLedger())

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

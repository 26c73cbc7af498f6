"""Packed rows: whole documents side by side, found again from numbers alone.

A row of the run is (epoch, row of the data); the row of the data is (window, row in the window); the
window, packed with a key drawn from seed and epoch, says which pieces of which documents those are.
Packing a window takes a few milliseconds and is kept in a small form, 5 bytes per document; a batch
then costs a look-up per row, one gather for the tokens and one pass for the rest.

A batch takes rows from many windows at once, so the packed ones lie side by side in a few arrays, and one compiled call
picks the pieces of a whole batch. The arrays are never changed: a window that is not there is packed, and a new set of
arrays that includes it replaces the old one. Readers need no lock.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples, ShardLayer
from penstock.errors import FormatError
from penstock.order import Permutation, derive_key
from penstock.packing import (
    PACKING_VERSION,
    PackIndex,
    Packing,
    PackingLedger,
    make_ledger,
    pack,
)
from penstock.plan import _kernels
from penstock.plan._accounts import DocumentTrace, Ledger, Mixing, trace_document
from penstock.plan._compose import DocumentRows
from penstock.plan._epochs import Epochs, PageHints
from penstock.plan._pack_index import amounts_of, read_costs
from penstock.plan._rows import Pieces
from penstock.plan._stages import ATTENTION, Pack, Shuffle
from penstock.plan._uses import Reads, RowRange, Rows
from penstock.schema import offsets_of

Key = tuple[int, int]
"""(epoch, window)"""

# Windows beyond those of one group are kept up to this size.
_KEPT_BYTES = 32 << 20
# Other threads may be so far behind.
_ROWS_BEHIND = 1 << 16
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlock:
    """The packing of one storage window: about 5 bytes per piece."""

    row_offsets: NDArray[np.int32]
    documents: NDArray[np.int32]
    """Document of each piece, counted from the window's first."""
    parts: NDArray[Any]
    """Which part of its document a piece is, in the smallest dtype: part k begins at token k * length."""
    first_document: int

    @classmethod
    def of(cls, packing: Packing, length: int, first_document: int) -> PackedBlock:
        """The small form of a packing."""
        parts = packing.starts // length
        parts = parts.astype(np.min_scalar_type(int(parts.max(initial=0))))
        row_offsets, documents = packing.row_offsets.astype(np.int32), packing.documents.astype(np.int32)
        return cls(row_offsets, documents, parts, first_document)

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.row_offsets.nbytes + self.documents.nbytes + self.parts.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    """Packed windows side by side: what one call of a kernel reads from."""

    blocks: Mapping[Key, PackedBlock]
    slots: Mapping[Key, int]
    arrays: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
    """Those that `_kernels.collect` reads, in its order."""

    @classmethod
    def of(cls, blocks: Mapping[Key, PackedBlock]) -> _Snapshot:
        """The arrays of these blocks; the blocks become views of them, so nothing is held twice."""
        parts = list(blocks.values())
        row_offsets = _concatenate([block.row_offsets for block in parts], np.int32)
        documents = _concatenate([block.documents for block in parts], np.int32)
        numbers = _concatenate([block.parts for block in parts], np.uint8)
        row_bases = offsets_of([len(block.row_offsets) for block in parts])[:-1]
        piece_bases = offsets_of([len(block.documents) for block in parts])[:-1]
        firsts = np.array([block.first_document for block in parts], np.int64)
        views, slots = {}, {key: slot for slot, key in enumerate(blocks)}
        bases = zip(row_bases.tolist(), piece_bases.tolist(), strict=True)
        for (key, block), (row, piece) in zip(blocks.items(), bases, strict=True):
            views[key] = PackedBlock(
                row_offsets[row : row + len(block.row_offsets)],
                documents[piece : piece + len(block.documents)],
                numbers[piece : piece + len(block.parts)],
                block.first_document,
            )
        arrays = (row_bases, row_offsets, piece_bases, documents, numbers, firsts)
        return cls(views, slots, arrays)


def _concatenate(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


class PackedBlocks:
    """Pieces of rows, by window and row; `pack` packs a window when it is first needed.

    The windows of a group stay in memory while it is read, however large they are: each of its batches needs most of
    them, and packing a window of a million documents takes 0.15 s. At 5 bytes a document, a group of 16 such windows
    takes 80 MB. With lanes, it is one group of each lane that this process reads.
    """

    def __init__(self, pack: Callable[[int, int], PackedBlock], length: int, epochs: Epochs) -> None:
        self._pack, self._length, self._epochs = pack, length, epochs
        self._snapshot = _Snapshot.of({})
        self._lock = threading.Lock()

    def collect(self, keys: list[Key], rows: NDArray[np.int64], at: int) -> tuple[NDArray[np.int64], ...]:
        """(row offsets, documents, starts) of the pieces in row `rows[k]` of window `keys[k]`, for all k.

        `at` is the row of the run that the caller has reached.
        """
        if not keys:
            return np.zeros(1, np.int64), _NOTHING, _NOTHING
        snapshot, slots = self._find(keys, at)
        return _kernels.collect(slots, rows, *snapshot.arrays, self._length)

    def load(self, keys: list[Key], at: int) -> None:
        """Pack those that are not there."""
        for begin in range(0, len(keys), self._epochs.group):
            self._find(keys[begin : begin + self._epochs.group], at)

    def _find(self, keys: list[Key], at: int) -> tuple[_Snapshot, NDArray[np.int64]]:
        """A snapshot that has all of `keys`, and their slots in it."""
        snapshot = self._snapshot
        try:
            slots = [snapshot.slots[key] for key in keys]
        except KeyError:
            snapshot = self._load(keys, at)
            slots = [snapshot.slots[key] for key in keys]
        return snapshot, np.array(slots, np.int64)

    def _load(self, keys: Iterable[Key], at: int) -> _Snapshot:
        """A snapshot that has all of `keys`; the oldest others go when they are too many."""
        with self._lock:
            blocks = dict(self._snapshot.blocks)
            wanted = dict.fromkeys(keys)
            for key in wanted:
                if key not in blocks:
                    blocks[key] = self._pack(*key)
            excess = sum(block.num_bytes for block in blocks.values()) - _KEPT_BYTES
            for key in list(blocks):  # the oldest first: those of the group before
                if excess > 0 and key not in wanted and self._may_go(key, len(blocks), at):
                    excess -= blocks.pop(key).num_bytes
            self._snapshot = _Snapshot.of(blocks)
            return self._snapshot

    def _may_go(self, key: Key, num_blocks: int, at: int) -> bool:
        if self._epochs.lanes == 1:
            return num_blocks > self._epochs.group
        return self._epochs.is_past(*key, at - _ROWS_BEHIND)


class PackedRows(DocumentRows):
    """Rows of packed documents."""

    stage: Pack

    def __init__(self, samples: Samples, stage: Pack, shuffle: Shuffle | None, index: PackIndex) -> None:
        super().__init__(samples, stage)
        self.index = index
        self.epochs = Epochs(index.rows_per_window, shuffle)
        self.num_rows = self.epochs.num_rows
        columns = (self.column,) if self.mask is None else (self.column, self.mask)
        self.hints = PageHints(self.epochs, samples, columns, index.window_starts)
        self._blocks = PackedBlocks(self._pack, stage.settings.length, self.epochs)
        self._row_targets = np.zeros(self.num_rows, np.min_scalar_type(stage.settings.length))
        """Targets in each row of the data, if no mask hides any: the same in all epochs, like the lengths in a row."""
        self._row_attention = np.zeros(self.num_rows)
        """The squared lengths in each row, added up."""
        self._is_counted = np.zeros(len(index.rows_per_window), np.bool_)

    @property
    def order_identity(self) -> Any:
        settings = self.stage.settings
        how = [self.stage.column, settings.length, settings.long, settings.max_documents, PACKING_VERSION]
        if self.stage.counted != (self.stage.column,):
            how.append([*self.stage.counted, *settings.limits])
        return ["pack", self.samples.fingerprint, how, self.epochs.identity]

    def reads(self, rows: RowRange) -> list[Reads]:
        """Whole windows: a row is known once the lengths of all documents in its window are."""
        return [Reads(self.epochs.spans(rows).of_windows(self.index.window_starts), self._layers)]

    @functools.cached_property
    def _layers(self) -> tuple[ShardLayer, ...]:
        return self.document_layers()

    def stored_at(self, rows: Rows) -> NDArray[np.float64]:
        return self.epochs.find(rows) / self.num_rows

    def mixing(self) -> list[Mixing]:
        return self.epochs.mixing(self.samples, self.index.window_starts)

    def trace(self, rows: Rows, source: str = "") -> list[DocumentTrace]:
        pieces = self._pieces(rows)
        fields = (pieces.rows, pieces.columns, pieces.documents, pieces.starts, pieces.sizes)
        return [trace_document(self.samples, source, *map(int, values)) for values in zip(*fields, strict=True)]

    @property
    def counts_ahead(self) -> bool:
        """Whether the lengths that rows are packed by say how many targets they have."""
        return self.mask is None and self.stage.cost is None

    def count_targets(self, rows: Rows) -> NDArray[np.int64]:
        if not self.counts_ahead:
            return super().count_targets(rows)
        return self._look_up(self._row_targets, rows).astype(np.int64)

    def costs(self, rows: Rows, measure: str) -> NDArray[np.float64]:
        return self._look_up(self._row_attention, rows) if measure == ATTENTION else super().costs(rows, measure)

    def _look_up(self, table: NDArray[Any], rows: Rows) -> NDArray[Any]:
        """The entry of each row in a table of the data's rows; windows that were never packed are packed first."""
        if not self._is_counted.all():
            for epoch, _, data_rows in self.epochs.locate(rows):
                windows = np.zeros(len(self._is_counted), np.bool_)
                windows[np.searchsorted(self.epochs.row_starts, data_rows, side="right") - 1] = True
                missing = np.flatnonzero(windows & ~self._is_counted)
                self._blocks.load(self._keys(epoch, missing), int(rows.min()))
        return table[self.epochs.find(rows)]

    def _keys(self, epoch: int, numbers: NDArray[np.int64]) -> list[Key]:
        """The keys of windows in an epoch; without a shuffle they are packed the same way in all."""
        return [(epoch if self.epochs.shuffle is not None else 0, number) for number in numbers.tolist()]

    def _pieces(self, rows: Rows) -> Pieces:
        keys: list[Key] = [(0, 0)] * len(rows)
        inside = np.empty(len(rows), np.int64)
        for epoch, places, data_rows in self.epochs.locate(rows):
            numbers = np.searchsorted(self.epochs.row_starts, data_rows, side="right") - 1
            inside[places] = data_rows - self.epochs.row_starts[numbers]
            for place, key in zip(places.tolist(), self._keys(epoch, numbers), strict=True):
                keys[place] = key
        row_offsets, documents, starts = self._blocks.collect(keys, inside, int(rows.min(initial=2**62)))
        stored = self.samples.locate(documents)
        length = self.stage.settings.length
        sizes = np.minimum(self.samples.storage.lengths_of(self.column, stored) - starts, length)
        if self.stage.cost is not None:
            self._check_costs(self.stage.cost, documents, sizes)
        return Pieces(row_offsets, documents, stored, starts, sizes)

    def _check_costs(self, cost: str, documents: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        exceeds = sizes > amounts_of(self.samples, cost, documents)
        if exceeds.any():
            first = int(documents[exceeds][0])
            raise FormatError(
                f"Sample {first:,} has {int(sizes[exceeds][0]):,} tokens, more than its {cost!r}. A cost counts the "
                "tokens, too; prepare the column again."
            )

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
            packing = packing.reordered(order)
        first, end = self.epochs.row_starts[number : number + 2].tolist()
        self._row_targets[first:end] = np.diff(offsets_of(packing.lengths - 1)[packing.row_offsets])
        self._row_attention[first:end] = np.diff(offsets_of(packing.lengths**2)[packing.row_offsets])
        self._is_counted[number] = True
        return PackedBlock.of(packing, self.stage.settings.length, int(self.index.window_starts[number]))

    def packing(self, epoch: int, number: int) -> Packing:
        """The packing of one window in one epoch."""
        shuffle = self.epochs.shuffle
        seed, epoch = (shuffle.seed, epoch) if shuffle is not None else (0, 0)
        return pack(self.lengths(number), self.stage.settings, derive_key(seed, "pack", epoch, number))

    def lengths(self, number: int) -> NDArray[np.int64]:
        """Lengths of the documents of one window; with limits, what they take of each budget."""
        begin, end = self.index.window_starts[number : number + 2].tolist()
        return read_costs(self.samples, self.stage, begin, end)

    def ledger(self, epoch: int) -> Ledger:
        """Where every token of an epoch went, each window packed again and checked piece by piece."""
        ledgers = (self._ledger_of_window(epoch, number) for number in range(len(self.index.rows_per_window)))
        return Ledger(num_rows=self.num_rows, packing=sum(ledgers, PackingLedger()), limits=self.stage.limits)

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

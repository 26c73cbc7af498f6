"""Packed windows that were needed lately, in the smallest form, side by side in a few arrays.

A batch takes rows from many windows at once, so they lie in common arrays and one compiled call picks
the pieces of a whole batch. The arrays are never changed: a window that is not there is packed, and a
new set of arrays with it takes the place of the old. Readers need no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.packing import Packing
from penstock.plan._compiled import kernels
from penstock.schema import offsets_of

Key = tuple[int, int]
"""(epoch, window)"""

# Windows beyond those of one group are kept up to this size.
_KEPT_BYTES = 32 << 20
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWindow:
    """The packing of one window: about 5 bytes per piece."""

    row_offsets: NDArray[np.int32]
    documents: NDArray[np.int32]
    """Document of each piece, counted from the window's first."""
    parts: NDArray[Any]
    """Which part of its document a piece is, in the smallest dtype: part k begins at token k * length."""
    first_document: int

    @classmethod
    def of(cls, packing: Packing, length: int, first_document: int) -> PackedWindow:
        """The small form of a packing."""
        parts = packing.starts // length
        parts = parts.astype(np.min_scalar_type(int(parts.max(initial=0))))
        return cls(packing.row_offsets.astype(np.int32), packing.documents.astype(np.int32), parts, first_document)

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.row_offsets.nbytes + self.documents.nbytes + self.parts.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    """Windows side by side: what one compiled call reads from."""

    windows: Mapping[Key, PackedWindow]
    slots: Mapping[Key, int]
    arrays: tuple[NDArray[Any], ...]

    @classmethod
    def of(cls, windows: Mapping[Key, PackedWindow]) -> _Snapshot:
        """The arrays of these windows; the windows become views of them, so nothing is held twice."""
        parts = list(windows.values())
        row_offsets = _concatenate([w.row_offsets for w in parts], np.int32)
        documents = _concatenate([w.documents for w in parts], np.int32)
        numbers = _concatenate([w.parts for w in parts], np.uint8)
        row_bases = np.cumsum([0] + [len(w.row_offsets) for w in parts])[:-1]
        piece_bases = np.cumsum([0] + [len(w.documents) for w in parts])[:-1]
        firsts = np.array([w.first_document for w in parts], np.int64)
        views = {}
        for (key, w), row, piece in zip(windows.items(), row_bases.tolist(), piece_bases.tolist(), strict=True):
            end = piece + len(w.documents)
            rows = row_offsets[row : row + len(w.row_offsets)]
            views[key] = PackedWindow(rows, documents[piece:end], numbers[piece:end], w.first_document)
        slots = {key: slot for slot, key in enumerate(windows)}
        return cls(views, slots, (row_bases, row_offsets, piece_bases, documents, numbers, firsts))


def _concatenate(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


class WindowCache:
    """Pieces of rows, by window and row; windows are packed by `pack` when they are first needed.

    The `num_kept` windows of a group are never let go of while it is read, whatever they take: each of its
    batches needs most of them, and packing a window of a million documents takes 0.15 s. At 5 bytes a document,
    a group of 16 such windows takes 80 MB.
    """

    def __init__(self, pack: Callable[[int, int], PackedWindow], length: int, num_kept: int) -> None:
        self._pack, self._length, self._num_kept = pack, length, num_kept
        self._snapshot = _Snapshot.of({})
        self._lock = threading.Lock()

    def collect(self, keys: list[Key], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """(row offsets, documents, starts) of the pieces in row `rows[k]` of window `keys[k]`, for all k."""
        if not keys:
            return np.zeros(1, np.int64), _NOTHING, _NOTHING
        snapshot = self._snapshot
        try:
            slots = [snapshot.slots[key] for key in keys]
        except KeyError:
            snapshot = self._load(keys)
            slots = [snapshot.slots[key] for key in keys]
        found: tuple[NDArray[np.int64], ...] = kernels().collect(
            np.array(slots, np.int64), rows, *snapshot.arrays, self._length
        )
        return found

    def _load(self, keys: Iterable[Key]) -> _Snapshot:
        """A snapshot that has all of `keys`; the oldest others go when they are too many."""
        with self._lock:
            windows = dict(self._snapshot.windows)
            wanted = dict.fromkeys(keys)
            for key in wanted:
                if key not in windows:
                    windows[key] = self._pack(*key)
            excess = sum(window.num_bytes for window in windows.values()) - _KEPT_BYTES
            for key in list(windows):  # the oldest first: those of the group before
                if excess > 0 and key not in wanted and len(windows) > self._num_kept:
                    excess -= windows.pop(key).num_bytes
            self._snapshot = _Snapshot.of(windows)
            return self._snapshot


def reorder(packing: Packing, order: NDArray[np.int64]) -> Packing:
    """The same rows in another order."""
    counts = np.diff(packing.row_offsets)[order]
    offsets = offsets_of(counts)
    pieces = np.repeat(packing.row_offsets[order] - offsets[:-1], counts) + np.arange(offsets[-1])
    return Packing(
        row_offsets=offsets,
        documents=packing.documents[pieces],
        starts=packing.starts[pieces],
        lengths=packing.lengths[pieces],
    )

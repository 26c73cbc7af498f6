"""Which row of the data stands where in each epoch, and so which data comes next.

The data of a row source is cut into storage windows, runs of consecutive rows. An epoch is an order over
them (`penstock.order`), made when it is first asked for: 4 ms for 100,000 windows. Where groups of windows are
read in turn (`mode="windows"`) the kernel is told which come next: without a shuffle it sees the pattern by itself,
and a full shuffle has none.

Whether batches are mixed as a full shuffle would mix them, measured on the data.

A windowed shuffle mixes `group` storage windows at a time. If samples of one class, or of one source, are stored next
to each other, a batch then holds the classes of those windows only. A loss curve shows it too late, so it is
measured: batches are drawn as the shuffle would draw them, and the variance of their class counts is
compared with that of batches drawn from everything. 1 is a full shuffle.

    what is counted    a column that labels have (`label`, `domain`, …); without one, the files that samples came from,
                       taken together when their paths differ in nothing but digits
    what it costs      64 samples of that column where nothing is stored in runs, some thousands where something is
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import ConcatStorage, Samples
from penstock.order import FullOrder, Order, SequentialOrder, WindowedOrder
from penstock.plan._accounts import COUNTED_BATCH as _BATCH
from penstock.plan._accounts import Mixing
from penstock.plan._rows import Rows, kernels
from penstock.plan._stages import Shuffle
from penstock.schema import LABEL_COLUMNS, Column, offsets_of
from penstock.shards import ORIGIN_COLUMN, Storage, hash_samples, read_samples

# What is permuted as one piece and read as one piece: large enough to stream from a disk.
STORAGE_WINDOW_BYTES = 4 << 20
_KEPT_EPOCHS = 4
_KEPT_GROUPS = 64


class Epochs:
    """The orders of the epochs of a row source, made when first needed."""

    def __init__(self, rows_per_window: NDArray[np.int64], shuffle: Shuffle | None) -> None:
        self.num_rows = int(rows_per_window.sum())
        self.rows_per_window = rows_per_window
        self.row_starts = offsets_of(rows_per_window)
        """First row of each storage window; the last entry is the number of rows."""
        assert shuffle is None or shuffle.group is not None, "with_groups writes the default out"
        self.shuffle = shuffle
        self.order = functools.lru_cache(_KEPT_EPOCHS)(self._order)

    def _order(self, epoch: int) -> Order:
        if self.shuffle is None:
            return SequentialOrder(self.num_rows)
        if self.shuffle.mode == "full":
            return FullOrder(self.num_rows, self.shuffle.seed, epoch)
        return WindowedOrder(self.rows_per_window, self.shuffle.seed, epoch, self.group)

    @property
    def group(self) -> int:
        """Storage windows that are mixed with each other; 1 where none are."""
        if self.shuffle is None or self.shuffle.mode == "full":
            return 1
        return self.shuffle.group or 1

    def locate(self, rows: Rows) -> list[tuple[int, Rows, NDArray[np.int64]]]:
        """(epoch, places in `rows`, rows of the data) for each epoch that `rows` touch; nearly always one."""
        epoch = self._only_epoch(rows)
        if epoch is not None:
            return [(epoch, np.arange(len(rows)), self.order(epoch).rows(rows - epoch * self.num_rows))]
        epochs = rows // self.num_rows
        found: list[tuple[int, Rows, NDArray[np.int64]]] = []
        for epoch in np.unique(epochs).tolist():
            places = np.flatnonzero(epochs == epoch)
            found.append((epoch, places, self.order(epoch).rows(rows[places] - epoch * self.num_rows)))
        return found

    def _only_epoch(self, rows: Rows) -> int | None:
        """The epoch that all rows are in; None when there are several, or no rows."""
        if not len(rows):
            return None
        least, greatest = kernels().extent(rows)
        epoch = least // self.num_rows
        return int(epoch) if greatest // self.num_rows == epoch else None

    def find(self, rows: Rows) -> NDArray[np.int64]:
        """The row of the data behind each row of the run."""
        epoch = self._only_epoch(rows)
        if epoch is not None:
            return self.order(epoch).rows(rows - epoch * self.num_rows)
        found = np.empty(len(rows), np.int64)
        for _, places, data_rows in self.locate(rows):
            found[places] = data_rows
        return found

    @property
    def identity(self) -> Any:
        """JSON of what decides the order."""
        shuffle = self.shuffle
        return None if shuffle is None else [shuffle.seed, shuffle.mode, shuffle.group]


def even_windows(num_rows: int, row_bytes: int) -> NDArray[np.int64]:
    """Rows of each storage window, when rows are alike: as many as 4 MiB hold, and what is left in the last."""
    rows_per_window = max(1, STORAGE_WINDOW_BYTES // row_bytes)
    sizes = np.full(-(-num_rows // rows_per_window), rows_per_window, np.int64)
    if len(sizes):
        sizes[-1] = num_rows - rows_per_window * (len(sizes) - 1)
    return sizes


class PageHints:
    """Tells the kernel which storage windows a run needs next and which it has left.

    Threads may call at once; at worst a window is announced twice.
    """

    def __init__(
        self, epochs: Epochs, samples: Samples, columns: tuple[Column, ...], window_starts: NDArray[np.int64]
    ) -> None:
        self._epochs, self._samples, self._columns = epochs, samples, columns
        self._window_starts = window_starts
        """First sample of each storage window; the last entry is the number of samples."""
        self._hinted: frozenset[tuple[int, int]] = frozenset()
        """(epoch, group) of the groups announced recently."""
        self._hinted_rows = range(0)
        """Rows of the group announced last: most calls end here."""
        self._left: tuple[int, int] | None = None
        """(epoch, group) up to which groups were released."""

    def will_need(self, row: int) -> None:
        """Announce, once, the windows of the row's group and of the next."""
        if row in self._hinted_rows or not self._reads_groups:
            return
        epoch, group, order = self._locate(row)
        first, positions = epoch * self._epochs.num_rows, order.positions_of_group(group)
        self._hinted_rows = range(first + positions.start, first + positions.stop)
        for number in range(group, min(group + 2, order.num_groups)):
            if (epoch, number) not in self._hinted:
                kept = self._hinted if len(self._hinted) < _KEPT_GROUPS else frozenset()
                self._hinted = kept | {(epoch, number)}
                for window in order.windows_of_group(number).tolist():
                    self._samples.will_need(self._columns, *self._samples_of(window))

    def dont_need(self, row: int) -> None:
        """Release the windows of the groups between the last row's and this row's."""
        if not self._reads_groups:
            return
        epoch, group, order = self._locate(row)
        before, here = self._left, (epoch, group)
        if before == (epoch, group + 1):  # another thread is ahead
            return
        self._left = here
        if before is None or before > here:  # the run starts, or starts over
            return
        for number in range(before[1] if before[0] == epoch else 0, group):
            for window in order.windows_of_group(number).tolist():
                self._samples.dont_need(self._columns, *self._samples_of(window))

    @property
    def _reads_groups(self) -> bool:
        shuffle = self._epochs.shuffle
        return shuffle is not None and shuffle.mode == "windows" and self._epochs.num_rows > 0

    def _locate(self, row: int) -> tuple[int, int, WindowedOrder]:
        """(epoch, group, the epoch's order) of an absolute row."""
        epoch, position = divmod(row, self._epochs.num_rows)
        order = self._epochs.order(epoch)
        assert isinstance(order, WindowedOrder)
        return epoch, order.group_of(position), order

    def _samples_of(self, window: int) -> tuple[int, int]:
        begin, end = self._window_starts[window : window + 2].tolist()
        return begin, end


Classes = Callable[[NDArray[np.int64]], NDArray[np.uint64]]
"""The class of each stored sample, as a number."""

_PAIRS, _BATCHES = 32, 32
_IN_RUNS = 0.25
_MOST_FILES = 4096
_SEED = 0


def measure_mixing(samples: Samples, epochs: Epochs, window_starts: NDArray[np.int64]) -> list[Mixing]:
    """How samples are mixed; nothing when nothing is stored in runs, or the shuffle reaches everything at once.

    Args:
        samples: The samples.
        epochs: The order of storage windows.
        window_starts: The first sample of each storage window; the last entry is the number of samples.
    """
    if len(epochs.rows_per_window) <= epochs.group or epochs.shuffle is None or epochs.shuffle.mode == "full":
        return []
    found = _classes_of(samples)
    if found is None:
        return []
    what, classes = found
    rng = np.random.default_rng(_SEED)
    if not _comes_in_runs(samples, classes, window_starts, rng):
        return []
    order = epochs.order(0)
    assert isinstance(order, WindowedOrder)
    groups = np.linspace(0, order.num_groups - 1, _BATCHES).round().astype(np.int64).tolist()
    drawn = np.stack([_draw(order.windows_of_group(group), window_starts, rng) for group in groups])
    _, numbers = np.unique(classes(samples.locate(drawn.reshape(-1))), return_inverse=True)
    return [_compare(what, numbers.reshape(drawn.shape))]


def _compare(what: str, batches: NDArray[np.int64]) -> Mixing:
    counts = np.stack([np.bincount(batch, minlength=int(batches.max()) + 1) for batch in batches])
    shares = counts.mean(axis=0) / _BATCH
    expected = float((_BATCH * shares * (1 - shares)).sum())
    variance = float(counts.var(axis=0, ddof=1).sum()) / expected if expected else 1.0
    return Mixing(what, float((counts > 0).sum(axis=1).mean()), variance)


def _draw(windows: NDArray[np.int64], starts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A batch of samples from these windows, as a permutation of all of them gives it."""
    ends = np.cumsum(starts[windows + 1] - starts[windows])
    places = rng.integers(0, max(1, int(ends[-1])), _BATCH)
    found = np.searchsorted(ends, places, side="right")
    return np.asarray(starts[windows[found] + 1] - (ends[found] - places), np.int64)


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

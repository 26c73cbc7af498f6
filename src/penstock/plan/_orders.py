"""Which row of the data stands where in each epoch, and so which data comes next.

The data of a row source is cut into storage windows, runs of consecutive rows. An epoch is an order over
them (`penstock.order`), made when it is first asked for: 4 ms for 100,000 windows. Where groups of windows are
read in turn (`mode="windows"`) the kernel is told which come next: without a shuffle it sees the pattern by itself,
and a full shuffle has none.

**Where every row is one sample**, the sample is found in one of four ways:

    StoredOrder     each sample once in an epoch, as stored or shuffled
    WeightedOrder   each as often as its weight says (`penstock.order.WeightedDraw`), then shuffled like stored ones
    BalancedOrder   every class in turn, its samples in passes of their own (`penstock.order.ClassDeal`)
    BucketedOrder   any of these, rows of similar length together

With `bucket`, rows of similar length come together, so that padding wastes little, and any row can still be asked for.
Rows of an epoch are taken `bucket` at a time, sorted by length, cut into runs, and the runs are put in an order drawn
from the seed. A batch of as many rows as a run then holds rows of similar length, and long and short batches alternate.
The inner order decides which rows share a bucket: under a shuffle, other ones in each epoch. Price: the lengths of a
bucket are looked up and sorted when its first row is read; a few buckets are kept.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples, ShardLayer, sample_layers, shard_edges
from penstock.errors import SchemaError
from penstock.order import (
    ClassDeal,
    FullOrder,
    LaneOrder,
    Order,
    Permutation,
    SequentialOrder,
    WeightedDraw,
    WindowedOrder,
    derive_key,
)
from penstock.plan import _kernels
from penstock.plan._accounts import Mixing, measure_mixing
from penstock.plan._rows import Rows
from penstock.plan._stages import Balanced, Pad, SampleWeights, Shuffle, Stage, Weighted
from penstock.plan._uses import RowRange, Spans, join_spans, scattered
from penstock.schema import Column, offsets_of
from penstock.shards import Storage, column_bytes

# What is permuted as one piece and read as one piece: large enough to stream from a disk.
STORAGE_WINDOW_BYTES = 4 << 20
_KEPT_EPOCHS = 4
_KEPT_GROUPS = 64
_KEPT_BUCKETS = 16
_READ, _MANY = 1 << 20, 1 << 16


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
        self._last_positions = functools.lru_cache(_KEPT_EPOCHS)(self._last_of)

    def _order(self, epoch: int) -> Order:
        if self.shuffle is None:
            return SequentialOrder(self.num_rows)
        if self.shuffle.mode == "full":
            return FullOrder(self.num_rows, self.shuffle.seed, epoch)
        if self.shuffle.lanes > 1:
            return LaneOrder(self.rows_per_window, self.shuffle.seed, epoch, self.group, self.shuffle.lanes)
        return WindowedOrder(self.rows_per_window, self.shuffle.seed, epoch, self.group)

    @property
    def group(self) -> int:
        """Storage windows that are mixed with each other; 1 where none are."""
        if self.shuffle is None or self.shuffle.mode == "full":
            return 1
        return self.shuffle.group or 1

    @property
    def lanes(self) -> int:
        """Lanes that take turns; 1 where there are none."""
        return 1 if self.shuffle is None else self.shuffle.lanes

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
        least, greatest = _kernels.extent(rows)
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

    def spans(self, rows: RowRange) -> Spans:
        """Between which rows of the run each storage window is read; places are numbers of windows."""
        return join_spans(self._spans_of_epoch(epoch, part) for epoch, part in rows.epochs(self.num_rows))

    def _spans_of_epoch(self, epoch: int, rows: RowRange) -> Spans:
        order, start = self.order(epoch), epoch * self.num_rows
        if isinstance(order, LaneOrder):
            places = rows.shifted(-start)
            first, last, windows = order.uses(places.begin, places.end, places.world_size, places.remainders)
        elif isinstance(order, WindowedOrder):
            first, last, windows = order.uses(rows.begin - start, rows.end - start)
        elif isinstance(order, SequentialOrder):
            low, high = (self._window_of(np.array([row - start])) for row in (rows.begin, rows.end - 1))
            windows = np.arange(low[0], high[0] + 1)
            first, last = self.row_starts[windows], self.row_starts[windows + 1] - 1
        else:
            return scattered(rows, lambda some: self._window_of(self.find(some)), len(self.rows_per_window))
        first, last = np.maximum(first + start, rows.begin), np.minimum(last + start, rows.end - 1)
        kept = (first <= last) & (self.rows_per_window[windows] > 0)
        return Spans(first[kept], last[kept], windows[kept], windows[kept] + 1)

    def _window_of(self, data_rows: Rows) -> NDArray[np.int64]:
        return np.searchsorted(self.row_starts, data_rows, side="right") - 1

    def mixing(self, samples: Samples, window_starts: NDArray[np.int64]) -> list[Mixing]:
        """How batches are mixed; nothing where a shuffle reaches all windows at once, or there is none."""
        order = self.order(0) if len(self.rows_per_window) > self.group else None
        return measure_mixing(samples, order, window_starts) if isinstance(order, WindowedOrder | LaneOrder) else []

    def is_past(self, epoch: int, window: int, row: int) -> bool:
        """Whether a window of lanes is not read again in an epoch from a row of the run on."""
        return epoch * self.num_rows + int(self._last_positions(epoch)[window]) < row

    def _last_of(self, epoch: int) -> NDArray[np.int64]:
        order = self.order(epoch)
        assert isinstance(order, LaneOrder)
        return order.last_positions()

    @property
    def identity(self) -> Any:
        """JSON of what decides the order."""
        shuffle = self.shuffle
        lanes = [] if shuffle is None or shuffle.lanes == 1 else [shuffle.lanes]
        return None if shuffle is None else [shuffle.seed, shuffle.mode, shuffle.group, *lanes]


def even_windows(num_rows: int, row_bytes: int) -> NDArray[np.int64]:
    """Rows of each storage window, when rows are alike: as many as 4 MiB hold, and what is left in the last."""
    rows_per_window = max(1, STORAGE_WINDOW_BYTES // row_bytes)
    sizes = np.full(-(-num_rows // rows_per_window), rows_per_window, np.int64)
    if len(sizes):
        sizes[-1] = num_rows - rows_per_window * (len(sizes) - 1)
    return sizes


def lane_edges(shuffle: Shuffle | None, layers: Sequence[ShardLayer], num_places: int) -> NDArray[np.int64] | None:
    """Where the storage windows of lanes begin, which are whole shards: each is then needed in one lane alone.

    None without lanes, or where the data is not in shards.
    """
    return None if shuffle is None or shuffle.lanes == 1 else shard_edges(layers, num_places)


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
        # With lanes, what is next depends on the rank, and its shards come into the cache just before.
        is_grouped = shuffle is not None and shuffle.mode == "windows" and shuffle.lanes == 1
        return is_grouped and self._epochs.num_rows > 0

    def _locate(self, row: int) -> tuple[int, int, WindowedOrder]:
        """(epoch, group, the epoch's order) of an absolute row."""
        epoch, position = divmod(row, self._epochs.num_rows)
        order = self._epochs.order(epoch)
        assert isinstance(order, WindowedOrder)
        return epoch, order.group_of(position), order

    def _samples_of(self, window: int) -> tuple[int, int]:
        begin, end = self._window_starts[window : window + 2].tolist()
        return begin, end


class SampleOrder(ABC):
    """Samples by row of the run."""

    num_rows: int
    """Rows in an epoch."""
    num_samples: int
    """Samples in the data."""
    seed: int | None
    """Of the shuffle, if there is one."""
    is_once: bool = False
    """Whether an epoch holds every sample exactly once."""
    _page_hints: PageHints | None = None
    """Knows which data comes next, where that is known: the samples of a class, dealt in turn, are anywhere."""

    @property
    @abstractmethod
    def identity(self) -> Any:
        """JSON of what decides the order."""

    @abstractmethod
    def find(self, rows: Rows) -> NDArray[np.int64]:
        """The index of the sample at each row."""

    def find_roughly(self, rows: Rows) -> NDArray[np.int64]:
        """The same, or samples that are stored near by, without reading any data."""
        return self.find(rows)

    @abstractmethod
    def spans(self, rows: RowRange) -> Spans:
        """Which samples these rows read, and between which of them."""

    def will_need(self, row: int) -> None:
        """Tell the kernel which data this row and those after it need, where that is known."""
        if self._page_hints is not None:
            self._page_hints.will_need(row)

    def dont_need(self, row: int) -> None:
        """Tell the kernel which data is behind this row, where that is known."""
        if self._page_hints is not None:
            self._page_hints.dont_need(row)

    def mixing(self) -> list[Mixing]:
        """How batches are mixed, where that is known and may differ from a full shuffle."""
        return []

    def count(self, epoch: int) -> NDArray[np.int64]:
        """How often each sample comes in an epoch."""
        rows = np.arange(epoch * self.num_rows, (epoch + 1) * self.num_rows)
        return np.bincount(self.find(rows), minlength=self.num_samples)


class StoredOrder(SampleOrder):
    """Each sample once."""

    is_once = True

    def __init__(self, samples: Samples, columns: tuple[Column, ...], shuffle: Shuffle | None) -> None:
        self._samples, self.seed = samples, None if shuffle is None else shuffle.seed
        # All columns: those that are shown do not change the order.
        edges = lane_edges(shuffle, sample_layers(samples, list(samples.storage.schema)), len(samples))
        even = even_windows(len(samples), sample_bytes(samples.storage))
        self._epochs = Epochs(even if edges is None else np.diff(edges), shuffle)
        self._page_hints = PageHints(self._epochs, samples, columns, self._epochs.row_starts)
        self.num_rows = self.num_samples = self._epochs.num_rows

    @property
    def identity(self) -> Any:
        return self._epochs.identity

    def find(self, rows: Rows) -> NDArray[np.int64]:
        return self._epochs.find(rows)

    def spans(self, rows: RowRange) -> Spans:
        return self._epochs.spans(rows).of_windows(self._epochs.row_starts)

    def mixing(self) -> list[Mixing]:
        return self._epochs.mixing(self._samples, self._epochs.row_starts)


class WeightedOrder(SampleOrder):
    """Each sample as often as its weight says."""

    def __init__(self, samples: Samples, columns: tuple[Column, ...], stage: Weighted, shuffle: Shuffle | None) -> None:
        self.num_samples, self.seed = len(samples), None if shuffle is None else shuffle.seed
        self._stage = stage
        num_rows = self.num_samples if stage.rows is None else stage.rows
        try:
            draw = _table(samples, stage, lambda: _draw_by_weight(samples, stage, num_rows))
        except ValueError as error:
            raise ValueError(f"sample(): {error}.") from None
        self._draw: WeightedDraw = draw.with_seed(self.seed or 0)
        self._epochs = Epochs(even_windows(num_rows, sample_bytes(samples.storage)), shuffle)
        self.num_rows = num_rows
        ends = np.minimum(self._epochs.row_starts, num_rows - 1)
        starts = np.append(self._draw.samples(0, ends)[:-1], len(samples))
        self._page_hints = PageHints(self._epochs, samples, columns, starts)

    @property
    def identity(self) -> Any:
        weights = self._stage.weights
        identity = [weights.identity] if isinstance(weights, SampleWeights) else weights
        return ["sample", identity, self.num_rows, self._stage.replacement, self._epochs.identity]

    def find(self, rows: Rows) -> NDArray[np.int64]:
        found = np.empty(len(rows), np.int64)
        for epoch, places, slots in self._epochs.locate(rows):
            found[places] = self._draw.samples(epoch, slots)
        return found

    def spans(self, rows: RowRange) -> Spans:
        slots = self._epochs.spans(rows).of_windows(self._epochs.row_starts)
        begins, ends = np.empty_like(slots.begins), np.empty_like(slots.ends)
        epochs = slots.first_rows // self.num_rows
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            begins[here] = self._draw.samples(epoch, slots.begins[here])
            ends[here] = self._draw.samples(epoch, slots.ends[here] - 1) + 1
        return slots._replace(begins=begins, ends=ends)


class BalancedOrder(SampleOrder):
    """Every class in turn."""

    def __init__(self, samples: Samples, stage: Balanced, shuffle: Shuffle | None) -> None:
        self.num_samples, self.seed = len(samples), None if shuffle is None else shuffle.seed
        if not len(samples):
            raise ValueError("balance(): the dataset has no samples.")
        self._members, sizes = _table(samples, stage, lambda: _by_class(_scalars(samples, stage.column, "balance")))
        """Samples, class after class."""
        most = len(sizes) * int(sizes.min())
        rounded = max(1, len(samples) // len(sizes)) * len(sizes)
        self.num_rows = rounded if stage.replacement else most
        if stage.rows is not None:
            self.num_rows = stage.rows
        if not stage.replacement and self.num_rows > most:
            raise ValueError(
                f"balance(rows={self.num_rows:,}, replacement=False): the smallest of {len(sizes):,} classes has "
                f"{sizes.min():,} samples, so an epoch has {most:,} rows at most."
            )
        rounds = 1 if stage.replacement else -(-self.num_rows // len(sizes))
        self._deal = ClassDeal(sizes, self.seed, rounds)
        self._rows_per_epoch = self.num_rows if stage.replacement else rounds * len(sizes)
        self._stage = stage

    @property
    def identity(self) -> Any:
        goes_round = ["round"] if self.seed is None and not self._stage.replacement else []
        return ["balance", self._stage.column, self.num_rows, self._stage.replacement, self.seed, *goes_round]

    def find(self, rows: Rows) -> NDArray[np.int64]:
        skipped = self._rows_per_epoch - self.num_rows  # an epoch begins with a round
        found: NDArray[Any] = self._members[self._deal.members(rows + rows // self.num_rows * skipped)]
        return found.astype(np.int64, copy=False)

    def spans(self, rows: RowRange) -> Spans:
        return scattered(rows, self.find, self.num_samples)


class BucketedOrder(SampleOrder):
    """Another order with the rows of each bucket put in runs of like length."""

    def __init__(self, inner: SampleOrder, samples: Samples, column: Column, stage: Pad) -> None:
        assert stage.bucket is not None
        self._inner, self._samples, self._column = inner, samples, column
        self._bucket, self._run, self._stage = stage.bucket, stage.run, stage
        self.num_rows, self.num_samples, self.seed = inner.num_rows, inner.num_samples, inner.seed
        self.is_once = inner.is_once
        self._sorted = functools.lru_cache(_KEPT_BUCKETS)(self._sort)

    @property
    def identity(self) -> Any:
        identity = ["bucket", self._column.name, self._bucket, self._run, self._inner.identity]
        stage = self._stage
        return identity if stage.run_tokens is None else [*identity, stage.run_tokens, stage.multiple, stage.length]

    def find(self, rows: Rows) -> NDArray[np.int64]:
        found = np.empty(len(rows), np.int64)
        epochs, places = np.divmod(rows, max(1, self.num_rows))
        buckets = places // self._bucket
        firsts = epochs * self.num_rows + buckets * self._bucket
        for first in np.unique(firsts).tolist():
            here = np.flatnonzero(firsts == first)
            found[here] = self._sorted(first)[rows[here] - first]
        return found

    def find_roughly(self, rows: Rows) -> NDArray[np.int64]:
        """Rows of a bucket, though in another order."""
        return self._inner.find(rows)

    def spans(self, rows: RowRange) -> Spans:
        """What the inner order reads for whole buckets: a bucket's first row looks up the lengths of all others."""
        return join_spans(self._spans_of_epoch(epoch, part) for epoch, part in rows.epochs(max(1, self.num_rows)))

    def _spans_of_epoch(self, epoch: int, rows: RowRange) -> Spans:
        start, size = epoch * self.num_rows, self._bucket
        stop = start + min(-(-(rows.end - start) // size) * size, self.num_rows)
        return self._inner.spans(RowRange(rows.begin - (rows.begin - start) % size, stop)).widened(size, rows)

    def will_need(self, row: int) -> None:
        self._inner.will_need(row)

    def dont_need(self, row: int) -> None:
        """What is behind the bucket."""
        self._inner.dont_need(row - row % max(1, self.num_rows) % self._bucket)

    def mixing(self) -> list[Mixing]:
        return self._inner.mixing()

    def _sort(self, first: int) -> NDArray[np.int64]:
        """The samples of the bucket that begins at a row."""
        epoch, place = divmod(first, self.num_rows)
        size = min(self._bucket, self.num_rows - place)
        samples = self._inner.find(np.arange(first, first + size))
        lengths = self._samples.storage.lengths_of(self._column, self._samples.locate(samples))
        by_length, borders = self._cut(lengths)
        key = derive_key(self.seed or 0, "bucket", epoch if self.seed is not None else 0, place)
        num_mixed = len(borders) - 1 - (self._stage.run_tokens is not None)  # the last run is a rest, and stays last
        runs = np.arange(len(borders) - 1)
        runs[:num_mixed] = Permutation(num_mixed, key)(runs[:num_mixed]) if num_mixed else 0
        sizes = np.diff(borders)[runs]
        places = np.repeat(borders[runs] - (np.cumsum(sizes) - sizes), sizes) + np.arange(size)
        return samples[by_length[places]]

    def _cut(self, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(the rows of a bucket by length, where each run of them begins, and finally their number)."""
        stage, size = self._stage, len(lengths)
        if stage.run_tokens is None:
            num_runs = -(-size // self._run)
            return np.argsort(lengths, kind="stable"), np.minimum(np.arange(num_runs + 1) * self._run, size)
        shown = lengths if stage.length is None else np.minimum(lengths, stage.length)
        by_length = np.argsort(-shown, kind="stable")  # a run is as wide as its first row, whatever comes after it
        return by_length, _kernels.cut(shown[by_length], stage.run_tokens, self._run, stage.multiple)


def make_order(samples: Samples, columns: tuple[Column, ...], stages: Sequence[Stage]) -> SampleOrder:
    """The order that stages say; `columns` are those that will be read."""
    shuffle = next((stage for stage in stages if isinstance(stage, Shuffle)), None)
    drawn = next((stage for stage in stages if isinstance(stage, (Weighted, Balanced))), None)
    if isinstance(drawn, Weighted):
        return WeightedOrder(samples, columns, drawn, shuffle)
    if isinstance(drawn, Balanced):
        return BalancedOrder(samples, drawn, shuffle)
    return StoredOrder(samples, columns, shuffle)


def sample_bytes(storage: Storage) -> int:
    """Mean size of a sample, from the data alone: files hold padding that depends on how it was cut into shards."""
    columns = storage.schema.shown.columns
    fixed = sum(column.item_bytes for column in columns if not column.is_ragged)
    ragged = column_bytes(storage, (column for column in columns if column.is_ragged))
    return max(1, fixed + ragged // max(1, storage.num_samples))


def _table(samples: Samples, stage: Stage, build: Callable[[], Any]) -> Any:
    """What a stage makes of all samples, built once: every stage after it makes the rows anew."""
    kept = samples.table
    if kept is None or kept[0] != stage:
        kept = samples.table = (stage, build())
    return kept[1]


def _draw_by_weight(samples: Samples, stage: Weighted, num_rows: int) -> WeightedDraw:
    return WeightedDraw(_weights(samples, stage), num_rows, 0, stage.replacement)


def _by_class(labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """(samples class after class, in order; number of samples in each class)."""
    span = int(labels.max()) - int(labels.min()) + 1 if labels.dtype.kind in "biu" else _MANY
    if span < _MANY:  # small numbers are sorted digit by digit, ten times as fast
        numbers = labels.view(np.uint8) if labels.dtype == np.bool_ else labels
        classes = (numbers - numbers.min()).view(f"u{labels.itemsize}").astype(np.uint16)  # int8 may wrap around
        sizes = np.bincount(classes)
    else:
        _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    members = np.argsort(classes, kind="stable").astype(np.uint32 if len(labels) < 1 << 32 else np.int64)
    return members, sizes[sizes > 0]


def _weights(samples: Samples, stage: Weighted) -> NDArray[Any]:
    if isinstance(stage.weights, str):
        return _scalars(samples, stage.weights, "sample")
    if stage.weights.values.shape != (len(samples),):
        raise ValueError(
            f"sample(): there are {len(samples):,} samples, and weights of shape {list(stage.weights.values.shape)}."
        )
    return stage.weights.values


def _scalars(samples: Samples, name: str, verb: str) -> NDArray[Any]:
    """One number per sample."""
    column = samples.storage.schema[name]
    if column.is_ragged or column.shape:
        raise SchemaError(f"{verb}(): column {name!r} is {column.spec}; one number per sample is needed.")
    values = np.empty(len(samples), column.dtype)
    for begin in range(0, len(values), _READ):
        indices = np.arange(begin, min(begin + _READ, len(values)))
        samples.storage.read_fixed(column, samples.locate(indices), values[begin : begin + _READ])
    return values

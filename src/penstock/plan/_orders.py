"""Which sample is row i, where every row is one sample. It is found in one of four ways:

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

from penstock.dataset import Samples, sample_layers
from penstock.errors import SchemaError
from penstock.order import (
    ClassDeal,
    Permutation,
    WeightedDraw,
    derive_key,
)
from penstock.plan import _kernels
from penstock.plan._accounts import Mixing
from penstock.plan._epochs import Epochs, PageHints, even_windows, lane_edges
from penstock.plan._stages import Balanced, Pad, SampleWeights, Shuffle, Stage, Weighted
from penstock.plan._uses import RowRange, Rows, Spans, join_spans, scattered
from penstock.schema import Column
from penstock.shards import Storage, column_bytes

_KEPT_BUCKETS = 16
_READ, _MANY = 1 << 20, 1 << 16


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
    hints: PageHints | None = None
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

    def page_hints(self, row: int) -> list[tuple[PageHints, int]]:
        """As for a row source."""
        return [] if self.hints is None else [(self.hints, row)]

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
        self.hints = PageHints(self._epochs, samples, columns, self._epochs.row_starts)
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
            draw = _table(
                samples, stage, lambda: WeightedDraw(_weights(samples, stage), num_rows, 0, stage.replacement)
            )
        except ValueError as error:
            raise ValueError(f"sample(): {error}.") from None
        self._draw: WeightedDraw = draw.with_seed(self.seed or 0)
        self._epochs = Epochs(even_windows(num_rows, sample_bytes(samples.storage)), shuffle)
        self.num_rows = num_rows
        ends = np.minimum(self._epochs.row_starts, num_rows - 1)
        starts = np.append(self._draw.samples(0, ends)[:-1], len(samples))
        self.hints = PageHints(self._epochs, samples, columns, starts)

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
        firsts = rows - rows % max(1, self.num_rows) % self._bucket
        if not len(rows):
            return firsts
        low, high = _kernels.extent(firsts)
        if low == high:
            return self._sorted(low)[rows - low]
        found = np.empty(len(rows), np.int64)
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

    def page_hints(self, row: int) -> list[tuple[PageHints, int]]:
        """Those of the bucket's first row, which looks up the lengths of all others."""
        return self._inner.page_hints(row - row % max(1, self.num_rows) % self._bucket)

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
            return _sort_stably(lengths), np.minimum(np.arange(num_runs + 1) * self._run, size)
        shown = lengths if stage.length is None else np.minimum(lengths, stage.length)
        by_length = _sort_stably(shown.max() - shown)  # a run is as wide as its first row, whatever comes after it
        return by_length, _kernels.cut(shown[by_length], stage.run_tokens, self._run, stage.multiple)


def _sort_stably(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Their places in rising order; small numbers are sorted digit by digit, four times as fast."""
    return np.argsort(numbers.astype(np.uint16) if numbers.max() < _MANY else numbers, kind="stable")


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

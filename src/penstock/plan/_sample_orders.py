"""Which sample is row i of the run, where every row is one sample: all of them in turn, by weight, or class by class.

StoredOrder     each sample once in an epoch, as stored or shuffled
WeightedOrder   each as often as its weight says (`penstock.order.WeightedDraw`), then shuffled like stored ones
BalancedOrder   every class in turn, its samples in passes of their own (`penstock.order.ClassDeal`)
BucketedOrder   any of these, rows of like length together (`_sample_rows.py`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples
from penstock.errors import SchemaError
from penstock.order import ClassDeal, WeightedDraw
from penstock.plan._accounts import Mixing
from penstock.plan._epochs import Epochs, PageHints, even_windows, measure_mixing
from penstock.plan._rows import Rows
from penstock.plan._stages import Balanced, SampleWeights, Shuffle, Stage, Weighted
from penstock.schema import Column
from penstock.shards import Storage, column_bytes


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
        self._epochs = Epochs(even_windows(len(samples), sample_bytes(samples.storage)), shuffle)
        self._page_hints = PageHints(self._epochs, samples, columns, self._epochs.row_starts)
        self.num_rows = self.num_samples = self._epochs.num_rows

    @property
    def identity(self) -> Any:
        """Of the shuffle."""
        return self._epochs.identity

    def find(self, rows: Rows) -> NDArray[np.int64]:
        """By the order of the epoch."""
        return self._epochs.find(rows)

    def mixing(self) -> list[Mixing]:
        """Of samples."""
        return measure_mixing(self._samples, self._epochs, self._epochs.row_starts)


class WeightedOrder(SampleOrder):
    """Each sample as often as its weight says."""

    def __init__(self, samples: Samples, columns: tuple[Column, ...], stage: Weighted, shuffle: Shuffle | None) -> None:
        self.num_samples, self.seed = len(samples), None if shuffle is None else shuffle.seed
        self._stage = stage
        weights = _weights(samples, stage)
        num_rows = self.num_samples if stage.rows is None else stage.rows
        try:
            self._draw = WeightedDraw(weights, num_rows, self.seed or 0, stage.replacement)
        except ValueError as error:
            raise ValueError(f"sample(): {error}.") from None
        self._epochs = Epochs(even_windows(num_rows, sample_bytes(samples.storage)), shuffle)
        self.num_rows = num_rows
        ends = np.minimum(self._epochs.row_starts, num_rows - 1)
        starts = np.append(self._draw.samples(0, ends)[:-1], len(samples))
        self._page_hints = PageHints(self._epochs, samples, columns, starts)

    @property
    def identity(self) -> Any:
        """The weights, how many rows, and the shuffle."""
        weights = self._stage.weights
        identity = [weights.identity] if isinstance(weights, SampleWeights) else weights
        return ["sample", identity, self.num_rows, self._stage.replacement, self._epochs.identity]

    def find(self, rows: Rows) -> NDArray[np.int64]:
        """The slot by the order of the epoch, the sample by the draw."""
        found = np.empty(len(rows), np.int64)
        for epoch, places, slots in self._epochs.locate(rows):
            found[places] = self._draw.samples(epoch, slots)
        return found


class BalancedOrder(SampleOrder):
    """Every class in turn."""

    def __init__(self, samples: Samples, stage: Balanced, shuffle: Shuffle | None) -> None:
        self.num_samples, self.seed = len(samples), None if shuffle is None else shuffle.seed
        labels = _scalars(samples, stage.column, "balance")
        if not len(labels):
            raise ValueError("balance(): the dataset has no samples.")
        _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        self._members = np.argsort(classes, kind="stable")
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
        """The column, how many rows, and the seed."""
        goes_round = ["round"] if self.seed is None and not self._stage.replacement else []
        return ["balance", self._stage.column, self.num_rows, self._stage.replacement, self.seed, *goes_round]

    def find(self, rows: Rows) -> NDArray[np.int64]:
        """The member of the class whose turn it is."""
        skipped = self._rows_per_epoch - self.num_rows  # an epoch begins with a round
        return self._members[self._deal.members(rows + rows // self.num_rows * skipped)]


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
    samples.storage.read_fixed(column, samples.locate(np.arange(len(samples))), values)
    return values

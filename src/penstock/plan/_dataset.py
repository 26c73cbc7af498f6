"""Dataset: random access to samples by index, whatever they are stored in.

A dataset is a location (where the data is), a few selections (which of its samples), and columns. It
opens nothing that is not asked for, pickles as that description, and gives whole batches by one
vectorised read per column. It works as a map-style dataset in torch's `DataLoader` by duck typing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.dataset import (
    ArraysLocation,
    Columns,
    Condition,
    JoinedLocation,
    Location,
    Sample,
    SampleKeys,
    Samples,
    Selection,
    Take,
    UnfoldedLocation,
    as_indices,
    check_zip,
    find_samples,
    find_true,
    lasting_attributes,
    read_columns,
    read_sample,
    split_parts,
)
from penstock.errors import SchemaError, StageError, counted, did_you_mean, whole_number
from penstock.plan._orders import make_order
from penstock.plan._pack_index import find_pack_index
from penstock.plan._packed_rows import PackedRows
from penstock.plan._plan import Plan
from penstock.plan._rows import RowSource
from penstock.plan._sample_rows import PaddedRows, SampleRows, TokenWindowRows, is_cheap_at_random
from penstock.plan._stages import (
    Balanced,
    Cast,
    Map,
    Pack,
    Pad,
    Shuffle,
    Stage,
    Stages,
    Weighted,
    Window,
    with_groups,
)
from penstock.plan._text import order_facts
from penstock.plan._verbs import Verbs, WholeBatch
from penstock.schema import Schema
from penstock.shards import Storage, classes_of, tokenizers_of


class Dataset(Verbs[Plan]):
    """Samples by index. `penstock.open` and `penstock.from_arrays` make one.

    >>> import numpy as np, penstock
    >>> ds = penstock.from_arrays({"x": np.arange(10), "y": np.arange(10) * 2})
    >>> len(ds), int(ds[3]["y"]), ds[[5, 1, 1]]["x"].tolist()
    (10, 6, [5, 1, 1])
    """

    def __init__(
        self,
        location: Location,
        selections: tuple[Selection, ...] = (),
        columns: tuple[str, ...] | None = None,
        *,
        fingerprint: str | None = None,
        storage: Storage | None = None,
        keys: SampleKeys | None = None,
    ) -> None:
        self._location = location
        self.storage = storage if storage is not None else location.open(fingerprint)
        self.schema: Schema = self.storage.schema.select(columns) if columns is not None else self.storage.schema.shown
        self.samples = Samples(self.storage, selections, self.schema, keys)
        """The samples where they are stored, for row sources to read from."""

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sample: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> Columns: ...
    def __getitem__(self, index: SupportsIndex | slice | Sequence[int] | NDArray[Any]) -> Sample | Columns:
        """One sample as a dict, or a dict of columns for a slice or several indices.

        Small values are copies; large ones are read-only views of the file.
        """
        if isinstance(index, slice):
            return self.read(np.arange(*index.indices(len(self))))
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return read_sample(self.samples, index.__index__())
        return self.read(np.asarray(index))

    def __getitems__(self, indices: Sequence[int] | WholeBatch) -> list[Sample] | Sample:
        """A list of samples by one vectorised read, or a whole batch: what torch's `DataLoader` asks for."""
        if isinstance(indices, WholeBatch):
            return indices.take()
        columns = self.read(indices)
        return [{name: values[number] for name, values in columns.items()} for number in range(len(indices))]

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def read(self, indices: ArrayLike, out: Mapping[str, NDArray[Any]] | None = None) -> Columns:
        """Samples `indices` as a dict of columns, by one gather per column.

        Args:
            indices: In any order, and repeated as you like; negative ones count from the end.
            out: Arrays to fill, for some or all fixed columns. Their dtype may be wider than the stored one.

        Raises:
            IndexError: an index is out of range.
            SchemaError: an array in `out` does not fit its column, or there is no such column.
        """
        return read_columns(self.samples, indices, out)

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Length of every sample of a ragged column, read from the index alone."""
        found = self.schema[column]
        if not found.is_ragged:
            raise SchemaError(f"Column {column!r} is {found.spec}: every sample has the same shape.")
        return self.samples.lengths(found)

    def select_columns(self, names: Iterable[str]) -> Dataset:
        """The same samples with only these columns; a single one may come without a list."""
        return self._derive(columns=tuple(self.schema.select(names)))

    def take(self, indices: ArrayLike) -> Dataset:
        """Only these samples, in this order. It keeps 8 bytes per sample, and so does its pickle."""
        taken = self._derive(selection=Take(as_indices(indices).copy()))  # the caller may change theirs
        len(taken)  # an index out of range is an error here, not at the first read
        return taken

    def filter(self, mask: ArrayLike | None = None, /, **columns: Condition) -> Dataset:
        """Only the samples for which `mask`, one bool per sample, is true, or that fulfil conditions on columns.

        Args:
            mask: As in `ds.filter(ds.lengths("tokens") > 16)`.
            columns: For each column a value, a list of values, or a function of an array of values that gives a bool
                for each. Only these columns are read.

        >>> import numpy as np, penstock
        >>> ds = penstock.from_arrays({"x": np.arange(6), "label": np.array([0, 1, 2, 0, 1, 2])})
        >>> ds.filter(label=[0, 2], x=lambda x: x > 2)[:]["x"].tolist()
        [3, 5]
        """
        if (mask is None) == (not columns):
            raise TypeError("filter() takes either a mask or conditions on columns, as in ds.filter(label=3).")
        kept = find_samples(self.samples, columns) if columns else find_true(mask, len(self))
        return self._derive(selection=Take(kept))

    def split(
        self, fractions: Mapping[str, float], *, seed: int, by: str | Sequence[str] = "content"
    ) -> dict[str, Dataset]:
        """Split at random into parts of about these fractions; every sample is in exactly one.

        A sample's part depends only on `seed` and on what `by` names, so it stays in its part whatever is added,
        removed, reordered or shuffled around it. Samples that are equal in that are in the same part.

        Args:
            fractions: Name and share of each part.
            seed: A different seed gives a different split.
            by: "content" (the first of `tokens`, `image`, `audio` and `text` that exists, or else all columns), names
                of columns, "file" (the path it was prepared from), or "index", with which removing one sample moves
                those after it.

        Raises:
            SchemaError: there is no such column.
            ValueError: the fractions do not add up to 1; `by` needs what the dataset does not have; or this is already
                a part of a split with this seed.
        """
        parts = split_parts(fractions, seed, by, self.samples)
        for part in parts.values():
            self.samples.keys.check(part.by)
        return _Parts((name, self._derive(selection=part)) for name, part in parts.items())

    def zip(self, other: Dataset, *, on: str | Sequence[str] = ()) -> Dataset:
        """The same samples with the columns of both: image and mask, tokens and features. Nothing is copied.

        Args:
            other: As many samples, in the same order.
            on: Columns that both have, and that must be equal in every sample; they are read once to compare them.

        Raises:
            SchemaError: both have a column that is not compared.
            ValueError: the numbers of samples differ, or a column that is compared does.

        >>> import numpy as np, penstock
        >>> x, y = penstock.from_arrays({"x": np.arange(3)}), penstock.from_arrays({"y": np.arange(3) * 2})
        >>> {name: int(value) for name, value in x.zip(y)[2].items()}
        {'x': 2, 'y': 4}
        """
        if not isinstance(other, Dataset):
            raise TypeError(
                f"zip(): a dataset is needed, not {type(other).__name__}; penstock.from_arrays makes one of arrays."
            )
        names = (on,) if isinstance(on, str) else tuple(on)
        check_zip(self, other, names)
        rest = [name for name in other.schema if name not in names]
        return Dataset(JoinedLocation("zip", (self, other.select_columns(rest)))) if rest else self

    def unfold(self, length: int, stride: int = 1) -> Dataset:
        """Windows of time series as samples: `length` consecutive steps, beginning every `stride` steps.

        Where columns are ragged, each sample is a series, and no window crosses from one into another; otherwise each
        sample is a step. Splits keep the windows of a series together.

        Raises:
            SchemaError: ragged columns whose steps do not belong together, or byte strings beside steps.
            ValueError: `length` or `stride` is less than 1.

        >>> import numpy as np, penstock
        >>> ds = penstock.from_arrays({"t": np.arange(7.0)})
        >>> ds.unfold(3, stride=2)[:]["t"].tolist()
        [[0.0, 1.0, 2.0], [2.0, 3.0, 4.0], [4.0, 5.0, 6.0]]
        """
        length = whole_number("unfold", "length", length, at_least=1)
        return Dataset(UnfoldedLocation(self, length, whole_number("unfold", "stride", stride, at_least=1)))

    def in_memory(self) -> Dataset:
        """The same samples, loaded into RAM now."""
        arrays = self.read(np.arange(len(self)))
        return Dataset(ArraysLocation(arrays, lasting_attributes(self.attributes)))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the data: which storage, which samples, which columns."""
        return self.samples.digest(repr(self.schema.to_json()))

    def select(self, selection: Selection) -> Dataset:
        """The samples that a recipe picks."""
        return self._derive(selection=selection)

    @property
    def is_cheap_at_random(self) -> bool:
        """Whether a full shuffle costs little: samples of 64 KiB or more, or not more than 16 GiB of them."""
        return is_cheap_at_random(self.storage)

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What is known besides the data: tokenizer, packing, what was skipped."""
        return self.storage.attributes

    @property
    def tokenizers(self) -> dict[str, str]:
        """The tokenizer that `prepare` used, as {digest: name}; empty if nothing says which it was."""
        return tokenizers_of(self.attributes)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels; empty if it was not prepared from class folders."""
        return classes_of(self.attributes)

    def origin(self, index: int) -> str | None:
        """The file and row that a sample was prepared from; None if the dataset does not say."""
        return self.samples.origin(index)

    def as_plan(self) -> Plan:
        """A plan with no stages yet."""
        return Plan(self)

    def with_stage(self, stage: Stage) -> Plan:
        """A plan with one stage."""
        return Plan(self).with_stage(stage)

    @property
    def path(self) -> str:
        """Where the data is: a folder, a file, or "in memory"."""
        return str(self._location)

    @functools.cached_property
    def folders(self) -> tuple[str, ...]:
        """Fingerprints of the folders of shards that it reads, as they are now."""
        return self._location.folders(self.storage)

    def build_rows(self, stages: Stages) -> RowSource:
        """The rows that a plan with these stages reads."""
        return _build_rows(self.samples, stages)

    def check_stage(self, stage: Stage) -> None:
        """Any stage can follow a dataset."""

    def map_seed(self, stages: Stages) -> int:
        """The seed of the shuffle, if there is one."""
        shuffle = _find_shuffle(stages)
        return 0 if shuffle is None else shuffle.seed

    def order_facts(self, stages: Stages) -> dict[str, str]:
        """The samples, and the settings that decide their order."""
        return {"data": self.samples.fingerprint, **order_facts(stages)}

    def to_json(self) -> dict[str, Any]:
        """The dataset in a plan file; `ValueError` for arrays in RAM and lists of indices."""
        location = self._location.to_json()
        path = {"path": location.pop("path")} if "path" in location else {}
        fields = {**path, "fingerprint": self.fingerprint, "columns": list(self.schema)}
        return {**fields, **location, "splits": [selection.to_json() for selection in self.samples.selections]}

    def __reduce__(self) -> tuple[Any, ...]:
        columns = tuple(self.schema)
        return _restore, (self._location, self.samples.selections, columns, self.storage.fingerprint)

    def __repr__(self) -> str:
        return f"Dataset({self._location}: {counted(len(self), 'sample')}; {self.schema})"

    def _derive(self, *, selection: Selection | None = None, columns: tuple[str, ...] | None = None) -> Dataset:
        selections = self.samples.selections if selection is None else (*self.samples.selections, selection)
        names = tuple(self.schema) if columns is None else columns
        return Dataset(self._location, selections, names, storage=self.storage, keys=self.samples.keys)


class _Parts(dict[str, Dataset]):
    """The parts of a split. A name that is not there is answered with those that are."""

    def __missing__(self, name: object) -> Dataset:
        parts = ", ".join(map(repr, self))
        raise KeyError(f"There is no part {name!r}. The parts are {parts}.{did_you_mean(str(name), self)}")


def _restore(
    location: Location, selections: tuple[Selection, ...], columns: tuple[str, ...], fingerprint: str
) -> Dataset:
    return Dataset(location, selections, columns, fingerprint=fingerprint)


def _build_rows(samples: Samples, stages: Stages) -> RowSource:
    """The row source that stages describe.

    Raises:
        SchemaError: a column does not fit its stage.
        StageError: a stage that has no effect, or no meaning, before window(), pack() or pad().
    """
    stages = with_groups(stages)
    casts = tuple(stage for stage in stages if isinstance(stage, Cast))
    cut = next((stage for stage in stages if isinstance(stage, (Window, Pack, Pad))), None)
    if cut is None:
        files = {
            name for stage in stages if isinstance(stage, Map) for name in getattr(stage.function, "opened_columns", ())
        }
        files &= {column.name for column in samples.schema.columns if column.kind == "bytes"}
        whole = tuple(column for column in samples.schema.columns if column.name not in files)
        return SampleRows(samples, casts, make_order(samples, whole, stages), files)
    if casts:
        raise StageError(f"cast() has no effect before {cut.verb}(): its rows are int64 already. Leave it out.")
    if isinstance(cut, Pad):
        return PaddedRows(samples, cut, make_order(samples, (samples.schema[cut.column],), stages))
    _refuse_draws(stages, cut)
    shuffle = _find_shuffle(stages)
    if isinstance(cut, Window):
        return TokenWindowRows(samples, cut, shuffle)
    return PackedRows(samples, cut, shuffle, find_pack_index(samples, cut, shuffle))


def _find_shuffle(stages: Stages) -> Shuffle | None:
    return next((stage for stage in stages if isinstance(stage, Shuffle)), None)


def _refuse_draws(stages: Stages, cut: Window | Pack) -> None:
    drawn = next((stage.verb for stage in stages if isinstance(stage, (Weighted, Balanced))), None)
    if drawn is not None:
        raise StageError(
            f"{cut.verb}() cannot follow {drawn}(): its rows, and how many there are, would differ between epochs. "
            "Use pad(), or give each kind of document its share with penstock.mix()."
        )

"""The contract of a transform: rows of raw data in, samples of the dataset out.

A transform is a small, picklable description. `open()` turns it into the object that does the work, once per worker
process, so tokenizers and decoders are loaded where they are used. A transform must be a pure function of its rows: the
same rows give the same samples in any worker, so that the output is identical to the byte.

A row that cannot become a sample is listed in `Output.errors` and has no sample. Whether that stops the run is decided
elsewhere (`on_error`). Exceptions are for what makes every row wrong: a missing column, a tokenizer that
disagrees with its reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.sources import Records, RowError


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Samples made from one `Records`, column by column."""

    columns: Mapping[str, Any]
    """What `DatasetWriter.write_batch` takes: arrays, `Ragged`, lists of bytes; may be empty if there is no sample."""
    sources: NDArray[np.int64]
    """For each sample, the place in the records of the row it came from; never decreases."""
    errors: tuple[RowError, ...] = ()
    """Rows that gave no sample, in order; `row` is the row's number in the split, `path` is left empty."""
    noticed: Mapping[str, int] = field(default_factory=dict)
    """What the user should know about rows that did become samples: counts, by a word for each."""

    @property
    def num_samples(self) -> int:
        """Samples in every column."""
        return len(self.sources)


class OpenTransform(Protocol):
    """A transform loaded in one process."""

    def __call__(self, records: Records) -> Output:
        """Samples of these rows, in their order."""
        ...


class Transform(Protocol):
    """A description of how rows become samples; picklable, a few hundred bytes where possible."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the output, as JSON: kept in the manifest, and compared to detect stale data."""
        ...

    @property
    def attributes(self) -> dict[str, Any]:
        """What readers of the data need, as JSON for the manifest: tokenizer, vocabulary size, ids."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences to show about this run; they depend on what is installed, so they are not in the manifest."""
        ...

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """Columns of the source that are read; None for all of them."""
        ...

    def columns(self) -> dict[str, str] | None:
        """Types of the output columns, as `DatasetWriter` takes them; None if only the first output will tell."""
        ...

    def before_run(self, sample: Iterable[Records]) -> Transform:
        """The transform to run, given some first rows; takes no more of `sample` than it needs."""
        ...

    def open(self) -> OpenTransform:
        """Load what is needed; called once in each worker process."""
        ...


class BadRows:
    """Places of the rows that cannot become samples, each with the first reason found."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._reasons: dict[int, tuple[str, str]] = {}

    def add(self, place: int, reason: str, message: str) -> None:
        """Mark a row; the first reason given stands."""
        self._reasons.setdefault(int(place), (reason, message))

    def __contains__(self, place: int) -> bool:
        return place in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def good_places(self) -> NDArray[np.int64]:
        """Places of the rows that are left."""
        is_good = np.ones(self._records.num_rows, bool)
        is_good[list(self._reasons)] = False
        return np.flatnonzero(is_good)

    def errors(self) -> tuple[RowError, ...]:
        """What `Output.errors` holds; the caller, who knows the split, adds the path."""
        if not self._reasons:
            return ()
        rows = self._records.row_numbers()
        return tuple(RowError("", int(rows[place]), *self._reasons[place]) for place in sorted(self._reasons))

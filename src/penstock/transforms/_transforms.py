"""What stands between a row of raw data and a sample of the dataset.

A transform is a small, picklable description; `open()` gives the thing that works, once per worker process, so
that tokenizers and decoders are loaded where they are used. A transform must be a pure function of its rows:
the same rows give the same samples in any worker, which is what makes output identical to the byte.

A row that cannot become a sample is reported in `Output.errors` with its place, and has no sample. Whether
that stops the run is for the engine to say (`on_error`). An exception is raised only for what makes every
row wrong: a column that does not exist, a tokenizer that disagrees with its reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock.sources import Records, RowError


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Samples made from one `Records`, column by column."""

    columns: Mapping[str, Any]
    """What `DatasetWriter.write_batch` takes: arrays, `Ragged`, lists of bytes; may be empty when no sample is."""
    sources: NDArray[np.int64]
    """For each sample, the place in the records of the row it came from; never falls."""
    errors: tuple[RowError, ...] = ()
    """Rows that gave no sample, in order; `row` is the row's number in the split, `path` is left empty."""

    @property
    def num_samples(self) -> int:
        """Samples in every column."""
        return len(self.sources)


class OpenTransform(Protocol):
    """A transform at work in one process."""

    def __call__(self, records: Records) -> Output:
        """Samples of these rows, in their order."""
        ...


class Transform(Protocol):
    """A description of how rows become samples; picklable, a few hundred bytes where it can be."""

    @property
    def identity(self) -> dict[str, Any]:
        """JSON of all that decides the output: kept in the manifest, compared to tell whether data is stale."""
        ...

    @property
    def attributes(self) -> dict[str, Any]:
        """JSON for the manifest that readers of the data need: tokenizer, vocabulary size, ids."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences a person should see about this run; they depend on what is installed, so never in the manifest."""
        ...

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """Columns of the source that are read; None for all of them."""
        ...

    def columns(self) -> dict[str, str] | None:
        """Types of the output columns as `DatasetWriter` takes them; None when the first output tells."""
        ...

    def before_run(self, sample: Iterable[Records]) -> Transform:
        """The transform to run, after a look at some of the rows; takes no more of `sample` than it needs."""
        ...

    def open(self) -> OpenTransform:
        """Load what is needed; called once in each worker process."""
        ...


def row_number(records: Records, place: int) -> int:
    """Number, in its split, of the row at `place` of the records."""
    return records.first_row + place if records.rows is None else int(records.rows[place])


def row_error(records: Records, place: int, reason: str, message: str) -> RowError:
    """Report of the row at `place`; the engine, which knows the split, adds the path."""
    from penstock.sources import RowError

    return RowError("", row_number(records, place), reason, message)

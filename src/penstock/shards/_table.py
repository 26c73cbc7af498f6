"""Where columns are in memory: one row of numbers per shard, which compiled loops can read.

    row of a shard:  FILE SIZE | VALUES OFFSETS COUNT STATE VALUE_FLAGS OFFSET_FLAGS | the same for the next column
                                 ^ slot of the first column                            ^ slot of the second

`FILE` is the file's descriptor, or -1 if there is no file; `SIZE` is the length it must still have. `VALUES` and
`OFFSETS` are addresses, `COUNT` is the number of elements. `STATE` is ABSENT (not open), OPEN (the flags say which
blocks were checked) or READY (all of them were). Mapped shards and arrays in RAM both provide such a table.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Column, Schema

FILE, SIZE, FIRST_COLUMN = 0, 1, 2
VALUES, OFFSETS, COUNT, STATE, VALUE_FLAGS, OFFSET_FLAGS, COLUMN_WIDTH = 0, 1, 2, 3, 4, 5, 6
ABSENT, OPEN, READY = 0, 1, 2


class Table:
    """Addresses of every column of every shard, and the objects that keep them valid."""

    __slots__ = ("held", "rows")

    def __init__(self, rows: NDArray[np.int64], held: dict[int, object]) -> None:
        self.rows = rows
        self.held = held

    @classmethod
    def empty(cls, num_shards: int, num_columns: int) -> Table:
        """A table in which no shard is open."""
        return cls(np.zeros((num_shards, FIRST_COLUMN + COLUMN_WIDTH * num_columns), np.int64), {})


class InMemory(Protocol):
    """Columns that have addresses."""

    slots: dict[str, int]
    starts: NDArray[np.int64]
    """Index of the first sample of each shard, and finally the number of samples."""
    value_starts: dict[str, NDArray[np.int64]]
    """The same for the elements of each column."""

    @property
    def table(self) -> Table:
        """Where the columns are now; a reader keeps a reference, as it may be replaced by the next time."""
        ...

    def prepare(self, column: Column, index: int) -> None:
        """Open and check what one sample needs, or raise if something is wrong with it."""
        ...

    def prepare_elements(self, column: Column, begin: int, end: int) -> None:
        """The same for elements `begin` to `end` of a column, whatever samples they belong to."""
        ...

    def sample_length(self, column: Column, index: int) -> int:
        """Elements of one ragged sample."""
        ...


def column_slots(schema: Schema) -> dict[str, int]:
    """Where the numbers of each column begin in a row of a table."""
    return {name: FIRST_COLUMN + COLUMN_WIDTH * place for place, name in enumerate(schema)}

"""What this room hands out: files, splits of them, and records, by columns or as dicts.

A split says which bytes, row groups or files one reader takes. It is plain data: it can be printed,
compared, pickled, and kept in a JSON file between two runs. Reading the same split of the same files
gives the same records in the same batches, on any machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of raw data, as it was when it was listed."""

    path: str
    """Absolute local path, or a URL without its signature, which is kept out of the text (see `_urls`)."""
    num_bytes: int
    """Stored size; -1 if the server does not say."""
    identity: str
    """Changes when the file does: size and modification time, or the store's version of it."""
    class_name: str = ""
    """Folder that gives an image its class; "" for other files."""
    is_seekable: bool = True
    """Whether any range can be requested. A web server may refuse, and then the file is one split."""


@dataclass(frozen=True, slots=True)
class Split:
    """What one reader reads.

    >>> split = Split("jsonl", "/data/a.jsonl", 0, 1 << 26, 1 << 26)
    >>> Split.from_json(split.to_json()) == split
    True
    """

    format: str
    path: str
    """The file, or the first one of a group."""
    begin: int
    """First byte (lines), row group (parquet), record batch (Arrow), row (objects); 0 for whole files and groups."""
    end: int
    """One past the last. Records that begin before `end` belong to the split, wherever they end."""
    num_bytes: int
    """About how much raw data the split holds; tasks are sized by it."""
    paths: tuple[str, ...] = ()
    """Files of a group, one record each, in the order of their rows; empty for a single file."""
    class_names: tuple[str, ...] = ()
    """Class of each file of a group of images; empty if there are no classes."""
    labels: tuple[int, ...] = ()
    """Number of each file's class among all classes."""

    @property
    def needs_this_process(self) -> bool:
        """Whether the data is an object in this process, which no other worker can read."""
        return self.format == "object"

    def path_of_row(self, row: int) -> str:
        """File that holds row `row` of the split."""
        return self.paths[row] if self.paths else self.path

    def to_json(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, no signatures of URLs; fields left at their default are left out."""
        values = {name: getattr(self, name) for name in self.__slots__}  # `asdict` takes six times as long
        return {name: list(each) if isinstance(each, tuple) else each for name, each in values.items() if each != ()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        fields: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in values.items()
        }
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that could not be read, and why."""

    path: str
    row: int
    """Number of the row within its split, counting bad rows."""
    reason: str
    """One word to count by: "bad_json", "wrong_fields", "invalid_utf8", "not_an_object", "too_long", …"""
    message: str
    """For people: what was found, where (by byte or line), and what was expected."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """A batch of records, column by column: about 4 MB of raw data, or one record that is larger.

    A column is a pyarrow Array (one chunk, no dictionary, no views) or a Python list: of bytes for files
    and tar members, of anything for values without a common Arrow type. A missing value is null, or
    None. A column of nothing but nulls may have Arrow's `null` type. Arrow strings are valid UTF-8: every
    reader has checked them, so nobody needs to check again.
    """

    columns: Mapping[str, Any]
    first_row: int
    """Number of the first row this batch accounts for, within the split."""
    num_rows: int
    """Records in the columns."""
    errors: tuple[RowError, ...] = ()
    """Rows that are not in the columns, in the order of their numbers."""
    num_bytes: int = 0
    """Raw bytes this batch was made of, for rates."""
    known: tuple[str, ...] = ()
    """Names that these rows have, requested or not, if the reader knows; for messages."""

    def row_numbers(self) -> NDArray[np.int64]:
        """Row number of each record within the split: from `first_row` on, without those of the errors."""
        return rows_around(self.first_row, self.num_rows, self.errors)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Records of one block as Python dicts."""

    place: int
    """Where the block begins, which `read_rows` can resume at."""
    values: list[dict[str, Any]]
    errors: tuple[RowError, ...] = ()
    """Rows that are not among the values."""
    first_row: int = 0
    """Number that errors give to the first row of the block."""
    end: int = 0
    """Where the block ends, in formats that are cut at bytes: its records, and none after them, begin before it."""

    def before_first_error(self) -> list[dict[str, Any]]:
        """The values before the first error."""
        return self.values[: min(error.row for error in self.errors) - self.first_row]


def rows_around(first_row: int, num_rows: int, errors: Sequence[RowError]) -> NDArray[np.int64]:
    """Row numbers of `num_rows` good rows, from `first_row` on, when those of the errors are among them."""
    rows = np.arange(first_row, first_row + num_rows + len(errors), dtype=np.int64)
    return rows if not errors else np.delete(rows, [error.row - first_row for error in errors])


def runs(sizes: Sequence[int], target: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges [begin, end), each with as many sizes as fit in `target`, and at least one.

    >>> list(runs([5, 5, 5, 20, 1], 10))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    begin = total = 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > target:
            yield begin, number
            begin, total = number, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)


def byte_ranges(num_bytes: int, target: int) -> Iterator[tuple[int, int]]:
    """Ranges of equal size, give or take a byte, that are about `target` long.

    >>> list(byte_ranges(10, 4))
    [(0, 5), (5, 10)]
    """
    count = max(1, round(num_bytes / target))
    for number in range(count if num_bytes else 0):
        begin, end = num_bytes * number // count, num_bytes * (number + 1) // count
        if begin < end:
            yield begin, end

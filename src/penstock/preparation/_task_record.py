"""What a finished task says it made, in Python and as JSON, which may be forged."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from penstock.preparation._progress import Counts
from penstock.preparation._specification import Specification
from penstock.shapes import COUNT, Either, find_mismatch
from penstock.shards import Runs, ShardEntry

Shelf = Literal["ready", "dealt"]
"""Where the shards of finished tasks wait: for the commit, or for the second pass of a shuffle."""
SHELVES: tuple[Shelf, ...] = ("ready", "dealt")
Example = tuple[str, int, str, str]
"""A bad row: path, row in its split, reason, message."""
KEY = re.compile("[0-9a-f]{32}")
"""What the key of a task looks like."""

_RECORD = {
    "key": KEY,
    "shelf": frozenset(SHELVES),
    "shards": [object],
    "splits": [(COUNT, Either(None, [(COUNT, COUNT, COUNT)]))],
    "skipped": {str: COUNT},
    "examples": [(str, int, str, str)],
    "counts": {field.name: float for field in dataclasses.fields(Counts)},
    "peak_bytes": COUNT,
}
"""The shape of a record, except for its shards, which check themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """What a finished task made."""

    key: str
    shelf: Shelf
    shards: tuple[ShardEntry, ...]
    splits: tuple[tuple[int, Runs], ...]
    """For each split, how many samples it gave, and from which rows."""
    skipped: Mapping[str, int]
    """Rows left out, by reason."""
    examples: tuple[Example, ...]
    """The first of them."""
    noticed: Mapping[str, int]
    """What the transform noticed in the rows that it used."""
    counts: Counts
    peak_bytes: int
    """The most memory the worker had used by then."""

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    def fits(self, specification: Specification, num_splits: int) -> bool:
        """Whether a task of that many splits could have made this; a record from a stranger may not."""
        ragged = {column.name for column in specification.schema.columns if column.is_ragged}
        return (
            self.shelf == ("ready" if specification.shuffle is None else "dealt")
            and len(self.splits) == num_splits
            and sum(num_samples for num_samples, _ in self.splits) == self.num_samples
            and all(shard.num_values.keys() == ragged for shard in self.shards)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "key": self.key,
            "shelf": self.shelf,
            "shards": [shard.to_json() for shard in self.shards],
            "splits": [list(split) for split in self.splits],
            "skipped": dict(self.skipped),
            "examples": [list(example) for example in self.examples],
            "noticed": dict(self.noticed),
            "counts": dataclasses.asdict(self.counts),
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """The inverse of `to_json`; `KeyError`, `TypeError`, `ValueError` or `AttributeError` on anything else."""
        if wrong := find_mismatch(fields, _RECORD) or find_mismatch(fields.get("noticed", {}), {str: COUNT}):
            raise ValueError(wrong)
        return cls(
            key=fields["key"],
            shelf=fields["shelf"],
            shards=tuple(ShardEntry.from_json(entry) for entry in fields["shards"]),
            splits=tuple((count, rows) for count, rows in fields["splits"]),
            skipped=fields["skipped"],
            examples=tuple((path, row, reason, message) for path, row, reason, message in fields["examples"]),
            noticed=fields.get("noticed", {}),
            counts=Counts(**fields["counts"]),
            peak_bytes=fields["peak_bytes"],
        )

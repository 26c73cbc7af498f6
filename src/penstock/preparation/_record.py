"""What a finished task says of itself, as it is kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from penstock.preparation._progress import Counts
from penstock.shards import Runs, ShardEntry

Shelf = Literal["ready", "dealt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """What a finished task has made."""

    key: str
    shelf: Shelf
    shards: tuple[ShardEntry, ...]
    splits: tuple[tuple[int, Runs], ...]
    """For each split, how many samples it gave and from which of its rows."""
    skipped: Mapping[str, int]
    """Rows left out, by reason."""
    examples: tuple[tuple[str, int, str, str], ...]
    """The first of them: path, row in its split, reason, message."""
    counts: Counts
    peak_bytes: int
    """Largest memory the worker had until then."""

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "key": self.key,
            "shelf": self.shelf,
            "shards": [shard.to_json() for shard in self.shards],
            "splits": [list(split) for split in self.splits],
            "skipped": dict(self.skipped),
            "examples": [list(example) for example in self.examples],
            "counts": self.counts.to_json(),
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        return cls(
            key=fields["key"],
            shelf=fields["shelf"],
            shards=tuple(ShardEntry.from_json(entry) for entry in fields["shards"]),
            splits=tuple((count, rows) for count, rows in fields["splits"]),
            skipped=fields["skipped"],
            examples=tuple((path, row, reason, message) for path, row, reason, message in fields["examples"]),
            counts=Counts.from_json(fields["counts"]),
            peak_bytes=fields["peak_bytes"],
        )

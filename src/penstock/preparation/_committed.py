"""Tasks whose shards are in a dataset, and how its manifest lists them.

The list is `[splits, shards]` for each task, in order; splits and shards themselves are listed elsewhere, once. What
a task skipped or noticed follows these numbers. The number of splits is negative if a task's samples were removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from penstock.preparation._skipping import merge_examples, sum_counts
from penstock.preparation._task_record import Example, TaskRecord
from penstock.preparation._tasks import Task, paths_of
from penstock.shapes import COUNT, Either
from penstock.shards import Runs, ShardEntry, SplitOrigin
from penstock.sources import Split

_COUNTS = {str: COUNT}
_SKIPPED = (int, COUNT, _COUNTS, [(str, int, str, str)])
TASK = Either((int, COUNT), _SKIPPED, (*_SKIPPED, _COUNTS))
"""The shape of a task in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedTask:
    """A task whose shards are in the dataset, or will be once it is committed."""

    splits: tuple[SplitOrigin, ...]
    shards: tuple[ShardEntry, ...]
    skipped: Mapping[str, int]
    examples: tuple[Example, ...]
    noticed: Mapping[str, int]
    is_dropped: bool = False
    """Its samples were removed; it stays in the list because samples refer to their splits by number."""

    @classmethod
    def of(cls, task: Task, record: TaskRecord) -> Self:
        """A task that was just finished."""
        pairs = zip(task.splits, record.splits, strict=True)
        return cls(
            splits=tuple(_origin_of(split, num_samples, rows) for split, (num_samples, rows) in pairs),
            shards=record.shards,
            skipped=record.skipped,
            examples=record.examples,
            noticed=record.noticed,
        )

    @classmethod
    def merge(cls, dealt: Sequence[CommittedTask], gathered: Iterable[TaskRecord]) -> Self:
        """A shuffled dataset as one task: every shard holds something of every split."""
        return cls(
            splits=tuple(split for task in dealt for split in task.splits),
            shards=tuple(shard for record in gathered for shard in record.shards),
            skipped=sum_counts(task.skipped for task in dealt),
            examples=tuple(merge_examples(example for task in dealt for example in task.examples)),
            noticed=sum_counts(task.noticed for task in dealt),
        )

    @property
    def paths(self) -> set[str]:
        """Every file it read."""
        return {path for split in self.splits for path in split.paths}

    def dropped(self) -> CommittedTask:
        """The task without its samples."""
        splits = tuple(dataclasses.replace(split, num_samples=0) for split in self.splits)
        return CommittedTask(splits=splits, shards=(), skipped={}, examples=(), noticed={}, is_dropped=True)

    def to_json(self) -> list[Any]:
        """Its entry in the manifest: how many splits and shards it has, what it skipped, and what it noticed."""
        counts: list[Any] = [-len(self.splits) if self.is_dropped else len(self.splits), len(self.shards)]
        noticed = [dict(self.noticed)] if self.noticed else []
        if not self.skipped and not noticed:
            return counts
        return [*counts, dict(self.skipped), [list(each) for each in self.examples], *noticed]


def _origin_of(split: Split, num_samples: int, rows: Runs) -> SplitOrigin:
    return SplitOrigin(paths_of(split), bool(split.paths), split.begin, split.end, num_samples, rows)


def read_tasks(
    entries: Sequence[Sequence[Any]], origins: Sequence[SplitOrigin], shards: Sequence[ShardEntry]
) -> list[CommittedTask]:
    """Tasks from their entries, which fit `TASK`, the splits of all of them, and shards of which theirs are the first.

    Raises:
        ValueError: they claim more shards than there are, or not all of the splits.
    """
    num_splits, num_shards = sum(abs(entry[0]) for entry in entries), sum(entry[1] for entry in entries)
    if num_splits != len(origins) or num_shards > len(shards):
        raise ValueError(
            f"its tasks have {num_splits:,} splits and {num_shards:,} shards, but the dataset has {len(origins):,} and "
            f"{len(shards):,}"
        )
    tasks = []
    split, shard = 0, 0
    for signed, num_shards, *more in entries:
        by_reason, examples = more[:2] or ({}, [])
        num_splits = abs(signed)
        tasks.append(
            CommittedTask(
                splits=tuple(origins[split : split + num_splits]),
                shards=tuple(shards[shard : shard + num_shards]),
                skipped=by_reason,
                examples=tuple((path, row, reason, message) for path, row, reason, message in examples),
                noticed=more[2] if len(more) > 2 else {},
                is_dropped=signed < 0,
            )
        )
        split, shard = split + num_splits, shard + num_shards
    return tasks

"""From finished tasks to the dataset: final names, the manifest, and one rename that makes it so.

Shards are linked into place, not moved: a run that is killed while it commits finds its finished tasks
again. Names are given in the order of tasks, so they depend on neither workers nor luck; the shards
that an earlier run made keep theirs, so whoever has the dataset open can go on reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.preparation._earlier import MadeTask
from penstock.preparation._plan import Task, paths_of
from penstock.preparation._recipe import Recipe
from penstock.preparation._record import TaskRecord
from penstock.preparation._skipping import merge_examples
from penstock.preparation._work import WorkFolder
from penstock.shards import Manifest, Runs, ShardEntry, SplitOrigin, Workspace, origins_to_json
from penstock.sources import SourceFile, Split


def made_task(task: Task, record: TaskRecord) -> MadeTask:
    """A task and its record, as the manifest will have it."""
    pairs = zip(task.splits, record.splits, strict=True)
    return MadeTask(
        splits=tuple(_origin_of(split, num_samples, rows) for split, (num_samples, rows) in pairs),
        shards=record.shards,
        skipped=record.skipped,
        examples=record.examples,
    )


def _origin_of(split: Split, num_samples: int, rows: Runs) -> SplitOrigin:
    return SplitOrigin(paths_of(split), bool(split.paths), split.begin, split.end, num_samples, rows)


def shuffled_task(dealt: Sequence[MadeTask], gathered: Iterable[TaskRecord]) -> MadeTask:
    """A shuffled dataset as one task: every shard holds something of every split."""
    return MadeTask(
        splits=tuple(split for task in dealt for split in task.splits),
        shards=tuple(shard for record in gathered for shard in record.shards),
        skipped=sum_skipped(dealt),
        examples=tuple(merge_examples(example for task in dealt for example in task.examples)),
    )


def adopt_shards(
    workspace: Workspace, work: WorkFolder, fresh: Sequence[MadeTask], first_number: int
) -> list[MadeTask]:
    """Link the shards of new tasks into the workspace under their final names."""
    named: list[MadeTask] = []
    number = first_number
    for task in fresh:
        shards: list[ShardEntry] = []
        for shard in task.shards:
            name = f"shard-{number:06d}-{shard.name.rsplit('-', 1)[1]}"
            workspace.adopt_shard(work.path / "ready" / shard.name, name)
            shards.append(dataclasses.replace(shard, name=name))
            number += 1
        named.append(dataclasses.replace(task, shards=tuple(shards)))
    return named


def next_number(manifest: Manifest | None) -> int:
    """The first shard number that an earlier dataset leaves free."""
    shards = manifest.shards if manifest is not None else ()
    return max((int(shard.name.split("-")[1]) + 1 for shard in shards), default=0)


def sum_skipped(tasks: Iterable[MadeTask]) -> dict[str, int]:
    """Rows skipped in all tasks, by reason, in the order of the reasons' names."""
    total: dict[str, int] = {}
    for task in tasks:
        for reason, count in task.skipped.items():
            total[reason] = total.get(reason, 0) + count
    return dict(sorted(total.items()))


def build_manifest(
    recipe: Recipe,
    tasks: Sequence[MadeTask],
    *,
    num_files: int,
    patterns: Sequence[str],
    pack: Sequence[int],
    transform_attributes: Mapping[str, Any],
) -> Manifest:
    """The manifest of the finished dataset, pack counts and provenance aside."""
    plain = recipe.to_json()
    kept = {name: value for name, value in plain.items() if name not in ("transform", "columns")}
    attributes = {
        **transform_attributes,
        "transform": plain["transform"],
        "skipped": _skipped(tasks),
        "preparation": {
            "patterns": list(patterns),
            "files": num_files,
            "pack": list(pack),
            "recipe": kept,
            "tasks": [task.to_json() for task in tasks],
        },
    }
    shards = tuple(shard for task in tasks for shard in task.shards)
    return Manifest(recipe.schema, shards, attributes)


def describe_origins(tasks: Sequence[MadeTask], files: Sequence[SourceFile]) -> dict[str, Any]:
    """The provenance of the finished dataset: which files there were, and which samples came from where."""
    return {
        "sources": [[file.path, file.num_bytes, file.identity] for file in files],
        "origins": origins_to_json(split for task in tasks for split in task.splits),
    }


def _skipped(tasks: Sequence[MadeTask]) -> dict[str, Any]:
    by_reason = sum_skipped(tasks)
    examples = merge_examples(example for task in tasks for example in task.examples)
    return {
        "rows": sum(by_reason.values()),
        "by_reason": by_reason,
        "first": [{"path": path, "row": row, "reason": why, "message": what} for path, row, why, what in examples],
    }

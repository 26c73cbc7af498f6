"""From finished tasks to the dataset: final names, the manifest, row counts for packing, provenance.

Shards are linked into place, not moved, so a run that is killed while committing finds its finished tasks again. They
are named in the order of tasks, so names depend on neither workers nor chance; shards of an earlier run keep
theirs, so that processes that have the dataset open can go on reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.packing import PACKING_VERSION, PackingSettings, build_pack_index, index_name
from penstock.preparation._plan import PACKED_COLUMN, RunPlan
from penstock.preparation._records import TaskRecord
from penstock.preparation._skipping import merge_examples, sum_counts
from penstock.preparation._work_folder import WorkFolder
from penstock.schema import offsets_of
from penstock.shards import Manifest, ShardEntry, Workspace, origins_to_json, pack_provenance, read_lengths


def stage_dataset(
    plan: RunPlan, fresh: Sequence[TaskRecord], workspace: Workspace, work: WorkFolder
) -> tuple[Manifest, dict[str, int]]:
    """Put all new files into the workspace; return the manifest to commit, and the rows skipped by reason."""
    tasks = [*plan.kept, *_adopt_shards(plan, fresh, workspace, work)]
    manifest = _build_manifest(plan, tasks)
    packing = _count_packed_rows(workspace, manifest, plan.settings.pack)
    entry, data = pack_provenance(_provenance_of(plan, tasks))
    workspace.add_file(entry.name, [data])
    manifest = dataclasses.replace(manifest, attributes={**manifest.attributes, **packing}, provenance=entry)
    return manifest, sum_counts(task.skipped for task in tasks)


def _adopt_shards(
    plan: RunPlan, fresh: Sequence[TaskRecord], workspace: Workspace, work: WorkFolder
) -> list[TaskRecord]:
    """Link the shards of new tasks into the workspace under their final names."""
    named: list[TaskRecord] = []
    if not fresh:
        return named
    number = plan.first_shard
    with work.open("ready") as ready:
        for task in fresh:
            shards: list[ShardEntry] = []
            for shard in task.shards:
                name = f"shard-{number:06d}-{shard.name.rsplit('-', 1)[1]}"
                workspace.adopt_shard(ready, shard.name, name)
                shards.append(dataclasses.replace(shard, name=name))
                number += 1
            named.append(dataclasses.replace(task, shards=tuple(shards)))
    return named


def _build_manifest(plan: RunPlan, tasks: Sequence[TaskRecord]) -> Manifest:
    """The manifest of the finished dataset, except for packing and provenance."""
    recipe = plan.specification.to_json()
    del recipe["columns"]  # the manifest has them
    attributes = {
        **plan.transform.attributes,
        "transform": recipe.pop("transform"),
        "skipped": _describe_skipped(tasks),
        "preparation": {
            "patterns": list(plan.patterns),
            "files": len(plan.files),
            "pack": list(plan.settings.pack),
            "recipe": recipe,
            "tasks": [task.to_entry() for task in tasks],
        },
    }
    if plan.reading.classes:
        attributes["classes"] = list(plan.reading.classes)
    if noticed := sum_counts(task.noticed for task in tasks):
        attributes["noticed"] = noticed
    shards = tuple(shard for task in tasks for shard in task.shards)
    return Manifest(plan.specification.schema, shards, attributes)


def _describe_skipped(tasks: Sequence[TaskRecord]) -> dict[str, Any]:
    by_reason = sum_counts(task.skipped for task in tasks)
    examples = merge_examples(example for task in tasks for example in task.examples)
    return {
        "rows": sum(by_reason.values()),
        "by_reason": by_reason,
        "first": [{"path": path, "row": row, "reason": why, "message": what} for path, row, why, what in examples],
    }


def _provenance_of(plan: RunPlan, tasks: Sequence[TaskRecord]) -> dict[str, Any]:
    """Which files there were, and which samples came from where."""
    return {
        "sources": [[file.path, file.num_bytes, file.identity] for file in plan.files],
        "origins": origins_to_json(split for task in tasks for split in task.splits),
    }


def _count_packed_rows(workspace: Workspace, manifest: Manifest, pack: Sequence[int]) -> dict[str, Any]:
    """The manifest's section on packing, so that a packed plan opens at once; empty if no length is given."""
    if not pack:
        return {}
    lengths = _Lengths(workspace, manifest)
    indexes: dict[str, Any] = {}
    for length in pack:
        settings = PackingSettings(length=length)
        index = build_pack_index(lengths.read, manifest.num_samples, settings)
        indexes[index_name(PACKED_COLUMN, settings)] = index.to_json()
    return {"packing": {"version": PACKING_VERSION, "samples": manifest.num_samples, "indexes": indexes}}


class _Lengths:
    """Lengths of all documents, read from the shards one at a time."""

    def __init__(self, workspace: Workspace, manifest: Manifest) -> None:
        self._workspace = workspace
        self._manifest = manifest
        counts = [shard.num_samples for shard in manifest.shards]
        self._starts = offsets_of(counts)
        self._last: tuple[int, NDArray[np.int64]] | None = None

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        """Lengths of documents `begin` to `end`."""
        parts = [np.empty(0, np.int64)]
        number = int(np.searchsorted(self._starts, begin, side="right")) - 1
        while begin < end:
            first, last = int(self._starts[number]), min(end, int(self._starts[number + 1]))
            parts.append(self._of_shard(number)[begin - first : last - first])
            begin, number = last, number + 1
        return np.concatenate(parts)

    def _of_shard(self, number: int) -> NDArray[np.int64]:
        if self._last is None or self._last[0] != number:
            entry, schema = self._manifest.shards[number], self._manifest.schema
            path = self._workspace.shard_path(entry.name)
            self._last = (number, read_lengths(path, entry, schema, PACKED_COLUMN))
        return self._last[1]

"""What an earlier preparation noted of itself, and which of its tasks still hold.

A task holds as long as every file it read is there, unchanged, and every shard that was made of them. The others are
dropped whole: their files, if they still exist, are prepared again, together with new ones, in tasks behind the kept
ones.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.preparation._plan import unchanged_files
from penstock.preparation._recipe import Recipe
from penstock.shards import Manifest, ShardEntry, SplitOrigin, origins_from_json, read_provenance
from penstock.sources import SourceFile

Example = tuple[str, int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTask:
    """A task whose shards are, or will be, in the dataset."""

    splits: tuple[SplitOrigin, ...]
    shards: tuple[ShardEntry, ...]
    skipped: Mapping[str, int]
    examples: tuple[Example, ...]
    is_dead: bool = False
    """Dropped; it stays in the list because samples name their splits by number."""

    @property
    def paths(self) -> set[str]:
        """Every file it read."""
        return {path for split in self.splits for path in split.paths}

    def to_json(self) -> list[Any]:
        """How the manifest cuts its lists of splits and shards into tasks, and what the task skipped."""
        told: list[Any] = [-len(self.splits) if self.is_dead else len(self.splits), len(self.shards)]
        return [*told, dict(self.skipped), [list(each) for each in self.examples]] if self.skipped else told


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A finished dataset that `prepare` made."""

    recipe: Recipe
    sources: Sequence[Sequence[Any]]
    """`[path, bytes, identity]` of each file."""
    patterns: tuple[str, ...]
    """What was asked for, to look for new files."""
    tasks: tuple[MadeTask, ...]
    pack: tuple[int, ...]
    num_added: int
    """Samples that another writer appended since."""
    lost: frozenset[str]
    """Names of shards that are not there, or not with their size."""

    def kept(self, files: Sequence[SourceFile]) -> list[MadeTask]:
        """Tasks whose files and shards are all as they were; the rest are dead ones where splits have numbers."""
        unchanged = unchanged_files(files, self.sources) - self._files_of_lost()
        kept: list[MadeTask] = []
        for task in self.tasks:
            if not task.is_dead and task.paths <= unchanged:
                kept.append(task)
            elif self.recipe.origins == "column":
                kept.append(_bury(task))
        return kept

    def _files_of_lost(self) -> set[str]:
        """Files to read again; other tasks may have other parts of the same ones."""
        lost = (task for task in self.tasks if not self.lost.isdisjoint(shard.name for shard in task.shards))
        return {path for task in lost for path in task.paths}

    def is_current(self, files: Sequence[SourceFile]) -> bool:
        """Whether the sources are exactly those that were prepared, and nothing made of them is lost."""
        if self.lost or not all(file.identity for file in files):  # objects of which nobody knows whether they changed
            return False
        return [[file.path, file.num_bytes, file.identity] for file in files] == [list(each) for each in self.sources]


def read_earlier(folder: Path, manifest: Manifest | None) -> Earlier | None:
    """What a dataset says of its preparation; None when something else made it.

    Raises:
        FormatError: the file that names the sources is damaged or missing.
    """
    attributes = manifest.attributes if manifest is not None else {}
    section = attributes.get("preparation")
    if manifest is None or not isinstance(section, dict) or "transform" not in attributes:
        return None
    columns = manifest.schema.to_json()
    recipe = Recipe.from_json({**section["recipe"], "transform": attributes["transform"], "columns": columns})
    provenance = read_provenance(folder, manifest)
    if not provenance.keys() >= {"sources", "origins"}:
        return None
    origins = tuple(origins_from_json(provenance["origins"]))
    num_made = sum(num_shards for _, num_shards, *_ in section["tasks"])
    return Earlier(
        recipe=recipe,
        sources=provenance["sources"],
        patterns=tuple(section["patterns"]),
        tasks=tuple(_read_tasks(section["tasks"], origins, manifest.shards)),
        pack=tuple(section["pack"]),
        num_added=sum(shard.num_samples for shard in manifest.shards[num_made:]),
        lost=frozenset(shard.name for shard in manifest.shards[:num_made] if not _is_there(folder, shard)),
    )


def _is_there(folder: Path, shard: ShardEntry) -> bool:
    try:
        return os.lstat(folder / shard.name).st_size == shard.num_bytes
    except OSError:
        return False


def _read_tasks(
    tasks: Iterable[Sequence[Any]], origins: Sequence[SplitOrigin], shards: Sequence[ShardEntry]
) -> Iterable[MadeTask]:
    split, shard = 0, 0
    for signed, num_shards, *skipping in tasks:
        by_reason, examples = skipping or ({}, [])
        num_splits = abs(signed)
        yield MadeTask(
            splits=tuple(origins[split : split + num_splits]),
            shards=tuple(shards[shard : shard + num_shards]),
            skipped=by_reason,
            examples=tuple((path, row, reason, message) for path, row, reason, message in examples),
            is_dead=signed < 0,
        )
        split, shard = split + num_splits, shard + num_shards


def _bury(task: MadeTask) -> MadeTask:
    splits = tuple(dataclasses.replace(split, num_samples=0) for split in task.splits)
    return MadeTask(splits=splits, shards=(), skipped={}, examples=(), is_dead=True)

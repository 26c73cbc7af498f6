"""Which work there is to do, as frozen data: tasks of about one shard each, in the order of the output.

Splits of a large file are a task each; small files are put together, in the order of their names, until
a task is full. What a task makes depends on its own splits alone, so tasks can run anywhere, in any
order, twice if need be. A task of a finished dataset is never opened again: adding files only adds
tasks, and a changed file costs the task it is in.

**How large.** A task reads as much as is expected to fill one shard. Data that would make only a few
shards is cut finer, into about 64 tasks, down to 32 MB of text or 4 MB of images, a third of a second each: work for
many cores, and a short wait for the last one. That choice is made once and kept in the recipe, or adding a file would
cut everything anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.identity import digest_json
from penstock.sources import SourceFile, Split

MIN_TASK_BYTES = 32 << 20
MIN_IMAGE_TASK_BYTES = 4 << 20
_WANTED_TASKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Splits that one worker turns into shards, and the key under which the result is kept."""

    key: str
    splits: tuple[Split, ...]
    first_split: int
    """Place of its first split among all splits."""

    @property
    def num_bytes(self) -> int:
        """Raw bytes, about."""
        return sum(max(0, split.num_bytes) for split in self.splits)

    @property
    def needs_this_process(self) -> bool:
        """Whether no other process can read its data."""
        return any(split.needs_this_process for split in self.splits)

    def __str__(self) -> str:
        first, last = self.splits[0], self.splits[-1]
        rest = f" to {last.path}" if last.path != first.path else ""
        return f"{first.path}{rest} ({self.num_bytes:,} bytes)"


def choose_task_bytes(total_bytes: int, shard_bytes: int, output_ratio: float, min_bytes: int = MIN_TASK_BYTES) -> int:
    """Raw bytes per task, when `output_ratio` bytes are expected for each of them."""
    full = max(1, int(shard_bytes / output_ratio))
    fair = max(min_bytes, total_bytes // _WANTED_TASKS)
    return min(full, 1 << (fair - 1).bit_length())


def group_splits(splits: Iterable[Split], task_bytes: int) -> list[tuple[Split, ...]]:
    """Splits put together into tasks of at most `task_bytes`, but for single splits that are larger."""
    groups: list[tuple[Split, ...]] = []
    waiting: list[Split] = []
    for of_one_file in _by_file(splits):
        if len(of_one_file) > 1:
            groups += [tuple(waiting)] * bool(waiting) + [(split,) for split in of_one_file]
            waiting = []
            continue
        if waiting and sum(split.num_bytes for split in (*waiting, *of_one_file)) > task_bytes:
            groups.append(tuple(waiting))
            waiting = []
        waiting += of_one_file
    return groups + [tuple(waiting)] * bool(waiting)


def name_tasks(
    groups: Sequence[tuple[Split, ...]],
    files: Mapping[str, SourceFile],
    *,
    recipe_key: str,
    first_split: int,
    is_numbered: bool,
    unknown: str,
) -> list[Task]:
    """Tasks for groups of splits. `is_numbered` says that the place of a split is in the output too.

    `unknown` is for files without an identity: it differs from run to run, so that no task on them is taken for done.
    """
    tasks: list[Task] = []
    for splits in groups:
        identities = [files[path].identity or unknown for split in splits for path in paths_of(split)]
        parts = [recipe_key, [split.to_json() for split in splits], identities, first_split if is_numbered else None]
        tasks.append(Task(key=digest_json(parts), splits=splits, first_split=first_split))
        first_split += len(splits)
    return tasks


def paths_of(split: Split) -> tuple[str, ...]:
    """Every file of a split."""
    return split.paths or (split.path,)


def _by_file(splits: Iterable[Split]) -> list[list[Split]]:
    """Neighbours that are parts of one file, together."""
    files: list[list[Split]] = []
    for split in splits:
        if files and not split.paths and files[-1][0].path == split.path:
            files[-1].append(split)
        else:
            files.append([split])
    return files


Cut = Callable[[Sequence[SourceFile]], list[Split]]
"""Cuts files into splits: `plan_splits` with its options."""


def unchanged_files(files: Sequence[SourceFile], known: Sequence[Sequence[Any]]) -> set[str]:
    """Paths of files that are as a manifest's list of sources has them; one without an identity never is."""
    recorded = {path: (num_bytes, identity) for path, num_bytes, identity in known if identity}
    return {file.path for file in files if recorded.get(file.path) == (file.num_bytes, file.identity)}

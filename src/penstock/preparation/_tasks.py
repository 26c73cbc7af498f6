"""Which tasks there are: splits of the sources, grouped to about one shard each, in the order of the output.

Each split of a large file is its own task; small files are grouped, in the order of their names, until a task
is full. What a task makes depends only on its own splits, so tasks can run anywhere, in any order, and
twice if need be. A task of a finished dataset is never reopened: adding files only adds tasks, and a changed file
costs the task it is in.

**How large.** A task reads as much as is expected to fill one shard. Data that would fill only a few shards is cut
finer, into about 64 tasks of at least 32 MB of text or 4 MB of images (a third of a second each), so that many cores
have something to do and the wait for the last one is short. The choice is made once and kept in the specification;
otherwise adding a file could change all tasks.
"""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.identity import digest, digest_json
from penstock.preparation._specification import Specification
from penstock.sources import SourceFile, SourceOptions, Split, class_names, resolve_types
from penstock.transforms import Transform

MIN_TASK_BYTES = 32 << 20
MIN_IMAGE_TASK_BYTES = 4 << 20
_WANTED_TASKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Splits that one worker turns into shards, and the key under which the result is kept."""

    key: str
    splits: tuple[Split, ...]
    first_split: int
    """Number of its first split among all splits of the dataset."""
    keys_of_others: tuple[str | None, ...] = ()
    """Keys of the same task in the other parts of a split, which it makes as well; None for a part without it."""

    @property
    def num_bytes(self) -> int:
        """About how many raw bytes it reads."""
        return sum(max(0, split.num_bytes) for split in self.splits)

    @property
    def needs_this_process(self) -> bool:
        """Whether no other process can read its data."""
        return any(split.needs_this_process for split in self.splits)

    def __str__(self) -> str:
        first, last = self.splits[0], self.splits[-1]
        rest = f" to {last.path}" if last.path != first.path else ""
        return f"{first.path}{rest} ({self.num_bytes:,} bytes)"


def pin_reading(reading: SourceOptions, transform: Transform, files: Sequence[SourceFile]) -> SourceOptions:
    """The options with what sources and transform determine: image classes, columns to read, types of CSV columns."""
    classes = class_names(files)
    _check_used(reading.classes, classes, files)
    if classes and reading.classes is None:
        reading = dataclasses.replace(reading, classes=classes)
    needed = getattr(transform, "input_columns", None)
    if reading.columns is None and needed is not None:
        reading = dataclasses.replace(reading, columns=tuple(needed))
    reading = dataclasses.replace(reading, exact=getattr(transform, "exact_columns", reading.exact))
    return resolve_types(files, reading)


def _check_used(classes: tuple[str, ...] | None, found: tuple[str, ...], files: Sequence[SourceFile]) -> None:
    """Refuse a list of classes if no source has any.

    Raises:
        ValueError: it is of no use; the message names the first source.
    """
    if classes is not None and files and not found:
        raise ValueError(
            f"classes={classes!r:.80}, but no source is an image in a class folder ({files[0].path}). Leave it out."
        )


def mix_files(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The files in an order that is independent of their class folders, and the same wherever they are stored."""
    return sorted(files, key=lambda file: digest(f"{file.class_name}/{os.path.basename(file.path)}"))


def task_bytes_for(transform: Transform, files: Iterable[SourceFile], shard_bytes: int) -> int:
    """Raw bytes per task, for a transform and all of its sources."""
    total = sum(max(0, file.num_bytes) for file in files)
    return choose_task_bytes(total, shard_bytes, _expected_ratio(transform), least_task_bytes(transform))


def choose_task_bytes(total_bytes: int, shard_bytes: int, output_ratio: float, min_bytes: int = MIN_TASK_BYTES) -> int:
    """Raw bytes per task, if each is expected to become `output_ratio` bytes of output."""
    full = max(1, int(shard_bytes / output_ratio))
    fair = max(min_bytes, total_bytes // _WANTED_TASKS)
    return min(full, 1 << (fair - 1).bit_length())


def _expected_ratio(transform: Transform) -> float:
    """Bytes of output expected per byte of input: a token is about four bytes of text."""
    columns = transform.columns() or {}
    widths = {"uint8[*]": 1, "uint16[*]": 2, "uint32[*]": 4}
    width = widths.get(columns.get("tokens", ""))
    is_bytes = transform.attributes.get("tokenizer", {}).get("kind") == "bytes"
    return 1.0 if width is None else width * (1.0 if is_bytes else 0.25)


def least_task_bytes(transform: Transform) -> int:
    """The smallest useful task: a byte of an image takes eight times as long as one of text."""
    return MIN_IMAGE_TASK_BYTES if "images" in transform.attributes else MIN_TASK_BYTES


def group_splits(splits: Iterable[Split], task_bytes: int) -> list[tuple[Split, ...]]:
    """Group splits up to `task_bytes`; a single larger split is its own group."""
    groups: list[tuple[Split, ...]] = []
    small: list[Split] = []
    num_bytes = 0
    for of_one_file in _by_file(splits):
        num_bytes += sum(split.num_bytes for split in of_one_file)
        if small and (num_bytes > task_bytes or len(of_one_file) > 1):
            groups.append(tuple(small))
            small, num_bytes = [], sum(split.num_bytes for split in of_one_file)
        if len(of_one_file) > 1:
            groups += [(split,) for split in of_one_file]
            num_bytes = 0
        else:
            small += of_one_file
    return [*groups, tuple(small)] if small else groups


def _by_file(splits: Iterable[Split]) -> list[list[Split]]:
    """Neighbouring splits of the same file, together."""
    files: list[list[Split]] = []
    for split in splits:
        if files and not split.paths and files[-1][0].path == split.path:
            files[-1].append(split)
        else:
            files.append([split])
    return files


def name_tasks(
    groups: Sequence[tuple[Split, ...]],
    files: Iterable[SourceFile],
    *,
    specification: Specification,
    first_split: int,
    run_name: str,
) -> tuple[Task, ...]:
    """Tasks for groups of splits, each with a key that changes when its result would.

    If origins are a column, the numbers of splits are part of the output, and so of the key. `run_name` is used as the
    identity of files that have none: it differs from run to run, so that no task on them is taken for finished.
    """
    specification_key, is_numbered = specification.key, specification.origins == "column"
    identities = {file.path: file.identity or run_name for file in files}
    tasks: list[Task] = []
    for splits in groups:
        read = [identities[path] for split in splits for path in paths_of(split)]
        number = first_split if is_numbered else None
        key = digest_json([specification_key, [split.to_json() for split in splits], read, number])
        tasks.append(Task(key=key, splits=splits, first_split=first_split))
        first_split += len(splits)
    return tuple(tasks)


def paths_of(split: Split) -> tuple[str, ...]:
    """Every file of a split."""
    return split.paths or (split.path,)

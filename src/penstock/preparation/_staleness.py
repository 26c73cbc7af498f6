"""Whether a dataset still matches its sources and transform, and how far an unfinished preparation has come."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import FormatError, IncompleteDataset, counted, first_few, printable
from penstock.filesystem import local_path
from penstock.preparation._previous import Previous, read_previous
from penstock.preparation._specification import differences
from penstock.preparation._work_folder import WorkFolder
from penstock.shards import read_manifest
from penstock.sources import PLAIN_SCHEMES, SourceFile, SourceOptions, list_files, refused_url
from penstock.transforms import Transform

_PASSES = {"deal": "the first pass of two, ", "gather": "the second pass of two, "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A preparation that is running or was stopped; the next run with the same arguments continues it."""

    stage: str
    """"prepare"; with `shuffle` first "deal", then "gather"."""
    tasks: int
    """Finished tasks."""
    total_tasks: int
    raw_bytes: int
    """About how many raw bytes the finished tasks read."""
    total_bytes: int
    samples: int
    """Samples they made."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        share = 100 * self.raw_bytes // max(1, self.total_bytes)
        return (
            f"{_PASSES.get(self.stage, '')}{self.tasks:,} of {self.total_tasks:,} tasks finished, "
            f"{share} % of the data, {counted(self.samples, 'sample')}"
        )


def find_unfinished(destination: str | os.PathLike[str]) -> Unfinished | None:
    """How far an unfinished preparation at `destination` has come; None if there is none."""
    work = WorkFolder(local_path(destination, "a dataset").absolute())
    noted = work.noted_tasks()
    if noted is None:
        return None
    pass_name, tasks = noted
    finished = work.records(tasks)
    return Unfinished(
        stage=pass_name,
        tasks=len(finished),
        total_tasks=len(tasks),
        raw_bytes=sum(tasks[key] for key in finished),
        total_bytes=sum(tasks.values()),
        samples=sum(record.num_samples for record in finished.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How a dataset differs from its sources; falsy if it does not."""

    new: tuple[str, ...] = ()
    """Source files that were added."""
    changed: tuple[str, ...] = ()
    """Source files that have changed."""
    missing: tuple[str, ...] = ()
    """Source files that are gone."""
    transform: tuple[str, ...] = ()
    """How the transform differs, in words."""
    unfinished: Unfinished | None = None
    """A preparation that the next run would continue, and how far it has come."""

    def __bool__(self) -> bool:
        return bool(self.new or self.changed or self.missing or self.transform or self.unfinished)

    def __str__(self) -> str:
        parts = [
            f"{counted(len(paths), 'source file')} {word} ({first_few(paths, 1)})"
            for word, paths in (("new", self.new), ("changed", self.changed), ("missing", self.missing))
            if paths
        ]
        parts += [f"a different {words}" for words in self.transform]
        parts += [f"a preparation can be continued ({self.unfinished})"] if self.unfinished else []
        return printable("; ".join(parts)) if parts else "up to date"


def is_stale(
    destination: str | os.PathLike[str],
    *,
    sources: Any = None,
    transform: Transform | None = None,
    reading: SourceOptions | None = None,
    schemes: Collection[str] = PLAIN_SCHEMES,
) -> Staleness:
    """Whether the sources or the transform no longer match the dataset at `destination`; reads no data.

    Without `sources`, it lists the paths and queries the servers that the dataset names: only do this with a dataset
    you trust.

    Args:
        destination: Folder of a dataset that `prepare` made.
        sources: What to compare with; None means the sources that `prepare` was given.
        transform: What to compare with; None means that it has not changed.
        reading: How to find the sources; only credentials and a different format matter here.
        schemes: Kinds of URLs that the dataset may name; "file" is a path on this machine.

    Raises:
        FormatError: the dataset names another kind of URL, or a chained one.
        IncompleteDataset: there is no finished dataset, or `prepare` did not make it.
    """
    path = local_path(destination, "a dataset").absolute()
    previous = read_previous(path, read_manifest(path))
    if previous is None:
        raise IncompleteDataset(f"{path}: not made by `penstock prepare`, so it has no sources to compare with.")
    changed = () if transform is None else tuple(_transform_changes(previous, transform))
    if sources is None:
        _check_patterns(path, previous.patterns, schemes)
    files = _list(previous, sources, reading or SourceOptions())
    return _compare(previous, files, changed, find_unfinished(path))


def _check_patterns(path: Path, patterns: Sequence[str], schemes: Collection[str]) -> None:
    url = refused_url(patterns, schemes)
    if url is not None:
        raise FormatError(
            f"{path}: names the source {reprlib.repr(url)}, but only {', '.join(schemes)} are followed, unchained. "
            "If you trust the dataset, say where to look (sources=), or which kinds of URLs to follow (schemes=)."
        )


def _transform_changes(previous: Previous, transform: Transform) -> list[str]:
    return differences({"transform": dict(previous.specification.transform)}, {"transform": transform.identity})


def _list(previous: Previous, sources: Any, reading: SourceOptions) -> Sequence[SourceFile] | None:
    """The sources as they are now; None if they were objects in a process that has ended."""
    wanted = sources if sources is not None else list(previous.patterns)
    if not wanted and sources is None:
        return None
    if reading.format is None:
        reading = dataclasses.replace(reading, format=previous.specification.reading["format"])
    try:
        return list_files(wanted, reading)
    except FileNotFoundError:  # they are all gone
        return []


def _compare(
    previous: Previous, files: Sequence[SourceFile] | None, transform: tuple[str, ...], unfinished: Unfinished | None
) -> Staleness:
    if files is None:
        return Staleness(transform=transform, unfinished=unfinished)
    now = {file.path: (file.num_bytes, file.identity) for file in files}
    then = {path: (num_bytes, identity) for path, num_bytes, identity in previous.sources}
    return Staleness(
        new=tuple(sorted(now.keys() - then.keys())),
        changed=tuple(sorted(path for path in now.keys() & then.keys() if now[path] != then[path])),
        missing=tuple(sorted(then.keys() - now.keys())),
        transform=transform,
        unfinished=unfinished,
    )

"""What an earlier run left at the destination, and whether this run may continue it or replace it.

    a dataset       its manifest says how it was made, and which task read which files
    `.preparing`    a run that was stopped: its specification, and the tasks it finished

A task of a dataset stays valid as long as every file it read still exists, unchanged, and so does every shard made
from them. Other tasks are dropped whole: their files, if they still exist, are prepared again, together with new ones,
in tasks that come after the kept ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import DatasetExists, FormatError, counted, first_few
from penstock.preparation._records import IN_MANIFEST, TaskRecord, read_entries
from penstock.preparation._specification import Settings, Specification, differences
from penstock.schema import HASH_COLUMN
from penstock.shapes import COUNT, find_mismatch
from penstock.shards import Manifest, ShardEntry, origins_from_json, read_provenance
from penstock.sources import SourceFile

_ATTRIBUTES = {
    "preparation": {"patterns": [str], "pack": [COUNT], "recipe": {str: object}, "tasks": [IN_MANIFEST]},
    "transform": {str: object},
}
"""What `prepare` writes into a manifest, as far as a later run reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """What a run continues: a dataset that `prepare` made, or only the specification of an unfinished run."""

    specification: Specification
    sources: Sequence[Sequence[Any]] = ()
    """`[path, bytes, identity]` of each file of the dataset."""
    patterns: tuple[str, ...] = ()
    """The sources as given, for finding new files."""
    tasks: tuple[TaskRecord, ...] = ()
    pack: tuple[int, ...] = ()
    num_appended: int = 0
    """Samples that another writer has appended since."""
    lost: frozenset[str] = frozenset()
    """Names of shards that are missing, or have the wrong size."""

    def kept(self, files: Sequence[SourceFile]) -> tuple[TaskRecord, ...]:
        """Tasks whose files and shards are all unchanged; the others, dropped, only if splits are numbered."""
        unchanged = self._unchanged(files) - self._files_of_lost()
        is_numbered = self.specification.origins == "column"
        are_kept = [(task, not task.is_dropped and task.paths <= unchanged) for task in self.tasks]
        return tuple(task if is_kept else task.dropped() for task, is_kept in are_kept if is_kept or is_numbered)

    def _unchanged(self, files: Sequence[SourceFile]) -> set[str]:
        """Paths of files that have not changed; a file without an identity always has."""
        recorded = {path: (num_bytes, identity) for path, num_bytes, identity in self.sources if identity}
        return {file.path for file in files if recorded.get(file.path) == (file.num_bytes, file.identity)}

    def _files_of_lost(self) -> set[str]:
        """Files whose shards are lost; other tasks may have read other parts of the same files."""
        lost = (task for task in self.tasks if not self.lost.isdisjoint(shard.name for shard in task.shards))
        return {path for task in lost for path in task.paths}

    def sources_beside(self, files: Sequence[SourceFile]) -> list[SourceFile]:
        """The sources of the dataset that are not among these files, as they were when read."""
        given = {file.path for file in files}
        return [SourceFile(*source) for source in self.sources if source[0] not in given]

    def gone(self, files: Sequence[SourceFile]) -> list[str]:
        """Paths of the dataset's sources that are no longer given, or have become empty."""
        given = {file.path: file.num_bytes for file in files}
        return [path for path, num_bytes, _ in self.sources if path not in given or (num_bytes and given[path] == 0)]

    def num_samples_of(self, paths: Collection[str]) -> int:
        """Samples that came from these files; inexact if rows of small files were skipped or gave several samples."""
        splits = [split for task in self.tasks if not task.is_dropped for split in task.splits]
        shares = ((split, sum(path in paths for path in split.paths)) for split in splits)
        return sum(
            min(count, split.num_samples) if split.is_group else count * split.num_samples for split, count in shares
        )

    def is_current(self, files: Sequence[SourceFile]) -> bool:
        """Whether the sources are exactly those of the dataset, and all of its shards are there."""
        if self.lost or not all(file.identity for file in files):  # without an identity, changes cannot be seen
            return False
        return [[file.path, file.num_bytes, file.identity] for file in files] == [list(each) for each in self.sources]


def read_previous(folder: Path, manifest: Manifest | None) -> Previous | None:
    """How a dataset was prepared; None if something else made it.

    Raises:
        FormatError: the file that names the sources is damaged or missing, or its contents are invalid.
    """
    attributes = manifest.attributes if manifest is not None else {}
    if manifest is None or not isinstance(attributes.get("preparation"), dict) or "transform" not in attributes:
        return None
    provenance = read_provenance(folder, manifest)
    if not provenance.keys() >= {"sources", "origins"}:
        return None
    try:
        return _parse(folder, manifest, provenance)
    except ValueError as error:
        raise FormatError(
            f"{folder}: its manifest or provenance does not say how it was prepared: {error}. Restore them, or prepare "
            "it again with overwrite=True (--overwrite)."
        ) from None


def _parse(folder: Path, manifest: Manifest, provenance: Mapping[str, Any]) -> Previous:
    """Parse the manifest and the provenance file; `ValueError` if they are invalid."""
    attributes, sources = manifest.attributes, provenance["sources"]
    if wrong := find_mismatch(attributes, _ATTRIBUTES, "attributes"):
        raise ValueError(wrong)
    if not _are_sources(sources):
        raise ValueError("the sources are not a list of paths, sizes and identities")
    section = attributes["preparation"]
    recipe = {**section["recipe"], "transform": attributes["transform"], "columns": manifest.schema.shown.to_json()}
    recipe["hashes"] = HASH_COLUMN in manifest.schema
    tasks = read_entries(section["tasks"], origins_from_json(provenance["origins"]), manifest.shards)
    num_prepared = sum(len(task.shards) for task in tasks)
    prepared, appended = manifest.shards[:num_prepared], manifest.shards[num_prepared:]
    return Previous(
        specification=Specification.from_json(recipe),
        sources=sources,
        patterns=tuple(section["patterns"]),
        tasks=tuple(tasks),
        pack=tuple(section["pack"]),
        num_appended=sum(shard.num_samples for shard in appended),
        lost=frozenset(shard.name for shard in prepared if not _is_there(folder, shard)),
    )


def _are_sources(sources: Any) -> bool:
    """Whether they are a list of `[path, bytes, identity]`; checked with a set, because there may be a million."""
    if not isinstance(sources, list) or not all(isinstance(each, list) for each in sources):
        return False
    return {tuple(map(type, each)) for each in sources} <= {(str, int, str)}


def _is_there(folder: Path, shard: ShardEntry) -> bool:
    try:
        return os.lstat(folder / shard.name).st_size == shard.num_bytes
    except OSError:
        return False


def find_previous(
    destination: Path,
    manifest: Manifest | None,
    unfinished: Specification | None,
    wanted: Mapping[str, Any],
    files: Sequence[SourceFile],
    settings: Settings,
) -> Previous | None:
    """What this run continues; None if it starts from scratch.

    Args:
        destination: Folder of the dataset.
        manifest: The dataset that is there.
        unfinished: The specification of a run that was stopped.
        wanted: The fields of the specification that the arguments determine (`requested_fields`).
        files: The sources.
        settings: Whether to overwrite, or to remove the samples of files that are not given.

    Raises:
        DatasetExists: something is there that this run cannot continue, and `overwrite` is not set; or files of the
            dataset are not given, and `remove` is not set.
    """
    if manifest is not None:
        previous = _read_if_valid(destination, manifest, settings)
        obstacle = _obstacle(previous, wanted, files, settings.pack)
        if previous is not None and not obstacle:
            if not (settings.overwrite or settings.remove):
                _refuse_removal(destination, previous, files)
            return previous
        if not settings.overwrite:
            raise DatasetExists(_refuse(destination, obstacle))
    if unfinished is not None:
        reasons = differences(unfinished.to_json(), wanted)
        if not reasons:
            return Previous(specification=unfinished)
        if not settings.overwrite and manifest is None:
            obstacle = f"an unfinished preparation is there, with a different {'; a different '.join(reasons)}"
            raise DatasetExists(_refuse(destination, obstacle))
    return None


def _read_if_valid(destination: Path, manifest: Manifest, settings: Settings) -> Previous | None:
    try:
        return read_previous(destination, manifest)
    except FormatError:
        if settings.overwrite:  # the damaged dataset is replaced
            return None
        raise


def _obstacle(
    previous: Previous | None, wanted: Mapping[str, Any], files: Sequence[SourceFile], pack: tuple[int, ...]
) -> str:
    """Why the existing dataset cannot be continued; "" if it can."""
    if previous is None:
        return "the dataset there was not made by `penstock prepare`"
    reasons = differences(previous.specification.to_json(), wanted)
    if reasons:
        return f"the dataset there was made with a different {'; a different '.join(reasons)}"
    is_current = previous.is_current(files)
    if previous.specification.shuffle is not None and not is_current:
        what = f"{counted(len(previous.lost), 'shard')} of it lost" if previous.lost else "other source files"
        return (
            f"the dataset there is shuffled, with {what}: every document's place depends on all sources, so everything "
            "must be prepared again"
        )
    if previous.specification.limit is not None and not is_current:
        limit = counted(previous.specification.limit, "sample")
        return f"the dataset there is a trial of the first {limit}, and its sources have changed since"
    if previous.num_appended and not (is_current and previous.pack == pack):
        appended = counted(previous.num_appended, "sample")
        return f"another writer has appended {appended} to the dataset there, which this run would drop"
    return ""


def _refuse_removal(destination: Path, previous: Previous, files: Sequence[SourceFile]) -> None:
    """Stop if source files of the dataset are missing or empty: a mistyped glob or a failed copy must not empty it."""
    gone = previous.gone(files)
    if not gone:
        return
    what = f"{counted(len(gone), 'source file')} of {len(previous.sources):,}"
    shown = first_few(gone, 1)
    samples = counted(previous.num_samples_of(frozenset(gone)), "sample")
    how = "no longer given" if set(gone).isdisjoint(file.path for file in files) else "no longer given, or empty now"
    raise DatasetExists(
        f"{destination}: {what} {'is' if len(gone) == 1 else 'are'} {how} ({shown}), and {samples} would be removed. "
        "To add to a dataset, give all sources, old and new, or pass append=True (--append) with only the new ones. "
        "To remove those samples, pass remove=True (--remove); to keep the dataset as it is, choose another "
        "destination."
    )


def _refuse(destination: Path, obstacle: str) -> str:
    return f"{destination}: {obstacle}. Pass overwrite=True (--overwrite) to replace it, or choose another destination."

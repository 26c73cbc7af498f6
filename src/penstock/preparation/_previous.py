"""What an earlier run left at the destination: whether it is up to date, and may be continued or replaced.

    a dataset       its manifest says how it was made, and which task read which files
    `.preparing`    a run that was stopped: its specification, and the tasks it finished

A task of a dataset stays valid as long as every file it read still exists, unchanged, and so does every shard made
from them. Other tasks are dropped whole: their files, if they still exist, are prepared again, together with new ones,
in tasks that come after the kept ones.
"""

import dataclasses
import os
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import DatasetExists, FormatError, IncompleteDataset, counted, first_few, printable
from penstock.filesystem import local_path
from penstock.preparation._records import IN_MANIFEST, TaskRecord, read_entries
from penstock.preparation._specification import Settings, Specification, differences
from penstock.preparation._work_folder import WorkFolder, folder_of
from penstock.schema import HASH_COLUMN
from penstock.shapes import COUNT, find_mismatch
from penstock.shards import Manifest, ShardEntry, origins_from_json, read_manifest, read_provenance, tokenizers_of
from penstock.sources import PLAIN_SCHEMES, SourceFile, SourceOptions, list_files, refused_url
from penstock.transforms import Transform

_ATTRIBUTES = {
    "preparation": {"patterns": [str], "pack": [COUNT], "recipe": {str: object}, "tasks": [IN_MANIFEST]},
    "transform": {str: object},
}
"""What `prepare` writes into a manifest, as far as a later run reads it."""
_PASSES = {"deal": "the first pass of two, ", "gather": "the second pass of two, "}


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

    @property
    def recorded(self) -> dict[str, tuple[int, str]]:
        """Size and identity of each source file."""
        return {path: (num_bytes, identity) for path, num_bytes, identity in self.sources}

    def _unchanged(self, files: Sequence[SourceFile]) -> set[str]:
        """Paths of files that have not changed; a file without an identity always has."""
        then, now = self.recorded, {file.path: (file.num_bytes, file.identity) for file in files if file.identity}
        return {path for path in now if now[path] == then.get(path)}

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
    work: WorkFolder,
    wanted: Mapping[str, Any],
    files: Sequence[SourceFile],
    settings: Settings,
    transform: Transform,
) -> Previous | None:
    """What this run continues; None if it starts from scratch.

    Args:
        destination: Folder of the dataset.
        manifest: The dataset that is there.
        work: What a run that was stopped has left.
        wanted: The fields of the specification that the arguments determine (`requested_fields`).
        files: The sources.
        settings: Whether to overwrite, or to remove the samples of files that are not given.
        transform: What this run does; refusals name its tokenizer.

    Raises:
        DatasetExists: something is there that this run cannot continue, and `overwrite` is not set; or files of the
            dataset are not given, and `remove` is not set.
    """
    names = tokenizers_of(transform.attributes)
    if manifest is not None:
        previous = _read_if_valid(destination, manifest, settings)
        names |= tokenizers_of(manifest.attributes)
        obstacle = _obstacle(previous, wanted, files, settings.pack, names)
        if previous is not None and not obstacle:
            if not (settings.overwrite or settings.remove):
                _refuse_removal(destination, previous, files)
            return previous
        if not settings.overwrite:
            raise DatasetExists(_refuse(destination, obstacle))
    unfinished = work.specification()
    if unfinished is not None:
        reasons = differences(unfinished.to_json(), wanted, names)
        if not reasons:
            return Previous(specification=unfinished)
        if not settings.overwrite and manifest is None and work.holds_samples():
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
    previous: Previous | None,
    wanted: Mapping[str, Any],
    files: Sequence[SourceFile],
    pack: tuple[int, ...],
    names: Mapping[str, str],
) -> str:
    """Why the existing dataset cannot be continued; "" if it can."""
    if previous is None:
        return "the dataset there was not made by `penstock prepare`"
    reasons = differences(previous.specification.to_json(), wanted, names)
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
    work = WorkFolder(folder_of(destination))
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
    url = refused_url(previous.patterns, schemes) if sources is None else None
    if url is not None:
        raise FormatError(
            f"{path}: names the source {reprlib.repr(url)}, but only {', '.join(schemes)} are followed, unchained. "
            "If you trust the dataset, say where to look (sources=), or which kinds of URLs to follow (schemes=)."
        )
    before = dict(previous.specification.transform)
    changes = [] if transform is None else differences({"transform": before}, {"transform": transform.identity})
    files = _list(previous, sources, reading or SourceOptions())
    now = {file.path: (file.num_bytes, file.identity) for file in files} if files is not None else previous.recorded
    then = previous.recorded
    return Staleness(
        new=tuple(sorted(now.keys() - then.keys())),
        changed=tuple(sorted(path for path in now.keys() & then.keys() if now[path] != then[path])),
        missing=tuple(sorted(then.keys() - now.keys())),
        transform=tuple(changes),
        unfinished=find_unfinished(path),
    )


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

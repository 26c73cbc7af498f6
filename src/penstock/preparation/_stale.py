"""Whether a prepared dataset still is what its sources and transform would give."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import IncompleteDataset
from penstock.preparation._earlier import Earlier, read_earlier
from penstock.preparation._recipe import differences
from penstock.preparation._unfinished import Unfinished, find_unfinished
from penstock.shards import read_manifest
from penstock.sources import SourceFile, SourceOptions, list_files
from penstock.transforms import Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """In what a dataset lags behind; false when it does not."""

    new: tuple[str, ...] = ()
    """Source files that were added."""
    changed: tuple[str, ...] = ()
    """Source files that are not as they were."""
    missing: tuple[str, ...] = ()
    """Source files that are gone."""
    transform: tuple[str, ...] = ()
    """In what the transform differs, in words."""
    unfinished: Unfinished | None = None
    """A preparation of what is missing that the next run would go on with, and how far it is."""

    def __bool__(self) -> bool:
        return bool(self.new or self.changed or self.missing or self.transform or self.unfinished)

    def __str__(self) -> str:
        parts = [
            f"{len(paths):,} source files {word} ({paths[0]}{', …' if len(paths) > 1 else ''})"
            for word, paths in (("new", self.new), ("changed", self.changed), ("missing", self.missing))
            if paths
        ]
        parts += [f"another {words}" for words in self.transform]
        parts += [f"a preparation can go on ({self.unfinished})"] if self.unfinished else []
        return "; ".join(parts) if parts else "up to date"


def is_stale(
    destination: str | os.PathLike[str],
    *,
    sources: Any = None,
    transform: Transform | None = None,
    reading: SourceOptions | None = None,
) -> Staleness:
    """Tell whether sources or transform no longer match the dataset at `destination`; reads no data.

    Args:
        destination: Folder of a dataset that `prepare` made.
        sources: What to compare with; None looks where the preparation looked.
        transform: What to compare with; None takes it as unchanged.
        reading: How sources are found; only credentials and, where another is meant, the format matter here.

    Raises:
        IncompleteDataset: no finished dataset is there, or `prepare` did not make it.
    """
    path = Path(destination).absolute()
    earlier = read_earlier(path, read_manifest(path))
    if earlier is None:
        raise IncompleteDataset(f"{path}: not made by `penstock prepare`, so it has no sources to compare with.")
    changed = () if transform is None else tuple(_transform_changes(earlier, transform))
    files = _list(earlier, sources, reading or SourceOptions())
    return _compare(earlier, files, changed, find_unfinished(path))


def _transform_changes(earlier: Earlier, transform: Transform) -> list[str]:
    return differences({"transform": dict(earlier.recipe.transform)}, {"transform": transform.identity})


def _list(earlier: Earlier, sources: Any, reading: SourceOptions) -> Sequence[SourceFile] | None:
    """The sources as they are now; None when they were objects of a process that is gone."""
    wanted = sources if sources is not None else list(earlier.patterns)
    if not wanted and sources is None:
        return None
    if reading.format is None:
        reading = dataclasses.replace(reading, format=earlier.recipe.reading["format"])
    try:
        return list_files(wanted, reading)
    except FileNotFoundError:  # none is left
        return []


def _compare(
    earlier: Earlier, files: Sequence[SourceFile] | None, transform: tuple[str, ...], unfinished: Unfinished | None
) -> Staleness:
    if files is None:
        return Staleness(transform=transform, unfinished=unfinished)
    now = {file.path: (file.num_bytes, file.identity) for file in files}
    then = {path: (num_bytes, identity) for path, num_bytes, identity in earlier.sources}
    return Staleness(
        new=tuple(sorted(now.keys() - then.keys())),
        changed=tuple(sorted(path for path in now.keys() & then.keys() if now[path] != then[path])),
        missing=tuple(sorted(then.keys() - now.keys())),
        transform=transform,
        unfinished=unfinished,
    )

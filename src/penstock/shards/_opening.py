"""Opening a shard's file, and telling a missing shard from a dataset that was written again."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from penstock.errors import DatasetChanged, FormatError, IncompleteDataset
from penstock.filesystem import FileReader, MappedFile, PositionedFile, is_network_filesystem
from penstock.shards._manifest import read_manifest

Io = Literal["auto", "map", "pread"]


def resolve_io(io: Io, path: Path) -> Literal["map", "pread"]:
    """How to read files at `path`."""
    if io not in ("auto", "map", "pread"):
        raise ValueError(f"io={io!r}; the choices are 'auto', 'map' and 'pread'.")
    if io == "auto":
        return "pread" if is_network_filesystem(path) else "map"
    return io


def open_file(folder: Path, name: str, *, io: Literal["map", "pread"], fingerprint: str) -> FileReader:
    """Open shard `name` of the dataset that has `fingerprint`.

    Raises:
        DatasetChanged: the dataset was overwritten, moved or removed.
        FormatError: the shard is missing.
    """
    kind = MappedFile if io == "map" else PositionedFile
    try:
        return kind(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        missing = _missing(folder, name, fingerprint)
    if isinstance(missing, DatasetChanged):
        raise missing
    try:  # the same data may have been written again a moment ago, under the same name
        return kind(folder / name)
    except FileNotFoundError:
        raise missing from None


def changed(folder: Path, found: str, expected: str) -> DatasetChanged:
    """The error for another dataset than the one that was opened."""
    return DatasetChanged(
        f"{folder}: the dataset has the fingerprint {found}, not {expected}: "
        "it was written again since it was opened. Open it anew."
    )


def _missing(folder: Path, name: str, fingerprint: str) -> Exception:
    try:
        now = read_manifest(folder).fingerprint
    except IncompleteDataset as error:
        return DatasetChanged(f"{error} It was moved or removed since it was opened; open it where it is now.")
    if now != fingerprint:
        return changed(folder, now, fingerprint)
    return FormatError(f"{folder / name}: the shard is missing. Restore it, or prepare the dataset again.")

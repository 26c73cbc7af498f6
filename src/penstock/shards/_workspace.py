"""From the old dataset to the new one, so that every instant shows one of the two.

    dest/.lock                      held by the one writer, signed with its name
    dest/.writing/shard-*           finished shards, synced, not yet visible
    dest/.writing/manifest.json     the new manifest, synced, not yet in force
    dest/.writing/previous.json     the manifest it will replace

    commit: write both manifests -> rename the shards -> rename the manifest -> unlink what only the
            previous manifest names -> remove .writing

The rename of the manifest is the one instant at which the dataset changes. Whatever a killed writer
leaves is in `.writing`, or is named by a manifest in there: cleaning up needs no guessing and
touches no file that Penstock did not write.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from penstock.errors import DatasetExists, FormatError, IncompleteDataset
from penstock.filesystem import (
    DirectoryLock,
    create_file,
    explain_os_error,
    publish,
    remove_if_present,
    sync_directory,
)
from penstock.shards._manifest import MANIFEST_NAME, WORK_FOLDER, Manifest, parse_manifest, read_manifest

Mode = Literal["create", "append", "overwrite"]

_PREVIOUS_NAME = "previous.json"
_OWN_NAMES = frozenset({MANIFEST_NAME, WORK_FOLDER, ".lock", "run.json"})


class Workspace:
    """The folder of a dataset while one writer changes it."""

    def __init__(self, directory: Path, mode: Mode) -> None:
        self._directory = directory
        self._folder = directory / WORK_FOLDER
        self._made = _make_directories(directory)
        self._lock = DirectoryLock(directory)
        try:
            self._lock.acquire()
            self.previous = _recover(directory)
            _check_mode(directory, mode, self.previous)
            self._folder.mkdir()
        except BaseException:
            self._leave()
            raise

    def add_shard(self, name: str, chunks: list[memoryview | bytes]) -> int:
        """Write and sync a shard that will appear with the commit; return its size."""
        remove_if_present(self._folder / name)
        return create_file(self._folder / name, chunks)

    def commit(self, manifest: Manifest) -> None:
        """Make `manifest` and its shards the dataset."""
        if self.previous is not None:
            create_file(self._folder / _PREVIOUS_NAME, [self.previous.to_bytes()])
        create_file(self._folder / MANIFEST_NAME, [manifest.to_bytes()])
        sync_directory(self._folder)
        for shard in manifest.shards:
            if (self._folder / shard.name).exists():
                os.replace(self._folder / shard.name, self._directory / shard.name)
        sync_directory(self._directory)
        publish(self._folder / MANIFEST_NAME, self._directory / MANIFEST_NAME)
        if self.previous is not None:
            _unlink_shards(self._directory, self.previous.shard_names - manifest.shard_names)
        self._made = []
        self.close()

    def close(self) -> None:
        """Remove what was not committed and give the lock back."""
        if self._folder.is_dir():
            _unlink_leftovers(self._directory)
            shutil.rmtree(self._folder)
        self._leave()

    def _leave(self) -> None:
        self._lock.release()
        for directory in reversed(self._made):
            try:
                directory.rmdir()
            except OSError:  # not empty: somebody else uses it by now
                break
        self._made = []


def _make_directories(directory: Path) -> list[Path]:
    missing = [parent for parent in [directory, *directory.parents] if not parent.exists()][::-1]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, directory, doing="made for the dataset") from error
    return missing


def _recover(directory: Path) -> Manifest | None:
    """Clean up after a writer that was killed; return the manifest in force."""
    folder = directory / WORK_FOLDER
    if folder.is_symlink():
        raise FormatError(f"{folder} is a symbolic link. Penstock does not write through it; remove it.")
    current = _manifest_or_none(directory)
    if folder.is_dir():
        _unlink_leftovers(directory)
        shutil.rmtree(folder)
    return current


def _unlink_leftovers(directory: Path) -> None:
    """Unlink shards that only a pending or a replaced manifest names."""
    current = _manifest_or_none(directory)
    kept = current.shard_names if current is not None else frozenset()
    for name in (MANIFEST_NAME, _PREVIOUS_NAME):
        path = directory / WORK_FOLDER / name
        try:
            manifest = parse_manifest(path.read_bytes(), str(path))
        except (
            FileNotFoundError,
            FormatError,
        ):  # absent, or cut short by the crash: then nothing was renamed yet
            continue
        _unlink_shards(directory, manifest.shard_names - kept)


def _unlink_shards(directory: Path, names: frozenset[str]) -> None:
    for name in names:
        remove_if_present(directory / name)


def _manifest_or_none(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except IncompleteDataset:
        return None


def _check_mode(directory: Path, mode: Mode, previous: Manifest | None) -> None:
    if mode == "append":
        if previous is None:
            raise IncompleteDataset(f"{directory}: no dataset to append to; write one with mode='create'.")
        return
    if mode == "create" and previous is not None:
        raise DatasetExists(
            f"{directory}: a dataset of {previous.num_samples:,} samples is there. "
            "Use mode='append', mode='overwrite', or another path."
        )
    known = _OWN_NAMES | (previous.shard_names if previous is not None else frozenset())
    strange = sorted(entry.name for entry in os.scandir(directory) if entry.name not in known)
    if strange:
        shown = ", ".join(strange[:3]) + (", …" if len(strange) > 3 else "")
        raise DatasetExists(
            f"{directory}: {len(strange)} other files are there ({shown}). "
            "A dataset gets a folder of its own; use another path, or move them."
        )

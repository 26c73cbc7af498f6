"""Replace the old dataset by the new one, so that at every instant one of the two is there.

    dest/.lock                      held by the one writer, signed with its name
    dest/.writing/shard-*           finished shards, synced, not yet visible; provenance-* too
    dest/.writing/manifest.json     the new manifest, synced, not yet in force
    dest/.writing/previous.json     the manifest it will replace

    commit: write both manifests -> rename the files -> rename the manifest -> unlink what only the
            previous manifest names -> remove .writing

The dataset changes at one instant, the rename of the manifest. Whatever a killed writer leaves is in
`.writing`, or is named by a manifest in there: cleaning up needs no guessing and touches no file that
Penstock did not write. Directories are synced between the steps, so that a power loss keeps their
order too.
"""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from penstock.errors import DatasetExists, FormatError, IncompleteDataset, PenstockError, StorageError, first_few
from penstock.filesystem import (
    DirectoryLock,
    OpenFolder,
    create_file,
    make_directory,
    open_regular,
    remove_if_present,
    remove_tree,
    rename,
    storage_errors,
    sync_directory,
)
from penstock.shards._manifest import MANIFEST_NAME, WORK_FOLDER, Manifest, parse_manifest, read_manifest

Mode = Literal["create", "append", "overwrite"]

_PREVIOUS_NAME = "previous.json"
_OWN_NAMES = frozenset({MANIFEST_NAME, WORK_FOLDER, ".lock", "run.json"})

# Errors from file systems without hard links; the last is a link from one file system to another.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

_NOT_AGAIN = "Do not append the same samples again."

_log = logging.getLogger(__name__)


class Workspace:
    """The folder of a dataset while one writer changes it."""

    def __init__(self, directory: Path, mode: Mode, *, known_names: frozenset[str] = frozenset()) -> None:
        self._directory = directory
        self._folder = directory / WORK_FOLDER
        self._added: list[str] = []
        self._made: list[Path] = []
        self._lock = DirectoryLock(directory)
        try:
            self._make_directories()
            self._lock.acquire()
            self.previous = _recover(directory)
            _check_mode(directory, mode, self.previous, known_names)
            make_directory(self._folder)
        except BaseException:
            self._leave()
            raise

    @property
    def is_open(self) -> bool:
        """Whether this process may write: not after `close`, and not in a forked copy."""
        return self._lock.is_held

    def add_file(self, name: str, chunks: list[memoryview | bytes]) -> int:
        """Write and sync a file that will appear with the commit; return its size."""
        num_bytes = create_file(self._folder / name, chunks)
        self._added.append(name)
        return num_bytes

    def adopt_shard(self, folder: OpenFolder, file: str, name: str) -> None:
        """Take a synced file from another folder on this disk as a shard that will appear with the commit.

        It is linked, so that an interrupted commit costs nothing; or moved, if the file system has no links.
        """
        with storage_errors(self._folder / name, doing=f"linked to {folder.path / file}"):
            try:
                os.link(file, self._folder / name, src_dir_fd=folder.descriptor, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                os.replace(file, self._folder / name, src_dir_fd=folder.descriptor)
        self._added.append(name)

    def shard_path(self, name: str) -> Path:
        """Where a shard is before the commit: among those added, or in the existing dataset."""
        return (self._folder if name in self._added else self._directory) / name

    def commit(self, manifest: Manifest, *, before_release: Callable[[], None] | None = None) -> None:
        """Make `manifest` and its shards the dataset; then, still under the lock, call `before_release`.

        An error says whether the dataset is as it was, or is the new one.
        """
        raw = manifest.to_bytes()
        parse_manifest(raw, str(self._directory / MANIFEST_NAME))  # nobody could open a dataset that fails here
        if self.previous is not None:
            create_file(self._folder / _PREVIOUS_NAME, [self.previous.to_bytes()])
        create_file(self._folder / MANIFEST_NAME, [raw])
        sync_directory(self._folder)
        for name in self._added:
            rename(self._folder / name, self._directory / name)
        sync_directory(self._directory)
        rename(self._folder / MANIFEST_NAME, self._directory / MANIFEST_NAME)
        self._made = []
        try:
            self._confirm()
            if before_release is not None:
                before_release()
            self.close()
        except BaseException as error:  # an interrupt too
            error.add_note(f"{self._directory}: the new dataset is in place, with all that was written. {_NOT_AGAIN}")
            raise

    def close(self) -> None:
        """Remove what is not part of the dataset and release the lock; does nothing the second time.

        What cannot be removed is left for the next writer: no reason to fail, least of all after a commit.
        """
        if not self.is_open:  # otherwise `.writing` may be another writer's
            return
        try:
            _clean(self._directory)
        except (PenstockError, OSError) as error:
            _log.warning("%s: left for the next writer to clean up: %s", self._directory, error)
        finally:
            self._leave()

    def _confirm(self) -> None:
        try:
            sync_directory(self._directory)
        except StorageError as error:
            # A power loss may bring back the previous manifest, so its shards stay until the next writer removes them.
            self._leave()
            raise StorageError(
                error.errno,
                f"{self._directory}: the new dataset is in place, but the disk did not confirm the write ({error}). "
                f"Check the disk and run `penstock verify` before relying on it. {_NOT_AGAIN}",
            ) from error

    def _make_directories(self) -> None:
        with storage_errors(self._directory, doing="looked for"):
            missing = [parent for parent in [self._directory, *self._directory.parents] if not parent.exists()]
        for directory in reversed(missing):
            if make_directory(directory):
                self._made.append(directory)

    def _leave(self) -> None:
        self._lock.release()
        for directory in reversed(self._made):
            try:
                directory.rmdir()
            except OSError:  # not empty: somebody else is using it by now
                break
        self._made = []


def _recover(directory: Path) -> Manifest | None:
    """Clean up after a writer that was killed; return the manifest in force."""
    folder = directory / WORK_FOLDER
    if folder.is_symlink():
        raise FormatError(f"{folder} is a symbolic link. Penstock does not write through links; remove it.")
    _clean(directory)
    return _manifest_or_none(directory)


def _clean(directory: Path) -> None:
    """Remove `.writing`, but first the files that only a manifest in there names."""
    folder = directory / WORK_FOLDER
    if not folder.is_dir():
        return
    current = _manifest_or_none(directory)
    kept = current.file_names if current is not None else frozenset()
    leftovers = (_file_names(folder / MANIFEST_NAME) | _file_names(folder / _PREVIOUS_NAME)) - kept
    if leftovers:
        sync_directory(directory)  # first make the manifest that does not name them durable
        for name in leftovers:
            remove_if_present(directory / name)
        sync_directory(directory)  # they must be gone before the manifest that names them
    remove_tree(folder)


def _file_names(path: Path) -> frozenset[str]:
    """Files that the manifest at `path` names; none if it is absent or was cut short by a crash."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return frozenset()
    with storage_errors(path, doing="read"), os.fdopen(descriptor, "rb") as file:
        raw = file.read()
    try:
        return parse_manifest(raw, str(path)).file_names
    except FormatError:  # not synced, so nothing was renamed yet
        return frozenset()


def _manifest_or_none(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except IncompleteDataset:
        return None


def _check_mode(directory: Path, mode: Mode, previous: Manifest | None, known_names: frozenset[str]) -> None:
    if mode == "append":
        if previous is None:
            raise IncompleteDataset(f"{directory}: no dataset to append to; write one with mode='create'.")
        return
    if mode == "create" and previous is not None:
        raise DatasetExists(
            f"{directory}: a dataset of {previous.num_samples:,} samples is already there. "
            "Use mode='append', mode='overwrite', or another path."
        )
    known = _OWN_NAMES | known_names | (previous.file_names if previous is not None else frozenset())
    with storage_errors(directory, doing="listed"):
        strange = sorted(name for name in os.listdir(directory) if name not in known)
    if strange:
        shown = first_few(strange, 3)
        raise DatasetExists(
            f"{directory}: {len(strange)} other files are there ({shown}). "
            "A dataset needs its own folder; use another path, or move them."
        )

"""A folder by its descriptor, so that no link can redirect what is done in it.

    OpenFolder(path, "work", "attempts") -> create, read, move, remove, sync: by name, in that very folder

The path that a user gives may lead through links. What is below it may have been unpacked from a stranger's archive: a
link in place of a folder would let us write files into, or clean up, whatever it points to. So each step down from the
path is taken with `O_NOFOLLOW`, and names are looked up relative to the descriptor, which stays with its folder
whatever happens to the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from penstock.errors import FormatError, StorageError
from penstock.filesystem._durable import create_file, explain_os_error, storage_errors, sync_descriptor
from penstock.filesystem._readers import open_regular

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class OpenFolder:
    """The folder at `path`, or below it at `names`, none of which may be a link.

    Raises:
        FileNotFoundError: it does not exist.
        FormatError: one of `names` is a link, or not a folder.
        StorageError: the file system refused.
    """

    def __init__(self, path: Path, *names: str) -> None:
        self.path = path
        self.descriptor = -1
        try:
            self._step(path, None)
            for name in names:
                self.path = self.path / name
                self._step(name, self.descriptor)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptor; does nothing the second time."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # nothing was written through it, and the kernel closes it anyway
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """The names of everything in the folder."""
        with storage_errors(self.path, doing="listed"):
            return os.listdir(self.descriptor)

    def make(self, name: str) -> bool:
        """Make a folder in this one, durably, unless the name is taken; return whether it was made."""
        with storage_errors(self.path / name, doing="made as a folder"):
            try:
                os.mkdir(name, dir_fd=self.descriptor)
            except FileExistsError:
                return False
        try:
            self.sync()
        except StorageError:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=self.descriptor)
            raise
        return True

    def create(self, name: str, chunks: Iterable[memoryview | bytes]) -> int:
        """Write a new file and sync it, as `create_file` does; return its size."""
        return create_file(self.path / name, chunks, within=self.descriptor)

    def open(self, name: str) -> int:
        """Descriptor of a regular file, as from `open_regular`."""
        return open_regular(self.path / name, within=self.descriptor)

    def size(self, name: str) -> int | None:
        """Size of a regular file in bytes; None if there is none."""
        try:
            status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def move(self, name: str, to: OpenFolder, new_name: str) -> None:
        """Give a synced file another name, here or in another folder; `sync` makes that durable."""
        with storage_errors(to.path / new_name, doing="renamed into place"):
            os.replace(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, a link, or a folder with everything in it, if it exists."""
        with storage_errors(self.path / name, doing="removed"), contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self.descriptor)  # follows no links either
            else:
                os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        with storage_errors(self.path, doing="synced"):
            sync_descriptor(self.descriptor)

    def _step(self, name: str | Path, within: int | None) -> None:
        try:
            descriptor = os.open(name, _FLAGS if within is None else _FLAGS | os.O_NOFOLLOW, dir_fd=within)
        except FileNotFoundError:
            raise
        except OSError as error:
            if within is not None and error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise FormatError(
                    f"{self.path} is a link, or not a folder. Penstock does not follow links here; remove it."
                ) from None
            raise explain_os_error(error, self.path, doing="opened") from error
        self.close()
        self.descriptor = descriptor

"""What a disk may hold after a power loss, worked out from what was done and what was synced.

The model is stricter than real file systems. Bytes that were not synced are lost. A name that was
made, moved or removed is sure only after its directory was synced; of those that are not, any subset
may have reached the disk, in any order. Only a rename is atomic, and only an empty directory goes.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Inode:
    """A file: what was written, and how much of it was synced."""

    written: bytes = b""
    synced: bytes = b""


@dataclass
class Operation:
    """One step: its kind, where, and the file it concerns; `path` is the directory or the final name."""

    kind: str
    path: str
    inode: Inode | None = None
    data: bytes = b""
    source: str = ""


class Died(BaseException):
    """Stands for SIGKILL: from then on no call has an effect."""


@dataclass
class Journal:
    """A hook for `intercepted` that writes down every operation below `root`, up to the death of the writer."""

    root: Path
    dies_at: int | None = None
    operations: list[Operation] = field(default_factory=list)
    names: dict[str, Inode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.root.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                self.names[str(path)] = Inode(data, data)
        self.before = dict(self.names)
        self.folders = {str(path) for path in self.root.rglob("*") if path.is_dir()} | {str(self.root)}

    def __call__(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.dies_at is not None and len(self.operations) >= self.dies_at and name != "close":
            raise Died
        path = self._path(name, args, kwargs)
        existed = os.path.exists(path)
        result = real(*args, **kwargs)
        if path.startswith(str(self.root)) and not path.endswith(".lock"):
            self._note(name, args, path, existed)
        return result

    def _note(self, name: str, args: tuple[Any, ...], path: str, existed: bool) -> None:
        inode = self.names.get(path)
        if name == "open" and not existed:
            self.names[path] = inode = Inode()
            self.operations.append(Operation("create", path, inode))
        elif name == "write":
            self.operations.append(Operation("write", path, inode, bytes(args[1])))
        elif name == "fsync":
            self.operations.append(Operation("sync", path, inode))
        elif name == "replace":
            moved = self.names.pop(str(args[0]))
            self.names[path] = moved
            self.operations.append(Operation("replace", path, moved, source=str(args[0])))
        elif name in ("unlink", "mkdir", "rmdir"):
            self.names.pop(path, None)
            self.operations.append(Operation(name, path))

    @staticmethod
    def _path(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        place = args[1] if name == "replace" else args[0]
        if isinstance(place, int):
            return os.readlink(f"/proc/self/fd/{place}")
        folder = kwargs.get("dir_fd")
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), place) if folder is not None else str(place)

    def states(self, instant: int, rng: random.Random) -> Iterator[State]:
        """Some of what may be on disk when the power goes before operation `instant`."""
        done = self.operations[:instant]
        unsure = [i for i, step in enumerate(done) if step.kind not in ("write", "sync") and not _is_sure(done, i)]
        yield self._state(done, set(unsure))
        for count in range(len(unsure)):
            yield self._state(done, set(unsure[count + 1 :]))
            yield self._state(done, {unsure[count]})
        for _ in range(8):
            yield self._state(done, {i for i in unsure if rng.random() < 0.5})

    def _state(self, done: list[Operation], lost: set[int]) -> State:
        names, folders = dict(self.before), set(self.folders)
        contents = {id(inode): Inode(inode.written, inode.synced) for inode in self.before.values()}
        for number, step in enumerate(done):
            inode = contents.setdefault(id(step.inode), Inode())
            if step.kind == "write":
                inode.written += step.data
            elif step.kind == "sync":
                inode.synced = inode.written
            elif number not in lost and os.path.dirname(step.path) in folders:
                _apply(step, names, folders)
        return State(folders, {path: contents[id(inode)].synced for path, inode in names.items()})


def _is_sure(done: list[Operation], number: int) -> bool:
    folder = os.path.dirname(done[number].path)
    return any(step.kind == "sync" and step.path == folder for step in done[number + 1 :])


def _apply(step: Operation, names: dict[str, Inode], folders: set[str]) -> None:
    if step.kind == "mkdir":
        folders.add(step.path)
    elif step.kind == "rmdir":
        if not any(os.path.dirname(path) == step.path for path in [*names, *folders]):
            folders.discard(step.path)
    elif step.kind == "unlink":
        names.pop(step.path, None)
    else:
        assert step.inode is not None
        names.pop(step.source, None)
        names[step.path] = step.inode


@dataclass
class State:
    """Folders and files."""

    folders: set[str]
    files: dict[str, bytes]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal states."""
        return (frozenset(self.folders), frozenset(self.files.items()))

    def restore(self, root: Path) -> None:
        """Make `root` what it is in this state."""
        shutil.rmtree(root)
        for folder in sorted(self.folders):
            os.mkdir(folder)
        for path, data in self.files.items():
            Path(path).write_bytes(data)

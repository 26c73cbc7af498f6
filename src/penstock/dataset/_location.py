"""Where a dataset's data is, in a few hundred bytes: what is pickled in place of the data.

A process that unpickles a location opens the files itself and compares the fingerprint; it raises
`DatasetChanged` before it reads anything else.

A folder can also be opened as it was before samples were appended. Appending writes new shards behind the old ones and
leaves those as they are, and a dataset's fingerprint is a digest of its list of shards. So what a folder held earlier
is found by its fingerprint: it is the first shards of today's list.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.dataset._joined import AnyDataset, ChosenStorage, ConcatStorage, ZipStorage
from penstock.dataset._remote import default_cache
from penstock.dataset._unfolded import UnfoldedStorage
from penstock.errors import DatasetChanged
from penstock.filesystem import expand_braces
from penstock.identity import digest
from penstock.shards import (
    ArrayStorage,
    Check,
    FilesFormat,
    ForeignFormat,
    Io,
    OnFault,
    RemoteTars,
    ShardFolder,
    Storage,
    open_files,
    open_megatron,
    open_npy,
    open_raw,
    read_manifest,
    storage_of_arrays,
)

if TYPE_CHECKING:
    from penstock.remote import RemoteFolder


class Location(Protocol):
    """Where a storage is, and how to open it."""

    def open(self, fingerprint: str | None = None) -> Storage:
        """The storage; `DatasetChanged` when it is not the one with `fingerprint`."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Arguments of `penstock.open` that lead here; `ValueError` when there are none."""
        ...

    def folders(self, storage: Storage) -> tuple[str, ...]:
        """Fingerprints of the folders of shards that its storage reads, by which `find_earlier` finds them later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLocation:
    """A folder of shards."""

    path: Path
    io: Io
    check: Check
    as_of: str | None = None
    """Fingerprint of its first shards, if only they are meant."""

    def open(self, fingerprint: str | None = None) -> ShardFolder:
        return ShardFolder(self.path, io=self.io, check=self.check, fingerprint=fingerprint, as_of=self.as_of)

    def to_json(self) -> dict[str, Any]:
        fields = {"path": str(self.path), "io": self.io, "check": self.check}
        return fields if self.as_of is None else {**fields, "as_of": self.as_of}

    def folders(self, storage: Storage) -> tuple[str, ...]:
        return (storage.fingerprint,)

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLocation:
    """A file of another program."""

    path: Path
    format: ForeignFormat
    column: str
    dtype: str | None
    shape: tuple[int, ...] | None
    offset: int = 0
    """Bytes of a raw file before its numbers."""

    def open(self, fingerprint: str | None = None) -> ArrayStorage:
        if self.format == "npy":
            storage = open_npy(self.path, self.column)
        elif self.format == "megatron":
            storage = open_megatron(self.path, self.column)
        else:
            storage = open_raw(self.path, self.column, self.dtype, self.shape, self.offset)
        _check_same(storage, fingerprint, f"{self.path}: the file")
        return storage

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"path": str(self.path), "format": self.format, "column": self.column}
        fields |= {"dtype": self.dtype} if self.dtype is not None else {}
        fields |= {"shape": list(self.shape)} if self.shape is not None else {}
        fields |= {"offset": self.offset} if self.offset else {}
        return fields

    def folders(self, storage: Storage) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesLocation:
    """Files of another program that are one dataset together."""

    paths: tuple[str, ...]
    """Files, folders or patterns."""
    format: FilesFormat
    columns: tuple[tuple[str, str], ...] | None
    """Names and types of the columns to open; an empty type is the usual one, None means all columns."""
    on_error: OnFault
    folder: RemoteFolder | None = None
    """Of the node's cache, in which tars of a store appear."""
    cache: Path | None = None
    """Where the cache is, if not in its usual place."""
    cache_bytes: int | None = None

    def open(self, fingerprint: str | None = None) -> Storage:
        columns, remote = None if self.columns is None else dict(self.columns), None
        if self.folder is not None:
            contents = self.folder.where.read_contents(self.folder.path)
            url = self.paths[0].rpartition("/")[0]
            remote = RemoteTars(url, self.folder.path, self.folder, contents.sizes, contents.etags)
        storage, rows, skipped = open_files(self.paths, self.format, columns, self.on_error, remote)
        if rows is not None:
            storage = ChosenStorage(storage, rows, skipped)
        _check_same(storage, fingerprint, f"{self}: a file")
        return storage

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"path": list(self.paths) if len(self.paths) > 1 else self.paths[0]}
        fields |= {"format": self.format}
        fields |= {"types": dict(self.columns)} if self.columns is not None else {}
        fields |= {"cache": str(self.cache)} if self.cache is not None else {}
        fields |= {"cache_bytes": self.cache_bytes} if self.cache_bytes is not None else {}
        return {**fields, "on_error": self.on_error} if self.on_error != "raise" else fields

    def folders(self, storage: Storage) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"


@dataclass(frozen=True, slots=True, eq=False)
class ArraysLocation:
    """Arrays in RAM: pickled whole, there is nowhere else to get them from."""

    arrays: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """What is known about them: tokenizer, classes."""

    def open(self, fingerprint: str | None = None) -> ArrayStorage:
        return storage_of_arrays(self.arrays, self.attributes)

    def to_json(self) -> dict[str, Any]:
        raise ValueError("A plan over arrays in RAM has no file; write them with DatasetWriter first.")

    def folders(self, storage: Storage) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return "in memory"


@dataclass(frozen=True, slots=True, eq=False)
class JoinedLocation:
    """The datasets that are joined, each with its own location."""

    kind: Literal["concat", "zip"]
    parts: tuple[AnyDataset, ...]

    def open(self, fingerprint: str | None = None) -> ConcatStorage | ZipStorage:
        storage = (ConcatStorage if self.kind == "concat" else ZipStorage)([part.samples for part in self.parts])
        _check_same(storage, fingerprint, f"{self}: a part")
        return storage

    def to_json(self) -> dict[str, Any]:
        return {self.kind: {f"part {number}": part.to_json() for number, part in enumerate(self.parts)}}

    def folders(self, storage: Storage) -> tuple[str, ...]:
        return tuple(dict.fromkeys(folder for part in self.parts for folder in part.folders))

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.parts)} datasets"


@dataclass(frozen=True, slots=True, eq=False)
class UnfoldedLocation:
    """The dataset that is cut into windows."""

    steps: AnyDataset
    length: int
    stride: int

    def open(self, fingerprint: str | None = None) -> UnfoldedStorage:
        storage = UnfoldedStorage(self.steps.samples, self.length, self.stride)
        _check_same(storage, fingerprint, f"{self}: the data")
        return storage

    def to_json(self) -> dict[str, Any]:
        return {"unfold": {"length": self.length, "stride": self.stride, "steps": self.steps.to_json()}}

    def folders(self, storage: Storage) -> tuple[str, ...]:
        return self.steps.folders

    def __str__(self) -> str:
        return f"windows of {self.length} every {self.stride} of {self.steps!r}"


def open_store_tars(patterns: Sequence[str], cache: Path | None, cache_bytes: int | None) -> RemoteFolder:
    """The folder of the cache for tars under one URL; one request for each.

    Raises:
        ValueError: they are under several, or a pattern would have the store listed.
    """
    urls = [url for pattern in patterns for url in expand_braces(pattern)]
    parents, names = {url.rpartition("/")[0] for url in urls}, [url.rpartition("/")[2] for url in urls]
    if len(parents) > 1 or any(character in name for name in names for character in "*?["):
        raise ValueError(
            f"{patterns[0]}: tars in a store are of one folder, and named with braces, as in train-{{000..099}}.tar; "
            "penstock.concat joins several folders."
        )
    from penstock.remote import open_objects  # with the clients of stores come 30 ms of imports

    return open_objects(parents.pop(), list(dict.fromkeys(names)), cache or default_cache(), cache_bytes)


def _check_same(storage: Storage, fingerprint: str | None, what: str) -> None:
    if fingerprint is not None and storage.fingerprint != fingerprint:
        raise DatasetChanged(f"{what} changed since it was opened. Open it again.")


def find_earlier(path: Path, as_of: str | Mapping[str, Any]) -> str:
    """The fingerprint of the storage then, from the state of a loader or any fingerprint of the dataset.

    Raises:
        DatasetChanged: the folder does not begin with what it held then.
        ValueError: it is not the state of a plan over datasets, or of one over this folder at several times.
    """
    wanted = {as_of} if isinstance(as_of, str) else _folders_of(as_of)
    manifest = read_manifest(path)
    schema = repr(manifest.schema.shown.to_json())
    found = [
        own
        for own, _ in manifest.as_it_grew()
        if not wanted.isdisjoint((own, digest(own), digest(f"{own}\n{schema}")))  # the storage, all rows, the dataset
    ]
    if len(found) > 1:
        raise ValueError(
            f"as_of=: the state is of a plan over {path} as it was at {len(found)} times. Give the fingerprint of "
            f"the one you mean: {', '.join(found[:3])}."
        )
    if not found:
        shown = ", ".join(sorted(each[:64] for each in wanted)[:3])
        raise DatasetChanged(
            f"{path}: its first shards never had the fingerprint {shown}. Either it was not only appended to "
            "since, or that is of another dataset, or of a part of this one (a split, a filter): give a state, or the "
            "fingerprint that `penstock inspect` showed then."
        )
    return found[0]


def _folders_of(state: Mapping[str, Any]) -> set[str]:
    """What a state says about the folders that its plan read."""
    fields = state if isinstance(state, Mapping) else {}
    folders, facts = fields.get("folders"), fields.get("facts")
    data = facts.get("data") if isinstance(facts, Mapping) else None
    found = {each for each in [data, *(folders if isinstance(folders, list | tuple) else ())] if isinstance(each, str)}
    if not found:
        raise ValueError(
            f"as_of={reprlib.repr(state)}: not the state of a plan over datasets that can grow. Give a fingerprint."
        )
    return found

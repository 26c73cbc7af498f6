"""An index of tars, made once: for every sample its key, and where the bytes of its members are.

    headers of each tar, in parallel -> one row per sample -> a small dataset, beside the tars or in the user's cache

The index is a folder of shards like any other (`.penstock-…`), so it is checked, mapped, and replaced in one instant.
Its columns are `key`, `fault`, and of each member its first byte and size, -1 where a sample has none; members that
are numbers are stored with their value. The manifest lists the tars with size and time: those that changed are read
again, the others are not. While it grows, what is finished is committed every minute, and an interrupted run goes on
from there. Of many processes that need it, one makes it.

Price: 1.5 us per member with a pax header, as WebDataset writes them, which is less than `tar -t` takes
(`benchmarks/bench_foreign.py`); 16 bytes per member.
"""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import (
    DatasetExists,
    FormatError,
    IncompleteDataset,
    PenstockError,
    StorageError,
    WriterBusy,
)
from penstock.filesystem import DirectoryLock, OpenFolder, PositionedFile, check_trusted, make_directory, user_cache
from penstock.identity import digest
from penstock.schema import Column, Ragged
from penstock.shards._folder import ShardFolder
from penstock.shards._open_shards import Supply
from penstock.shards._tar_scan import FAULTS, MISSING, Found, Scan, Tar, scan_tar
from penstock.shards._writer import DatasetWriter

Int64 = NDArray[np.int64]
VERSION = 1
_COMMIT_SECONDS, _COMMIT_SAMPLES = 60.0, 1 << 21
_WAIT_SECONDS = 0.5
_WORTH_LOGGING = 1 << 30
_FOLDER = "index"

Progress = Callable[[int, int], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of a member of all samples."""

    name: str
    is_number: bool
    num_samples: int = 0
    num_bytes: int = 0
    num_wrong: int = 0
    """How many should be numbers, and are not."""


class TarIndex:
    """The index in a folder.

    Raises:
        FormatError: it is damaged, or not an index.
        IncompleteDataset: there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = ShardFolder(folder, io="auto", check="window")
        attributes: Any = self.folder.attributes
        try:
            if attributes["version"] != VERSION:
                raise ValueError(f"version {attributes['version']}")
            self.tars = tuple(Tar(str(each[0]), *map(int, each[1:])) for each in attributes["tars"])
            self.members = tuple(
                Member(str(each[0]), bool(each[1]), *map(int, each[2:])) for each in attributes["members"]
            )
            self.faults = {FAULTS[int(code)]: int(count) for code, count in attributes["faults"].items()}
            names = [name for number, each in enumerate(self.members) for name in columns_of(number, each)]
            if (
                list(self.folder.schema) != ["key", "fault", *names]
                or min((t.num_samples for t in self.tars), default=0) < 0
            ):
                raise ValueError("other columns")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise FormatError(f"{folder}: not an index of tars ({error}). Remove the folder.") from None
        if sum(tar.num_samples for tar in self.tars) != self.folder.num_samples:
            raise FormatError(f"{folder}: the index has other samples than its tars. Remove the folder.")

    def column(self, name: str) -> Column:
        """A column of the index."""
        return self.folder.schema[name]

    def read(self, name: str, indices: Int64) -> NDArray[Any]:
        """Numbers of these samples."""
        column = self.column(name)
        out = np.empty(len(indices), column.dtype)
        self.folder.read_fixed(column, indices, out)
        return out

    def scan_of(self, number: int) -> Scan:
        """What was found in a tar."""
        starts = np.cumsum([0, *(tar.num_samples for tar in self.tars)])
        indices = np.arange(starts[number], starts[number + 1])
        scan = Scan(
            self.tars[number], list(self.folder.read_ragged(self.column("key"), indices)), self.read("fault", indices)
        )
        for place, member in enumerate(self.members):
            names = columns_of(place, member)
            parts = [self.read(name, indices) for name in names]
            scan.members[member.name] = Found._make(parts if member.is_number else [*parts, None, None])
        return scan


def columns_of(place: int, member: Member) -> tuple[str, ...]:
    """Names of the columns about a member."""
    names = f"begin{place}", f"size{place}"
    return (*names, f"number{place}", f"is_number{place}") if member.is_number else names


@dataclass(frozen=True, slots=True)
class RemoteTars:
    """Tars in a store, which appear in a folder of this node's cache when they are asked for."""

    url: str
    path: Path
    supply: Supply
    sizes: Mapping[str, int]
    """Of each tar, in the order of the samples."""
    etags: Mapping[str, str]

    @property
    def tars(self) -> list[Tar]:
        """As they are in the store; what tells that one was replaced is its ETag."""
        return [Tar(name, size, int(digest(self.etags[name], 7), 16), 0, 0, 0) for name, size in self.sizes.items()]


def open_tar(path: Path, remote: RemoteTars | None) -> PositionedFile:
    """A tar; from a store it is fetched first, and stays until it is closed."""
    while remote is not None:
        remote.supply.obtain(path.name)
        try:
            file = PositionedFile(path)
        except FileNotFoundError:  # others needed the room
            continue
        if remote.supply.hold(file.descriptor):
            return file
    return PositionedFile(path.resolve())


def open_index(
    patterns: Sequence[str],
    paths: Sequence[Path],
    on_progress: Progress | None = None,
    remote: RemoteTars | None = None,
) -> TarIndex:
    """The index of these tars, which the patterns mean; it is made, or brought up to date, if it has to be.

    Raises:
        FormatError: a tar is truncated or damaged.
    """
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    wanted = [_describe(path, folder) for path in paths] if remote is None else remote.tars
    name = digest("\n".join(os.path.relpath(pattern, folder) for pattern in patterns), 8)
    places = [folder / f".penstock-{name}"]
    if (cache := user_cache("tars")) is not None:
        places.append(cache / digest(f"{folder}\n{name}", 8))
    if remote is not None:  # the folder is one of a cache, which comes and goes
        places = [] if cache is None else [cache / digest("\n".join([remote.url, *remote.sizes]), 8)]
    for place in places:
        if (index := _current(place, wanted)) is not None:
            return index
    for place in places:
        try:
            return _make(place, folder, wanted, on_progress, remote)
        except (StorageError, DatasetExists, PermissionError) as error:
            _log.info("The index of tars cannot be kept in %s: %s", place, error)
    raise StorageError(
        f"{folder}: an index of the tars can be kept neither there nor in the user's cache ({cache}). Set "
        "XDG_CACHE_HOME to a folder that can be written to."
    )


def _describe(path: Path, folder: Path) -> Tar:
    """A tar that is not indexed yet."""
    status = os.stat(path)
    return Tar(os.path.relpath(path, folder), status.st_size, status.st_mtime_ns, 0, 0, 0)


def _current(place: Path, wanted: Sequence[Tar]) -> TarIndex | None:
    """The index, if it is of these tars as they are."""
    index = _load(place)
    return index if index is not None and [tar[:3] for tar in index.tars] == [tar[:3] for tar in wanted] else None


def _load(place: Path) -> TarIndex | None:
    try:
        return TarIndex(place / _FOLDER)
    except IncompleteDataset:
        return None
    except (PenstockError, OSError) as error:
        _log.warning("The index is made again: %s", error)
        return None


def _make(
    place: Path, folder: Path, wanted: Sequence[Tar], on_progress: Progress | None, remote: RemoteTars | None
) -> TarIndex:
    """Make the index, or wait for the process that does."""
    if place.parent != folder:
        check_trusted(place.parent, Path(__file__))
        place.parent.mkdir(parents=True, exist_ok=True)
        check_trusted(place.parent, Path(__file__))
    make_directory(place)
    while True:
        try:
            with DirectoryLock(place):
                return _current(place, wanted) or _extend(place, folder, wanted, on_progress, remote)
        except WriterBusy:
            time.sleep(_WAIT_SECONDS)


def _extend(
    place: Path, folder: Path, wanted: Sequence[Tar], on_progress: Progress | None, remote: RemoteTars | None
) -> TarIndex:
    """Index the tars that the index lacks, and commit what is done every minute."""
    index = _load(place)
    if index is None:
        with OpenFolder(place) as opened:
            opened.remove(_FOLDER)  # what is there cannot be read, so it cannot be replaced by a writer
    kept = 0 if index is None else len(index.tars)
    known: dict[Any, Scan] = {}
    if index is not None and [tar[:3] for tar in index.tars] != [tar[:3] for tar in wanted[:kept]]:
        numbers = {tar[:3]: number for number, tar in enumerate(index.tars)}
        known = {tar[:3]: index.scan_of(numbers[tar[:3]]) for tar in wanted if tar[:3] in numbers}
        index, kept = None, 0
    done, total = sum(tar.num_bytes for tar in wanted[:kept]), sum(tar.num_bytes for tar in wanted)
    if total - done > _WORTH_LOGGING:
        _log.info("Indexing %d MB of tars, once; the index is kept in %s", (total - done) >> 20, place)
    pending: list[Scan] = []
    since = time.monotonic()
    for tar, scan in zip(wanted[kept:], _scan_all(folder, wanted[kept:], known, remote), strict=True):
        pending.append(scan)
        done += tar.num_bytes
        if on_progress is not None:
            on_progress(done, total)
        if time.monotonic() - since > _COMMIT_SECONDS or sum(len(each.keys) for each in pending) > _COMMIT_SAMPLES:
            index, pending, since = _commit(place, index, pending), [], time.monotonic()
    return _commit(place, index, pending) if pending or index is None else index


def _scan_all(
    folder: Path, tars: Sequence[Tar], known: Mapping[Any, Scan], remote: RemoteTars | None
) -> Iterator[Scan]:
    """What is in each tar, in order: a few are read at a time, which hides how long storage takes to answer."""
    num_threads = max(1, min(16, 4 * (os.cpu_count() or 1), len(tars)))

    def scan(tar: Tar) -> Scan:
        return known[tar[:3]] if tar[:3] in known else scan_tar(open_tar(folder / tar.name, remote), tar)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-index") as pool:
        ahead = collections.deque(pool.submit(scan, tar) for tar in tars[: 2 * num_threads])
        try:
            for place in range(len(tars)):
                found = ahead.popleft().result()
                if place + 2 * num_threads < len(tars):
                    ahead.append(pool.submit(scan, tars[place + 2 * num_threads]))
                yield found
        finally:
            for each in ahead:
                each.cancel()


def _commit(place: Path, known: TarIndex | None, scans: list[Scan]) -> TarIndex:
    """Add scans to an index, or begin a new one; other members than it knows make it new."""
    names = {name for scan in scans for name in scan.members}
    if known is not None and not names <= {member.name for member in known.members}:
        scans = [*map(known.scan_of, range(len(known.tars))), *scans]
        known = None
    members = known.members if known is not None else _new_members(scans)
    totals, faults = [list(_totals(member, scans)) for member in members], collections.Counter[str]()
    for scan in scans:
        codes, counts = np.unique(scan.faults[scan.faults > 0], return_counts=True)
        faults.update({str(code): int(count) for code, count in zip(codes, counts, strict=True)})
    faults.update({str(FAULTS.index(name)): count for name, count in known.faults.items()} if known is not None else {})
    tars = [*(known.tars if known is not None else ()), *(scan.tar for scan in scans)]
    attributes = {"version": VERSION, "tars": tars, "members": totals, "faults": dict(faults)}
    columns = {"key": "bytes", "fault": "uint8"}
    for number, member in enumerate(members):
        columns |= dict(zip(columns_of(number, member), ("int64", "int64", "int64", "bool"), strict=False))
    folder = place / _FOLDER
    with DatasetWriter(
        folder, columns, mode="overwrite" if known is None else "append", attributes=attributes
    ) as writer:
        for scan in scans:
            writer.write_batch(_rows(scan, members))
    return TarIndex(folder)


def _new_members(scans: Sequence[Scan]) -> tuple[Member, ...]:
    kinds = {name: found.numbers is not None for scan in scans for name, found in scan.members.items()}
    return tuple(Member(name, is_number) for name, is_number in kinds.items())


def _totals(member: Member, scans: Sequence[Scan]) -> tuple[str, bool, int, int, int]:
    found = [scan.members[member.name] for scan in scans if member.name in scan.members]
    sizes = [each.sizes[each.sizes != MISSING] for each in found]
    wrong = sum(int((~each.are_numbers[each.sizes != MISSING]).sum()) for each in found if each.are_numbers is not None)
    return (
        member.name,
        member.is_number,
        member.num_samples + sum(map(len, sizes)),
        member.num_bytes + sum(int(each.sum()) for each in sizes),
        member.num_wrong + wrong,
    )


def _rows(scan: Scan, members: Sequence[Member]) -> dict[str, Any]:
    count = len(scan.keys)
    nowhere = np.full(count, MISSING)
    nothing = Found(nowhere, nowhere, np.zeros(count, np.int64), np.zeros(count, bool))
    rows: dict[str, Any] = {
        "key": scan.keys if scan.keys else Ragged(np.empty(0, np.uint8), np.zeros(1, np.int64), True)
    }
    rows["fault"] = scan.faults
    for number, member in enumerate(members):
        rows |= dict(zip(columns_of(number, member), scan.members.get(member.name, nothing), strict=False))
    return rows

"""Which file and row each sample came from: how that is written, checked and read.

    prepare: OriginRuns.add(rows) -> SplitOrigin -> origins_to_json -> pack_provenance -> provenance-*.json
    trace:   provenance-*.json -> read_provenance (checked) -> Provenance.origin(sample) -> "a.jsonl [0:4096], row 7"

A *split* is the part of a source file, or the group of small files, that one reader read. The file says how many
samples each of them gave, in order:

    "origins": {"files": [path, ...], "splits": [[file, begin, end, samples, rows], ...]}

`rows` is null if sample k of a split is its row k, as with almost every transform. If rows are skipped or give several
samples, it is runs `[first sample, first row, stride]`: stride 1 is one sample per row, stride 0 several from one row.
A sixth number means that the split is a group of that many files from `file` on, one row each. A dataset that was
shuffled, or whose runs would grow with the data, has a column `origin` instead: (split, row) of each sample.

A folder of a million images is a million source files, and hardly anybody who opens a dataset needs their names. So
the manifest only names this file, with its size and checksum; it is read to trace a sample or to prepare again.
Verifying reads it block by block, in little memory.
"""

import errno
import functools
import itertools
import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptionError, FormatError, SchemaError, StorageError
from penstock.filesystem import PositionedFile
from penstock.identity import digest
from penstock.shards._layout import BLOCK_BYTES, checksum
from penstock.shards._manifest import FileEntry, Manifest
from penstock.shards._storage import Storage

ORIGIN_COLUMN = "origin"
ORIGIN_SPEC = "int64[2]"
Runs = list[list[int]] | None
"""Runs `[first sample, first row, stride]`, or None if sample k is row k."""

_MAX_RUNS = 20_000  # about 20 bytes each
_MAX_COUNT = 1 << 48


class OriginRuns:
    """Collects the rows that the samples of one split came from."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._runs: list[list[int]] = []
        self._last_row = 0
        self._stride: int | None = None
        """None while the last run has a single sample and may still become either kind."""

    def add(self, rows: NDArray[np.int64]) -> None:
        """Record that the next samples came from these rows, which must be non-decreasing."""
        if not len(rows):
            return
        if not self._runs:
            self._begin(0, int(rows[0]))
            self.num_samples, self._last_row, rows = 1, int(rows[0]), rows[1:]
        steps = np.diff(rows, prepend=self._last_row)
        borders = [0, *(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(steps)]
        for begin, end in itertools.pairwise(borders):
            if begin < end:
                self._add_steps(rows, int(steps[begin]), begin, end)
        self.num_samples += len(rows)
        self._last_row = int(rows[-1]) if len(rows) else self._last_row

    def rows(self) -> Runs:
        """The runs, or None if sample k is row k.

        Raises:
            SchemaError: there are too many for a manifest.
        """
        if not self._runs or self._runs == [[0, 0, 1]]:
            return None
        if len(self._runs) > _MAX_RUNS:
            raise SchemaError(
                "Rows are skipped or repeated so often that tracing the samples of one split takes "
                f"{len(self._runs):,} runs (the limit is {_MAX_RUNS:,}). Keep the origin of each sample in a column: "
                "origins='column' or --origins column, with --overwrite if a run is unfinished."
            )
        return self._runs

    def _add_steps(self, rows: NDArray[np.int64], step: int, begin: int, end: int) -> None:
        """Add rows `begin` to `end`, each `step` after the one before."""
        if step not in (0, 1):
            for place in range(begin, end):
                self._begin(self.num_samples + place, int(rows[place]))
        elif self._stride is None:
            self._stride = self._runs[-1][2] = step
        elif self._stride != step:
            self._begin(self.num_samples + begin, int(rows[begin]))
            if end - begin > 1:
                self._stride = self._runs[-1][2] = step

    def _begin(self, sample: int, row: int) -> None:
        self._runs.append([sample, row, 1])
        self._stride = None


@dataclass(frozen=True, slots=True)
class SplitOrigin:
    """The files and rows that the samples of one split came from."""

    paths: tuple[str, ...]
    is_group: bool
    """Whether row r is the r-th file, rather than row r of the one file."""
    begin: int
    end: int
    num_samples: int
    rows: Runs


def origins_to_json(origins: Iterable[SplitOrigin]) -> dict[str, Any]:
    """The file's key "origins"."""
    files: list[str] = []
    numbers: dict[str, int] = {}
    splits: list[list[Any]] = []
    for origin in origins:
        number = len(files) if origin.is_group else numbers.setdefault(origin.paths[0], len(files))
        if number == len(files):
            files += origin.paths
        group = [len(origin.paths)] if origin.is_group else []
        splits.append([number, origin.begin, origin.end, origin.num_samples, origin.rows, *group])
    return {"files": files, "splits": splits}


def origins_from_json(section: Mapping[str, Any]) -> list[SplitOrigin]:
    """The inverse of `origins_to_json`."""
    files, origins = section["files"], []
    for number, begin, end, num_samples, rows, *group in section["splits"]:
        paths = tuple(files[number : number + (group[0] if group else 1)])
        origins.append(SplitOrigin(paths, bool(group), begin, end, num_samples, rows))
    return origins


def pack_provenance(content: Mapping[str, Any]) -> tuple[FileEntry, bytes]:
    """The bytes of the file, and its entry in the manifest."""
    data = json.dumps(dict(content), allow_nan=False).encode()
    return FileEntry(f"provenance-{digest(data, 8)}.json", len(data), checksum(data)), data


def read_provenance(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Contents of the file that the manifest names; empty if it names none.

    Raises:
        CorruptionError: it differs from its checksum.
        FormatError: it is missing, is not JSON, or its origins are invalid.
        StorageError: it cannot be read, or does not fit in memory.
    """
    entry = manifest.provenance
    if entry is None:
        return {}
    file = _open(folder, entry)
    data = _read_all(file)
    _check(file, entry, checksum(data))
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file.path}: not JSON ({type(error).__name__}: {error}).") from None
    if not isinstance(content, dict):
        raise FormatError(f"{file.path}: holds {reprlib.repr(content)}, not an object.")
    if not _are_valid(content.get("origins", {"files": [], "splits": []})):
        raise FormatError(f"{file.path}: 'origins' must be files and splits of them, and is not. Restore the file.")
    return content


def verify_provenance(folder: Path, entry: FileEntry) -> None:
    """Check every byte of the file against its checksum.

    Raises:
        CorruptionError: it differs from its checksum.
        FormatError: it is missing.
    """
    file, found = _open(folder, entry), 0
    for begin in range(0, file.size, BLOCK_BYTES):
        found = checksum(file.read(begin, min(begin + BLOCK_BYTES, file.size)), found)
    _check(file, entry, found)


def _open(folder: Path, entry: FileEntry) -> PositionedFile:
    path = folder / entry.name
    try:
        file = PositionedFile(path)
    except FileNotFoundError:
        raise FormatError(
            f"{path}: the file is missing. Restore it to trace samples or to prepare more; reading does not need it."
        ) from None
    if file.size != entry.num_bytes:
        raise CorruptionError(
            f"{path}: the file has {file.size:,} bytes, but the manifest says {entry.num_bytes:,}. Restore it."
        )
    return file


def _read_all(file: PositionedFile) -> bytearray:
    try:
        data = bytearray(file.size)
    except MemoryError:
        raise StorageError(errno.ENOMEM, f"{file.path}: its {file.size:,} bytes do not fit in memory.") from None
    file.read_into(0, np.frombuffer(data, np.uint8))
    return data


def _check(file: PositionedFile, entry: FileEntry, found: int) -> None:
    if found != entry.checksum:
        raise CorruptionError(f"{file.path}: the file does not match its checksum. Restore it from a copy.")


class Provenance:
    """The origins of one dataset's samples."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        origins = storage.provenance().get("origins") or {}
        self.files: list[str] = origins.get("files", [])
        """Paths; a split refers to them by their place here."""
        self._splits: list[list[Any]] = origins.get("splits", [])
        self._ends = np.cumsum([split[3] for split in self._splits], dtype=np.int64)
        is_known = ORIGIN_COLUMN in storage.schema and storage.schema[ORIGIN_COLUMN].spec == ORIGIN_SPEC
        self._column = storage.schema[ORIGIN_COLUMN] if is_known else None
        """(split, row) of each sample; a column of that name but another type is the user's own."""

    @property
    def is_complete(self) -> bool:
        """Whether the source file of every sample is known."""
        return self._num_known >= self._storage.num_samples

    @property
    def _num_known(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def check_complete(self) -> None:
        """Refuse to group by source file unless that of every sample is known.

        Raises:
            ValueError: it is not; the message says for how many it is.
        """
        if not self.is_complete:
            raise ValueError(
                f"The source file is known for {self._num_known:,} of {self._storage.num_samples:,} samples: the "
                "others were not made by `penstock prepare`, which records it. Name a column instead."
            )

    def files_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number in `files` of the file that each stored sample came from."""
        splits: NDArray[np.int64] = np.array(
            [[file, bool(group)] for file, _, _, _, _, *group in self._splits], np.int64
        ).reshape(-1, 2)
        if self._column is not None:
            origins = np.empty((len(indices), 2), np.int64)
            self._storage.read_fixed(self._column, indices, origins)
            self._check_places(origins)
            numbers, rows = origins[:, 0], origins[:, 1]
        else:
            numbers = np.searchsorted(self._ends, indices, side="right")
            rows = indices - (self._ends[numbers] - np.array([split[3] for split in self._splits], np.int64)[numbers])
            for number in np.unique(numbers[splits[numbers, 1] == 1]).tolist():
                here = numbers == number
                rows[here] = _rows_of(self._splits[number][4], rows[here])
        files: NDArray[np.int64] = splits[numbers, 0] + rows * splits[numbers, 1]
        return files

    def _check_places(self, places: NDArray[np.int64]) -> None:
        """Refuse (split, row) pairs that do not exist: they are data, and may come from strangers.

        Raises:
            FormatError: naming one.
        """
        num_rows, (numbers, rows) = self._num_rows, places.T
        exists = (numbers >= 0) & (numbers < len(num_rows)) & (rows >= 0)
        exists[exists] = rows[exists] < num_rows[numbers[exists]]
        if not exists.all():
            number, row = places[~exists][0].tolist()
            raise FormatError(
                f"The column {ORIGIN_COLUMN!r} says that a sample is row {row} of split {number}, which none of the "
                f"{len(num_rows):,} splits that the dataset names has. Prepare the dataset again."
            )

    @functools.cached_property
    def _num_rows(self) -> NDArray[np.int64]:
        """Rows that each split may have; a group of files has one row per file."""
        return np.array([split[5] if len(split) > 5 else _MAX_COUNT for split in self._splits], np.int64)

    def origin(self, index: int) -> str | None:
        """File and row of a stored sample in words; None if unknown."""
        if not self._splits:
            return None
        if self._column is not None:
            place = self._storage.value(self._column, index)
            self._check_places(place.reshape(1, 2))
            number, row = place.tolist()
        else:
            number = int(np.searchsorted(self._ends, index, side="right"))
            if number >= len(self._splits):
                return None
            before = int(self._ends[number - 1]) if number else 0
            (row,) = _rows_of(self._splits[number][4], np.array([index - before])).tolist()
        file, begin, end, _, _, *num_files = self._splits[number]
        if num_files:  # a group of small files, each of them one row
            return str(self.files[file + row])
        return f"{self.files[file]} [{begin}:{end}], row {row}"


def _rows_of(runs: Runs, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows that samples of one split came from."""
    if runs is None:
        return samples
    firsts, rows, strides = np.array(runs, np.int64).T
    found = np.searchsorted(firsts, samples, side="right") - 1
    traced: NDArray[np.int64] = rows[found] + (samples - firsts[found]) * strides[found]
    return traced


def _are_valid(origins: Any) -> bool:
    """Whether every split refers to listed files, and its runs to rows of them."""
    files, splits = (origins.get(key) if isinstance(origins, dict) else None for key in ("files", "splits"))
    if not isinstance(files, list) or not isinstance(splits, list) or not all(type(file) is str for file in files):
        return False
    return all(_is_split(split, len(files)) for split in splits)


def _is_split(split: Any, num_files: int) -> bool:
    if not isinstance(split, list) or len(split) not in (5, 6):
        return False
    file, begin, end, num_samples, runs, *group = split
    if not all(_is_count(number) for number in (file, begin, num_samples, *group)):
        return False
    if not _is_count(end) and end != -1:  # -1: to the end of the file, if its size is unknown
        return False
    num_rows = group[0] if group else _MAX_COUNT
    # Without runs, either sample k is row k, or a column of the dataset says which row it is.
    are_runs_valid = runs is None or _are_runs(runs, num_samples, num_rows)
    return are_runs_valid and file + (group[0] if group else 1) <= num_files


def _are_runs(runs: Any, num_samples: int, num_rows: int) -> bool:
    """Whether runs `[first sample, first row, stride]` begin with sample 0 and stay below `num_rows`."""
    if not isinstance(runs, list) or not all(_is_run(run) for run in runs):
        return False
    firsts = [*(run[0] for run in runs), num_samples]
    pairs = zip(runs, firsts[1:], strict=True)
    last_rows = [row + max(0, end - 1 - first) * stride for (first, row, stride), end in pairs]
    return firsts[0] == 0 and firsts == sorted(firsts) and max(last_rows, default=num_rows) < num_rows


def _is_run(run: Any) -> bool:
    return isinstance(run, list) and len(run) == 3 and all(_is_count(number) for number in run)


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < _MAX_COUNT

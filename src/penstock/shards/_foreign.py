"""Files of other programs that are one dataset together: which files a pattern means, and which samples are shown.

    "shards/train-{000..099}.tar", "shards/*.tar"   tars as WebDataset writes them       _tars
    "folder" of save_to_disk, "part-*.arrow"        Arrow files, mapped                  _arrow

They have no checksums, so what can be checked is checked: sizes, offsets, index. A sample with something missing is
refused, or left out and counted.

A `datasets.Dataset` is a table of mapped files, each whole or a slice of its rows, and perhaps indices, as in a saved
folder. What is done to columns (renamed, cast, replaced) exists in the object only, not in its files, and is refused;
leaving some out is not. `datasets` itself is never imported.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, counted
from penstock.filesystem import matching_paths, read_small
from penstock.shards._arrow import ArrowStorage
from penstock.shards._manifest import MANIFEST_NAME
from penstock.shards._storage import Storage
from penstock.shards._tar_index import Progress, RemoteTars, TarIndex, open_index
from penstock.shards._tars import TarStorage, describe_faults

FilesFormat = Literal["tar", "arrow"]
OnFault = Literal["raise", "skip"]
_STATE, _PARTS = "state.json", "dataset_dict.json"
_MOST_BYTES = 64 << 20
_HARMLESS = ("select", "drop", "remove_column", "replace_schema_metadata")
_SAVE = "Save it, dataset.save_to_disk(folder), and open the folder."
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

_log = logging.getLogger(__name__)


class OpenFiles(NamedTuple):
    """A storage of all samples in the files."""

    storage: Storage
    rows: NDArray[np.int64] | None
    """The samples that are shown, in this order; None for all."""
    skipped: Mapping[str, Any]
    """How many are left out, and why, as a manifest says it; empty if nobody was asked to leave any out."""


def guess_files_format(path: str) -> FilesFormat | None:
    """Format of what a path or a pattern means; None if it is neither tars nor Arrow."""
    if os.path.exists(f"{path}/{MANIFEST_NAME}"):  # `os.path` raises nothing: opening the path says what is wrong
        return None
    if path.endswith(_COMPRESSED):
        raise FormatError(
            f"{path}: a compressed tar can only be read from its beginning. Unpack it (`gunzip`, `zstd -d`), "
            "or `penstock prepare` it."
        )
    if path.endswith(".arrow") or is_saved_dataset(Path(path)):
        return "arrow"
    return "tar" if path.endswith(".tar") else None


def open_files(
    paths: Sequence[str],
    format: FilesFormat,
    columns: Mapping[str, str] | Sequence[str] | None,
    on_error: OnFault,
    remote: RemoteTars | None = None,
) -> OpenFiles:
    """The samples of all files that these paths mean, or of tars in a store.

    Raises:
        FileNotFoundError: a path means no file.
        FormatError: a file is damaged, or `on_error` is "raise" and a sample is.
        SchemaError: a column is not there, or cannot be opened.
    """
    if format == "arrow":
        return _open_arrow(paths, columns, on_error)
    storage = TarStorage(
        *index_tars(paths, remote=remote),
        columns if isinstance(columns, Mapping | None) else dict.fromkeys(columns, ""),
        remote,
    )
    whole, reasons = storage.whole_samples()
    if whole is None:
        return OpenFiles(storage, None, {})
    faults = describe_faults(storage, whole, reasons)
    if on_error == "raise":
        raise FormatError(
            f"{storage.where}: {faults}. Leave them out, on_error='skip', or open only members that all "
            "samples have, as in columns=['jpg', 'cls'], or a number as it is, columns={'id': 'bytes'}."
        )
    return OpenFiles(storage, np.flatnonzero(whole), note_skipped(faults, int((~whole).sum()), reasons))


def index_tars(
    paths: Sequence[str], on_progress: Progress | None = None, remote: RemoteTars | None = None
) -> tuple[TarIndex, list[Path]]:
    """The index of tars, made if it has to be, and their paths.

    Args:
        paths: Paths and patterns.
        on_progress: Called with (bytes done, bytes in all).
    """
    if remote is not None:
        found = [remote.path / name for name in remote.sizes]
    else:
        found = list(dict.fromkeys(path for pattern in paths for path in matching_paths(pattern)))
    return open_index(paths, found, on_progress, remote), found


def _open_arrow(
    paths: Sequence[str], columns: Mapping[str, str] | Sequence[str] | None, on_error: OnFault
) -> OpenFiles:
    data: list[Path] = []
    indices: list[Path] = []
    for path in paths:
        if os.path.isdir(path):
            files, reordered = files_of_folder(Path(path))
            data, indices = [*data, *files], [*indices, *reordered]
        else:
            data += matching_paths(path)
    if indices and len(paths) > 1:
        raise FormatError(f"{indices[0]} reorders the rows of one folder; open the folders one by one.")
    storage = ArrowStorage(data, None if columns is None else list(columns))
    rows, whole = read_indices(indices, storage.num_samples), storage.whole_samples()
    if whole is None:
        return OpenFiles(storage, rows, {})
    shown = np.flatnonzero(whole) if rows is None else rows[whole[rows]]
    num_missing = (storage.num_samples if rows is None else len(rows)) - len(shown)
    if num_missing and on_error == "raise":
        raise FormatError(
            f"{data[0]}{' and others' if len(data) > 1 else ''}: {counted(num_missing, 'sample')} of "
            f"{storage.num_samples:,} have missing values, such as number {int(np.argmin(whole)):,}. Leave them out, "
            "on_error='skip', or leave columns out, columns=[...]."
        )
    return OpenFiles(storage, shown, note_skipped(f"{data[0]}: missing values", num_missing, {"missing": num_missing}))


def note_skipped(faults: str, num_rows: int, by_reason: Mapping[str, int]) -> dict[str, Any]:
    """What is left out, for attributes; it is logged, too."""
    if num_rows:
        _log.warning("%s are left out; %s", counted(num_rows, "sample"), faults)
    return {"skipped": {"rows": num_rows, "by_reason": dict(by_reason)}}


class HuggingFaceDataset(Protocol):
    """A `datasets.Dataset`."""

    column_names: list[str]

    @property
    def cache_files(self) -> list[dict[str, Any]]:
        """The files that it maps."""
        ...


class Found(NamedTuple):
    """What an object shows."""

    paths: list[Path]
    columns: list[str]
    slices: list[tuple[Path, int, int]]
    """First row and number of rows, of each file in turn."""
    indices: NDArray[np.int64] | None


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder is one that `save_to_disk` wrote."""
    return os.path.isfile(path / _STATE) or os.path.isfile(path / _PARTS)


def files_of_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """(files of data, files of indices) of a folder that `save_to_disk` wrote.

    Raises:
        FormatError: it holds several datasets, or does not say what it holds.
    """
    try:
        if (folder / _PARTS).is_file():
            parts = json.loads(read_small(folder / _PARTS, _MOST_BYTES))["splits"]
            first = folder / str(parts[0])
            raise FormatError(f"{folder}: the parts {', '.join(map(repr, parts))} of a dataset. Open one: {first}.")
        state = json.loads(read_small(folder / _STATE, _MOST_BYTES))
        names = [[part["filename"] for part in state.get(key) or ()] for key in ("_data_files", "_indices_files")]
        if not names[0] or not all(
            isinstance(name, str) and Path(name).name == name for name in itertools.chain(*names)
        ):
            raise ValueError("it names no files, or files elsewhere")
    except FormatError:
        raise
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{folder}: {_STATE} is not that of a saved dataset: {error}. Save it again.") from None
    data, indices = ([folder / name for name in each] for each in names)
    return data, indices


def read_indices(paths: list[Path], num_samples: int) -> NDArray[np.int64] | None:
    """The rows that files of indices list; None if there are no files.

    Raises:
        FormatError: a row that does not exist.
    """
    if not paths:
        return None
    storage = ArrowStorage(paths, ["indices"])
    rows = np.empty(storage.num_samples, np.int64)
    storage.read_fixed(storage.schema["indices"], np.arange(len(rows)), rows)
    return _checked(rows, num_samples, paths[0])


def find_files(dataset: HuggingFaceDataset) -> Found:
    """The files of an object, and the rows that it shows.

    Raises:
        ValueError: it is several datasets, in memory, or more than rows of files.
    """
    kind = type(dataset).__name__
    if kind != "Dataset" or not type(dataset).__module__.startswith("datasets."):
        parts = f" Give one of its parts: {', '.join(map(repr, dataset))}." if isinstance(dataset, dict) else ""
        raise ValueError(f"A dataset is opened from a path or from a datasets.Dataset, not from a {kind}.{parts}")
    given: Any = dataset
    if given.format["type"] == "custom":
        raise ValueError(
            "The dataset has a transform, which is not in its files: give ds.with_format(None), and make the function "
            "a map of the plan."
        )
    blocks = [block for row in getattr(given.data, "blocks", [[given.data]]) for block in row]
    if len(blocks) != len(getattr(given.data, "blocks", [0])):
        raise ValueError(f"The dataset has columns side by side from several files. {_SAVE}")
    slices = [_slice_of(block) for block in blocks]
    indices = None if given._indices is None else given._indices.column(0).to_numpy().astype(np.int64)
    paths = list(dict.fromkeys(path for path, _, _ in slices))
    return Found(paths, list(given.column_names), slices, indices)


def rows_of(found: Found, storage: ArrowStorage) -> NDArray[np.int64] | None:
    """The samples of a storage over the files that the object shows; None if it shows all of them in order."""
    starts = dict(zip(found.paths, storage.file_starts().tolist(), strict=False))
    parts = [np.arange(begin, begin + count) + starts[path] for path, begin, count in found.slices]
    rows = np.concatenate([np.empty(0, np.int64), *parts])
    if found.indices is not None:
        rows = rows[_checked(found.indices, len(rows), found.paths[0])]
    return None if np.array_equal(rows, np.arange(storage.num_samples)) else rows


def _slice_of(block: Any) -> tuple[Path, int, int]:
    path, changes = getattr(block, "path", None), getattr(block, "replays", None)
    if path is None or changes is None:
        raise ValueError(f"The dataset is in memory, or a part of it is. {_SAVE}")
    begin = 0
    for name, args, kwargs in changes:
        if name == "slice":
            begin += int(args[0] if args else kwargs.get("offset", 0))
        elif name not in _HARMLESS:
            raise ValueError(f"The dataset's columns differ from those in its files ({name}). {_SAVE}")
    return Path(path), begin, block.num_rows


def _checked(rows: NDArray[np.int64], num_samples: int, path: Path) -> NDArray[np.int64]:
    if rows.size and not (rows.min() >= 0 and rows.max() < num_samples):
        raise FormatError(f"{path}: the indices list rows that its files, of {num_samples:,} rows, do not have.")
    return rows

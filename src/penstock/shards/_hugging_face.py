"""Datasets of the library `datasets` as Arrow files: which files, which of their rows, and in which order.

    a folder of `save_to_disk`   `state.json` names its files, and older ones files of indices that reorder the rows
    a `datasets.Dataset`         a table of mapped files, each whole or a slice of its rows, and perhaps indices

What is done to columns (renamed, cast, replaced) exists in the object only, not in its files, and is refused; leaving
some out is not. `datasets` itself is never imported.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.filesystem import read_small
from penstock.shards._arrow import ArrowStorage

_STATE, _PARTS = "state.json", "dataset_dict.json"
_MOST_BYTES = 64 << 20
_HARMLESS = ("select", "drop", "remove_column", "replace_schema_metadata")
_SAVE = "Save it, dataset.save_to_disk(folder), and open the folder."


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

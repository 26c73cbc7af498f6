"""Files of other programs that are one dataset together: which files a pattern means, and which samples are shown.

    "shards/train-{000..099}.tar", "shards/*.tar"   tars as WebDataset writes them       _tars
    "folder" of save_to_disk, "part-*.arrow"        Arrow files, mapped                  _arrow

They have no checksums, so what can be checked is checked: sizes, offsets, index. A sample with something missing is
refused, or left out and counted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, counted
from penstock.filesystem import matching_paths
from penstock.shards._arrow import ArrowStorage
from penstock.shards._hugging_face import files_of_folder, is_saved_dataset, read_indices
from penstock.shards._manifest import MANIFEST_NAME
from penstock.shards._storage import Storage
from penstock.shards._tar_index import Progress, TarIndex, open_index
from penstock.shards._tars import TarStorage, describe_faults

FilesFormat = Literal["tar", "arrow"]
OnFault = Literal["raise", "skip"]
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
    paths: Sequence[str], format: FilesFormat, columns: Mapping[str, str] | Sequence[str] | None, on_error: OnFault
) -> OpenFiles:
    """The samples of all files that these paths mean.

    Raises:
        FileNotFoundError: a path means no file.
        FormatError: a file is damaged, or `on_error` is "raise" and a sample is.
        SchemaError: a column is not there, or cannot be opened.
    """
    if format == "arrow":
        return _open_arrow(paths, columns, on_error)
    storage = TarStorage(
        *index_tars(paths), columns if isinstance(columns, Mapping | None) else dict.fromkeys(columns, "")
    )
    whole, reasons = storage.whole_samples()
    if whole is None:
        return OpenFiles(storage, None, {})
    faults = describe_faults(storage, whole, reasons)
    if on_error == "raise":
        raise FormatError(
            f"{storage.paths[0].parent}: {faults}. Leave them out, on_error='skip', or open only members that all "
            "samples have, as in columns=['jpg', 'cls'], or a number as it is, columns={'id': 'bytes'}."
        )
    return OpenFiles(storage, np.flatnonzero(whole), note_skipped(faults, int((~whole).sum()), reasons))


def index_tars(paths: Sequence[str], on_progress: Progress | None = None) -> tuple[TarIndex, list[Path]]:
    """The index of tars, made if it has to be, and their paths.

    Args:
        paths: Paths and patterns.
        on_progress: Called with (bytes done, bytes in all).
    """
    found = list(dict.fromkeys(path for pattern in paths for path in matching_paths(pattern)))
    return open_index(paths, found, on_progress), found


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

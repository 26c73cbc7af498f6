"""How many rows each storage window packs into: the one thing about packing that must be known beforehand.

Documents are cut once into windows of at least 16,384 rows' worth of tokens; documents never leave
their window, so its number of rows depends on its lengths alone and is the same in every epoch. The
index is 16 bytes per window: 200 kB for a billion documents. It comes from the dataset when it was
prepared with `pack=`, from the user's cache, or is counted now, at about 100 M documents/s.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError
from penstock.packing import PACKING_VERSION, PackingSettings, count_rows
from penstock.report import progress_bar

logger = logging.getLogger(__name__)

ROWS_PER_WINDOW = 16_384
MAX_WINDOW_TOKENS = 256 << 20
# Documents this short fill rows perfectly; more of them in one window would only cost memory.
MAX_WINDOW_DOCUMENTS = 1 << 20
_CHUNK = 1 << 22
_WORTH_KEEPING = 4 << 20  # below this many documents counting is faster than finding the file

ReadLengths = Callable[[int, int], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class PackIndex:
    """Where each window begins, in documents, and how many rows it packs into."""

    window_starts: NDArray[np.int64]
    """First document of each window, and behind them the number of documents."""
    window_rows: NDArray[np.int64]

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the manifest and the cache."""
        return {"window_starts": self.window_starts.tolist(), "window_rows": self.window_rows.tolist()}

    @classmethod
    def from_json(cls, fields: Any, num_documents: int) -> PackIndex:
        """What `to_json` gave; `ValueError` when it cannot be an index of so many documents."""
        try:
            starts, rows = (np.array(fields[name], np.int64) for name in ("window_starts", "window_rows"))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not two lists of numbers ({type(error).__name__}: {error})") from None
        if starts.ndim != 1 or rows.shape != (len(starts) - 1,) or starts[0] != 0 or starts[-1] != num_documents:
            raise ValueError("windows do not cover the documents")
        if (np.diff(starts) < 0).any() or (rows < 0).any():
            raise ValueError("windows are not in order")
        return cls(starts, rows)


def index_name(column: str, settings: PackingSettings) -> str:
    """What an index is called in the manifest and the cache."""
    return f"{column} {settings.length} {settings.long} {settings.max_documents}"


def find_pack_index(
    read_lengths: ReadLengths,
    num_documents: int,
    settings: PackingSettings,
    *,
    column: str,
    fingerprint: str,
    attributes: Mapping[str, Any],
    cache: Path,
) -> PackIndex:
    """The index, from the dataset, from the cache, or counted now and kept."""
    name = index_name(column, settings)
    stored = attributes.get("packing")
    # Whoever appends to a dataset leaves counts behind that are of fewer samples.
    is_of_all = isinstance(stored, dict) and stored.get("samples", num_documents) == num_documents
    if isinstance(stored, dict) and is_of_all and stored.get("version") == PACKING_VERSION:
        indexes = stored.get("indexes")
        if isinstance(indexes, dict) and name in indexes:
            return _from_dataset(indexes[name], num_documents, name)
    if num_documents < _WORTH_KEEPING:
        return build_pack_index(read_lengths, num_documents, settings)
    identity = hashlib.blake2b(f"{fingerprint} {name} {PACKING_VERSION}".encode(), digest_size=16).hexdigest()
    return _from_cache(cache / f"{identity}.json", num_documents, lambda: _build(read_lengths, num_documents, settings))


def _from_dataset(fields: Any, num_documents: int, name: str) -> PackIndex:
    try:
        return PackIndex.from_json(fields, num_documents)
    except ValueError as error:
        raise FormatError(
            f"The packing {name!r} stored with the dataset is not of its {num_documents:,} documents: {error}. "
            "Prepare the dataset again."
        ) from None


def build_pack_index(
    read_lengths: ReadLengths,
    num_documents: int,
    settings: PackingSettings,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> PackIndex:
    """Cut documents into windows and count the rows of each; `on_progress` is told bytes of lengths read."""
    starts, rows = [0], []
    for begin, end in _cut(read_lengths, num_documents, settings.length):
        starts.append(end)
        rows.append(count_rows(read_lengths(begin, end), settings))
        if on_progress is not None:
            on_progress(8 * end, 8 * num_documents)
    return PackIndex(np.array(starts, np.int64), np.array(rows, np.int64))


def _cut(read_lengths: ReadLengths, num_documents: int, length: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) document of each window. A rest too small for a window joins the one before it."""
    target = min(ROWS_PER_WINDOW * length, MAX_WINDOW_TOKENS)
    held: tuple[int, int] | None = None
    begin, tokens = 0, 0
    for chunk in range(0, num_documents, _CHUNK):
        last = min(chunk + _CHUNK, num_documents)
        totals = np.cumsum(read_lengths(chunk, last))
        used = 0
        while True:
            by_tokens = chunk + int(np.searchsorted(totals, used + target - tokens)) + 1
            end = min(by_tokens, begin + MAX_WINDOW_DOCUMENTS)
            if end > last:
                break
            if held is not None:
                yield held
            held = (begin, end)
            begin, tokens, used = end, 0, int(totals[end - chunk - 1])
        tokens += int(totals[-1]) - used
    if begin < num_documents or held is None:
        held = (begin if held is None else held[0], num_documents)
    if held[1] > held[0]:
        yield held


def _build(read_lengths: ReadLengths, num_documents: int, settings: PackingSettings) -> PackIndex:
    with progress_bar(f"counting rows of {settings.length} tokens") as on_progress:
        return build_pack_index(read_lengths, num_documents, settings, on_progress=on_progress)


def _from_cache(path: Path, num_documents: int, build: Callable[[], PackIndex]) -> PackIndex:
    """One process of the machine builds, the others wait for it; a damaged file is built again."""
    try:
        return _load(path, num_documents)
    except (OSError, ValueError):
        pass
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("Row counts are not kept, %s cannot be written: %s", path.parent, error)
            return build()
        try:
            return _load(path, num_documents)
        except (OSError, ValueError):
            index = build()
            _keep(path, index)
            return index


def _keep(path: Path, index: PackIndex) -> None:
    text = json.dumps(index.to_json())
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    working = path.with_suffix(f".{os.getpid()}")
    try:
        working.write_text(f"{digest}\n{text}")
        os.replace(working, path)
    except OSError as error:
        logger.warning("Row counts are not kept, %s cannot be written: %s", path, error)
        working.unlink(missing_ok=True)


def _load(path: Path, num_documents: int) -> PackIndex:
    digest, _, text = path.read_text().partition("\n")
    if hashlib.blake2b(text.encode(), digest_size=8).hexdigest() != digest:
        raise ValueError(f"{path} is damaged")
    return PackIndex.from_json(json.loads(text), num_documents)

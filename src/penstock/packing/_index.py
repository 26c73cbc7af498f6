"""How many rows each storage window packs into: the one thing about packing that must be known in advance.

Documents are divided once into windows of at least 16,384 rows' worth of tokens. They never leave
their window, so its number of rows depends only on its lengths and is the same in every epoch. The
index takes 16 bytes per window: 200 kB for a billion documents. Counting runs at about 100 M documents/s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.packing._pack import count_rows
from penstock.packing._settings import PackingSettings

ROWS_PER_WINDOW = 16_384
MAX_WINDOW_TOKENS = 256 << 20
# So many documents in a window must be short, and fill rows perfectly; more would only cost memory.
MAX_WINDOW_DOCUMENTS = 1 << 20
_CHUNK = 1 << 22

Lengths = npt.NDArray[np.int64]
ReadLengths = Callable[[int, int], Lengths]
"""Lengths of documents `begin` to `end`; with limits, what they take of each budget."""


@dataclass(frozen=True, slots=True, eq=False)
class PackIndex:
    """Where each window begins, in documents, and how many rows it packs into."""

    window_starts: npt.NDArray[np.int64]
    """First document of each window; the last entry is the number of documents."""
    rows_per_window: npt.NDArray[np.int64]

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the manifest and the cache."""
        return {"window_starts": self.window_starts.tolist(), "window_rows": self.rows_per_window.tolist()}

    @classmethod
    def from_json(cls, fields: Any, num_documents: int) -> PackIndex:
        """The inverse of `to_json`; `ValueError` if it cannot be an index of `num_documents` documents."""
        try:
            starts, rows = (np.array(fields[name], np.int64) for name in ("window_starts", "window_rows"))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not two lists of numbers ({type(error).__name__}: {error})") from None
        if starts.ndim != 1 or rows.shape != (len(starts) - 1,) or starts[0] != 0 or starts[-1] != num_documents:
            raise ValueError("windows do not cover the documents")
        if (np.diff(starts) < 0).any() or (rows < 0).any():
            raise ValueError("windows are not in order")
        return cls(starts, rows)


def index_name(column: str, settings: PackingSettings, *, by_shard: bool = False) -> str:
    """The key of an index in the manifest and the cache."""
    limits = f" {' '.join(map(str, settings.limits))}" if settings.limits else ""
    name = f"{column} {settings.length} {settings.long} {settings.max_documents}{limits}"
    return f"{name} by shard" if by_shard else name


def build_pack_index(
    read_lengths: ReadLengths, num_documents: int, settings: PackingSettings, edges: npt.NDArray[np.int64] | None = None
) -> PackIndex:
    """Divide documents into windows, or at `edges`, and count the rows of each; every length is read once."""
    if edges is not None:
        counts = [count_rows(read_lengths(*ends), settings) for ends in itertools.pairwise(edges.tolist())]
        return PackIndex(edges, np.array(counts, np.int64))
    starts, rows = [0], []
    for lengths in _windows(read_lengths, num_documents, settings.length):
        starts.append(starts[-1] + len(lengths))
        rows.append(count_rows(lengths, settings))
    return PackIndex(np.array(starts, np.int64), np.array(rows, np.int64))


def _windows(read_lengths: ReadLengths, num_documents: int, length: int) -> Iterator[Lengths]:
    """Lengths of the documents of each window. A remainder too small for a window joins the one before."""
    target = min(ROWS_PER_WINDOW * length, MAX_WINDOW_TOKENS)
    held: Lengths | None = None
    parts: list[Lengths] = []
    begin, tokens = 0, 0
    for chunk in range(0, num_documents, _CHUNK):
        lengths = read_lengths(chunk, min(chunk + _CHUNK, num_documents))
        totals = np.cumsum(lengths if lengths.ndim == 1 else lengths[:, 0])
        first, used = 0, 0
        while True:
            by_tokens = int(np.searchsorted(totals, used + target - tokens)) + 1
            end = min(by_tokens, begin + MAX_WINDOW_DOCUMENTS - chunk)
            if end > len(lengths):
                break
            if held is not None:
                yield held
            held = np.concatenate([*parts, lengths[first:end]])
            parts, tokens, used = [], 0, int(totals[end - 1])
            first, begin = end, chunk + end
        parts.append(lengths[first:])
        tokens += int(totals[-1]) - used
    if begin < num_documents:
        held = np.concatenate([*parts] if held is None else [held, *parts])
    if held is not None:
        yield held

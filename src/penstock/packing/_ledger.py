"""What is known of a packing without packing: how many rows each storage window has, and where every token goes.

Documents are divided once into windows of at least 16,384 rows' worth of tokens. They never leave
their window, so its number of rows depends only on its lengths and is the same in every epoch. The
index takes 16 bytes per window: 200 kB for a billion documents. Counting runs at about 100 M documents/s.

A ledger is the account of a packing, and the proof that nothing is lost silently. It follows from the lengths and the
settings alone, and costs a row count and a few passes over the lengths. Two balances hold for every ledger, and for
every sum of ledgers:

    num_tokens        == tokens_placed + tokens_truncated + tokens_dropped
    num_rows * length == tokens_placed + padding_tokens
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.packing._pack import PackingSettings, apply_long_policy, check_lengths, count_rows

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingLedger:
    """What packing placed, cut, padded and left out; `+` joins the ledgers of several windows.

    >>> ledger = make_ledger(np.array([3, 5, 0, 9]), PackingSettings(length=8))
    >>> ledger.num_rows, ledger.tokens_placed, ledger.padding_tokens, ledger.targets_lost
    (3, 17, 7, 1)
    >>> (ledger + ledger).num_rows
    6
    """

    num_documents: int = 0
    """Documents given, including empty and dropped ones."""

    num_tokens: int = 0
    """Tokens given."""

    num_rows: int = 0
    """Rows made."""

    num_pieces: int = 0
    """Whole documents and parts of documents in those rows."""

    tokens_placed: int = 0
    """Tokens in rows, each in exactly one place."""

    padding_tokens: int = 0
    """Places in rows that hold no token."""

    num_empty: int = 0
    """Documents without tokens, which are in no row."""

    num_split: int = 0
    """Documents that became more than one piece."""

    tokens_truncated: int = 0
    """Tokens cut off after the first `length` of their document by long="truncate"."""

    documents_dropped: int = 0
    """Documents left out by long="drop"."""

    tokens_dropped: int = 0
    """Tokens of those documents."""

    units_placed: tuple[int, ...] = ()
    """What the documents in rows take of each further budget."""

    units_offered: tuple[int, ...] = ()
    """What the rows have of each further budget."""

    targets_lost: int = 0
    """Next-token targets lost at cuts, one per cut: the last token before it has nothing to predict."""

    def __post_init__(self) -> None:
        assert self.num_tokens == self.tokens_placed + self.tokens_truncated + self.tokens_dropped

    @property
    def fill(self) -> float:
        """The share of places in rows that hold a token; 1.0 if there are no rows."""
        num_places = self.tokens_placed + self.padding_tokens
        return self.tokens_placed / num_places if num_places else 1.0

    def __add__(self, other: PackingLedger) -> PackingLedger:
        names = (field.name for field in fields(self))
        return PackingLedger(**{name: _sum(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def fills(self) -> tuple[float, ...]:
        """The share that is used of the tokens' places, and of each further budget."""
        pairs = zip(self.units_placed, self.units_offered, strict=True)
        return (self.fill, *(placed / offered if offered else 1.0 for placed, offered in pairs))


def _sum(one: Any, other: Any) -> Any:
    if not isinstance(one, tuple):
        return one + other
    return tuple(a + b for a, b in itertools.zip_longest(one, other, fillvalue=0))


def make_ledger(lengths: npt.NDArray[np.integer], settings: PackingSettings) -> PackingLedger:
    """The account of packing these documents, the same for every key and every order of them.

    Raises:
        TypeError: `lengths` is not a numpy array of integers.
        ValueError: a length is negative, or the tokens are too many to count.
    """
    every = check_lengths(lengths, len(settings.limits))
    all_kept = apply_long_policy(every, settings)
    num_rows = count_rows(every, settings)
    given, kept = (every[:, 0], all_kept[:, 0]) if settings.limits else (every, all_kept)
    num_tokens, tokens_placed = int(given.sum()), int(kept.sum())
    num_long = _count_long(every, settings)
    num_cuts = _count_cuts(kept, settings.length)
    lost = num_tokens - tokens_placed
    return PackingLedger(
        num_documents=given.size,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_pieces=int(np.count_nonzero(kept)) + num_cuts,
        tokens_placed=tokens_placed,
        padding_tokens=num_rows * settings.length - tokens_placed,
        num_empty=given.size - int(np.count_nonzero(given)),
        num_split=num_long if settings.long == "split" else 0,
        tokens_truncated=lost if settings.long == "truncate" else 0,
        documents_dropped=num_long if settings.long == "drop" else 0,
        tokens_dropped=lost if settings.long == "drop" else 0,
        units_placed=tuple(all_kept[kept > 0, 1:].sum(axis=0).tolist()) if settings.limits else (),
        units_offered=tuple(num_rows * limit for limit in settings.limits),
        targets_lost=num_cuts + (num_long if settings.long == "truncate" else 0),
    )


def _count_long(given: npt.NDArray[np.int64], settings: PackingSettings) -> int:
    """Documents that exceed a row, or one of its limits."""
    if not settings.limits:
        return int(np.count_nonzero(given > settings.length))
    exceeds = given > np.array([settings.length, *settings.limits])
    return int(np.count_nonzero(exceeds.any(axis=1) & (given[:, 0] > 0)))


def _count_cuts(kept: npt.NDArray[np.int64], length: int) -> int:
    # Division is slow and long documents are few: select before dividing.
    return int(((kept[kept > length] - 1) // length).sum())

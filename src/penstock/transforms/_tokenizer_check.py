"""Is the fast tokenizer equal to the reference? Asked before a run and during it.

Before: a battery of texts chosen to break tokenizers, and up to 1 MB of the user's own documents. During:
one document in 10,000, by a hash of its place and length, so the choice is the same in every run and at any
number of workers. The reference takes 0.5 s for the sample, and about 1 % of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.schema import Ragged
from penstock.transforms._rows import row_bytes
from penstock.transforms._tokenizer_engines import TokenizerEngine

SAMPLE_BYTES = 1 << 20
CHECK_ONE_IN = 10_000
MAX_CHECKED_BYTES = 1 << 20
_NEIGHBOURS = 4


class TokenizerMismatch(PenstockError, RuntimeError):
    """Two tokenizers that must agree gave different tokens for one document."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two lists of tokens part."""

    text: str
    place: int
    """First token that differs."""
    found: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        begin, end = max(0, self.place - _NEIGHBOURS), self.place + _NEIGHBOURS
        return (
            f"at token {self.place:,}: the fast tokenizer gives {list(self.found[begin:end])} from token {begin:,}, "
            f"the reference {list(self.expected[begin:end])} ({len(self.found):,} and {len(self.expected):,} tokens "
            f"in all), for the text {self.text[:80]!r}"
        )


def join_texts(texts: Sequence[str]) -> Ragged:
    """Texts as an engine takes them."""
    encoded = [text.encode() for text in texts]
    lengths = np.array([len(text) for text in encoded], np.int64)
    return Ragged.from_lengths(np.frombuffer(b"".join(encoded), np.uint8), lengths)


def find_difference(fast: TokenizerEngine, reference: TokenizerEngine, rows: Ragged) -> Difference | None:
    """The first document on which two engines differ."""
    found_ids, found_ends = fast.encode(rows.values, rows.offsets)
    ids, ends = reference.encode(rows.values, rows.offsets)
    if np.array_equal(found_ends, ends) and np.array_equal(found_ids, ids):
        return None
    for document in range(len(rows)):
        found = found_ids[found_ends[document] : found_ends[document + 1]]
        expected = ids[ends[document] : ends[document + 1]]
        if not np.array_equal(found, expected):
            return _describe(row_bytes(rows, document), found, expected)
    return None


def _describe(text: memoryview, found: NDArray[np.integer], expected: NDArray[np.integer]) -> Difference:
    shared = min(len(found), len(expected))
    differs = np.flatnonzero(found[:shared] != expected[:shared])
    place = int(differs[0]) if len(differs) else shared
    return Difference(str(text, "utf-8"), place, tuple(found.tolist()), tuple(expected.tolist()))


def cut_text(values: NDArray[np.uint8], num_bytes: int) -> NDArray[np.uint8]:
    """The first bytes of a document, up to a border between characters."""
    if len(values) <= num_bytes:
        return values
    while num_bytes and values[num_bytes] & 0xC0 == 0x80:
        num_bytes -= 1
    return values[:num_bytes]


def take_sample(rows: Ragged, num_bytes: int) -> Ragged:
    """Whole documents up to `num_bytes`; the last one is cut."""
    num_bytes = min(num_bytes, len(rows.values))
    num_rows = int(np.searchsorted(rows.offsets, num_bytes, side="left"))
    values = cut_text(rows.values, num_bytes)
    return Ragged(values, np.minimum(rows.offsets[: num_rows + 1], len(values)))


def choose_checked(row_numbers: NDArray[np.int64], lengths: NDArray[np.int64], key: int) -> NDArray[np.int64]:
    """Places of the documents to check: one in 10,000, by SplitMix64 of row number, length and key."""
    with np.errstate(over="ignore"):
        mixed = row_numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= lengths.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) ^ np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.flatnonzero((mixed ^ (mixed >> np.uint64(31))) % np.uint64(CHECK_ONE_IN) == 0)


def check_document(
    fast: TokenizerEngine, reference: TokenizerEngine, text: NDArray[np.uint8], found: NDArray[np.integer]
) -> Difference | None:
    """Compare what was found for one document with the reference; of a very long one, its first 1 MB anew."""
    piece = cut_text(text, MAX_CHECKED_BYTES)
    rows = Ragged(piece, np.array([0, len(piece)]))
    if len(piece) < len(text):
        return find_difference(fast, reference, rows)
    expected, _ = reference.encode(rows.values, rows.offsets)
    return None if np.array_equal(found, expected) else _describe(row_bytes(rows, 0), found, expected)

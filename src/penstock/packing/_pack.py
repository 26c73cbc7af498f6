"""Best-fit-decreasing packing: the longest pieces first, each into the fullest row that still has room.

Settings and lengths are checked at the border of the room and trusted inside. After the policy for long documents is
applied, one rule is left for the kernels: a document is cut into pieces of `length` tokens and a remainder, and a
document of no tokens has no piece. The packing has two independent halves. The *layout* says which lengths share a row;
it follows only from the histogram of lengths, so the number of rows is the same for every key and every order of the
documents, and can be counted once and stored. The *deal* says which document of that length takes which slot of the
layout; it is redrawn by the key, an argument because it changes while the settings stay: epochs pair documents
differently.

    lengths -> pieces -> histogram -> layout: the row of slot 0, 1, 2, ... by decreasing length   (no key)
                  `---> pieces by decreasing length, equal ones shuffled -> slots -> rows         (key)

What it costs, from `benchmarks/bench_packing.py` on one core, windows of 16,384 rows of web-like documents:
- 18-36 M documents/s to pack, 220-370 M to count rows (on a shared machine); about 50 bytes per piece while
  packing, 20 in the result.
- A call wastes about one row, so its fill is 1 - 1/rows: 99.993 %. That is why windows are large.
- Best fit puts documents of similar length together. Of the documents that are neighbours in a row, 2 % are
  neighbours again under another key; of all that share a row, 13 % do so again at 2 k, 26 % at 8 k,
  mostly documents under 200 tokens, which fill rows by the dozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Final, Literal, SupportsIndex, get_args

import numpy as np
import numpy.typing as npt

from penstock.packing import _kernels
from penstock.schema import offsets_of

LongPolicy = Literal["split", "truncate", "drop"]

# The packer keeps tables with one entry per possible amount of free space, about 28 bytes per token of a row:
# 470 MB at this bound, which is sixteen times a context of a million tokens.
MAX_LENGTH: Final = 2**24
MAX_LIMIT: Final = 2**30
MAX_LIMITS: Final = 7
PACKING_VERSION: Final = 1
"""Changes whenever the same lengths, settings and key would give different rows, or a different number of them."""

# Pieces and rows are numbered in int32 while packing: half the memory traffic of int64.
_MAX_PIECES: Final = 2**31 - 1

# The two shuffles of a packing draw from separate streams.
_DEAL_STREAM, _ROW_STREAM = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSettings:
    """How documents are put into rows of one length.

    >>> PackingSettings(length=4096)
    PackingSettings(length=4096, long='split', max_documents=None, limits=())

    Raises:
        TypeError: `length` or `max_documents` is not an int.
        ValueError: a number is out of range, or `long` is not one of its choices.
    """

    length: int
    """Tokens per row: longer rows cut fewer documents, but attention costs more."""

    long: LongPolicy = "split"
    """Documents longer than a row: "split" keeps every token and loses one target per cut, "truncate"
    keeps the first `length` tokens, "drop" leaves the document out; the ledger counts all three."""

    max_documents: int | None = None
    """At most this many documents, or pieces of them, per row: bounds `cu_seqlens` for static shapes, but pads rows of
    short documents (web text, 64 per row: fill 99.95 % at 4,096 tokens, 87 % at 32,768)."""

    limits: tuple[int, ...] = ()
    """What a row has of further budgets, such as images; documents are then whole, so `long` must be "drop". Lengths
    have a column for each of them."""

    def __post_init__(self) -> None:
        limits = tuple(_checked_count("limits", limit, limit=MAX_LIMIT) for limit in self.limits)
        object.__setattr__(self, "limits", limits)
        if limits and (self.long != "drop" or len(limits) > MAX_LIMITS):
            raise ValueError(
                f"pack(limits=...) keeps documents whole and takes at most {MAX_LIMITS} limits; got {len(limits)} and "
                f"long={self.long!r}. With long='drop', documents that exceed a row or a limit are left out and "
                "counted."
            )
        object.__setattr__(self, "length", _checked_count("length", self.length, limit=MAX_LENGTH))
        if self.max_documents is not None:
            max_documents = _checked_count("max_documents", self.max_documents, limit=None)
            object.__setattr__(self, "max_documents", max_documents)
        if self.long not in get_args(LongPolicy):
            choices = ", ".join(repr(choice) for choice in get_args(LongPolicy))
            raise ValueError(f"long must be one of {choices}, got {self.long!r}")


def _checked_count(name: str, value: SupportsIndex, *, limit: int | None) -> int:
    # Settings go into fingerprints and TOML files, so numpy's integers become Python's; a bool is an error.
    try:
        count = index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if count < 1 or (limit is not None and count > limit):
        expected = "at least 1" if limit is None else f"from 1 to {limit:,}"
        raise ValueError(f"{name} must be {expected}, got {count:,}")
    return count


def check_lengths(lengths: npt.NDArray[np.integer], num_limits: int = 0) -> npt.NDArray[np.int64]:
    """The lengths as contiguous int64, copied only if they are not; with limits, what documents take of each budget.

    Raises:
        TypeError: not a numpy array of integers.
        ValueError: not of the right shape, a negative length, or more tokens in total than 64 bits can count.
    """
    # Callers without a type checker may pass anything.
    found: object = lengths
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        kind = f"{found.dtype} array" if isinstance(found, np.ndarray) else type(found).__name__
        raise TypeError(f"lengths must be a numpy array of integers, got {kind}")
    if num_limits and (lengths.ndim != 2 or lengths.shape[1] != num_limits + 1):
        raise ValueError(f"with {num_limits} limits, lengths must have {num_limits + 1} columns, got {lengths.shape}")
    if not num_limits and lengths.ndim != 1:
        raise ValueError(f"lengths must have one dimension, got shape {lengths.shape}")
    checked = np.ascontiguousarray(lengths, dtype=np.int64)
    if checked.size:
        _check_range(lengths, checked)
    return checked


def _check_range(lengths: npt.NDArray[np.integer], checked: npt.NDArray[np.int64]) -> None:
    # An unsigned length over 2**63 became negative in the cast, so one comparison finds both errors.
    if checked.min() < 0:
        index = int(checked.argmin())
        raise ValueError(f"lengths[{index}] is {lengths.flat[index]}; a document has 0 to 2**63 - 1 tokens")
    # The product bounds the sum and cannot itself overflow in Python.
    if int(checked.max()) * checked.size >= 2**63:
        index = int(checked.argmax())
        raise ValueError(
            f"lengths[{index}] is {lengths.flat[index]:,}; {checked.size:,} documents of that size "
            f"are more tokens than 64 bits can count. Are these byte offsets rather than lengths?"
        )


def apply_long_policy(lengths: npt.NDArray[np.int64], settings: PackingSettings) -> npt.NDArray[np.int64]:
    """How many tokens of each document go into rows; "split" keeps them all, without a copy."""
    if settings.limits:
        fits = np.all(lengths <= np.array([settings.length, *settings.limits]), axis=1)
        return np.where(fits[:, None], lengths, 0)
    match settings.long:
        case "split":
            return lengths
        case "truncate":
            return np.minimum(lengths, settings.length)
        case "drop":
            return np.where(lengths <= settings.length, lengths, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Which piece of which document goes where: row r holds pieces `row_offsets[r]:row_offsets[r + 1]`.

    Rows are in the packer's own order, those of the longest pieces first: permute them before use.
    Pieces inside a row are already shuffled; use them in this order.

    >>> packing = pack(np.array([3, 5, 9]), PackingSettings(length=8), key=0)
    >>> packing.num_rows, packing.num_pieces
    (3, 4)
    >>> np.add.reduceat(packing.lengths, packing.row_offsets[:-1]).tolist()
    [8, 8, 1]
    """

    row_offsets: npt.NDArray[np.int64]
    """Where each row's pieces begin, and finally the number of pieces."""

    documents: npt.NDArray[np.int64]
    """Index of each piece's document in the given lengths."""

    starts: npt.NDArray[np.int64]
    """Place of each piece's first token in its document."""

    lengths: npt.NDArray[np.int32]
    """Number of tokens of each piece: at least 1, at most a row."""

    @property
    def num_rows(self) -> int:
        """Rows, none of them empty."""
        return self.row_offsets.size - 1

    @property
    def num_pieces(self) -> int:
        """Whole documents and parts of documents."""
        return self.documents.size

    def reordered(self, rows: npt.NDArray[np.int64]) -> Packing:
        """The same rows in another order."""
        counts = np.diff(self.row_offsets)[rows]
        offsets = offsets_of(counts)
        pieces = np.repeat(self.row_offsets[rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Packing(
            row_offsets=offsets,
            documents=self.documents[pieces],
            starts=self.starts[pieces],
            lengths=self.lengths[pieces],
        )


def count_rows(lengths: npt.NDArray[np.integer], settings: PackingSettings) -> int:
    """How many rows `pack` makes from these documents, whatever the key and the order of documents.

    Raises:
        TypeError: `lengths` is not a numpy array of integers.
        ValueError: a length is negative, or the tokens are too many to count.
    """
    kept = apply_long_policy(check_lengths(lengths, len(settings.limits)), settings)
    if settings.limits:
        return _lay_out_vectors(_vectors(kept, settings)[1], settings)[1].size
    histogram = _kernels.count_pieces(kept, settings.length)
    if settings.max_documents is None:
        return int(_kernels.count_rows(histogram))
    # With a limit on documents, rows with the same room are no longer alike: lay out every piece.
    _, row_sizes = _lay_out(histogram, settings)
    return row_sizes.size


def pack(lengths: npt.NDArray[np.integer], settings: PackingSettings, key: int) -> Packing:
    """Put documents into rows; the key decides which of the documents of equal length goes where.

    The same arguments give the same packing on any machine and in any thread.

    Raises:
        TypeError: `lengths` is not a numpy array of integers, or `key` not an int.
        ValueError: a length is negative, the key does not fit 64 bits, or there are over 2**31 pieces.
    """
    if type(key) is not int:
        raise TypeError(f"key must be an int, got {key!r} of type {type(key).__name__}")
    if not 0 <= key < 2**64:
        raise ValueError(f"key must be from 0 to 2**64 - 1, got {key}")
    kept = apply_long_policy(check_lengths(lengths, len(settings.limits)), settings)
    if settings.limits:
        return _pack_vectors(kept, settings, key)
    histogram = _kernels.count_pieces(kept, settings.length)
    slot_rows, row_sizes = _lay_out(histogram, settings)
    row_offsets = offsets_of(row_sizes)

    documents, starts, sizes = _kernels.cut(kept, settings.length, slot_rows.size)
    run_offsets = offsets_of(histogram[:0:-1])  # pieces of equal length, longest first
    dealt = _kernels.sort_falling(sizes, run_offsets)
    _kernels.shuffle_groups(dealt, run_offsets, key, _DEAL_STREAM)
    pieces = _kernels.gather_rows(dealt, slot_rows, row_offsets)
    _kernels.shuffle_groups(pieces, row_offsets, key, _ROW_STREAM)
    documents, starts, sizes = _kernels.take_pieces(pieces, documents, starts, sizes)
    return Packing(row_offsets=row_offsets, documents=documents, starts=starts, lengths=sizes)


def _pack_vectors(kept: npt.NDArray[np.int64], settings: PackingSettings, key: int) -> Packing:
    """The same for documents that take something of several budgets; those that take the same are alike."""
    documents, vectors = _vectors(kept, settings)
    slot_rows, row_sizes = _lay_out_vectors(vectors, settings)
    row_offsets = offsets_of(row_sizes)
    dealt = np.arange(len(vectors), dtype=np.int32)
    is_first = np.ones(len(vectors), bool)
    is_first[1:] = False
    for column in vectors.T:
        is_first[1:] |= column[1:] != column[:-1]
    _kernels.shuffle_groups(dealt, np.append(np.flatnonzero(is_first), len(vectors)), key, _DEAL_STREAM)
    pieces = _kernels.gather_rows(dealt, slot_rows, row_offsets)
    _kernels.shuffle_groups(pieces, row_offsets, key, _ROW_STREAM)
    lengths = vectors[pieces, 0].astype(np.int32)
    return Packing(
        row_offsets=row_offsets, documents=documents[pieces], starts=np.zeros_like(pieces, np.int64), lengths=lengths
    )


def _vectors(
    kept: npt.NDArray[np.int64], settings: PackingSettings
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Documents that go into rows, and what each takes of every budget: the largest first, equal ones side by side.

    The size of one is the sum of its shares in the budgets. Documents of equal size are sorted by a hash of what they
    take, so that one sort of one number does.
    """
    documents = np.flatnonzero(kept[:, 0])
    budgets = _budgets(settings)
    vectors = np.ones((len(documents), len(budgets)), np.int64)  # a document counts as one, where they are limited
    vectors[:, : kept.shape[1]] = kept[documents]
    if len(vectors) > _MAX_PIECES:
        raise ValueError(f"{len(vectors):,} documents; one packing can have {_MAX_PIECES:,}. Pack fewer at a time.")
    sizes, hashes = np.zeros((2, len(vectors)), np.uint64)
    for place, (column, budget) in enumerate(zip(vectors.T.astype(np.uint64), budgets.tolist(), strict=True)):
        sizes += column * np.uint64(2**30 // budget)
        hashes += column * np.uint64(0x9E3779B97F4A7C15 * (2 * place + 1) % 2**64)
    order = _kernels.sort_keys(sizes << np.uint64(28) | hashes >> np.uint64(36))
    return documents[order], vectors[order]


def _budgets(settings: PackingSettings) -> npt.NDArray[np.int64]:
    """What a row has: tokens, the limits, and documents if they are limited, too."""
    more = () if settings.max_documents is None else (min(settings.max_documents, MAX_LIMIT),)
    return np.array([settings.length, *settings.limits, *more], np.int64)


def _lay_out_vectors(
    vectors: npt.NDArray[np.int64], settings: PackingSettings
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The better of two layouts: rows that are filled one after the other, and rows that are filled evenly.

    The first wins where one budget binds and there are small documents, the second where both bind, and where every
    document takes as much of the second budget: the first would leave all small documents to the last rows.
    """
    budgets = _budgets(settings)
    tight = _kernels.lay_out_vectors(vectors, budgets, 0)
    fewest = int((-(-vectors.sum(axis=0) // budgets)).max()) if len(vectors) else 0
    if tight[1].size <= fewest + fewest // 500:
        return tight
    even = _kernels.lay_out_vectors(vectors, budgets, fewest)
    return even if even[1].size < tight[1].size and even[1].all() else tight


def _lay_out(
    histogram: npt.NDArray[np.int64], settings: PackingSettings
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    num_pieces = int(histogram[1:].sum())
    if num_pieces > _MAX_PIECES:
        raise ValueError(
            f"these documents make {num_pieces:,} pieces of at most {settings.length:,} tokens; "
            f"one packing can have {_MAX_PIECES:,}. Pack fewer documents at a time."
        )
    max_documents = min(settings.max_documents or _MAX_PIECES, _MAX_PIECES)
    slot_rows, row_sizes = _kernels.lay_out(histogram, num_pieces, max_documents)
    return slot_rows, row_sizes

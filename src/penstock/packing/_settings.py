"""What a caller gives, checked at the border of the room and trusted inside: settings, and the lengths of documents.

The number of rows follows only from these; the key that breaks ties differently in each epoch is an argument of `pack`,
because it changes while the settings stay. After the policy for long documents is applied, one rule is left for the
kernels: a document is cut into pieces of `length` tokens and a remainder, and a document of no tokens has no piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Final, Literal, SupportsIndex, get_args

import numpy as np
import numpy.typing as npt

LongPolicy = Literal["split", "truncate", "drop"]

# The packer keeps tables with one entry per possible amount of free space, about 28 bytes per token of a row:
# 470 MB at this bound, which is sixteen times a context of a million tokens.
MAX_LENGTH: Final = 2**24
MAX_LIMIT: Final = 2**30
MAX_LIMITS: Final = 7


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

"""What a caller may choose about packing, checked once on construction.

The number of rows follows only from these settings and the lengths; the key that breaks ties
differently in each epoch is an argument of `pack`, because it changes while the settings stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Final, Literal, SupportsIndex, get_args

LongPolicy = Literal["split", "truncate", "drop"]

# The packer keeps tables with one entry per possible amount of free space, about 28 bytes per token of a row:
# 470 MB at this bound, which is sixteen times a context of a million tokens.
MAX_LENGTH: Final = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSettings:
    """How documents are put into rows of one length.

    >>> PackingSettings(length=4096)
    PackingSettings(length=4096, long='split', max_documents=None)

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

    def __post_init__(self) -> None:
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

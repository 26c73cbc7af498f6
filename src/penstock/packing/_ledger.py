"""Where every token went: the account of a packing, and the proof that nothing is lost silently.

Two balances hold for every ledger, and for every sum of ledgers:

    num_tokens        == tokens_placed + tokens_truncated + tokens_dropped
    num_rows * length == tokens_placed + padding_tokens

All figures follow from the lengths and the settings, so a ledger needs neither a packing nor a key:
every epoch of the same data has the same ledger. It costs a row count and a few passes over the lengths.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.packing._pack import count_rows
from penstock.packing._settings import PackingSettings, apply_long_policy, check_lengths


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

"""Rows that stand in for rows at which a mapped function fails: `map(fn, on_error="skip")`.

A batch must stay full, and stay a pure function of the plan. So the row in place of a failed one is a function of its
number alone: a chain of rows of the same epoch is drawn from the seed and the number, and the first at which no
function fails is taken, as it would come in its own place. Wherever the batch is computed, it is the same row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.order import derive_key
from penstock.plan._mapping import first_row

_logger = logging.getLogger(__name__)
_MOST_TRIES = 16

Compute = Callable[[int], Mapping[str, Any]]
"""A batch of this row alone, with the maps applied so far."""


@dataclass(slots=True)
class Replacing:
    """The replaced rows of one batch."""

    seed: int
    num_rows: int
    """Rows in an epoch."""
    places: set[int] = field(default_factory=set)
    """Of the replaced rows in the batch."""

    def stand_in(self, place: int, row: int, error: Exception, compute: Compute) -> dict[str, Any]:
        """What stands in place of a row that failed.

        Raises:
            Exception: the row's own error, when every row that was tried instead failed, too.
        """
        first = row // self.num_rows * self.num_rows
        for attempt in range(_MOST_TRIES):
            instead = first + derive_key(self.seed, "instead", row, attempt) % self.num_rows
            try:
                found = first_row(compute(instead))
            except Exception as other:  # noqa: BLE001 - whatever a user's function raises
                _logger.debug("Row %d cannot stand in for row %d: %r", instead, row, other)
                continue
            _logger.info("Row %d is replaced by row %d: %s: %s", row, instead, type(error).__name__, error)
            self.places.add(place)
            return found
        error.add_note(f"and {_MOST_TRIES} other rows that were tried in its place failed as well")
        raise error

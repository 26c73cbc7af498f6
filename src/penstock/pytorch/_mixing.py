"""A word about batches that are less mixed than people expect: in the log, where it stops no script."""

from __future__ import annotations

import logging

from penstock.errors import PenstockError
from penstock.plan import Plan
from penstock.pytorch._ranks import find_rank

_log = logging.getLogger(__name__)
_told: set[str] = set()


def tell_of_runs(plan: Plan, rank: int | None) -> None:
    """Say once, on the first rank, that a plan's shuffle leaves together what is stored together."""
    if (find_rank()[0] if rank is None else rank) != 0:
        return
    try:
        found = [mixing for mixing in plan.mixing() if mixing.is_far]
    except (PenstockError, OSError):  # the first batch that needs what is damaged says so
        return
    for mixing in found:
        message = (
            f"{mixing}. Prepare the data with shuffle=0 (--shuffle 0), mix more at a time with shuffle(seed, group=…), "
            "or, where random reads are cheap, use shuffle(seed, mode='full')."
        )
        if message not in _told:
            _told.add(message)
            _log.warning("%s", message)

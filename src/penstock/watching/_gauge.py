"""What a loader says about itself while it runs: batches that are ready, and time spent copying.

Torch's iterator has it in attributes that are not public; with a version that has others, nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Gauge = Callable[[], tuple[float, float]]
"""(batches ready now, seconds of copying so far); NaN for what the loader does not say."""


def gauge_of(loader: Any, batches: Any) -> Gauge | None:
    """How to ask this loader, whose loop is `batches`; None when there is nothing to ask."""
    if type(loader).__module__.startswith("penstock.") and callable(getattr(loader, "stats", None)):
        return lambda: _ask_penstock(loader)
    queue, held = getattr(batches, "_data_queue", None), getattr(batches, "_task_info", None)
    if callable(getattr(queue, "qsize", None)) and isinstance(held, dict):
        return lambda: _ask_torch(queue, held)
    return None


def _ask_penstock(loader: Any) -> tuple[float, float]:
    statistics = loader.stats()
    return statistics.num_queued, statistics.copy_seconds


def _ask_torch(queue: Any, held: dict[int, Any]) -> tuple[float, float]:
    """In the queue, and out of order beside it."""
    try:
        return queue.qsize() + sum(len(info) == 2 for info in held.values()), math.nan
    except (NotImplementedError, OSError, TypeError):  # no qsize on this system; a queue that is closed
        return math.nan, math.nan

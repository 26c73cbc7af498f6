"""Loader settings to compare: an *arm* is one combination of options, a *space* all that may be tried.

Without workers nothing is computed ahead, so options of workers have no effect: all such combinations are one arm.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.loader import simplify

Options = Mapping[str, Any]
Space = Mapping[str, Sequence[Any]]

MODELLED = ("num_workers", "prefetch", "prefetch_factor", "in_order")
"""Options whose effect can be ranked by a model of the measured times."""
_TORCHS_PREFETCH_FACTOR = 2
_COSTS = {"pin_memory": True, "persistent_workers": True, "in_order": False}
"""Values that cost something: memory that cannot be paged out, processes that stay alive, the order of batches."""


def default_space(num_cpus: int) -> dict[str, tuple[Any, ...]]:
    """What to try for a loader with torch's options: up to twice as many workers as processors, in case they wait."""
    counts = {0, 1, max(1, num_cpus // 2), num_cpus - 1, num_cpus, 2 * num_cpus}
    return {"num_workers": tuple(sorted(count for count in counts if count >= 0)), "prefetch_factor": (2, 4, 8, 16)}


def check_space(space: Space) -> None:
    """Refuse a space with nothing to choose from.

    Raises:
        ValueError, TypeError: it does not map option names to lists of values.
    """
    if not isinstance(space, Mapping) or not space:
        raise ValueError(f"space={space!r}: give values to try for at least one option: {{'num_workers': (0, 2)}}.")
    for name, values in space.items():
        if not isinstance(name, str) or not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise TypeError(f"space[{name!r}]={values!r}: expected a list of values to try, with at least one.")


def arms_of(space: Space) -> list[dict[str, Any]]:
    """Every combination once."""
    names = list(space)
    combined = (dict(zip(names, values, strict=True)) for values in itertools.product(*space.values()))
    return list({key_of(arm): arm for arm in map(simplify, combined)}.values())


def key_of(options: Options) -> tuple[tuple[str, str], ...]:
    """What identifies an arm."""
    return tuple(sorted((name, repr(value)) for name, value in options.items()))


def name_of(options: Options) -> str:
    """An arm as people write it."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "as it is"


def num_workers_of(options: Options) -> int:
    """Workers of an arm; 0 if that is not among its options."""
    count = options.get("num_workers")
    return count if isinstance(count, int) else 0


def num_ahead_of(options: Options) -> int:
    """Batches that are computed ahead."""
    workers, prefetch = num_workers_of(options), options.get("prefetch")
    if not workers:
        return 0
    if isinstance(prefetch, int):
        return max(1, prefetch)
    factor = options.get("prefetch_factor")
    return workers * (factor if isinstance(factor, int) else _TORCHS_PREFETCH_FACTOR)


def is_deeper(options: Options, than: Options) -> bool:
    """Whether two arms differ only in the queue, and this one has more batches ahead."""
    queues = ("prefetch", "prefetch_factor")
    rest, others = ({name: each[name] for name in each if name not in queues} for each in (options, than))
    return rest == others and num_ahead_of(options) > num_ahead_of(than)


def price_of(options: Options) -> tuple[int, int, int]:
    """What an arm costs besides time: first its workers, then batches in memory, then costly options."""
    special = sum(options.get(name, not costly) is costly for name, costly in _COSTS.items())
    return num_workers_of(options), num_ahead_of(options), special

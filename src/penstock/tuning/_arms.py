"""Loader settings to compare: an *arm* is one combination of options, a *space* all values that may be tried.

Without workers nothing is computed ahead, so options of workers have no effect: all such combinations are one arm.

A model says how fast an arm should be, from a few batches that were computed without workers, one after the other.
They and their steps are replayed through as many workers and as deep a queue as the arm has:

    worker     starts batch i when it is free and batch i - ahead was taken
    trainer    takes batch i when it is ready and step i - 1 is over

Together they must not need more than the processors can do. The ranking is useful even if the numbers are off: the
model only chooses which arms race (see `_race`), it never judges.
"""

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.loader import simplify

Options = Mapping[str, Any]
Space = Mapping[str, Sequence[Any]]

MODELLED = ("num_workers", "prefetch", "prefetch_factor", "in_order")
"""Options whose effect can be ranked by a model of the measured times."""
_TORCHS_PREFETCH_FACTOR = 2
_COSTS = {"pin_memory": True, "persistent_workers": True, "in_order": False}
"""Values that cost something: memory that cannot be paged out, processes that stay alive, the order of batches."""
_STEPS, _SETTLED = 240, 40
_ALIKE = 1.03
"""Predictions that differ by less count as equal."""
_MARGIN = 0.1
"""How much longer batches may take than the measured ones, beyond their own uncertainty: cores are contended."""
_CROWD = 0.01
"""Assumed cost of each worker beyond the number of processors, as a share of a step: switches, and cold caches."""


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
    combined = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
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


class _Predicted(NamedTuple):
    """An arm, and what the model says about it."""

    seconds: float
    """Of a step."""
    price: tuple[int, int, int]
    arm: Options

    @property
    def num_workers(self) -> int:
        return self.price[0]


class Look(NamedTuple):
    """What was measured in a job without workers."""

    produce: Sequence[float]
    """Seconds to make each batch, waiting included."""
    produce_cpu: float
    """Mean CPU seconds of one batch."""
    step: Sequence[float]
    """Seconds of each training step."""
    step_cpu: float
    """Mean CPU seconds of one step."""


def predict(look: Look, options: Options, num_cpus: int) -> float:
    """Seconds from one step to the next."""
    workers = num_workers_of(options)
    if not workers:
        return statistics.fmean(look.produce) + statistics.fmean(look.step)
    played = _play(look, workers, max(workers, num_ahead_of(options)), in_order=options.get("in_order", True))
    computed = (look.produce_cpu + look.step_cpu) / num_cpus
    return max(played, computed) * (1 + _CROWD * max(0, workers + 1 - num_cpus))


def choose_racers(arms: Sequence[Options], look: Look, num_cpus: int, count: int = 3) -> list[Options]:
    """The arms to race: those that should be fastest; among equals the cheapest with a margin, and a hedge either side.

    The cheapest of many equals is a borderline case: real batches are less even than the measured ones, and real cores
    more contended. So the first racer would still do if batches took longer. Another is cheaper, or has only a deeper
    queue, in case the margin was not needed; a third has more workers, in case it was not enough.
    """
    predicted = _rank(arms, look, num_cpus)
    near = _near(predicted)
    first = _with_margin(near, look, num_cpus)
    fewer = [each for each in near if each.num_workers < first.num_workers]
    same = [each for each in near if each.num_workers == first.num_workers and each.price > first.price]
    more = [each for each in near if each.num_workers > first.num_workers]
    most_of_fewer = [each for each in fewer if each.num_workers == fewer[-1].num_workers]
    fewest_of_more = [each for each in more if each.num_workers == more[0].num_workers]
    chosen = [first, *(_deep(most_of_fewer) or _deep(same)), *_deep(fewest_of_more)]
    chosen += [each for each in predicted if all(each is not other for other in chosen)]
    return [each.arm for each in chosen[:count]]


def _rank(arms: Iterable[Options], look: Look, num_cpus: int) -> list[_Predicted]:
    """The fastest first; of equals, the cheapest."""
    predicted = [_Predicted(predict(look, arm, num_cpus), price_of(arm), arm) for arm in arms]
    return sorted(predicted, key=lambda each: (each.seconds, each.price))


def _near(predicted: list[_Predicted]) -> list[_Predicted]:
    """Those as fast as the fastest, the cheapest first."""
    near = [each for each in predicted if each.seconds <= _ALIKE * predicted[0].seconds]
    return sorted(near, key=lambda each: each.price)


def _with_margin(near: list[_Predicted], look: Look, num_cpus: int) -> _Predicted:
    """The cheapest that would still be near the fastest if every batch took longer."""
    margin = 1 + _MARGIN + _uncertainty(look.produce)
    slower = look._replace(produce=[margin * seconds for seconds in look.produce])
    found = _near(_rank([each.arm for each in near], slower, num_cpus))[0]
    return next(each for each in near if each.arm is found.arm)


def _uncertainty(values: Sequence[float]) -> float:
    """Two standard errors of the mean, as a share of it: how far a few uneven batches may mislead."""
    if len(values) < 2 or not any(values):
        return 0.0
    return 2 * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


def _deep(candidates: list[_Predicted]) -> list[_Predicted]:
    """One with more batches ahead than most, if there is any."""
    return candidates[3 * len(candidates) // 4 :][:1]


def _play(look: Look, workers: int, ahead: int, *, in_order: bool) -> float:
    """Seconds per step of a pipeline whose batches are drawn from the measured ones, always in the same order."""
    draw = random.Random(0)  # noqa: S311 - not for secrets
    free = [0.0] * workers
    ready: list[float] = []  # when started batches are done; if order does not matter, a heap of those not taken
    taken: list[float] = []
    now, num_begun = 0.0, 0
    for number in range(_STEPS):
        while num_begun < number + ahead:
            done = max(heapq.heappop(free), taken[-1] if taken else 0.0) + draw.choice(look.produce)
            heapq.heappush(free, done)
            ready.append(done) if in_order else heapq.heappush(ready, done)
            num_begun += 1
        now = max(now, ready[number] if in_order else heapq.heappop(ready))
        taken.append(now)
        now += draw.choice(look.step)
    return (taken[-1] - taken[_SETTLED]) / (_STEPS - 1 - _SETTLED)

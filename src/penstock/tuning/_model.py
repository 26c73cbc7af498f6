"""How fast an arm should be, from a few batches that were computed without workers, one after the other.

The batches and steps that were measured are played again, through as many workers and as deep a queue as the arm has:

    worker     starts batch i when it is free and batch i - ahead was taken
    trainer    takes batch i when it is there and step i - 1 is over

What all of them compute must also fit on the processors. The ranking is right even where the numbers are not: the model
only chooses who races (see `_race`), it never judges.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from penstock.tuning._arms import Options, num_ahead_of, num_workers_of, price_of

_STEPS, _SETTLED = 240, 40
_ALIKE = 1.03
"""Predictions that differ by less are taken for equal."""
_CROWD = 0.01
"""Of the time of a step that each worker beyond the processors is taken to cost: switches, and cold caches."""


_Predicted = tuple[float, tuple[int, int, int], Options]
"""(seconds of a step, price, arm)"""


class Look(NamedTuple):
    """What was measured of a job without workers."""

    produce: Sequence[float]
    """Seconds to make each batch, waiting included."""
    produce_cpu: float
    """Mean processor seconds of one batch."""
    step: Sequence[float]
    """Seconds of each training step."""
    step_cpu: float
    """Mean processor seconds of one step."""


def predict(look: Look, options: Options, num_cpus: int) -> float:
    """Seconds from one step to the next."""
    workers = num_workers_of(options)
    if not workers:
        return statistics.fmean(look.produce) + statistics.fmean(look.step)
    played = _play(look, workers, max(workers, num_ahead_of(options)), in_order=options.get("in_order", True))
    computed = (look.produce_cpu + look.step_cpu) / num_cpus
    return max(played, computed) * (1 + _CROWD * max(0, workers + 1 - num_cpus))


def choose_racers(arms: Sequence[Options], look: Look, num_cpus: int, count: int = 3) -> list[Options]:
    """The arms to race: those that should be fastest, and among equals the cheapest and a hedge in each direction.

    The cheapest of many equals is at their edge: real batches are less even than those looked at, real cores more
    contended. So one racer is deeper inside (more batches ahead), and one has more workers.
    """
    predicted = sorted(((predict(look, arm, num_cpus), price_of(arm), arm) for arm in arms), key=lambda each: each[:2])
    near = sorted((each for each in predicted if each[0] <= _ALIKE * predicted[0][0]), key=lambda each: each[1])
    first = near[0]
    workers = first[1][0]
    deeper = _deep([each for each in near[1:] if each[1][0] == workers])
    wider = [each for each in near if each[1][0] > workers]
    wider = _deep([each for each in wider if each[1][0] == wider[0][1][0]])
    chosen = [first, *deeper, *wider]
    chosen += [each for each in predicted if all(each is not other for other in chosen)]
    return [arm for _, _, arm in chosen[:count]]


def _deep(candidates: list[_Predicted]) -> list[_Predicted]:
    """One that has more batches ahead than most, if there is any."""
    return candidates[3 * len(candidates) // 4 :][:1]


def _play(look: Look, workers: int, ahead: int, *, in_order: bool) -> float:
    """Seconds per step of a pipeline whose batches are drawn from those that were looked at, always in the same way."""
    draw = random.Random(0)  # noqa: S311 - not for secrets
    free = [0.0] * workers
    ready: list[float] = []  # of batches that were begun; out of order a heap of those not taken
    taken: list[float] = []
    now, num_begun = 0.0, 0
    for number in range(_STEPS):
        while num_begun < number + ahead:
            done = max(heapq.heappop(free), taken[-1] if taken else 0.0) + draw.choice(look.produce)
            heapq.heappush(free, done)
            heapq.heappush(ready, done) if not in_order else ready.append(done)
            num_begun += 1
        now = max(now, ready[number] if in_order else heapq.heappop(ready))
        taken.append(now)
        now += draw.choice(look.step)
    return (taken[-1] - taken[_SETTLED]) / (_STEPS - 1 - _SETTLED)

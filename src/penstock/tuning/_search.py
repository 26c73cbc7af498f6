"""The whole search: which arms are tried, in which order.

    look         some batches without workers -> the model chooses three racers by workers and prefetch
    race         between these three; in the place of those that fail, others
    no workers   against the leader, if the look was faster: the model does not know what handing over costs
    the rest     each other option by itself: the leader against the same with another value

Options are tried one after the other, not all combined: they seldom interact, and there are many combinations.
Without a look (if a loader cannot do without workers), or without options that the model knows, all arms have one
turn, and the best three race.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Generator, Sequence
from typing import Any

from penstock.loader import simplify
from penstock.tuning._arms import MODELLED, Options, Space, arms_of, key_of, num_workers_of
from penstock.tuning._model import Look, choose_racers
from penstock.tuning._race import Cost, Turn, race

_NUM_RACERS = 3

Asking = Generator[Options, float | None, Options | None]
_Race = Callable[[Sequence[Options]], Asking]


def search(space: Space, look: Look | None, num_cpus: int, turns: list[Turn], *, rounds: int, cost: Cost) -> Asking:
    """Yields the next arm, and is sent its rate, or None if it failed; returns the fastest.

    Turns are added to `turns`. A race may cost as much as `rounds` usual turns of each of its arms.
    """
    first = {name: values[0] for name, values in space.items()}
    known = {name: values for name, values in space.items() if name in MODELLED}
    others = {name: values for name, values in space.items() if name not in MODELLED and len(values) > 1}
    arms = [simplify(first | arm) for arm in arms_of(known)] if known else [first]
    run = functools.partial(race, turns=turns, rounds=rounds, cost=cost)
    leader = yield from _race_known(arms, look, num_cpus, turns, run)
    for name, values in others.items():
        if leader is not None and name in simplify({**leader, name: values[0]}):
            found = yield from run(_variants(leader, name, values))
            leader = leader if found is None else found
    return leader


def _race_known(arms: Sequence[Options], look: Look | None, num_cpus: int, turns: list[Turn], run: _Race) -> Asking:
    left = list(arms)
    if look is None and len(arms) > _NUM_RACERS:
        left = yield from _best_of_one_round(arms, turns)
    leader, num_wanted = None, _NUM_RACERS
    while left and num_wanted:
        chosen = left if look is None else choose_racers(left, look, num_cpus, num_wanted)
        found = yield from run(chosen if leader is None else [leader, *chosen])
        leader = leader if found is None else found
        left = [arm for arm in left if all(arm is not each for each in chosen)]
        num_wanted = len([arm for arm in chosen if not _rates(turns, arm)])  # those that failed
    alone = next((arm for arm in left if not num_workers_of(arm)), None)
    if look is not None and leader is not None and alone is not None and _was_faster(look, leader, turns):
        leader = yield from run([leader, alone])
    return leader


def _was_faster(look: Look, leader: Options, turns: Sequence[Turn]) -> bool:
    """Whether batches were made and used faster in the look, one after the other, than by the leader."""
    size = leader.get("batch_size")
    best = statistics.fmean(_rates(turns, leader)) / (size if isinstance(size, int) else 1)
    return statistics.fmean(look.produce) + statistics.fmean(look.step) < 1 / best


def _rates(turns: Sequence[Turn], arm: Options) -> list[float]:
    return [turn.rate for turn in turns if key_of(turn.arm) == key_of(arm)]


def _variants(leader: Options, name: str, values: Sequence[Any]) -> list[Options]:
    """An arm, and its copies with every other value of one option."""
    return [leader, *(simplify({**leader, name: value}) for value in values if value != leader[name])]


def _best_of_one_round(arms: Sequence[Options], turns: list[Turn]) -> Generator[Options, float | None, list[Options]]:
    yield from race(arms, turns, rounds=1)
    return [turn.arm for turn in sorted(turns, key=lambda turn: -turn.rate)[:_NUM_RACERS]]

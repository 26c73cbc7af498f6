"""The whole search: which arms are tried, in which order.

    look         some batches without workers -> the model chooses three racers by workers and prefetch
    race         between these three
    the rest     each other option by itself: the leader against the same with another value

Options are tried one after the other, not all combined: they seldom interact, and there are many combinations.
Without a look (if a loader cannot do without workers), or without options that the model knows, all arms have one
turn, and the best three race.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

from penstock.tuning._arms import MODELLED, Options, Space, arms_of, simplify
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
    while left:
        racers = left if look is None else choose_racers(left, look, num_cpus, _NUM_RACERS)
        leader = yield from run(racers)
        if leader is not None:
            return leader
        left = [arm for arm in left if all(arm is not racer for racer in racers)]  # those that failed are out
    return None


def _variants(leader: Options, name: str, values: Sequence[Any]) -> list[Options]:
    """An arm, and its copies with every other value of one option."""
    return [leader, *(simplify({**leader, name: value}) for value in values if value != leader[name])]


def _best_of_one_round(arms: Sequence[Options], turns: list[Turn]) -> Generator[Options, float | None, list[Options]]:
    yield from race(arms, turns, rounds=1)
    return [turn.arm for turn in sorted(turns, key=lambda turn: -turn.rate)[:_NUM_RACERS]]

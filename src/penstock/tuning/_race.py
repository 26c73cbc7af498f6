"""Race arms in turns: which is next, which drops out, and what the turns show. Pure: rates in, decisions out.

    round 1    a b c          each arm has a turn of some steps
    round 2    a b c          arms are compared round by round, so that drift of the machine cancels out
    round 3    a b            c is slower than the leader beyond the noise: its turns go to the others
    …                         until one is left, or the turns are used up: the last ones are for the best two

The *best* has the highest rate. The *cheapest* has the lowest price among those that are within the noise of the best.

The whole search says which arms race, in which order:

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
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

from penstock.loader import simplify
from penstock.report import Gain
from penstock.tuning._arms import (
    MODELLED,
    Look,
    Options,
    Space,
    arms_of,
    choose_racers,
    is_deeper,
    key_of,
    num_workers_of,
    price_of,
)

ROUNDS = 4
_NUM_RACERS = 3
_LEAST_ROUNDS = 2
"""One round says nothing about the noise."""
_STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Two-sided 95 % quantiles by degrees of freedom: the mean is wrong by more standard errors only one time in twenty."""
_HOPELESS = math.log(1.3)
"""An arm that is this much slower in its only round, or half as much over two, would need a miracle."""
_NEGLIGIBLE = math.log(1.01)
_NOT_WORTH_IT = math.log(1.05)
"""No saving is worth a larger loss than this, however noisy the machine."""
_ROUNDING = 1e-9

Cost = Callable[[Options], float]
"""What a turn of an arm costs, where a usual one costs 1."""
Asking = Generator[Options, float | None, Options | None]
"""Yields the next arm, and is sent its rate, or None if it failed; returns the fastest, or None if all failed."""


class Turn(NamedTuple):
    """One turn of an arm."""

    arm: Options
    round: int
    """Turns of one round are compared with each other."""
    rate: float
    """Work per second."""


class Comparison(NamedTuple):
    """How much faster one arm is than another: the mean logarithm of paired ratios, and its standard error."""

    mean: float
    error: float
    num_rounds: int

    @classmethod
    def of(cls, logs: Sequence[float]) -> Comparison:
        """From the logarithm of each round's ratio. Drift of the machine cancels; what is left is in the error."""
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        return cls(statistics.fmean(logs) if logs else 0.0, error, len(logs))

    @property
    def ratio(self) -> float:
        return math.exp(self.mean)

    @property
    def width(self) -> float:
        """Half the width of the 95 % interval of the mean."""
        return _STUDENT[min(self.num_rounds - 1, len(_STUDENT) - 1)] * self.error

    @property
    def gain(self) -> Gain:
        """For a page. One round says nothing about the noise: such a ratio may be wrong by all of itself."""
        return Gain(ratio=self.ratio, error=self.ratio * min(self.width, 1.0))

    def is_above(self, ratio: float) -> bool:
        """Whether the whole interval is above a ratio; two rounds are no evidence."""
        return self.num_rounds > 2 and self.mean - self.width > math.log(ratio)

    @property
    def is_clearly_slower(self) -> bool:
        """Whether it is slower, and more rounds would hardly change that."""
        if self.num_rounds < 3:
            return self.num_rounds > 0 and self.mean < -_HOPELESS / self.num_rounds
        return self.mean + min(self.width, _HOPELESS) < 0 and self.mean < -_NEGLIGIBLE

    @property
    def is_within_noise(self) -> bool:
        """Whether it is plausibly as fast, and at most a few percent slower.

        Turns are few and noisy: an arm that seems to lose exactly what a saving is worth has an even chance of losing
        more; one that seems to lose half of that, a small chance.
        """
        may_be_as_fast = self.mean + self.width > 0 or self.mean > -_NEGLIGIBLE
        return self.num_rounds > 1 and self.mean > -_NOT_WORTH_IT / 2 and may_be_as_fast


def compare(turns: Iterable[Turn], arm: Options, other: Options) -> Comparison:
    """One arm against another, over the rounds in which both had a turn."""
    rates = {(key_of(turn.arm), turn.round): turn.rate for turn in turns}
    mine, its = key_of(arm), key_of(other)
    rounds = [round_ for key, round_ in rates if key == mine and (its, round_) in rates]
    return Comparison.of([math.log(rates[mine, each] / rates[its, each]) for each in rounds])


def leader_of(turns: Sequence[Turn]) -> Options:
    """The fastest arm: the first that no other beats over the rounds they share."""
    arms = list({key_of(turn.arm): turn.arm for turn in turns}.values())
    best = arms[0]
    for arm in arms[1:]:
        found = compare(turns, arm, best)
        if found.mean > 0 or (not found.num_rounds and _rate(turns, arm) > _rate(turns, best)):
            best = arm
    return best


def cheapest_within_noise(turns: Sequence[Turn], best: Options) -> Options:
    """The arm to use: as fast as the best, as far as can be told, at the lowest price."""
    arms = list({key_of(turn.arm): turn.arm for turn in turns}.values())
    as_good = [arm for arm in arms if _without_luck(turns, arm, best, arms).is_within_noise]
    return min([best, *as_good], key=price_of)


def _without_luck(turns: Sequence[Turn], arm: Options, best: Options, arms: Sequence[Options]) -> Comparison:
    """An arm against the best. A deeper queue slows nothing down: where turns say so, both count as the same arm."""
    found = compare(turns, arm, best)
    deeper = [compare(turns, other, best) for other in arms if is_deeper(other, arm)]
    slower = [each.mean for each in deeper if each.num_rounds > 1 and each.mean < found.mean]
    return found._replace(mean=statistics.fmean([found.mean, *slower]))


def race(arms: Sequence[Options], turns: list[Turn], *, rounds: int = ROUNDS, cost: Cost = lambda arm: 1.0) -> Asking:
    """Race these arms, and add their turns to `turns`.

    There are `rounds` for each arm, as far as that is affordable if some cost more than others; the turns of an arm
    that drops out go to the others.
    """
    alive, left = list(arms), float(rounds * len(arms))
    own: list[Turn] = []
    number = max((turn.round for turn in turns), default=-1)
    while alive := _affordable(alive, own, left, cost):
        number += 1
        for arm in list(alive):
            left -= cost(arm)
            rate = yield arm
            if rate is None:
                alive.remove(arm)
            else:
                own.append(Turn(arm, number, rate))
                turns.append(own[-1])
        if not own:
            return None
        leader = leader_of(own)
        alive = [arm for arm in alive if not compare(own, arm, leader).is_clearly_slower]
        if len(alive) == 1 and number > own[0].round:
            break
    return leader_of(own) if own else None


def _affordable(alive: list[Options], turns: Sequence[Turn], left: float, cost: Cost) -> list[Options]:
    """The arms of the next round: all, the best two, or none. There are always two rounds."""
    if len({turn.round for turn in turns}) < _LEAST_ROUNDS:
        return alive
    if len(alive) > 2 and sum(map(cost, alive)) > left + _ROUNDING:
        leader = leader_of(turns)
        alive = sorted(alive, key=lambda arm: -compare(turns, arm, leader).mean)[:2]
    return alive if sum(map(cost, alive)) <= left + _ROUNDING else []


def search(space: Space, look: Look | None, num_cpus: int, turns: list[Turn], *, rounds: int, cost: Cost) -> Asking:
    """Race the arms of a space, and add their turns to `turns`; a race may cost `rounds` usual turns of each arm."""
    first = {name: values[0] for name, values in space.items()}
    known = {name: values for name, values in space.items() if name in MODELLED}
    others = {name: values for name, values in space.items() if name not in MODELLED and len(values) > 1}
    arms = [simplify(first | arm) for arm in arms_of(known)] if known else [first]
    run = functools.partial(race, turns=turns, rounds=rounds, cost=cost)
    leader = yield from _race_known(arms, look, num_cpus, turns, run)
    for name, values in others.items():
        if leader is not None and name in simplify({**leader, name: values[0]}):
            others_of = (simplify({**leader, name: value}) for value in values if value != leader[name])
            found = yield from run([leader, *others_of])
            leader = leader if found is None else found
    return leader


def _race_known(
    arms: Sequence[Options], look: Look | None, num_cpus: int, turns: list[Turn], run: Callable[..., Asking]
) -> Asking:
    left = list(arms)
    if look is None and len(arms) > _NUM_RACERS:
        yield from race(arms, turns, rounds=1)
        left = [turn.arm for turn in sorted(turns, key=lambda turn: -turn.rate)[:_NUM_RACERS]]
    leader, num_wanted = None, _NUM_RACERS
    while left and num_wanted:
        chosen = left if look is None else choose_racers(left, look, num_cpus, num_wanted)
        found = yield from run(chosen if leader is None else [leader, *chosen])
        leader = leader if found is None else found
        left = [arm for arm in left if all(arm is not each for each in chosen)]
        num_wanted = sum(not _rate(turns, arm) for arm in chosen)  # those that failed
    alone = next((arm for arm in left if not num_workers_of(arm)), None)
    if look is not None and leader is not None and alone is not None and _was_faster(look, leader, turns):
        leader = yield from run([leader, alone])
    return leader


def _was_faster(look: Look, leader: Options, turns: Sequence[Turn]) -> bool:
    """Whether batches were made and used faster in the look, one after the other, than by the leader."""
    size = leader.get("batch_size")
    best = _rate(turns, leader) / (size if isinstance(size, int) else 1)
    return statistics.fmean(look.produce) + statistics.fmean(look.step) < 1 / best


def _rate(turns: Sequence[Turn], arm: Options) -> float:
    """Mean over the arm's turns; 0 if it had none, or failed in all."""
    rates = [turn.rate for turn in turns if key_of(turn.arm) == key_of(arm)]
    return statistics.fmean(rates) if rates else 0.0

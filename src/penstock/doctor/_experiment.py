"""The experiment, as pure arithmetic: which settings have the next turn, and what the turns say.

    baseline, likeliest, baseline, …           where training clearly waits: the change that should help most
    baseline, replay, baseline, replay, …      how fast a loader that costs nothing would be: the ceiling
    baseline, trial, trial, …, baseline, …     a race of changed settings: after each round the slow ones drop out

A turn is some steps of the script with one *trial*: the batches as they are, the same ones again from memory, or
those of a loader rebuilt with a change. A gain is the ratio of a turn's rate to that of the baseline turns before and
after it, averaged over rounds on a logarithmic scale. Drift of the machine cancels; what is left is in the error.
"""

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from penstock.tuning import Comparison

TrialKind = Literal["as-is", "replay", "options", "penstock", "warm", "grouped", "threads"]
CEILING_ROUNDS, MOST_CEILING_ROUNDS, RACE_ROUNDS, MOST_RACE_ROUNDS = 3, 6, 5, 10
FEWEST_ROUNDS = 3
"""Fewer are no evidence."""
LEAST_GAIN = 1.05
"""Less is not worth a change, nor a reader's time."""
_NARROW = 0.05
HEALTHY_BELOW = 1.15
"""Replayed batches are warm in caches, and no worker competes for cores: jobs that never wait read 1.07 to 1.19."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to serve the script's batches."""

    number: int
    name: str
    """As people write it: `num_workers=4`."""
    kind: TrialKind
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options of the loader that differ."""

    @property
    def uses_own_loader(self) -> bool:
        """Whether the batches are those of the script's own loader, unchanged."""
        return self.kind in ("as-is", "threads")


AS_IS = Trial(number=0, name="as it is", kind="as-is")
"""The baseline: the script as it is."""
REPLAY = Trial(number=1, name="a loader that costs nothing", kind="replay")


class TurnResult(NamedTuple):
    """What happened in one turn."""

    trial: int
    rows: float
    """Samples that were trained on."""
    steps: int
    seconds: float
    wait_seconds: float
    """Of these, spent in `next()`."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.rows / max(self.seconds, 1e-9)


def compare_with_baseline(turns: Sequence[TurnResult], trial: int) -> Comparison | None:
    """A trial against the baseline, from all turns in the order in which they were taken; None before its first."""
    logs = []
    for number, turn in enumerate(turns):
        if turn.trial == trial and turn.rows > 0:
            beside = [*_nearest(reversed(turns[:number])), *_nearest(turns[number + 1 :])]
            if beside:
                logs.append(math.log(turn.rate) - statistics.fmean(math.log(each.rate) for each in beside))
    return Comparison.of(logs) if logs else None


def _nearest(turns: Any) -> list[TurnResult]:
    """The first baseline turn, if there is one."""
    return next(([turn] for turn in turns if turn.trial == AS_IS.number and turn.rows > 0), [])


def experiment(
    choose: Callable[[Sequence[TurnResult]], Sequence[Trial]], likeliest: Trial | None = None
) -> Generator[Trial, TurnResult | None, None]:
    """Yields the trial that has the next turn, and is sent its result, or None when it could not be tried.

    `choose` gets the turns so far, and names what to try. The likeliest is tried before anything else: if the run ends
    early, that is known.
    """
    turns: list[TurnResult] = []
    failed: set[int] = set()

    def take(trial: Trial) -> Generator[Trial, TurnResult | None, None]:
        result = yield trial
        if result is None:
            failed.add(trial.number)
        else:
            turns.append(result)

    yield from take(AS_IS)
    early = [] if likeliest is None else [likeliest]
    for done in range(1, FEWEST_ROUNDS + 1):
        for trial in early:
            yield from take(trial)
            early = [] if trial.number in failed else early
            yield from take(AS_IS)
        early = survivors(early, turns, done)
    for done in range(1, MOST_CEILING_ROUNDS + 1):
        yield from take(REPLAY)
        yield from take(AS_IS)
        if done >= CEILING_ROUNDS and (
            REPLAY.number in failed or is_clear(compare_with_baseline(turns, REPLAY.number))
        ):
            break
    alive = early + [trial for trial in choose(turns) if trial is not likeliest]
    for done in range(1, MOST_RACE_ROUNDS + 1):
        for trial in alive:
            yield from take(trial)
        alive = survivors([trial for trial in alive if trial.number not in failed], turns, done)
        if not alive:
            return
        yield from take(AS_IS)
        gains = [compare_with_baseline(turns, trial.number) for trial in alive]
        if done >= FEWEST_ROUNDS and all(is_narrow(gain) for gain in gains):
            return
        if done >= RACE_ROUNDS and not any(is_promising(gain) for gain in gains):
            return


def is_clear(ceiling: Comparison | None) -> bool:
    """Whether the whole interval of a ceiling is on one side of the border to healthy."""
    return ceiling is None or abs(ceiling.mean - math.log(HEALTHY_BELOW)) > ceiling.width


def is_narrow(gain: Comparison | None) -> bool:
    """Whether more rounds would hardly change a gain."""
    return gain is not None and gain.num_rounds >= FEWEST_ROUNDS and gain.gain.error < _NARROW * gain.ratio


def is_promising(gain: Comparison | None) -> bool:
    """Whether a change seems to help, and more rounds may show that it does."""
    return gain is not None and gain.ratio >= LEAST_GAIN and not gain.is_above(1.0)


def survivors(trials: Sequence[Trial], turns: Sequence[TurnResult], done: int) -> list[Trial]:
    """The trials that go on: at most three after the first round, two after the second; none that makes it slower.

    Before there is evidence, no trial drops out for a difference that is also found between baseline turns, and the
    first round decides less: starting workers alone may have disturbed it.
    """
    found = {trial.number: compare_with_baseline(turns, trial.number) for trial in trials}
    ratios = {number: each.ratio for number, each in found.items() if each is not None}
    best = max(ratios.values(), default=0.0)
    doubt = math.exp(-2 * _spread(turns) / math.sqrt(done)) if done < FEWEST_ROUNDS else 1.0
    least, share = (0.8, 0.7) if done == 1 else (1.0, 0.8)
    floor = doubt * max(least, share * best)
    kept = sorted((trial for trial in trials if ratios.get(trial.number, 0) >= floor), key=lambda t: -ratios[t.number])
    return kept[: 3 if done == 1 else 2]


def _spread(turns: Sequence[TurnResult]) -> float:
    """By how much the rates of baseline turns differ: the standard deviation of their logarithms."""
    logs = [math.log(turn.rate) for turn in turns if turn.trial == AS_IS.number and turn.rows > 0]
    return statistics.stdev(logs) if len(logs) > 1 else 0.0


def affordable_trials(num_turns: float) -> int:
    """How many trials to begin with so that the last of them get enough rounds to be evidence; at least one.

    All have a turn in the first round, three in the second, two in the third; each round ends with a baseline turn.
    """
    affordable = 1
    for count in range(2, 100):
        if count + min(count, 3) + min(count, 2) + FEWEST_ROUNDS > num_turns:
            break
        affordable = count
    return affordable

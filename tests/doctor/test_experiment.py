"""The experiment's arithmetic: whose turn it is, and what the turns say."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from penstock.doctor import (
    AS_IS,
    REPLAY,
    Trial,
    TurnClock,
    TurnClocks,
    TurnResult,
    affordable_trials,
    compare_with_baseline,
    experiment,
)

FAST = Trial(number=2, name="fast", kind="options", changes={"num_workers": 4})
SLOW = Trial(number=3, name="slow", kind="options", changes={"num_workers": 1})
BROKEN = Trial(number=4, name="broken", kind="options")


def turn(trial: int, rate: float) -> TurnResult:
    return TurnResult(trial=trial, rows=rate, steps=10, seconds=1.0, wait_seconds=0.1)


def conduct(
    rate_of: Callable[[Trial, int], float | None], trials: list[Trial], likeliest: Trial | None = None
) -> list[TurnResult]:
    """Run an experiment on a job whose rates are known."""
    turns: list[TurnResult] = []
    plan = experiment(lambda _: trials, likeliest)
    trial = next(plan)
    while True:
        rate = rate_of(trial, len(turns))
        result = None if rate is None else turn(trial.number, rate)
        if result is not None:
            turns.append(result)
        try:
            trial = plan.send(result)
        except StopIteration:
            return turns


def test_a_gain_is_the_ratio_to_the_turns_beside_it() -> None:
    found = compare_with_baseline([turn(0, 10), turn(2, 30), turn(0, 20), turn(2, 40)], 2)
    assert found is not None
    assert math.isclose(found.ratio, math.sqrt((30 / math.sqrt(10 * 20)) * (40 / 20)))


def test_a_machine_that_slows_down_all_the_time_does_not_change_a_gain() -> None:
    rates = {0: 100.0, 1: 200.0, 2: 150.0, 3: 50.0}
    turns = conduct(lambda trial, place: rates[trial.number] * 0.97**place, [FAST, SLOW])
    found = compare_with_baseline(turns, 2)
    assert found is not None
    assert math.isclose(found.ratio, 1.5, rel_tol=0.05)


def test_the_error_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = random.Random(1)
    hits = 0
    for _ in range(300):
        noisy = [turn(number % 2 * 2, (1.4 if number % 2 else 1.0) * generator.gauss(10, 1)) for number in range(11)]
        found = compare_with_baseline(noisy, 2)
        assert found is not None
        hits += abs(found.gain.ratio - 1.4) <= found.gain.error
    assert hits > 260


def test_one_round_is_no_evidence() -> None:
    found = compare_with_baseline([turn(0, 10), turn(2, 100), turn(0, 10)], 2)
    assert found is not None
    assert not found.is_above(1.0)
    assert found.gain.error >= found.ratio


@pytest.mark.parametrize(("rates", "is_clear"), [((15, 15.2, 14.9), True), ((15, 15.1), False), ((15, 9, 22), False)])
def test_a_gain_counts_when_its_whole_interval_does(rates: tuple[float, ...], is_clear: bool) -> None:
    turns = [each for rate in rates for each in (turn(0, 10), turn(2, rate))]
    found = compare_with_baseline([*turns, turn(0, 10)], 2)
    assert found is not None
    assert found.is_above(1.0) is is_clear
    assert not is_clear or found.gain.ratio - found.gain.error > 1


def test_a_gain_that_is_clear_needs_no_more_rounds() -> None:
    rates = {0: 10.0, 1: 20.0, 2: 18.0}
    turns = conduct(lambda trial, place: rates[trial.number] * (1 + 0.001 * (place % 3)), [FAST])
    assert sum(each.trial == 2 for each in turns) == 3


def test_a_change_that_makes_it_slower_drops_out_after_one_turn() -> None:
    rates = {0: 10.0, 1: 20.0, 2: 18.0, 3: 5.0}
    turns = conduct(lambda trial, place: rates[trial.number] * 1.3 ** (place % 2), [SLOW, FAST])
    assert sum(each.trial == 3 for each in turns) == 1
    assert sum(each.trial == 2 for each in turns) == 5


def test_a_gain_that_noise_hides_has_more_rounds_and_a_loss_has_not() -> None:
    def rounds(gain: float) -> int:
        noise = random.Random(5)
        rates = {0: 10.0, 1: 20.0, 2: 10.0 * gain}
        turns = conduct(lambda trial, place: rates[trial.number] * math.exp(noise.gauss(0, 0.3)), [FAST])
        return sum(each.trial == 2 for each in turns)

    assert rounds(1.3) > 5 >= rounds(0.8)


@pytest.mark.parametrize(
    ("baseline", "first", "num_turns"), [((39, 63, 60, 81), 59, 5), ((60,), 53, 5), ((60,), 45, 1)]
)
def test_a_change_whose_first_turn_was_slower_by_chance_has_another_on_a_noisy_machine(
    baseline: tuple[float, ...], first: float, num_turns: int
) -> None:
    plain, tried = itertools.cycle(baseline), itertools.chain([first], itertools.cycle([70.0, 90.0]))
    turns = conduct(lambda trial, _: next(tried) if trial is FAST else next(plain), [FAST])
    assert min(5, sum(each.trial == FAST.number for each in turns)) == num_turns


def test_a_change_that_cannot_be_tried_is_left_out() -> None:
    rates = {0: 10.0, 1: 20.0, 2: 18.0, 4: None}
    turns = conduct(lambda trial, place: rates[trial.number], [BROKEN, FAST])
    assert {each.trial for each in turns} == {0, 1, 2}


def test_with_nothing_to_try_only_the_ceiling_is_measured() -> None:
    turns = conduct(lambda trial, place: 10.0, [])
    assert {each.trial for each in turns} == {AS_IS.number, REPLAY.number}
    assert sum(each.trial == REPLAY.number for each in turns) == 3


def test_the_likeliest_change_is_measured_before_anything_else_and_races_with_the_others() -> None:
    rates = {0: 10.0, 1: 20.0, 2: 18.0, 3: 12.0}
    turns = conduct(lambda trial, place: rates[trial.number], [SLOW], likeliest=FAST)
    assert [each.trial for each in turns[:8]] == [0, 2, 0, 2, 0, 2, 0, 1]
    found = compare_with_baseline(turns[:7], 2)
    assert found is not None
    assert found.is_above(1.7)
    assert {each.trial for each in turns[13:]} == {0, 2, 3}


@pytest.mark.parametrize("rate", [6.0, None])
def test_a_likeliest_change_that_does_not_help_takes_one_turn(rate: float | None) -> None:
    rates = {0: 10.0, 1: 20.0, 2: rate, 3: 12.0}
    turns = conduct(lambda trial, place: rates[trial.number], [FAST, SLOW], likeliest=FAST)
    assert [each.trial for each in turns].count(2) == (rate is not None)
    assert {0, 1, 3} <= {each.trial for each in turns}


def test_an_unclear_ceiling_is_measured_for_longer() -> None:
    generator = random.Random(3)
    turns = conduct(lambda trial, place: generator.gauss(11 if trial is REPLAY else 10, 2), [])
    assert sum(each.trial == REPLAY.number for each in turns) > 3


def test_at_most_three_then_two_run_on() -> None:
    trials = [Trial(number=number, name=str(number), kind="options") for number in range(2, 8)]
    turns = conduct(lambda trial, _: 12 + trial.number / 10 if trial in trials else 10.0, trials)
    counts = [sum(turn.trial == trial.number for turn in turns) for trial in trials]
    assert counts == [1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(("epoch_steps", "whole"), [(10, True), (100_000, False), (None, False)])
def test_short_epochs_are_taken_whole(epoch_steps: int | None, whole: bool) -> None:
    clocks = TurnClocks(step_seconds=0.02, turn_seconds=1.0, slowest=0.0)
    assert clocks.fits_twice(epoch_steps, prefetched=4) is not whole


@pytest.mark.parametrize(("num_turns", "trials"), [(0, 1), (6, 1), (9, 2), (12, 4), (14, 6)])
def test_no_more_is_tried_than_there_is_time_for_three_rounds_of(num_turns: int, trials: int) -> None:
    assert affordable_trials(num_turns) == trials


def hand_over(clock: TurnClock, ready: list[float]) -> None:
    for number, count in enumerate(ready):
        now = number * 10_000_000
        clock.handed_over(now, now, 1, is_disturbed=False, num_ready=lambda count=count: count)


def new_clock(*, warm_up: int = 2, steps: int = 10) -> TurnClock:
    return TurnClock(2, warm_up=warm_up, steps=steps, longest_seconds=10.0)


def test_steps_that_live_on_a_queue_that_runs_down_do_not_count() -> None:
    clock = new_clock()
    hand_over(clock, [30 - number for number in range(30)])
    assert not clock.is_over
    clock = new_clock()
    hand_over(clock, [*(30 - number for number in range(30)), *([0] * 20)])
    assert clock.is_over
    assert clock.result.steps < 30


def test_a_queue_that_runs_down_before_each_slow_batch_and_is_full_behind_it_does_not_run_down() -> None:
    clock = new_clock(steps=30)
    hand_over(clock, [7, 7, 7, 7, 6, 5, 4, 3, 2, 1, 0] * 4)
    assert clock.is_over
    assert clock.result.steps >= 30


def test_a_queue_that_is_empty_needs_no_more_steps_to_warm_up() -> None:
    clock = new_clock(warm_up=30)
    hand_over(clock, [3, 2, *([0] * 16)])
    assert clock.is_over


@pytest.mark.parametrize("ready", [[4, 3, 4, 3] * 4, [0] * 16, [math.nan] * 16])
def test_steps_beside_a_queue_that_stays_as_it_is_count_at_once(ready: list[float]) -> None:
    clock = new_clock()
    hand_over(clock, ready)
    assert clock.is_over
    assert clock.result.steps >= 10


def test_turns_of_a_job_with_slow_batches_are_as_fast_as_the_job() -> None:
    """Every sixteenth batch takes long; wherever a turn ends, the next one goes on."""
    periods = itertools.cycle([0.015] * 15 + [0.18])
    clocks = TurnClocks(step_seconds=0.015, turn_seconds=0.67, slowest=0.18)
    now, rows, seconds = 0, 0.0, 0.0
    for _ in range(40):
        clock = clocks.make(AS_IS, warm_up=13)
        while not clock.is_over:
            now += int(1e9 * next(periods))
            clock.handed_over(now, now, 1, is_disturbed=False, num_ready=lambda: math.nan)
        rows, seconds = rows + clock.result.rows, seconds + clock.result.seconds
        clocks.add(clock.result)
    assert math.isclose(rows / seconds, 16 / (15 * 0.015 + 0.18), rel_tol=0.05)


@pytest.mark.parametrize(("pace", "steps"), [(0.4, 8), (0.01, 100), (1e-9, 4096)])
def test_a_turn_has_steps_for_its_time_neither_too_few_nor_too_many(pace: float, steps: int) -> None:
    clocks = TurnClocks(step_seconds=pace, turn_seconds=1.0, slowest=0.0)
    for multiple, expected in ((1, steps), (32, math.ceil(steps / 32) * 32)):
        clock = clocks.make(AS_IS, warm_up=0, multiple_of=multiple)
        num_steps = -1  # the first batch only starts the clock
        while not clock.is_over:
            clock.handed_over(0, 0, 1, is_disturbed=False, num_ready=lambda: math.nan)
            num_steps += 1
        assert num_steps == expected


def test_a_turn_waits_until_some_worker_may_be_at_a_slow_batch() -> None:
    even, uneven = (TurnClocks(step_seconds=0.01, turn_seconds=1.0, slowest=slow) for slow in (0.02, 0.30))
    assert even.warm_up_steps(AS_IS, 4) == 5
    assert uneven.warm_up_steps(AS_IS, 4) == 30
    assert uneven.warm_up_steps(FAST, 4) == 60  # its loader is new

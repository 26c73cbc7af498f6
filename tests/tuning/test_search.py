"""The search over measured arms: who races, who drops out, what is best, and what is cheapest."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.tuning import (
    Look,
    Options,
    Turn,
    arms_of,
    cheapest_within_noise,
    check_space,
    choose_racers,
    compare,
    default_space,
    key_of,
    leader_of,
    predict,
    race,
    search,
)

WIDTHS = ((2, 1), (2, 8), (3, 4))
GRID = {"num_workers": (1, 2, 3, 4, 6), "prefetch_factor": (1, 2, 4, 8, 16)}


def run(asking: Any, rate: Callable[[Options], float | None]) -> tuple[Options | None, list[Options]]:
    """What a search returns, and the arms that had a turn."""
    asked = []
    try:
        arm = next(asking)
        while True:
            asked.append(arm)
            arm = asking.send(rate(arm))
    except StopIteration as end:
        return end.value, asked


def equal(arm: Options) -> float:
    return 1.0


def uneven(mean: float, spread: float, count: int = 30) -> list[float]:
    draw = random.Random(3)
    return [max(mean / 4, draw.gauss(mean, spread)) for _ in range(count)]


def test_without_workers_all_options_of_workers_are_one_arm():
    arms = arms_of({"num_workers": (0, 2), "prefetch_factor": (2, 8), "persistent_workers": (False, True)})
    assert len(arms) == 1 + 4
    assert {"num_workers": 0} in arms


def test_the_default_space_goes_from_no_workers_to_twice_the_processors():
    assert default_space(2)["num_workers"] == (0, 1, 2, 4)
    assert default_space(1)["num_workers"] == (0, 1, 2)


@pytest.mark.parametrize("space", [{}, {"num_workers": 3}, {"num_workers": []}, {"workers": "thread"}])
def test_a_space_with_nothing_to_choose_from_is_refused(space):
    with pytest.raises((ValueError, TypeError), match="space"):
        check_space(space)


def test_the_model_knows_that_waiting_is_shared_by_workers_and_computing_by_processors():
    waits = Look([0.040] * 9, 0.0, [0.010] * 9, 0.0)
    assert predict(waits, {"num_workers": 0}, 2) == pytest.approx(0.050)
    assert predict(waits, {"num_workers": 1}, 8) == pytest.approx(0.040)
    assert predict(waits, {"num_workers": 4}, 8) == pytest.approx(0.010, rel=0.01)
    computes = Look([0.040] * 9, 0.040, [0.010] * 9, 0.010)
    assert predict(computes, {"num_workers": 4}, 2) >= 0.025  # 50 ms of computing on two processors
    assert predict(computes, {"num_workers": 4}, 8) == pytest.approx(0.010, rel=0.01)


def test_the_model_knows_that_uneven_batches_need_a_deeper_queue():
    look = Look([0.004] * 19 + [0.080], 0.0, [0.010] * 20, 0.0)
    shallow, deep = (predict(look, {"num_workers": 2, "prefetch_factor": depth}, 8) for depth in (1, 8))
    assert shallow > 1.1 * deep
    out_of_order = predict(look, {"num_workers": 2, "prefetch_factor": 1, "in_order": False}, 8)
    assert out_of_order < shallow


def test_among_equals_the_racers_are_the_cheapest_a_deeper_and_a_wider_one():
    look = Look([0.015] * 9, 0.0, [0.010] * 9, 0.0)
    racers = choose_racers(arms_of(GRID), look, 8)
    assert racers[0] == {"num_workers": 2, "prefetch_factor": 1}
    assert racers[1]["num_workers"] == 2
    assert racers[1]["prefetch_factor"] > 1
    assert racers[2]["num_workers"] == 3


def test_a_race_drops_who_is_slower_beyond_noise_and_gives_its_turns_to_the_others():
    rates = {0: 100.0, 1: 99.5, 2: 50.0}
    turns: list[Turn] = []
    draw = random.Random(1)
    asking = race([{"a": arm} for arm in rates], turns)
    leader, asked = run(asking, lambda arm: rates[arm["a"]] * draw.gauss(1, 0.01))
    assert leader in ({"a": 0}, {"a": 1})
    assert asked.count({"a": 2}) == 1
    assert asked.count({"a": 0}) > 4
    assert len(asked) <= 12


@pytest.mark.parametrize("look", [None, Look([0.015] * 9, 0.0, [0.010] * 9, 0.0)])
def test_a_search_ends_when_every_arm_has_failed(look):
    turns: list[Turn] = []
    leader, asked = run(search(GRID, look, 8, turns, rounds=4, cost=equal), lambda arm: None)
    assert (leader, turns) == (None, [])
    assert sorted(map(str, asked)) == sorted(map(str, arms_of(GRID)))


def test_turns_that_cost_more_are_fewer_and_the_last_ones_are_for_the_best_two():
    costs, slowest = {0: 1.0, 1: 1.0, 2: 1.3}, iter((90.0, 104.0, 93.0))
    asking = race([{"a": arm} for arm in costs], [], rounds=4, cost=lambda arm: costs[arm["a"]])
    _, asked = run(asking, lambda arm: next(slowest) if arm["a"] == 2 else 100.0)
    assert [arm["a"] for arm in asked] == [0, 1, 2] * 3 + [0, 1]
    assert sum(costs[arm["a"]] for arm in asked) <= 12


def test_there_are_two_rounds_whatever_they_cost():
    _, asked = run(race([{"a": 0}, {"a": 1}], [], rounds=2, cost=lambda arm: 9.0), lambda arm: 5.0)
    assert [arm["a"] for arm in asked] == [0, 1, 0, 1]


def test_an_arm_that_seems_to_lose_nearly_as_much_as_is_worth_it_is_not_taken_however_noisy_the_turns():
    cheap, best = {"num_workers": 2}, {"num_workers": 3}
    for loss, chosen in ((0.96, best), (0.985, cheap)):
        rates = ((100 * loss, 90), (100 * loss, 110), (90 * loss, 100), (110 * loss, 100))
        turns = [
            Turn(arm, number, rate)
            for number, both in enumerate(rates)
            for arm, rate in zip((cheap, best), both, strict=True)
        ]
        assert compare(turns, cheap, best).width > 0.1
        assert cheapest_within_noise(turns, best) == chosen


def test_a_queue_that_seems_faster_than_a_deeper_one_was_lucky():
    shallow, deep, best = ({"num_workers": workers, "prefetch_factor": 2 * depth} for workers, depth in WIDTHS)
    rates = ((99, 92, 100), (96, 94, 99), (101, 93, 101), (96, 93, 100))
    turns = [
        Turn(arm, number, rate)
        for number, all_ in enumerate(rates)
        for arm, rate in zip((shallow, deep, best), all_, strict=True)
    ]
    assert cheapest_within_noise([turn for turn in turns if turn.arm != deep], best) == shallow
    assert cheapest_within_noise(turns, best) == best


def test_the_first_racer_is_not_at_the_edge_when_a_few_uneven_batches_leave_much_open():
    even = Look([0.0155] * 30, 0.0, [0.010] * 30, 0.0)
    assert choose_racers(arms_of(GRID), even, 8)[0]["num_workers"] == 2
    open_ = Look([0.010] * 24 + [0.0375] * 6, 0.0, [0.010] * 30, 0.0)  # the same mean
    racers = choose_racers(arms_of(GRID), open_, 8)
    assert racers[0]["num_workers"] == 3
    assert {racer["num_workers"] for racer in racers} == {2, 3, 4}  # a hedge on each side


def test_drift_of_the_machine_does_not_decide_a_race():
    slowing = iter(range(1, 1000))
    turns: list[Turn] = []
    leader, _ = run(
        race([{"a": 0}, {"a": 1}], turns), lambda arm: (110 if arm["a"] else 100) / (1 + 0.02 * next(slowing))
    )
    assert leader == {"a": 1}
    assert compare(turns, {"a": 0}, {"a": 1}).is_clearly_slower


def test_the_cheapest_within_the_noise_of_the_best_is_told_from_the_best():
    few, many, slow = {"num_workers": 2}, {"num_workers": 8}, {"num_workers": 1}
    rates = {0: (100, 101.5, 60), 1: (103, 102, 61), 2: (99, 101, 59), 3: (101, 101.6, 60)}
    turns = [
        Turn(arm, number, rate)
        for number, all_ in rates.items()
        for arm, rate in zip((few, many, slow), all_, strict=True)
    ]
    best = leader_of(turns)
    assert best == many
    assert cheapest_within_noise(turns, best) == few


def test_an_arm_that_fails_is_out_and_the_rest_goes_on():
    turns: list[Turn] = []
    leader, asked = run(race([{"a": 0}, {"a": 1}], turns), lambda arm: None if arm["a"] == 0 else 5.0)
    assert leader == {"a": 1}
    assert asked.count({"a": 0}) == 1
    assert run(race([{"a": 0}], []), lambda arm: None) == (None, [{"a": 0}])


def test_when_all_racers_fail_the_others_are_tried():
    look = Look([0.015] * 9, 0.0, [0.010] * 9, 0.0)
    found, asked = run(
        search(GRID, look, 8, [], rounds=2, cost=equal), lambda arm: 1.0 if arm["num_workers"] > 4 else None
    )
    assert found is not None
    assert found["num_workers"] == 6
    assert len(asked) > 3


def test_others_race_in_the_place_of_racers_that_fail():
    look = Look([0.015] * 9, 0.0, [0.010] * 9, 0.0)
    turns: list[Turn] = []
    found, _ = run(
        search(GRID, look, 8, turns, rounds=2, cost=equal), lambda arm: None if arm["num_workers"] == 3 else 1.0
    )
    assert found["num_workers"] != 3
    assert len({key_of(turn.arm) for turn in turns}) == 3


@pytest.mark.parametrize(("alone", "fastest"), [(9000.0, 0), (500.0, 2)])
def test_no_workers_win_where_handing_over_takes_longer_than_making_a_batch(alone: float, fastest: int):
    look = Look([0.00010] * 9, 0.0001, [0.00001] * 9, 0.00001)
    space = {"num_workers": (0, 2, 4), "prefetch_factor": (2, 4)}
    turns: list[Turn] = []
    rates = {0: alone, 2: 800.0, 4: 700.0}
    found, _ = run(search(space, look, 2, turns, rounds=2, cost=equal), lambda arm: rates[arm["num_workers"]])
    assert found["num_workers"] == fastest
    assert cheapest_within_noise(turns, found)["num_workers"] == fastest


def test_other_options_are_tried_one_after_the_other_on_the_winner():
    look = Look([0.015] * 9, 0.0, [0.010] * 9, 0.0)
    space = {**GRID, "pin_memory": (False, True), "mine": ("a", "b", "c")}
    found, asked = run(
        search(space, look, 8, [], rounds=4, cost=equal),
        lambda arm: (1.0 + 0.3 * (arm["mine"] == "c")) * (1 + 0.3 * arm["pin_memory"]) * arm["num_workers"],
    )
    assert (found["pin_memory"], found["mine"], found["num_workers"]) == (True, "c", 3)
    assert len(asked) < 60


def test_without_options_that_the_model_knows_every_arm_has_a_turn_and_the_best_race():
    found, asked = run(
        search({"mine": tuple(range(9))}, None, 8, [], rounds=3, cost=equal), lambda arm: 1.0 + arm["mine"]
    )
    assert found == {"mine": 8}
    assert {arm["mine"] for arm in asked} == set(range(9))


@pytest.mark.parametrize("kind", ["waits", "computes", "uneven", "light", "step-bound"])
def test_the_search_finds_a_setting_near_the_best_with_a_quarter_of_the_grids_steps(kind):
    """Against a stand-in for the machine: the model's own arithmetic, with other batches, noise, and hand-over."""
    looks = {
        "waits": Look(uneven(0.030, 0.004), 0.001, [0.010] * 30, 0.001),
        "computes": Look(uneven(0.020, 0.004), 0.020, [0.010] * 30, 0.002),
        "uneven": Look([0.005] * 27 + [0.120] * 3, 0.004, [0.012] * 30, 0.001),
        "light": Look(uneven(0.001, 0.0002), 0.001, [0.010] * 30, 0.001),
        "step-bound": Look(uneven(0.002, 0.0005), 0.002, [0.030] * 30, 0.028),
    }
    look, good = looks[kind], 0
    arms = arms_of(GRID)
    truth = {str(arm): 1 / (predict(look, arm, 2) * (1 + 0.004 * arm["num_workers"]) + 0.0003) for arm in arms}
    for seed in range(20):
        draw = random.Random(seed)
        seen = look._replace(produce=draw.choices(look.produce, k=30), step=draw.choices(look.step, k=30))
        turns: list[Turn] = []
        found, asked = run(
            search(GRID, seen, 2, turns, rounds=4, cost=equal),
            lambda arm, draw=draw: truth[str(arm)] * draw.gauss(1, 0.04),
        )
        chosen = cheapest_within_noise(turns, found)
        good += truth[str(chosen)] > 0.95 * max(truth.values())
        assert 32 + 19 * len(asked) <= 0.26 * 40 * len(arms)
    assert good >= 19

"""Loops of a number of steps: what frameworks need that take every epoch to be as long as the first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from accelerate import skip_first_batches

import penstock
from penstock.plan import Plan
from pytorch.examples import documents, numbers, plain_batch, received

PLANS = {
    "carried": lambda: numbers(26).shuffle(seed=1).batch(4),
    "dropped": lambda: numbers(26).shuffle(seed=1).batch(4, tail="drop"),
    "short": lambda: numbers(26).shuffle(seed=1).batch(4, tail="short"),
    "packed": lambda: documents(60).shuffle(seed=1).pack(32).batch(4),
    "by tokens": lambda: documents(60).shuffle(seed=1).pad().batch(tokens=128, multiple=2),
    "by tokens, short": lambda: documents(61).shuffle(seed=1).pad().batch(tokens=128, multiple=2, tail="short"),
}


def run_of(plan: Plan) -> list[dict[str, Any]]:
    """The first 30 batches of the endless run."""
    loader = penstock.DataLoader(plan, epochs=None, num_workers=0)
    return [plain_batch(batch) for batch in itertools.islice(loader, 30)]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("steps", [1, 5, 7, 11])
def test_loops_of_steps_laid_end_to_end_are_the_run(name: str, steps: int) -> None:
    plan = PLANS[name]()
    loader = penstock.DataLoader(plan, steps=steps, num_workers=1)
    loops = [received(loader) for _ in range(-(-30 // steps))]
    assert {len(loop) for loop in loops} == {steps} == {len(loader)}
    assert list(itertools.chain(*loops))[:30] == run_of(plan)


@pytest.mark.parametrize("name", PLANS)
def test_a_state_from_any_step_resumes_its_loop(name: str) -> None:
    plan = PLANS[name]()
    run = run_of(plan)
    for done in range(16):
        loader = penstock.DataLoader(plan, epochs=None, num_workers=0)
        for _ in itertools.islice(loader, done):
            pass
        again = penstock.DataLoader(plan, steps=5, num_workers=0)
        again.load_state_dict(loader.state_dict())
        assert len(again) == 5
        assert received(again) == run[done : done // 5 * 5 + 5]
        assert received(again) == run[done // 5 * 5 + 5 : done // 5 * 5 + 10]


@pytest.mark.parametrize("name", PLANS)
def test_frameworks_count_loops_as_epochs(name: str) -> None:
    plan = PLANS[name]()
    run = run_of(plan)
    for epoch, num_skipped in ((0, 3), (2, 0), (3, 4)):
        loader = penstock.DataLoader(plan, steps=5, num_workers=1)
        loader.set_epoch(epoch)
        assert received(skip_first_batches(loader, num_skipped)) == run[5 * epoch + num_skipped : 5 * epoch + 5]
        assert received(loader) == run[5 * epoch + 5 : 5 * epoch + 10]


def test_parts_of_steps_are_counted_as_batches() -> None:
    loader = penstock.DataLoader(numbers(24).batch(8), steps=2, micro_batch=4, num_workers=0)
    assert len(loader) == 4
    assert [batch["x"][0].item() for batch in loader] == [0, 4, 8, 12]
    assert [batch["x"][0].item() for batch in loader] == [16, 20, 0, 4]


def test_a_loop_of_steps_that_is_left_is_not_continued() -> None:
    loader = penstock.DataLoader(numbers(24).batch(4), steps=4, num_workers=0)
    next(iter(loader))
    with pytest.warns(UserWarning, match="The last loop left early: its last 12 rows are skipped and the next loop"):
        assert next(iter(loader))["x"].tolist() == [16, 17, 18, 19]


def test_a_loop_that_never_ends_is_in_every_epoch() -> None:
    """Lightning counts loops, and tells the sampler so when the loop has begun."""
    plan = numbers(8).shuffle(seed=1).batch(4)
    loader = penstock.DataLoader(plan, epochs=None, num_workers=0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "row": 4})
    loop = iter(loader)
    next(loop)
    loader.set_epoch(0)
    assert plain_batch(next(loop)) == plain_batch(plan.read(0, epoch=4))


def test_steps_and_epochs_are_not_given_together() -> None:
    with pytest.raises(ValueError, match="epochs=2 with steps=3: give one of them"):
        penstock.DataLoader(numbers(8).batch(4), epochs=2, steps=3)
    with pytest.raises(ValueError, match="steps=0; expected an integer of at least 1"):
        penstock.DataLoader(numbers(8).batch(4), steps=0)
    with pytest.raises(ValueError, match=r"steps=3 is for plans; .* itertools.islice\(loader, 3\)"):
        penstock.DataLoader(range(8), steps=3)


def test_a_plan_without_batches_has_no_steps() -> None:
    loader = penstock.DataLoader(numbers(3).batch(4, tail="drop"), steps=2, num_workers=0)
    with pytest.raises(ValueError, match=r"no batches \(3 rows\), so a loop cannot have steps=2"):
        next(iter(loader))

"""What a page of the doctor points at."""

from __future__ import annotations

import pytest

from penstock.diagnosis._page import long_waits
from penstock.report import StepTimes


@pytest.mark.parametrize(
    ("wait", "step", "expected"),
    [
        ((0.2, 0.0, 0.0, 0.2, 0.2, 0.0), 0.02, ((7, 8), (10, 12))),  # a few hold up the others
        ((0.2,) * 4, 0.02, ((7, 11),)),  # all wait alike
        ((0.0001,) * 4, 0.02, ()),  # nobody waits
        ((), 0.02, ()),
    ],
)
def test_the_steps_of_a_finding_are_those_that_waited(
    wait: tuple[float, ...], step: float, expected: tuple[tuple[int, int], ...]
) -> None:
    assert long_waits(StepTimes(wait=wait, step=(step,) * len(wait), first=7)) == expected

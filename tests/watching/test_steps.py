"""Steps of long runs in little memory: what is kept is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.watching._summary import StepHistory, StepRow


def row(begin: float, wait: float, step: float = 1.0, queued: float = math.nan) -> StepRow:
    return StepRow(begin, wait, step, math.nan, 0.5, 0.0, 1.0, 0.0, queued)


def history_of(waits: np.ndarray) -> StepHistory:
    history = StepHistory()
    for number, wait in enumerate(waits):
        history.add(row(float(number), float(wait)))
    return history


@given(st.lists(st.floats(0, 10), max_size=600))
def test_sums_and_the_latest_steps_are_exact(waits: list[float]) -> None:
    history = history_of(np.array(waits))
    first, rows = history.latest()
    assert history.num_added == history.num_steps == len(waits)
    assert (first, rows[:, 1].tolist()) == (0, waits)
    if waits:
        assert history.total("wait") == pytest.approx(sum(waits))
        assert history.mean("step") == 1.0
        assert history.means("wait").tolist() == waits
        assert [seconds for _, seconds in history.longest()] == sorted(waits, reverse=True)[:20]
    assert math.isnan(history.mean("queued"))


def test_a_long_run_is_kept_as_means_and_nothing_grows() -> None:
    waits = np.random.default_rng(5).exponential(0.01, 20_000)
    history = history_of(waits)
    assert history.steps_per_block == 16
    means = history.means("wait")
    assert len(means) == 1250
    assert means == pytest.approx(waits.reshape(1250, 16).mean(axis=1))
    first, rows = history.latest()
    assert (first, len(rows)) == (20_000 - 4096, 4096)
    assert history.longest()[0] == (int(waits.argmax()), waits.max())
    for share in (0.5, 0.9, 0.99):
        assert history.wait_quantile(share) == pytest.approx(np.quantile(waits, share), rel=0.06)


def test_what_was_not_measured_counts_for_nothing() -> None:
    history = StepHistory()
    for number in range(4):
        history.add(row(number, 0.0, queued=math.nan if number % 2 else 3.0))
    assert history.mean("queued") == 3.0
    assert np.isnan(history.means("queued")).tolist() == [False, True, False, True]


def test_an_empty_history_has_no_quantiles() -> None:
    assert math.isnan(StepHistory().wait_quantile(0.5))
    assert StepHistory().longest() == []

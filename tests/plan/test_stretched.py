"""Epochs of another length: take, skip and repeat change where they begin and end, and no row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import StageError, StateError
from penstock.loader import Cursor
from penstock.plan import Plan
from plan.examples import assert_same, shuffled, tokens_dataset


def numbers(count: int = 10) -> Any:
    return penstock.from_arrays({"x": np.arange(count)})


def epoch(plan: Plan, number: int) -> list[int]:
    found: list[int] = plan.batch(plan.num_rows, tail="short").read(0, number)["x"].tolist()
    return found


def test_what_is_taken_and_what_is_skipped_make_up_the_epoch() -> None:
    whole = numbers().shuffle(seed=3)
    for number in range(3):
        taken, skipped = epoch(whole.take(rows=4), number), epoch(whole.skip(rows=4), number)
        assert (len(taken), len(skipped)) == (4, 6)
        assert taken + skipped == epoch(whole, number)


def test_without_a_shuffle_the_same_rows_are_taken_in_every_epoch() -> None:
    plan = numbers().as_plan().take(rows=3)
    assert [epoch(plan, number) for number in range(3)] == [[0, 1, 2]] * 3


def test_more_rows_than_there_are_come_in_several_passes() -> None:
    plan = numbers(4).as_plan().take(rows=6)
    assert [epoch(plan, number) for number in range(2)] == [[0, 1, 2, 3, 0, 1]] * 2


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 4))
def test_repeating_joins_epochs_and_changes_no_row_of_the_run(data: st.DataObject, count: int, times: int) -> None:
    plain = shuffled(numbers(count), data.draw).batch(3)
    repeated = Plan(plain.source, plain.stages[:-1]).repeat(times).batch(3)
    assert repeated.num_rows == times * count
    for row in range(2 * times * count):
        assert_same(repeated.read_at(row), plain.read_at(row))


@pytest.mark.parametrize("cut", ["window", "pack"])
def test_a_budget_of_tokens_is_rounded_down_to_rows(cut: str) -> None:
    rows = getattr(tokens_dataset([8] * 10).shuffle(seed=1), cut)(8)
    assert rows.take(tokens=39).num_rows == 4
    assert rows.take(tokens=400e0).num_rows == 50
    assert rows.take(tokens=160).ledger().num_passes == 2


def test_the_ledger_says_how_many_passes_an_epoch_touches_and_what_it_leaves_out() -> None:
    packed = tokens_dataset([5, 3, 8, 7, 2, 9]).shuffle(seed=1).pack(8)
    ledger = packed.take(rows=2 * packed.num_rows + 1).ledger()
    assert (ledger.num_passes, ledger.rows_left_out) == (3, packed.num_rows - 1)
    assert ledger.num_rows + ledger.rows_left_out == ledger.num_passes * packed.num_rows
    assert ledger.packing == packed.ledger().packing
    nested = packed.skip(rows=1).repeat(2).take(rows=3).ledger()
    assert nested.num_rows + nested.rows_left_out == nested.num_passes * packed.num_rows


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(1, 900), st.integers(1, 3), st.integers(0, 2))
def test_the_ledger_of_a_stretched_mixture_counts_the_rows_of_each_source(
    skipped: int, taken: int, times: int, epoch: int
) -> None:
    sources = {name: (penstock.from_arrays({"x": np.full(7, value)}), value) for name, value in (("a", 1), ("b", 2))}
    plan = penstock.mix(sources, seed=1, rows=301).skip(rows=skipped).take(rows=taken).repeat(times)
    read = plan.batch(plan.num_rows, tail="short").read(0, epoch)["x"]
    counted = plan.ledger(epoch).sources
    assert {name: source.num_rows for name, source in counted.items()} == {
        "a": int((read == 1).sum()),
        "b": int((read == 2).sum()),
    }


def test_a_source_of_a_mixture_goes_through_the_epochs_that_it_was_given() -> None:
    plan = penstock.mix({"a": (numbers().as_plan().take(rows=2), 1)}, seed=1, rows=64).batch(64)
    assert np.bincount(plan.read(0)["x"]).tolist() == [32, 32]
    other = penstock.mix({"a": (numbers().as_plan().take(rows=3), 1)}, seed=1, rows=64)
    assert other.order_fingerprint != plan.order_fingerprint


def restore(plan: Plan, state: dict[str, Any]) -> int:
    return Cursor(plan).restore(state).row


def test_a_state_goes_on_when_an_epoch_is_cut_short_and_when_a_budget_is_raised() -> None:
    whole = numbers().shuffle(seed=3)
    state = Cursor(whole.batch(2), 6).state()
    assert restore(whole.take(rows=8).batch(2), state) == 6
    assert restore(whole.take(rows=35).batch(2), state) == 6
    half = Cursor(whole.take(rows=15).batch(2), 14).state()
    assert restore(whole.take(rows=35).batch(2), half) == 14
    assert restore(whole.repeat(4).batch(2), half) == 14


def test_a_budget_that_is_used_up_goes_on_where_it_ended_when_it_is_raised() -> None:
    whole = numbers().shuffle(seed=3)
    used_up = Cursor(whole.take(rows=15).batch(5), 15).state()
    assert (used_up["epoch"], used_up["row"]) == (1, 0)
    for raised in (whole.take(rows=20), whole.take(rows=100)):
        assert restore(raised.batch(5), used_up) == 15
    assert restore(whole.take(rows=15).batch(5), used_up) == 15


def test_a_state_is_compared_at_once_however_many_passes_an_epoch_has() -> None:
    """2**40 fingerprints, one for each number of passes, would take weeks."""
    endless = numbers().shuffle(seed=3).repeat(2**40).batch(1)
    for times in (1, 2, 3**20):
        state = Cursor(numbers().shuffle(seed=3).repeat(times).batch(1), 7).state()
        assert restore(endless, state) == 7
    with pytest.raises(StateError, match="another order of the data"):
        restore(endless, Cursor(numbers().shuffle(seed=4).repeat(2).batch(1), 7).state())


def test_a_state_of_rows_that_stand_elsewhere_is_refused() -> None:
    whole = numbers().shuffle(seed=3)
    for before, after, row in (
        (whole, whole.skip(rows=1), 0),
        (whole.skip(rows=1), whole, 0),
        (whole, whole.repeat(2), 11),
        (whole.repeat(2), whole, 3),
    ):
        with pytest.raises(StateError, match="another order of the data"):
            restore(after.batch(1), Cursor(before.batch(1), row).state())


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda plan: plan.take(), ValueError, "give rows="),
        (lambda plan: plan.take(rows=1, tokens=1), ValueError, "give rows="),
        (lambda plan: plan.take(rows=0), ValueError, "at least 1"),
        (lambda plan: plan.take(rows=2.5), TypeError, "must be an int"),
        (lambda plan: plan.take(tokens=2.5), TypeError, "must be an int"),
        (lambda plan: plan.take(tokens=8), StageError, r"window\(\) or pack\(\) before it"),
        (lambda plan: plan.skip(rows=10), ValueError, "nothing would be left; an epoch has 10 rows"),
        (lambda plan: plan.skip(rows=-1), ValueError, "at least 0"),
        (lambda plan: plan.repeat(0), ValueError, "at least 1"),
        (lambda plan: plan.repeat(2**40).repeat(2**40), ValueError, r"more than 2\*\*62 rows"),
        (lambda plan: plan.batch(2).repeat(2), StageError, r"repeat\(\) cannot follow batch\(\)"),
        (lambda plan: plan.repeat(2).shuffle(1), StageError, r"shuffle\(\) cannot follow repeat\(\)"),
    ],
)
def test_nonsense_is_refused(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(numbers().as_plan())
    with pytest.raises(ValueError, match="a single row has 8"):
        tokens_dataset([8]).pack(8).take(tokens=7)
    with pytest.raises(ValueError, match="nothing would be left"):
        tokens_dataset([0]).pack(8).repeat(2)


def test_a_plan_shows_its_stretches_and_a_file_keeps_them(tmp_path: Any) -> None:
    numbers(20).shuffle(seed=1)
    np.save(tmp_path / "x.npy", np.arange(20))
    plan = penstock.open(tmp_path / "x.npy").shuffle(seed=1).skip(rows=2).take(rows=5).repeat(3).batch(4)
    assert "  .skip(rows=2)\n  .take(rows=5)\n  .repeat(times=3)\n" in repr(plan)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml") == plan

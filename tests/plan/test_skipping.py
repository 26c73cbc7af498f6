"""`map(on_error="skip")`: a row that fails has a stand-in, the same one wherever the batch is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.plan import Plan, pure

from . import functions
from .examples import assert_same


def data(count: int = 40) -> Any:
    return penstock.from_arrays({"x": np.arange(count)}).shuffle(seed=3)


@pure
def refuse_fives(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"] % 5 == 0:
        raise ValueError("a five")
    return {"x": row["x"]}


def tripled(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"] % 7 == 0:
        raise KeyError("a seven")
    return {"x": row["x"] * 3, "draw": rng.integers(0, 1000)}


def plan_of(size: int = 8) -> Plan:
    plan: Plan = data().map(refuse_fives, on_error="skip").map(tripled, on_error="skip").batch(size)
    return plan


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 3))
def test_a_batch_stays_full_pure_and_says_what_was_replaced(row: int, world_size: int, share: int) -> None:
    plan = plan_of(world_size * share)
    whole, given_rows = plan.read_at(row), data().batch(world_size * share).read_at(row)["x"]
    is_bad = (given_rows % 5 == 0) | (given_rows % 7 == 0)
    assert whole["is_replaced"].tolist() == is_bad.tolist()
    assert whole["num_replaced"] == is_bad.sum()
    assert (whole["x"][~is_bad] == 3 * given_rows[~is_bad]).all()
    assert not (whole["x"] // 3 % 5 == 0).any()
    assert not (whole["x"] // 3 % 7 == 0).any()
    for rank in range(world_size):
        part = plan.read_at(row, rank, world_size)
        for key in ("x", "draw", "is_replaced"):
            assert part[key].tolist() == whole[key][rank::world_size].tolist()
    assert_same(plan.read_at(row), whole)


def test_a_stand_in_is_a_row_of_the_same_epoch_as_it_would_come_itself() -> None:
    plan = plan_of(40)
    batch = plan.read(0)
    by_number = {
        int(x): int(draw)
        for x, draw, bad in zip(batch["x"], batch["draw"], batch["is_replaced"], strict=True)
        if not bad
    }
    first_map_only = data().map(refuse_fives, on_error="skip").batch(40).read(0)
    assert first_map_only["num_replaced"] == 8
    replaced_later = [
        place for place in np.flatnonzero(batch["is_replaced"]) if not first_map_only["is_replaced"][place]
    ]
    assert replaced_later
    for place in replaced_later:
        assert by_number[int(batch["x"][place])] == batch["draw"][place]


def test_where_everything_fails_the_error_is_the_rows_own() -> None:
    def never(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        raise RuntimeError(f"no {row['x']}")

    with pytest.raises(RuntimeError) as caught:
        penstock.from_arrays({"x": np.arange(3)}).map(never, on_error="skip").batch(1).read(1)
    assert str(caught.value) == "no 1"
    assert any("16 other rows" in note for note in caught.value.__notes__)


def test_without_skip_nothing_changes() -> None:
    with pytest.raises(ValueError, match="a five"):
        data().map(refuse_fives).batch(40).read(0)
    plain = data().map(tripled)
    assert "on_error" not in repr(plain)
    assert plain.fingerprint != data().map(tripled, on_error="skip").fingerprint
    assert plain.order_fingerprint == data().map(tripled, on_error="skip").order_fingerprint


def test_the_loader_counts_what_was_replaced() -> None:
    with penstock.DataLoader(data().map(refuse_fives, on_error="skip").batch(8), workers="thread") as loader:
        assert sum(batch["num_replaced"] for batch in loader) == 8
        assert loader.stats().num_replaced == 8


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.integers(1, 9), st.sampled_from(["carry", "drop", "even"]), st.integers(20, 60))
def test_the_ledger_counts_what_is_replaced_once_the_functions_are_tried(
    epoch: int, size: int, tail: Any, taken: int
) -> None:
    stages = data().take(rows=taken).map(refuse_fives, on_error="skip").map(tripled, on_error="skip")
    one_by_one, first = stages.batch(1), epoch * taken
    expected = sum(one_by_one.read_at(row)["num_replaced"] for row in range(first, first + taken))
    assert stages.batch(size, tail=tail).ledger(epoch).rows_replaced is None
    assert stages.batch(size, tail=tail).ledger(epoch, try_maps=True).rows_replaced == expected
    assert stages.ledger(epoch, try_maps=True).rows_replaced == expected
    assert data().take(rows=taken).batch(size).ledger(epoch, try_maps=True).rows_replaced == 0


def test_rows_that_a_batched_map_made_of_packed_ones_are_counted_too() -> None:
    def sums(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["input_ids"].sum(axis=1)}

    documents = penstock.from_arrays({"tokens": penstock.Ragged.from_lengths(np.arange(90), [3] * 30)})
    plan = documents.shuffle(seed=1).pack(3).map(sums, batched=True).map(refuse_fives, on_error="skip").batch(4)
    expected = sum(int(sum(range(first, first + 3))) % 5 == 0 for first in range(0, 90, 3))
    assert plan.ledger(try_maps=True).rows_replaced == expected


def test_a_plan_shows_it_a_file_keeps_it_and_nonsense_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(9))
    plan = penstock.open(tmp_path / "x.npy").map(functions.jitter, on_error="skip").batch(2)
    assert ".map(jitter, on_error='skip')" in repr(plan)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml", allow_code=[functions.__name__.partition(".")[0]]) == plan
    with pytest.raises(ValueError, match="only a function of single rows"):
        data().map(tripled, on_error="skip", batched=True)
    with pytest.raises(ValueError, match="'raise' and 'skip'"):
        data().map(tripled, on_error="ignore")

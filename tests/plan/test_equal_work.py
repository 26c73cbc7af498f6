"""Batches whose rows are dealt to ranks by what they cost: the same rows, other ranks."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import SchemaError, StageError
from penstock.plan import Plan
from penstock.plan._dealing import Dealer

from .examples import ragged, tokens_dataset
from .test_laws import Example, _tiny_windows, rows_of, sequences

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
RNG = np.random.default_rng(0)
LENGTHS = np.minimum(np.exp(RNG.normal(4, 1.2, 6000)).astype(int) + 1, 2000).tolist()

__all__ = ["_tiny_windows"]


def cut(stages: Any, size: int, **options: Any) -> Plan:
    """Batches by attention, or by a column where the rows have no tokens."""
    for balance in ("attention", "x"):
        try:
            plan: Plan = stages.batch(size, balance=balance, **options)
            return plan
        except SchemaError:
            continue
    raise AssertionError("no measure fits")


def share(plan: Plan, row: int, *where: int) -> list[int]:
    return plan._reader.rows_at(row, *where)[0].tolist()


@given(
    sequences(),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 3),
    st.sampled_from(["carry", "short", "even", "pad", "drop"]),
    st.integers(0, 200),
)
@few
def test_every_row_of_a_batch_goes_to_one_rank_and_one_part_whatever_the_balance(
    example: Example, world_size: int, num_parts: int, times: int, tail: str, place: int
) -> None:
    size = world_size * num_parts * times
    plain = example.stages.as_plan().batch(size, tail=tail)
    assume(plain.num_rows)
    try:
        dealt = cut(example.stages.as_plan(), size, tail=tail)
    except StageError:
        assume(False)
    row = plain.steps.skip_tail(place) if tail == "drop" else place
    whole = [share(plain, row, rank, world_size) for rank in range(world_size)]
    own = [share(dealt, row, rank, world_size) for rank in range(world_size)]
    assert [len(rows) for rows in own] == [len(rows) for rows in whole]
    assert sorted(chain(*own)) == sorted(chain(*whole))
    for rank in range(world_size):
        parts = [share(dealt, row, rank, world_size, part, num_parts) for part in range(num_parts)]
        expected = [len(share(plain, row, rank, world_size, part, num_parts)) for part in range(num_parts)]
        assert [len(rows) for rows in parts] == expected
        assert sorted(chain(*parts)) == sorted(own[rank])
    assert dealt.order_fingerprint == plain.order_fingerprint
    assert dealt.num_batches(1) == plain.num_batches(1)


@given(sequences(), st.sampled_from([1, 2, 4]), st.integers(0, 60))
@few
def test_what_ranks_read_is_the_batch_and_its_targets_are_counted_over_all(
    example: Example, world_size: int, row: int
) -> None:
    plan = example.stages.as_plan()
    assume(plan.num_rows)
    try:
        dealt = cut(plan, 8)
    except StageError:
        assume(False)
    expected = plan.batch(8).read_at(row)
    found = [dealt.read_at(row, rank, world_size) for rank in range(world_size)]
    if "lengths" not in expected:  # padded rows are as wide as the longest of their rank
        assert sorted(map(repr, chain(*map(rows_of, found)))) == sorted(map(repr, rows_of(expected)))
    if "num_targets" in expected:
        assert {batch["num_targets_global"] for batch in found} == {expected["num_targets_global"]}
        assert sum(batch["num_targets"] for batch in found) == expected["num_targets"]
    assert [pickle.loads(pickle.dumps(dealt)) == dealt, dealt == plan.batch(8)] == [True, False]


def costs_of_ranks(plan: Plan, row: int, world_size: int, num_parts: int = 1) -> np.ndarray:
    """Squared lengths of the documents that each rank and part gets, from the batches themselves."""
    found = np.zeros((world_size, num_parts))
    for rank, part in np.ndindex(found.shape):
        batch = plan.read_at(row, rank, world_size, part=part, num_parts=num_parts)
        lengths = (
            batch["lengths"] if "lengths" in batch else np.bincount(batch["document_ids"][batch["document_ids"] >= 0])
        )
        found[rank, part] = (lengths.astype(float) ** 2).sum()
    return found


@pytest.mark.parametrize("length", [None, 512])
@pytest.mark.parametrize(("world_size", "rows"), [(4, 2), (8, 4), (8, 8), (3, 16)])
def test_the_dearest_rank_is_as_cheap_as_a_long_search_makes_it(length: int | None, world_size: int, rows: int) -> None:
    stages = tokens_dataset(LENGTHS).shuffle(seed=1)
    plan = (stages.pad() if length is None else stages.pack(length)).batch(world_size * rows, balance="attention")
    for row in (0, 5 * world_size * rows):
        ranks = costs_of_ranks(plan, row, world_size)[:, 0]
        each = np.concatenate([costs_of_ranks(plan.without_maps(), row, world_size * rows)[:, 0]])
        best = min(each[RNG.permutation(len(each)).reshape(world_size, rows)].sum(axis=1).max() for _ in range(3000))
        assert ranks.max() <= 1.02 * best
        assert np.isclose(ranks.sum(), each.sum())


def test_the_dearest_part_of_every_rank_comes_first() -> None:
    plan = tokens_dataset(LENGTHS).shuffle(seed=1).pack(512).batch(64, balance="attention")
    costs = costs_of_ranks(plan, 64, 4, 4)
    assert (np.diff(costs, axis=1) <= 0).all()
    assert costs.sum(axis=1).max() < 1.02 * costs.sum(axis=1).mean()


def test_balance_counts_tokens_a_column_or_a_weighted_sum() -> None:
    lengths = [9, 1, 1, 1, 5, 4, 3, 8]
    columns = {"tokens": ragged([np.arange(length) for length in lengths]), "frames": np.arange(8, dtype=np.float32)}
    kept = penstock.from_arrays(columns).pad(keep="frames")
    tokens, frames = kept.batch(8, balance="tokens"), kept.batch(8, balance="frames")
    mixed = kept.batch(8, balance={"frames": 1, "tokens": 1 / 1024})
    assert [sum(tokens.read(0, 0, rank, 2)["lengths"].tolist()) for rank in range(2)] == [16, 16]
    for plan in (frames, mixed, penstock.from_arrays(columns).batch(8, balance="frames")):
        assert [plan.read(0, 0, rank, 2)["frames"].sum() for rank in range(2)] == [14, 14]
    assert "balance={'frames': 1.0, 'tokens': 0.0009765625}" in repr(mixed)


def test_a_split_document_costs_its_column_once() -> None:
    columns = {"tokens": ragged([np.arange(10), np.arange(3)]), "frames": np.array([7, 2])}
    plan = penstock.from_arrays(columns).pack(4, keep="frames")
    assert plan.row_source.costs(np.arange(plan.num_rows), "frames").sum() == 9


@pytest.mark.parametrize(
    ("balance", "error", "message"),
    [
        ("label", SchemaError, r"balance='label'.*the rows have none of this name.*keep="),
        ("text", SchemaError, r"balance='text'.*it is bytes"),
        ({}, ValueError, "at least one name"),
        ({"tokens": -1}, ValueError, "weights above 0"),
        ({"tokens": "much"}, TypeError, "a column, or {name: weight}"),
        (7, TypeError, "a column, or {name: weight}"),
    ],
)
def test_what_cannot_be_counted_is_refused_when_the_plan_is_made(balance: Any, error: type, message: str) -> None:
    columns = {"tokens": ragged([np.arange(3)] * 4), "text": penstock.Ragged(np.zeros(4, np.uint8), np.arange(5), True)}
    with pytest.raises(error, match=message):
        penstock.from_arrays(columns).pad(keep="text").batch(4, balance=balance)


def test_rows_of_equal_cost_are_refused() -> None:
    with pytest.raises(StageError, match=r"rows of window\(\) have no documents, so all cost the same"):
        tokens_dataset([9, 9]).window(3).batch(2, balance="attention")


def test_a_cost_below_zero_names_the_row() -> None:
    plan = penstock.from_arrays({"x": np.arange(8), "cost": np.array([1.0, 2, 3, np.nan, 1, 1, -4, 1])})
    dealt = plan.batch(4, balance="cost")
    for step, found in enumerate(("row 3 .*costs nan", "row 6 .*costs -4")):
        with pytest.raises(ValueError, match=found):
            dealt.read(step, 0, 0, 2)


def test_a_plan_tells_what_ranks_wait_for_each_other() -> None:
    stages = tokens_dataset(LENGTHS).shuffle(seed=1).pack(512)
    told = stages.batch(64).imbalance(8)
    assert (told.world_size, told.costs, told.num_steps) == (
        8,
        (("attention", 1.0),),
        min(64, stages.batch(64).num_batches()),
    )
    assert 1.0 <= told.after < 1.02 < told.before
    assert told == stages.batch(64, balance="attention").imbalance(8)
    assert f"{100 * told.gain:.0f} % faster" in str(told)
    with pytest.raises(StageError, match=r"no batch\(\) yet"):
        stages.imbalance(8)


def test_plan_files_keep_the_balance_and_older_plans_their_fingerprints(tmp_path: Any) -> None:
    from .examples import make_documents, write_tokens

    data = penstock.open(write_tokens(tmp_path / "data", make_documents([3, 9, 4, 4])))
    plain, dealt = data.pad().batch(4), data.pad().batch(4, balance={"attention": 0.5, "tokens": 1})
    (tmp_path / "plan.toml").write_text(dealt.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml") == dealt
    assert "balance" not in plain.to_toml()
    assert data.pad().batch(4, balance=None) == plain


def test_one_batch_is_dealt_once_for_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tokens_dataset(LENGTHS).shuffle(seed=1).pack(512).batch(64, balance="attention")
    dealer, calls = plan._reader.dealer, []
    assert isinstance(dealer, Dealer)
    make = dealer._deal
    monkeypatch.setattr(Dealer, "_deal", lambda self, *key: calls.append(key) or make(*key))
    plan = pickle.loads(pickle.dumps(plan))
    for part in range(4):
        plan.read_at(64, 1, 4, part=part, num_parts=4)
    assert calls == [(64, 4)]

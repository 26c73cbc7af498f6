"""Mixtures whose weights change on the way, weights by temperature, and rows that say where they are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import SchemaError, StageError, StateError
from penstock.loader import Cursor
from penstock.order import Mixture, ScheduledMixture
from penstock.plan import Dataset, Plan
from plan.examples import assert_same, tokens_dataset


def numbers(count: int, first: int) -> Dataset:
    return penstock.from_arrays({"x": np.arange(first, first + count)})


def both(schedule: Any = None, **options: Any) -> Plan:
    sources = {"a": (numbers(50, 0).shuffle(1), 3), "b": (numbers(20, 1000).shuffle(2), 1)}
    return penstock.mix(sources, **{"seed": 7, "rows": 100, "schedule": schedule, **options})


def run_of(plan: Plan, num_rows: int) -> np.ndarray:
    found: np.ndarray = plan.batch(num_rows).read_at(0)["x"]
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.dictionaries(st.integers(1, 40).map(lambda stratum: 32 * stratum), st.integers(0, 99), max_size=4),
    st.data(),
)
def test_a_schedule_leaves_out_and_repeats_no_row_of_a_source(
    weights: list[int], seeds: dict[int, int], data: st.DataObject
) -> None:
    changes = {}
    for row in seeds:
        drawn = data.draw(st.lists(st.integers(0, 5), min_size=len(weights), max_size=len(weights)))
        changes[row] = drawn if any(drawn) else weights
    mixture = ScheduledMixture(weights, 7, changes)
    rows = np.arange(2048)
    sources, positions = mixture.locate(rows)
    for source in range(len(weights)):
        own = positions[sources == source]
        assert sorted(own.tolist()) == list(range(len(own)))
        assert mixture.counts(2048)[source] == len(own)
    first = min(changes, default=2048)
    plain = Mixture(weights, 7).locate(rows[:first])
    assert (sources[:first] == plain[0]).all()
    assert (positions[:first] == plain[1]).all()
    for row in data.draw(st.lists(st.integers(0, 2047), max_size=5)):
        found = mixture.locate([row])
        assert (found[0].tolist(), found[1].tolist()) == ([sources[row]], [positions[row]])
        assert mixture.counts(row).tolist() == np.bincount(sources[:row], minlength=len(weights)).tolist()


def test_weights_change_at_the_row_that_is_given_rounded_up() -> None:
    plan = both({64: {"a": 1, "b": 3}, 130: {"b": 1}})
    is_b = run_of(plan, 320) >= 1000
    assert [int(part.sum()) for part in np.split(is_b, [64, 160])] == [16, 72, 160]
    assert "from row 64 on: a 16384/65536, b 49152/65536" in repr(plan)
    assert "from row 160 on: a 0/65536, b 65536/65536" in repr(plan)


def test_tokens_are_counted_in_rows() -> None:
    sources = {name: (tokens_dataset([8] * 40).pack(8), 1) for name in ("a", "b")}
    in_tokens = penstock.mix(sources, seed=1, rows=64, schedule={512: {"a": 1}}, schedule_in="tokens")
    in_rows = penstock.mix(sources, seed=1, rows=64, schedule={64: {"a": 1}})
    assert in_tokens == in_rows


def test_the_ledger_tells_what_changed_and_counts_each_source() -> None:
    plan = both({64: {"a": 1, "b": 3}, 200: {"b": 1}})
    first, second = plan.ledger(0), plan.ledger(2)
    assert first.schedule == {0: {"a": 0.75, "b": 0.25}, 64: {"a": 0.25, "b": 0.75}}
    assert list(second.schedule) == [0, 64, 224]
    run = run_of(plan, 300)
    for epoch in range(3):
        counted = plan.ledger(epoch).sources["b"].num_rows
        assert counted == int((run[100 * epoch : 100 * (epoch + 1)] >= 1000).sum())
    assert both().ledger().schedule == {}
    assert list(plan.skip(rows=20).ledger(2).schedule) == [0, 44, 164]


def restore(plan: Plan, state: dict[str, Any]) -> int:
    return Cursor(plan.batch(4)).restore(state).row


def test_a_change_at_a_checkpoint_goes_on_from_states_before_it() -> None:
    once, twice = {128: {"b": 1}}, {128: {"b": 1}, 256: {"a": 1}}
    for before, after, row in ((None, once, 128), (None, twice, 100), (once, twice, 256)):
        assert restore(both(after), Cursor(both(before).batch(4), row).state()) == row
        assert_same(both(before).batch(4).read_at(row - 4), both(after).batch(4).read_at(row - 4))
    for before, after, row in ((None, once, 129), (once, twice, 257), (once, None, 0), (once, {128: {"a": 1}}, 0)):
        with pytest.raises(StateError, match="mix was"):
            restore(both(after), Cursor(both(before).batch(4), row).state())
    stretched = both().repeat(2)
    assert restore(both(once).repeat(2), Cursor(stretched.batch(4), 120).state()) == 120


SCHEDULES = st.dictionaries(
    st.integers(1, 12).map(lambda stratum: 32 * stratum),
    st.sampled_from([{"a": 1}, {"b": 1}, {"a": 1, "b": 9}, {"a": 9, "b": 1}]),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(SCHEDULES, st.sampled_from(["a", "b"]))
def test_an_epoch_that_is_one_pass_ends_when_the_source_has_been_read_once(schedule: Any, name: str) -> None:
    plan = both(schedule, rows=None, epoch=name)
    size, other = {"a": (50, "b"), "b": (20, "a")}[name]
    drawn = dict(schedule)
    while drawn and (row := max(drawn)) and name not in drawn[row]:  # a source left out counts as if it were not
        if int(own_rows(both(drawn), name, row).sum()) >= size:
            break
        del drawn[row]
    own = np.cumsum(own_rows(both(drawn), name, 4000))
    assert plan.num_rows == int(np.searchsorted(own, size)) + 1
    if drawn == schedule:
        assert plan.ledger().sources[name].num_rows == size
        assert plan.ledger().sources[name].num_passes == 1
    assert plan.ledger().sources[other].num_rows == plan.num_rows - plan.ledger().sources[name].num_rows


def own_rows(plan: Plan, name: str, num_rows: int) -> np.ndarray:
    """Whether each row of the run is of this source."""
    found: np.ndarray = (run_of(plan, num_rows) >= 1000) == (name == "b")
    return found


def test_a_share_that_falls_makes_the_epoch_longer_and_one_that_rises_shorter() -> None:
    assert both(rows=None, epoch="a").num_rows == 67
    assert both({32: {"a": 1, "b": 9}}, rows=None, epoch="a").num_rows > 200
    assert both({32: {"a": 1}}, rows=None, epoch="a").num_rows == 58


@pytest.mark.parametrize("schedule", [{32: {"a": 1, "b": 9}}, {32: {"a": 1}}, {32: {"a": 1}, 320: {"b": 1}}])
def test_states_of_epochs_as_long_as_by_the_first_weights_still_fit(schedule: Any) -> None:
    before, now = both(schedule, rows=67), both(schedule, rows=None, epoch="a")
    assert before.num_rows != now.num_rows
    for row in (5, 67, 150, 300):
        assert restore(now, Cursor(before.batch(4), row).state()) == row
        assert_same(before.batch(4).read_at(row), now.batch(4).read_at(row))


def test_a_change_added_at_a_checkpoint_fits_when_an_epoch_is_one_pass() -> None:
    once, twice = {32: {"a": 1, "b": 9}}, {32: {"a": 1, "b": 9}, 320: {"a": 1}}
    for before, after, row in ((None, once, 32), (once, twice, 320), (None, {32: {"b": 1}}, 20)):
        one, other = both(before, rows=None, epoch="a"), both(after, rows=None, epoch="a")
        assert restore(other, Cursor(one.batch(4), row).state()) == row


def test_temperature_brings_shares_closer_and_sizes_are_the_default() -> None:
    sources: Any = {"large": numbers(900, 0), "small": numbers(100, 1000)}
    shares = {
        temperature: penstock.mix(sources, seed=1, rows=10, temperature=temperature).ledger().sources["small"].num_rows
        for temperature in (0.5, 1, 2, 1e6)
    }
    assert penstock.mix(sources, seed=1, rows=10).source.quotas[0]["small"] == 6554
    assert penstock.mix(sources, seed=1, rows=10, temperature=2).source.quotas[0]["small"] == 16384
    assert shares[0.5] <= shares[1] <= shares[2] <= shares[1e6]


@pytest.mark.parametrize("kind", ["samples", "packed", "padded"])
def test_rows_say_which_source_they_are_from(kind: str) -> None:
    stages = {"samples": lambda ds: ds, "packed": lambda ds: ds.pack(8), "padded": lambda ds: ds.pad()}[kind]
    sources = {name: (stages(tokens_dataset([8] * 9)), 1) for name in ("a", "b")}
    plan = penstock.mix(sources, seed=1, rows=20, source_ids=True).batch(6)
    for rank in range(2):
        batch = plan.read(1, rank=rank, world_size=2)
        traces = {trace.row: trace.source for trace in plan.documents(1, rank=rank, world_size=2)}
        assert batch["source_ids"].dtype == np.int32
        assert ["ab"[number] for number in batch["source_ids"]] == [traces[row] for row in range(3)]


def test_source_ids_are_in_bundles_of_batches_too() -> None:
    plan = both(source_ids=True).batch(4)
    with penstock.DataLoader(plan, workers="thread", num_workers=1) as loader:
        for step, batch in enumerate(loader):
            assert batch["source_ids"].tolist() == plan.read(step)["source_ids"].tolist()


def test_a_plan_file_keeps_all_of_it_and_plans_without_it_are_what_they_were(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(9))
    data = penstock.open(tmp_path / "x.npy")
    plan = penstock.mix(
        {"a": (data, 2), "b": (data.shuffle(1), 1)},
        seed=1,
        rows=50,
        temperature=2.0,
        schedule={32: {"b": 1}},
        source_ids=True,
    ).batch(2)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    again = penstock.load_plan(tmp_path / "plan.toml")
    assert again == plan
    assert "mix(seed=1, rows=50, temperature=2.0, source_ids=True)" in repr(plan)
    assert again.order_fingerprint == plan.order_fingerprint
    assert both().fingerprint != both(source_ids=True).fingerprint
    assert both().order_fingerprint == both(source_ids=True).order_fingerprint


def test_a_place_in_a_schedule_may_be_written_as_a_power_of_ten() -> None:
    assert both(schedule={1e3: {"a": 1}}).fingerprint == both(schedule={1000: {"a": 1}}).fingerprint


def test_a_column_that_is_called_as_the_numbers_of_sources_is_not_overwritten() -> None:
    data = penstock.from_arrays({"source_ids": np.arange(4)})
    assert penstock.mix({"a": data}, seed=1, rows=4).batch(4).read(0)["source_ids"].tolist()
    with pytest.raises(SchemaError, match=r"mix\(source_ids=True\): the sources have a column 'source_ids'"):
        penstock.mix({"a": data}, seed=1, rows=4, source_ids=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedule": {0: {"a": 1}}}, ValueError, "at least 1"),
        ({"schedule": {32: {"c": 1}}}, ValueError, "expected weights of 'a', 'b'"),
        ({"schedule": {32: {"a": 0}}}, ValueError, "no source has a weight"),
        ({"schedule": {32: {"a": -1}}}, ValueError, "finite, and at least 0"),
        ({"schedule": {32: 5}}, ValueError, "expected weights of 'a', 'b'"),
        ({"schedule": {32: {"a": 1}, 33: {"b": 1}, 34: {"a": 1}}}, ValueError, "less than 32 rows apart"),
        ({"schedule": {99: {"a": 1}}, "schedule_in": "tokens"}, StageError, r"window\(\) or pack\(\)"),
        ({"schedule": {99: {"a": 1}}, "schedule_in": "steps"}, ValueError, "'rows' and 'tokens'"),
        ({"schedule": [(32, {"a": 1})]}, TypeError, r"\{row: \{name: weight\}\} is needed, not list"),
        ({"schedule": {"32": {"a": 1}, 64: {"b": 1}}}, TypeError, "must be an int, not str"),
        ({"schedule": {32.5: {"a": 1}}}, TypeError, "must be an int, not float"),
        ({"temperature": 1e-9}, ValueError, r"mix\(temperature=1e-09\): it leaves nothing of the weight of 'b'"),
        ({"temperature": 0}, ValueError, "a positive, finite number"),
        ({"temperature": "hot"}, ValueError, "a positive, finite number"),
    ],
)
def test_nonsense_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        both(**options)

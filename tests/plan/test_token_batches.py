"""Batches of as many rows as fit into a budget of tokens: their borders depend on the plan alone."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import SchemaError, StageError
from penstock.plan import Plan, _budget, _epochs

from .examples import IGNORED, make_documents, ragged, tokens_dataset, write_tokens

few = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TAILS = ["carry", "short", "even", "pad", "drop"]


@pytest.fixture(autouse=True, scope="module")
def _tiny_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_epochs, "STORAGE_WINDOW_BYTES", 24)
        patch.setattr(_budget, "_CHUNK_BATCHES", 2)
        yield


@st.composite
def plans(draw: st.DrawFn, tails: list[str] = TAILS) -> Plan:
    """Padded documents or samples, in batches by tokens."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=40))
    stages: Any = tokens_dataset(lengths)
    stages = stages.shuffle(seed=draw(st.integers(0, 3))) if draw(st.booleans()) else stages
    kind = draw(st.sampled_from(["samples", "pad", "bucket", "mix"]))
    multiple = draw(st.integers(1, 4))
    unit = 1
    if kind in ("pad", "bucket"):
        unit = draw(st.integers(1, 4))
        bucket = {"bucket": draw(st.integers(1, 12)), "run": 2} if kind == "bucket" else {}
        stages = stages.pad(multiple=unit, **bucket)
    if kind == "mix":
        stages = penstock.mix({"a": (stages.pad(), 1), "b": (tokens_dataset([3, 1, 4]).pad(), 2)}, seed=1, rows=23)
    if draw(st.booleans()):
        stages = stages.as_plan().take(rows=draw(st.integers(1, 50)))
    tokens = multiple * unit * draw(st.integers(-(-9 // unit), 20))
    plan: Plan = stages.batch(tokens=tokens, multiple=multiple, tail=draw(st.sampled_from(tails)))
    return plan


def starts_of(plan: Plan, epochs: int) -> list[int]:
    return [plan.row_of(step, epoch) for epoch in range(epochs) for step in range(plan.num_batches(epoch))]


def padded(plan: Plan, rows: list[int]) -> int:
    """Tokens of these rows when all are as wide as the longest."""
    pieces = plan.row_source.piece_source
    unit = 1 if pieces is None else pieces.stage.multiple  # type: ignore[union-attr]
    widest = max(1, int(plan.row_source.costs(np.array(rows), "tokens").max()))
    return len(rows) * -(-widest // unit) * unit


@given(plans(), st.integers(1, 3))
@few
def test_batches_follow_each_other_fit_the_budget_and_could_not_be_longer(plan: Plan, epochs: int) -> None:
    steps, size = plan.steps, plan.global_size
    assert isinstance(steps, _budget.BudgetSteps)
    starts = starts_of(plan, epochs)
    assert starts == sorted(starts)
    assert not starts or starts[0] == 0
    for row, following in pairwise([*starts, None]):
        end = steps.next_row(row)
        assert steps.skip_tail(end) == following or following is None
        assert padded(plan, list(range(row, end))) <= steps.tokens
        stop = steps._chunk_at(row)[1]
        is_last = (end - row) % size != 0
        assert not is_last or (steps.tail in ("short", "even", "pad") and end % plan.num_rows == 0)
        if end + size <= stop:
            assert padded(plan, list(range(row, end + size))) > steps.tokens
    if starts and steps.tail == "carry":
        assert steps.next_row(starts[-1]) >= epochs * plan.num_rows
    elif starts:
        assert epochs * plan.num_rows - steps.next_row(starts[-1]) == steps.num_dropped()


@given(plans(), st.integers(0, 90), st.integers(0, 90))
@few
def test_the_arithmetic_of_steps_agrees_with_walking_from_batch_to_batch(plan: Plan, row: int, length: int) -> None:
    steps = plan.steps
    row = begin = steps.skip_tail(row)
    end = (row + length) // plan.num_rows * plan.num_rows + plan.num_rows
    count = parts = 0
    while row < end:
        count, parts = count + 1, parts + steps.num_parts(row, plan.global_size)
        row = steps.skip_tail(steps.next_row(row))
        if steps.tail == "drop" and row % plan.num_rows == 0 and plan.num_rows < plan.global_size:
            return
    assert steps.num_batches_between(begin, end) == count
    assert steps.num_parts_between(begin, end, plan.global_size) == parts
    for number, start in enumerate(starts_of(plan, 2)):
        assert (steps.number_at(start), steps.row_at(number)) == (number, start)
        assert plan.row_of(steps.num_before(start), start // plan.num_rows) == start


@given(plans(), st.sampled_from([1, 2, 3, 4]), st.integers(0, 60))
@few
def test_ranks_share_a_batch_that_begins_at_any_row_and_each_has_its_part_of_the_budget(
    plan: Plan, world_size: int, row: int
) -> None:
    steps = plan.steps
    assert isinstance(steps, _budget.BudgetSteps)
    if plan.global_size % world_size:
        with pytest.raises(ValueError, match=r"multiple of \d+ rows, which .* batch\(tokens=\d+, multiple=\d+\) could"):
            plan.read_at(row, 0, world_size)
        return
    row = steps.skip_tail(row)
    rows = [steps.rows_at(row, rank, world_size)[0].tolist() for rank in range(world_size)]
    assert sorted(chain(*rows)) == sorted(steps.rows_at(row)[0].tolist()) or steps.tail == "even"
    for rank, own in enumerate(rows):
        batch = plan.read_at(row, rank, world_size)
        values = batch["input_ids"] if "input_ids" in batch else batch["tokens"]
        assert len(values) == len(own)
        assert not own or padded(plan, own) * world_size <= steps.tokens or len(own) * world_size > steps.num_real(row)
    assert pickle.loads(pickle.dumps(plan)).steps.next_row(row) == steps.next_row(row)


def test_a_run_goes_on_at_a_row_of_other_batches_and_the_next_chunk_is_everybodys() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 3000).tolist()
    stages = tokens_dataset(lengths).shuffle(seed=1).pad()
    before, plan = stages.batch(28), stages.batch(tokens=960, multiple=4)
    starts = set(starts_of(plan, 1))
    row = before.row_of(7)
    assert row not in starts
    seen = []
    while row not in starts:
        seen.append(row)
        row = plan.steps.next_row(row)
    assert len(seen) < 10
    assert before.order_fingerprint == plan.order_fingerprint


def test_rows_of_like_length_leave_next_to_no_padding() -> None:
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(5, 1, 20_000)).astype(int) + 1, 1000).tolist()
    stages = tokens_dataset(lengths).shuffle(seed=1)
    plan = stages.pad(bucket=10_000, run=4, run_tokens=8000).batch(tokens=8000, multiple=4, tail="drop")
    batches = [plan.read(step)["attention_mask"] for step in range(plan.num_batches())]
    told = plan.ledger().batches
    assert told is not None
    assert told.num_batches == len(batches)
    assert (told.num_tokens, told.num_places) == (
        sum(mask.sum() for mask in batches),
        sum(mask.size for mask in batches),
    )
    assert told.fill > 0.98
    assert told.num_places > 0.9 * 8000 * len(batches)
    assert stages.pad(bucket=10_000, run=4).order_fingerprint != plan.order_fingerprint


LONG = [4, 9, 3, 30, 2, 5, 1, 40, 6, 7, 3, 2]


def test_a_document_that_is_too_long_is_named() -> None:
    plan = tokens_dataset(LONG).pad().batch(tokens=40, multiple=2)
    with pytest.raises(StageError, match=r"row 3 .*has 30 tokens, and 2 rows may have 20 each.*pad\(length=20\) cuts"):
        plan.read(0)
    cut = tokens_dataset(LONG).pad(20).batch(tokens=40, multiple=2)
    assert cut.ledger().tokens_truncated == 30
    assert max(cut.read(step)["input_ids"].size for step in range(cut.num_batches())) <= 40


@pytest.mark.parametrize("tail", ["carry", "short", "pad", "drop"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_documents_that_are_too_long_are_left_out_and_counted(tail: Any, world_size: int) -> None:
    plan = tokens_dataset(LONG).shuffle(seed=1).pad().batch(tokens=40, multiple=2, long="drop", tail=tail)
    plain = tokens_dataset(LONG).shuffle(seed=1).pad().batch(2)
    kept, targets = [], 0
    for step in range(plan.num_batches()):
        batches = [plan.read(step, 0, rank, world_size) for rank in range(world_size)]
        targets += batches[0]["num_targets_global"]
        assert batches[0]["num_targets_global"] == sum(batch["num_targets"] for batch in batches)
        for batch in batches:
            kept += batch["lengths"][~batch["is_repeated"]].tolist()
            assert (batch["labels"][batch["is_repeated"]] == IGNORED).all()
    assert sorted(kept) == sorted(length for length in LONG if length <= 20)
    assert targets == sum(length - 1 for length in LONG if length <= 20)
    told = plan.ledger()
    assert told.batches is not None
    assert (told.batches.rows_too_long, told.batches.tokens_too_long) == (2, 70)
    assert "rows too long" in str(told)
    assert plan.order_fingerprint == plain.order_fingerprint


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "the number of rows, or tokens="),
        ({"global_size": 4, "tokens": 40}, ValueError, "the number of rows, or tokens="),
        ({"global_size": 4, "multiple": 2}, ValueError, r"are for batch\(tokens="),
        ({"tokens": 4, "multiple": 8}, ValueError, "leaves 0 tokens for a row"),
        ({"tokens": 40, "long": "cut"}, ValueError, "long='cut'.*'raise'.*'drop'"),
        ({"tokens": 40, "long": "drop", "tail": "even"}, ValueError, "use tail='pad'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        tokens_dataset([3, 4]).pad().batch(**options)


def test_rows_of_one_length_and_rows_without_any_are_refused() -> None:
    with pytest.raises(StageError, match=r"all rows have 8 places; batch\(5\) is the same"):
        tokens_dataset([3, 4]).pack(8).batch(tokens=40)
    with pytest.raises(SchemaError, match="need a ragged column 'tokens', or only one; there is none"):
        penstock.from_arrays({"x": np.arange(4)}).batch(tokens=40)


def test_plan_files_and_text_say_what_was_asked_for(tmp_path: Any) -> None:
    data = penstock.open(write_tokens(tmp_path / "data", make_documents([3, 9, 4, 4])))
    plan = data.pad().batch(tokens=64, multiple=2, long="drop", balance="tokens")
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml") == plan
    assert ".batch(balance='tokens', tokens=64, multiple=2, long='drop')" in repr(plan)
    assert (
        len({plan.fingerprint, data.pad().batch(tokens=64, multiple=2).fingerprint, data.pad().batch(2).fingerprint})
        == 3
    )


def test_balance_deals_the_rows_of_a_batch_by_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 3000).tolist()
    stages = tokens_dataset(lengths).shuffle(seed=1).pad()
    plain, dealt = (stages.batch(tokens=4000, multiple=8, balance=how) for how in (None, "attention"))
    assert [plain.row_of(step) for step in range(20)] == [dealt.row_of(step) for step in range(20)]
    told = dealt.imbalance(8)
    assert told.after < told.before - 0.2


def test_samples_are_counted_by_their_only_ragged_column() -> None:
    sounds = penstock.from_arrays({"wave": ragged([np.arange(n) for n in (5, 9, 2, 2)]), "label": np.arange(4)})
    plan = sounds.batch(tokens=18, tail="short")
    assert [plan.read(step)["label"].tolist() for step in range(2)] == [[0, 1], [2, 3]]


def test_the_first_batch_takes_the_lengths_of_one_chunk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tokens_dataset([3] * 5000).shuffle(seed=1).pad().batch(tokens=30, multiple=2)
    counted = []
    costs = type(plan.row_source).costs
    monkeypatch.setattr(
        type(plan.row_source), "costs", lambda self, rows, *a: counted.append(len(rows)) or costs(self, rows, *a)
    )
    plan.read_at(4000)
    assert sum(counted) < 1200

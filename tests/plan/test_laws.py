"""What holds for every plan: a batch is a pure function of a few numbers.

Storage windows and packing windows are made tiny, so that small data has many of them.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.packing import _ledger
from penstock.plan import Plan, _epochs, _reading

from .examples import IGNORED, assert_same, lengths_lists, make_documents, ragged, shuffled

few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TAILS = ["carry", "short", "pad", "drop"]


@pytest.fixture(autouse=True, scope="module")
def _tiny_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_epochs, "STORAGE_WINDOW_BYTES", 24)
        patch.setattr(_ledger, "ROWS_PER_WINDOW", 2)
        patch.setattr(_reading, "_CHUNK_ROWS", 4)
        yield


@dataclass
class Example:
    """A plan without batch(), and the tokens that an epoch of it must hold (None for a mixture)."""

    stages: Any
    tokens: list[int] | None


def row_source(draw: st.DrawFn, kind: str, first: int = 1) -> Example:
    lengths = draw(lengths_lists)
    documents = make_documents(lengths, first=first)
    tokens = [int(token) for document in documents for token in document]
    if kind == "samples":
        columns = {"x": np.arange(first, first + len(lengths)), "tokens": ragged(documents)}
        return Example(shuffled(penstock.from_arrays(columns), draw), list(range(first, first + len(lengths))))
    if kind in ("sample", "balance"):
        return Example(shuffled(drawn(draw, kind, len(lengths)), draw), None)
    dataset = shuffled(penstock.from_arrays({"tokens": ragged(documents)}), draw)
    if kind == "pad":
        bucket = {"bucket": draw(st.sampled_from([None, 1, 5])), "run": draw(st.integers(1, 3))}
        return Example(dataset.pad(multiple=4, side="left", **bucket), tokens)
    length = draw(st.sampled_from([1, 3, 8]))
    if kind == "window":
        return Example(dataset.window(length), tokens[: len(tokens) // length * length])
    return Example(
        dataset.pack(
            length,
            max_documents=draw(st.sampled_from([None, 1, 3])) if first == 1 else None,
            positions=draw(st.sampled_from(["restart", "continue"])),
        ),
        tokens,
    )


def drawn(draw: st.DrawFn, kind: str, count: int) -> Any:
    """Samples by weight or by class."""
    columns = {"x": np.arange(count), "kind": np.array([draw(st.integers(1, 4)) for _ in range(count)])}
    dataset, replacement = penstock.from_arrays(columns), draw(st.booleans())
    if kind == "balance":
        return dataset.balance("kind", replacement=replacement)
    return dataset.sample("kind", rows=draw(st.integers(1, count)), replacement=replacement)


@st.composite
def sequences(draw: st.DrawFn) -> Example:
    """Rows of any kind, in any order, from one source or several."""
    example = draw(unstretched())
    stretches = draw(st.lists(st.sampled_from(["take", "skip", "repeat"]), max_size=2)) if draw(st.booleans()) else []
    for verb in stretches if example.stages.as_plan().num_rows else []:
        example = Example(stretched(example.stages.as_plan(), verb, draw), None)
    return example


def stretched(plan: Plan, verb: str, draw: st.DrawFn) -> Plan:
    """Epochs of another length."""
    if verb == "repeat":
        return plan.repeat(draw(st.integers(1, 3)))
    if verb == "skip":
        return plan.skip(rows=draw(st.integers(0, plan.num_rows - 1)))
    return plan.take(rows=draw(st.integers(1, 2 * plan.num_rows + 1)))


@st.composite
def unstretched(draw: st.DrawFn) -> Example:
    """Epochs of one pass, or as long as a mixture says."""
    kind = draw(
        st.sampled_from(
            ["samples", "window", "pack", "pack", "pad", "sample", "balance", "mix", "packed mix", "padded mix"]
        )
    )
    if kind == "mix":
        sources = {name: row_source(draw, "samples", first).stages for name, first in (("a", 1), ("b", 1000))}
        return _mixed(draw, sources)
    if kind == "packed mix":
        sources = {}
        for name, first in (("a", 1), ("b", 1000)):
            lengths = [length + 1 for length in draw(lengths_lists)]
            documents = penstock.from_arrays({"tokens": ragged(make_documents(lengths, first=first))})
            sources[name] = shuffled(documents, draw).pack(8, max_documents=4)
        return _mixed(draw, sources)
    if kind == "padded mix":
        sources = {name: row_source(draw, "pad", first).stages for name, first in (("a", 1), ("b", 1000))}
        return _mixed(draw, sources)
    return row_source(draw, kind)


def _mixed(draw: st.DrawFn, sources: dict[str, Any]) -> Example:
    weights = [draw(st.integers(1, 5)) for _ in sources]
    epoch = {"rows": draw(st.integers(1, 40))} if draw(st.booleans()) else {"epoch": "b"}
    parts = {name: (stages, weight) for (name, stages), weight in zip(sources.items(), weights, strict=True)}
    schedule = {32: {"a": 1}, 64: {"a": 1, "b": 3}} if draw(st.booleans()) else None
    return Example(penstock.mix(parts, seed=draw(st.integers(0, 9)), schedule=schedule, **epoch), None)


def rows_of(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Each row of a batch as a value to compare; document ids count from the row's first."""
    arrays = {key: value for key, value in batch.items() if isinstance(value, (np.ndarray, penstock.Ragged))}
    arrays.pop("cu_seqlens", None)
    count = len(next(iter(arrays.values())))
    found = []
    for row in range(count):
        values = {key: np.asarray(value[row]) for key, value in arrays.items()}
        if "attention_mask" in values:  # how wide a row is depends on the others
            is_token = values["attention_mask"] != 0
            values = {key: value[is_token] if value.shape == is_token.shape else value for key, value in values.items()}
        if "document_ids" in values:
            ids = values["document_ids"]
            values["document_ids"] = np.where(ids < 0, -1, ids - ids[0])
        found.append(tuple((key, value.tolist()) for key, value in values.items()))
    return found


def tokens_of(batch: dict[str, Any]) -> list[int]:
    if "x" in batch:
        keep = ~batch["is_repeated"] if "is_repeated" in batch else np.ones(len(batch["x"]), bool)
        return batch["x"][keep].tolist()
    is_token = np.ones(batch["input_ids"].shape, bool)
    if "document_ids" in batch:
        is_token = batch["document_ids"] >= 0
    if "attention_mask" in batch:
        is_token = batch["attention_mask"] != 0
    if "is_repeated" in batch:
        is_token = is_token & ~batch["is_repeated"][:, None]
    return batch["input_ids"][is_token].tolist()


@few
@given(sequences(), st.integers(1, 16), st.integers(1, 3), st.sampled_from(TAILS), st.integers(0, 2), st.data())
def test_the_ranks_of_a_step_hold_the_rows_of_the_global_batch_in_turn(
    example: Example, world_size: int, share: int, tail: Any, epoch: int, data: st.DataObject
) -> None:
    plan = example.stages.batch(share * world_size, tail=tail)
    if not plan.num_batches(epoch):
        return
    step = data.draw(st.integers(0, plan.num_batches(epoch) - 1))
    whole = plan.read(step, epoch)
    parts = [plan.read(step, epoch, rank, world_size) for rank in range(world_size)]
    expected = rows_of(whole)
    for rank, part in enumerate(parts):
        assert list(part) == list(whole)
        assert rows_of(part) == expected[rank::world_size]
    if "num_targets" in whole:
        assert whole["num_targets"] == whole["num_targets_global"] == int((whole["labels"] != IGNORED).sum())
        assert sum(part["num_targets"] for part in parts) == whole["num_targets"]
        assert {part["num_targets_global"] for part in parts} == {whole["num_targets"]}
        for part in parts:
            assert part["num_targets"] == int((part["labels"] != IGNORED).sum())


@few
@given(sequences(), st.integers(1, 16), st.integers(1, 3), st.integers(0, 2))
def test_an_even_tail_gives_every_rank_as_many_rows_and_repeats_only_marked_ones(
    example: Example, world_size: int, share: int, epoch: int
) -> None:
    plan = example.stages.batch(share * world_size, tail="even")
    for step in range(plan.num_batches(epoch)):
        whole = plan.read(step, epoch)
        parts = [plan.read(step, epoch, rank, world_size) for rank in range(world_size)]
        sizes = {len(part["is_repeated"]) for part in parts}
        assert len(sizes) == 1
        assert 1 <= sizes.pop() <= share
        assert not whole["is_repeated"].any()
        first = [
            row for part in parts for row, mark in zip(rows_of(part), part["is_repeated"], strict=True) if not mark
        ]
        assert Counter(map(str, first)) == Counter(map(str, rows_of(whole)))
        if "num_targets" in whole:
            assert {part["num_targets_global"] for part in parts} == {sum(part["num_targets"] for part in parts)}


@few
@given(
    sequences().filter(lambda example: example.tokens is not None),
    st.integers(1, 12),
    st.sampled_from(TAILS),
    st.integers(0, 3),
)
def test_an_epoch_holds_every_sample_and_token_exactly_once(
    example: Example, batch_size: int, tail: Any, epoch: int
) -> None:
    plan = example.stages.batch(batch_size, tail=tail)
    if tail == "carry":  # rows of the run, whatever batches they come in
        first, last = epoch * plan.num_rows, (epoch + 1) * plan.num_rows
        one_by_one = example.stages.batch(1)
        found = Counter(token for row in range(first, last) for token in tokens_of(one_by_one.read_at(row)))
    else:
        found = Counter(token for step in range(plan.num_batches(epoch)) for token in tokens_of(plan.read(step, epoch)))
    expected = Counter(example.tokens)
    if tail == "drop":
        ledger = plan.ledger(epoch)
        dropped = range(plan.num_rows - ledger.rows_dropped, plan.num_rows)
        one_by_one = example.stages.batch(1)
        assert ledger.rows_dropped == plan.num_rows % batch_size
        for row in dropped:
            found.update(tokens_of(one_by_one.read_at(epoch * plan.num_rows + row)))
    assert found == expected


@few
@given(sequences(), st.integers(1, 7), st.integers(0, 2))
def test_padded_rows_are_marked_repeat_the_epoch_and_are_no_targets(example: Example, size: int, epoch: int) -> None:
    plan = example.stages.batch(size, tail="pad")
    if not plan.num_rows:
        return
    last = plan.read(plan.num_batches(epoch) - 1, epoch)
    num_repeated = -plan.num_rows % size
    assert last["is_repeated"].tolist() == [False] * (size - num_repeated) + [True] * num_repeated
    plain = example.stages.batch(size)
    for place in np.flatnonzero(last["is_repeated"]).tolist():
        original = epoch * plan.num_rows + (place - (size - num_repeated)) % plan.num_rows
        if "labels" in last:
            assert (last["labels"][place] == IGNORED).all()
            found, expected = (dict(rows_of(batch)[at]) for batch, at in ((last, place), (plain.read_at(original), 0)))
            assert found["input_ids"] == expected["input_ids"]
        else:
            assert last["x"][place] == plain.read_at(original)["x"][0]


@few
@given(sequences(), st.integers(1, 9), st.sampled_from([*TAILS, "even"]), st.randoms(use_true_random=False))
def test_a_step_asked_alone_is_the_step_met_in_sequence(example: Example, size: int, tail: Any, random: Any) -> None:
    plan = example.stages.batch(size, tail=tail)
    asked = [(step, epoch) for epoch in range(3) for step in range(plan.num_batches(epoch))]
    met = {key: plan.read(*key) for key in asked}
    random.shuffle(asked)
    for key in asked[:6]:
        assert_same(pickle.loads(pickle.dumps(plan)).read(*key), met[key])


@few
@given(sequences(), st.integers(0, 100), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_another_batch_or_world_size_continues_the_same_rows(
    example: Example, start: int, size: int, share: int, world_size: int
) -> None:
    first, second = example.stages.batch(size), example.stages.batch(share * world_size)
    if not first.num_rows:
        return
    rows = [row for k in range(5) for row in rows_of(first.read_at(start + k * size))]
    resumed = start + size  # after one batch of the old kind
    for k in range(2):
        at = resumed + k * share * world_size
        for rank in range(world_size):
            part = rows_of(second.read_at(at, rank, world_size))
            expected = [at + rank + world_size * j - start for j in range(share)]
            assert [row for row, place in zip(part, expected, strict=True) if place < len(rows)] == [
                rows[place] for place in expected if place < len(rows)
            ]


@few
@given(sequences(), st.integers(1, 9))
def test_with_carry_the_batches_of_a_run_are_one_sequence_of_rows(example: Example, size: int) -> None:
    plan, one_by_one = example.stages.batch(size), example.stages.batch(1)
    batches = [plan.read(step, epoch) for epoch in range(3) for step in range(plan.num_batches(epoch))]
    rows = [row for batch in batches for row in rows_of(batch)]
    assert all(len(rows_of(batch)) == size for batch in batches)
    assert rows == [rows_of(one_by_one.read_at(row))[0] for row in range(len(rows))]
    assert len(rows) >= 3 * plan.num_rows


@few
@given(sequences(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.sampled_from([*TAILS, "even"]))
def test_the_parts_of_a_ranks_batch_are_its_rows_and_know_the_targets_of_the_step(
    example: Example, world_size: int, share: int, num_parts: int, tail: Any
) -> None:
    plan = example.stages.batch(share * world_size, tail=tail)
    if not plan.num_batches():
        return
    row = plan.row_of(plan.num_batches() - 1)
    whole = plan.read_at(row, world_size - 1, world_size)
    parts = [plan.read_at(row, world_size - 1, world_size, part=k, num_parts=num_parts) for k in range(num_parts)]
    assert [values for part in parts for values in rows_of(part)] == rows_of(whole)
    if "num_targets" in whole:
        assert sum(part["num_targets"] for part in parts) == whole["num_targets"]
        assert {part["num_targets_global"] for part in parts} == {whole["num_targets_global"]}


@few
@given(sequences(), st.integers(1, 9), st.sampled_from([*TAILS, "even"]))
def test_steps_count_rows_of_the_run(example: Example, size: int, tail: Any) -> None:
    plan = example.stages.batch(size, tail=tail)
    for epoch in range(3):
        for step in range(plan.num_batches(epoch)):
            assert_same(plan.read(step, epoch), plan.read_at(plan.row_of(step, epoch)))


def test_epochs_come_in_another_order_and_without_a_shuffle_in_the_same() -> None:
    dataset = penstock.from_arrays({"x": np.arange(200)})
    epochs = {
        mode: [np.concatenate([plan.read(step, epoch)["x"] for step in range(4)]).tolist() for epoch in range(3)]
        for mode, plan in {
            "none": dataset.batch(50),
            "windows": dataset.shuffle(1).batch(50),
            "full": dataset.shuffle(1, "full").batch(50),
        }.items()
    }
    assert epochs["none"] == [list(range(200))] * 3
    for mode in ("windows", "full"):
        assert len({tuple(epoch) for epoch in epochs[mode]}) == 3
        assert sorted(epochs[mode][0]) == list(range(200))
    assert epochs["windows"] != epochs["full"]


def test_window_mode_reads_a_group_of_storage_windows_at_a_time() -> None:
    """24 bytes are 3 numbers of 8: groups of 2 windows are 6 positions in a row."""
    dataset = penstock.from_arrays({"x": np.arange(60)})
    order = [int(x) for x in dataset.shuffle(3, group=2).batch(60).read(0)["x"]]
    for begin in range(0, 60, 6):
        assert len({x // 3 for x in order[begin : begin + 6]}) == 2


@pytest.mark.stress
@pytest.mark.timeout(3600)
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(sequences(), st.integers(1, 16), st.integers(1, 3), st.sampled_from(TAILS), st.integers(0, 2), st.data())
def test_the_laws_hold_for_thousands_of_plans(
    example: Example, world_size: int, share: int, tail: Any, epoch: int, data: st.DataObject
) -> None:
    laws = {
        test_the_ranks_of_a_step_hold_the_rows_of_the_global_batch_in_turn: (world_size, share, tail, epoch, data),
        test_another_batch_or_world_size_continues_the_same_rows: (7 * epoch, share, share, world_size),
        test_padded_rows_are_marked_repeat_the_epoch_and_are_no_targets: (share * world_size, epoch),
        test_with_carry_the_batches_of_a_run_are_one_sequence_of_rows: (share * world_size,),
        test_steps_count_rows_of_the_run: (share * world_size, tail),
    }
    for law, arguments in laws.items():
        law.hypothesis.inner_test(example, *arguments)
    if example.tokens is not None:
        test_an_epoch_holds_every_sample_and_token_exactly_once.hypothesis.inner_test(example, share, tail, epoch)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_an_evaluation_with_an_even_tail_has_a_finite_mean_loss_on_every_rank(world_size: int) -> None:
    documents = penstock.from_arrays({"tokens": penstock.Ragged.from_lengths(np.arange(36), [4] * 9)})
    plan = documents.pack(4).batch(8, tail="even")
    labels = [plan.read(1, 0, rank, world_size)["labels"] for rank in range(world_size)]
    assert [rows.shape for rows in labels] == [(1, 4)] * world_size
    assert all((rows != -100).any() for rows in labels)  # a short tail has no row, a padded one no label, on seven of 8

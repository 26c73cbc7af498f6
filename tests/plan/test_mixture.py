"""Mixtures: exact shares, each source's own epochs, and batches as valid as those of one source."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import SchemaError
from penstock.plan import Dataset, Plan
from plan.examples import assert_same, make_documents, packed_reference, ragged, tokens_dataset, write_tokens

BLOCK = 65_536


def numbers(count: int, first: int) -> Dataset:
    return penstock.from_arrays({"x": np.arange(first, first + count)})


def three(**epoch: Any) -> Plan:
    return penstock.mix(
        {
            "a": (numbers(1000, 0).shuffle(1), 0.5),
            "b": (numbers(90, 10_000).shuffle(2, "full"), 0.3),
            "c": (numbers(5, 20_000), 0.2),
        },
        seed=7,
        **epoch,
    )


@pytest.mark.parametrize("block", [0, 1, 5])
def test_every_block_holds_exactly_the_quota_of_each_source(block: int) -> None:
    plan = three(rows=10 * BLOCK).batch(BLOCK)
    counts = np.bincount(plan.read_at(block * BLOCK)["x"] // 10_000)
    assert counts.tolist() == [32768, 19661, 13107]


def test_each_source_runs_through_its_own_epochs_each_exactly_once() -> None:
    x = np.concatenate([three(rows=1000).batch(500).read_at(row)["x"] for row in range(0, 20_000, 500)])
    for first, count in ((0, 1000), (10_000, 90), (20_000, 5)):
        own = x[(x >= first) & (x < first + 10_000)] - first
        whole = len(own) // count - 1  # rows of a stratum come mixed, so the last epoch may be begun early
        counts = Counter(own.tolist())
        assert set(counts) == set(range(count))
        assert min(counts.values()) >= whole
        assert max(counts.values()) <= whole + 3
    # In the order of their own positions, sources are the sequences they would be alone.
    rows = np.arange(20_000)
    plan = three(rows=1000)
    sources, positions = plan.row_source.mixture.locate(rows)  # type: ignore[attr-defined]
    for number, alone in enumerate(
        (numbers(1000, 0).shuffle(1), numbers(90, 10_000).shuffle(2, "full"), numbers(5, 20_000))
    ):
        mine = sources == number
        single = alone.batch(1)
        order = np.argsort(positions[mine])
        assert positions[mine][order].tolist() == sorted(set(positions[mine].tolist()))
        for place in order[:: max(1, len(order) // 20)]:
            assert x[mine][place] == single.read_at(int(positions[mine][place]))["x"][0]


def test_an_epoch_is_the_rows_given_or_one_pass_of_a_named_source() -> None:
    assert three(rows=123).num_rows == 123
    plan = three(epoch="b")
    x = plan.batch(plan.num_rows).read(0)["x"]
    assert ((x >= 10_000) & (x < 20_000)).sum() == 90  # as many rows as its epoch has
    fewer = plan.batch(plan.num_rows - 1).read(0)["x"]
    assert ((fewer >= 10_000) & (fewer < 20_000)).sum() == 89


def test_rows_do_not_depend_on_the_length_of_the_mixtures_epoch() -> None:
    for row in (0, 100, 999):
        assert_same(three(rows=50).batch(7).read_at(row), three(epoch="a").batch(7).read_at(row))


def packed(lengths: list[int], first: int, **options: Any) -> Plan:
    return penstock.from_arrays({"tokens": ragged(make_documents(lengths, first=first))}).shuffle(1).pack(8, **options)


@pytest.mark.parametrize("max_documents", [None, 3])
def test_packed_mixtures_give_valid_batches_that_know_their_sources(max_documents: int | None) -> None:
    lengths = {"a": [5, 9, 1, 2, 0, 7] * 3, "b": [20, 3, 3]}
    first = {"a": 1, "b": 1000}
    documents = {name: make_documents(lengths[name], first=first[name]) for name in lengths}
    parts = {name: (packed(lengths[name], first[name], max_documents=max_documents), 1) for name in lengths}
    plan = penstock.mix(parts, seed=3, rows=30).batch(6)
    all_documents = documents["a"] + documents["b"]
    for step in range(5):
        traces = plan.documents(step)
        assert {trace.source for trace in traces} <= {"a", "b"}
        behind_a = len(documents["a"])
        shifted = [replace(t, document=t.document + behind_a * (t.source == "b")) for t in traces]
        single = Plan(plan.source.sources[0][1].source, plan.source.sources[0][1].stages)  # type: ignore[union-attr]
        assert_same(plan.read(step), packed_reference(single, all_documents, shifted, 6))
        parts_of_ranks = [plan.read(step, rank=rank, world_size=3) for rank in range(3)]
        assert sum(part["num_targets"] for part in parts_of_ranks) == plan.read(step)["num_targets"]
        assert {part["num_targets_global"] for part in parts_of_ranks} == {plan.read(step)["num_targets"]}


def test_a_loss_mask_in_one_source_only_hides_labels_of_that_source() -> None:
    masked = penstock.from_arrays(
        {"tokens": ragged(make_documents([8] * 5, first=1000)), "loss_mask": ragged([np.zeros(8)] * 5, "bool")}
    )
    plan = penstock.mix({"a": (packed([8] * 5, 1), 1), "b": (masked.pack(8), 1)}, seed=1, rows=20).batch(20)
    batch = plan.read(0)
    is_masked = batch["input_ids"][:, 0] >= 1000
    assert (batch["labels"][is_masked] == -100).all()
    assert ((batch["labels"][~is_masked] != -100).sum(1) == 7).all()
    assert batch["num_targets"] == 7 * (~is_masked).sum()


def test_mixtures_of_mixtures_are_mixtures() -> None:
    inner = penstock.mix({"x": (packed([5] * 9, 1), 1), "y": (packed([4] * 9, 1000), 1)}, seed=1, rows=10)
    plan = penstock.mix({"inner": (inner, 3), "z": (packed([8] * 9, 2000), 1)}, seed=2, rows=64).batch(32)
    batch = plan.read(0)
    thousands = batch["input_ids"][:, 0] // 1000
    assert np.bincount(thousands, minlength=3)[2] == 8
    assert {trace.source for trace in plan.documents(0)} == {"inner/x", "inner/y", "z"}
    assert batch["num_targets"] == (batch["labels"] != -100).sum()
    parts = [plan.read(0, rank=rank, world_size=4) for rank in range(4)]
    assert {part["num_targets_global"] for part in parts} == {batch["num_targets"]}
    plain = penstock.mix({"inner": (three(rows=10), 1), "d": (numbers(3, 30_000), 1)}, seed=1, rows=64).batch(32)
    assert np.bincount(plain.read(0)["x"] // 10_000)[3] == 16


def test_ragged_and_byte_columns_are_mixed_row_by_row() -> None:
    def data(letter: bytes, count: int) -> Dataset:
        names = [letter * (index % 3) for index in range(count)]
        return penstock.from_arrays({"name": names, "t": ragged(make_documents([1, 0, 3] * count)[:count])})

    plan = penstock.mix({"a": (data(b"a", 9), 1), "b": (data(b"b", 4), 1)}, seed=1, rows=16).batch(16)
    batch, traces = plan.read(0), plan.documents(0)
    for row, trace in enumerate(traces):
        assert batch["name"][row] == trace.source.encode() * (trace.document % 3)
        assert len(batch["t"][row]) == [1, 0, 3][trace.document % 3]


@pytest.mark.parametrize("kind", ["samples", "packed"])
def test_a_rank_without_rows_gets_an_empty_batch(kind: str) -> None:
    plan = three(rows=3) if kind == "samples" else penstock.mix({"a": (packed([5, 9], 1), 1)}, seed=1, rows=3)
    batch = plan.batch(4, tail="short").read(0, rank=3, world_size=4)
    assert len(batch["x" if kind == "samples" else "input_ids"]) == 0


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: numbers(3, 0).cast(x="float64"), "float64"),
        (lambda: penstock.from_arrays({"y": np.arange(3)}), "'y'"),
        (lambda: penstock.from_arrays({"x": np.zeros((3, 2), np.int64)}), r"int64\[2\]"),
        (lambda: penstock.from_arrays({"x": [b"a", b"bc"]}), "bytes"),
        (lambda: tokens_dataset([9]).window(4), "input_ids"),
    ],
)
def test_sources_whose_columns_differ_are_refused_by_name(other: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=rf"'a' and 'b' differ in columns.*{words}"):
        penstock.mix({"a": (numbers(3, 0), 1), "b": (other(), 1)}, seed=1, rows=4)


def test_ragged_sources_with_other_elements_are_refused() -> None:
    one = penstock.from_arrays({"x": penstock.Ragged(np.zeros((3, 2), np.int32), np.array([0, 1, 3]))})
    other = penstock.from_arrays({"x": penstock.Ragged(np.zeros((3, 4), np.int32), np.array([0, 1, 3]))})
    with pytest.raises(SchemaError, match="differ in columns"):
        penstock.mix({"a": (one, 1), "b": (other, 1)}, seed=1, rows=4)


@pytest.mark.parametrize("options", [{"labels": "same"}, {"positions": "continue"}, {"pad": 5}, {"max_documents": 2}])
def test_packed_sources_whose_rows_look_different_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="'a' and 'b' differ in pack settings"):
        penstock.mix({"a": (packed([5], 1), 1), "b": (packed([5], 1, **options), 1)}, seed=1, rows=4)


def test_packed_and_other_rows_do_not_mix() -> None:
    with pytest.raises(SchemaError, match="either all sources are packed or none is"):
        penstock.mix({"a": (packed([5], 1), 1), "b": (tokens_dataset([9]).window(8), 1)}, seed=1, rows=4)


@pytest.mark.parametrize("weight", [0, -1, -0.5, float("nan"), float("inf"), "0.5", None])
def test_weights_that_are_not_positive_are_refused_by_name(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"the weight of 'b' is .*; weights are positive, finite numbers"):
        penstock.mix({"a": (numbers(3, 0), 1), "b": (numbers(3, 0), weight)}, seed=1, rows=4)


def test_a_weight_that_rounds_to_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"mix\(\) of 'a', 'b', in this order: weights\[1\].* rounds to 0 rows of 65,536"
    ):
        penstock.mix({"a": (numbers(3, 0), 1), "b": (numbers(3, 0), 1e-9)}, seed=1, rows=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give rows=, the rows in an epoch, or epoch="),
        ({"rows": 4, "epoch": "a"}, "give rows=, the rows in an epoch, or epoch="),
        ({"epoch": "web"}, r"mix\(epoch='web'\): the sources are 'a'"),
        ({"rows": 0}, r"mix\(rows=0\)"),
        ({"rows": 2.5}, r"mix\(rows=2.5\)"),
        ({"rows": 4, "seed": "x"}, r"mix\(seed='x'\): the seed must be an int"),
    ],
)
def test_an_epoch_or_seed_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        penstock.mix({"a": (numbers(3, 0), 1)}, **({"seed": 1} | arguments))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([(numbers(3, 0), 1)], r"the sources are \{name: \(stages, weight\)\}, not list"),
        ({"a": ([1, 2, 3], 1)}, "'a' is list; a source is a Penstock dataset or plan"),
        ({0: (numbers(3, 0), 1)}, "0 cannot name a source"),
    ],
)
def test_sources_of_another_form_are_refused_in_words(sources: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        penstock.mix(sources, seed=1, rows=4)


def test_sources_without_rows_or_no_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="'b' has no rows"):
        penstock.mix({"a": (numbers(3, 0), 1), "b": (numbers(0, 0), 1)}, seed=1, rows=4)
    with pytest.raises(ValueError, match="at least one source"):
        penstock.mix({}, seed=1, rows=4)


def test_the_repr_shows_the_shares_after_rounding() -> None:
    text = repr(three(epoch="b").batch(8))
    assert "mix(seed=7, epoch='b')" in text
    assert "a: 32768/65536 of Plan" in text
    assert "b: 19661/65536 of Plan" in text
    assert ".shuffle(seed=2, mode='full')" in text
    assert text.endswith("  .batch(global_size=8)")


def made_with(vocabulary: str, folder: Path) -> Dataset:
    tokenizer = {"name": f"{vocabulary}.json", "sha256": vocabulary * 16}
    return penstock.open(write_tokens(folder, make_documents([6, 6]), attributes={"tokenizer": tokenizer}))


def test_sources_made_with_different_tokenizers_are_refused_unless_that_is_said(tmp_path: Path) -> None:
    parts = {name: (made_with(name, tmp_path / name).pack(4), 1.0) for name in ("code", "text")}
    with pytest.raises(ValueError, match=r"different tokenizers.*'code' with code.json \(codecode\), 'text' with text"):
        penstock.mix(parts, seed=1, rows=8)
    inner = penstock.mix({"code": parts["code"]}, seed=1, rows=8)
    with pytest.raises(ValueError, match="different tokenizers"):
        penstock.mix({"inner": (inner, 1.0), "text": parts["text"]}, seed=1, rows=8)
    plan = penstock.mix(parts, seed=1, rows=8, different_tokenizers=True).batch(2)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml").fingerprint == plan.fingerprint


def test_sources_with_one_tokenizer_or_none_that_is_known_are_mixed(tmp_path: Path) -> None:
    known, same = made_with("text", tmp_path / "a").pack(4), made_with("text", tmp_path / "b").pack(4)
    unknown = tokens_dataset([6, 6]).pack(4)
    plan = penstock.mix({"known": (known, 1.0), "same": (same, 1.0), "unknown": (unknown, 1.0)}, seed=1, rows=9).batch(
        3
    )
    assert plan.read(0)["input_ids"].shape == (3, 4)

"""Verbs in combination, against lists: split, filter, concat, zip, mix, schedules, growth, states and plan files.

A dataset is drawn as a tree of verbs over two folders, and beside it the list of samples that it must show. Parts of
splits are found sample by sample: a split of a single sample says where that sample belongs.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import StateError
from penstock.loader import Cursor
from penstock.plan import Dataset, Plan

from .examples import assert_same, folder
from .test_laws import rows_of

SIZES = {0: (7, 12), 1: (5, 9)}
"""Samples of each folder: when the plan is made, and after more were appended."""
Open = Callable[[int], Dataset]
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def tokens_of(sample: int) -> np.ndarray:
    """The tokens of a sample, which no other has."""
    return np.arange(sample * 100, sample * 100 + 1 + sample * 7 % 13, dtype=np.uint32)


def write(path: Path, number: int, begin: int, end: int) -> None:
    columns = {"tokens": "uint32[*]", "id": "int64"}
    with penstock.DatasetWriter(path, columns, shard_bytes=150, mode="append" if begin else "create") as writer:
        for sample in range(number * 50 + begin, number * 50 + end):
            writer.write({"tokens": tokens_of(sample), "id": sample})


@dataclass
class Tree:
    """How a dataset is built, and the samples it must show."""

    build: Callable[[Open], Dataset]
    samples: list[int]
    has_file: bool = True
    folders: set[int] = field(default_factory=set)


def leaf(draw: st.DrawFn) -> Tree:
    number = draw(st.integers(0, 1))
    samples = list(range(number * 50, number * 50 + SIZES[number][0]))
    return Tree(lambda open_: open_(number), samples, folders={number})


def derived(draw: st.DrawFn, tree: Tree, seed: int) -> Tree:
    """One more verb; seeds of splits must differ."""
    verb = draw(st.sampled_from(["filter", "mask", "take", "content", "index", "id", "concat", "none"]))
    before, samples = tree.build, tree.samples
    if verb == "filter":
        kept = [sample for sample in samples if sample % 3]
        return Tree(lambda open_: before(open_).filter(id=lambda ids: ids % 3 != 0), kept, False, tree.folders)
    if verb == "mask":
        mask = np.array([sample % 4 != 1 for sample in samples], bool)
        kept = [sample for sample in samples if sample % 4 != 1]
        return Tree(lambda open_: before(open_).filter(mask), kept, False, tree.folders)
    if verb == "take" and samples:
        chosen = draw(st.lists(st.integers(-len(samples), len(samples) - 1), max_size=12))
        return Tree(lambda open_: before(open_).take(chosen), [samples[each] for each in chosen], False, tree.folders)
    if verb in ("content", "index", "id"):
        part = draw(st.sampled_from(["a", "b"]))

        def split(dataset: Dataset) -> dict[str, Dataset]:
            return dataset.split({"a": 0.6, "b": 0.4}, seed=seed, by=verb)

        if verb == "index":
            kept = [samples[at] for at in split(penstock.from_arrays({"n": np.arange(len(samples))}))[part][:]["n"]]
        else:
            kept = [each for each in samples if len(split(alone(each))[part])]
        return Tree(lambda open_: split(before(open_))[part], kept, tree.has_file, tree.folders)
    if verb == "concat":
        other = leaf(draw)
        build, both = other.build, tree.folders | other.folders
        return Tree(
            lambda open_: penstock.concat(before(open_), build(open_)), samples + other.samples, tree.has_file, both
        )
    return tree


def alone(sample: int) -> Dataset:
    return penstock.from_arrays({"tokens": [tokens_of(sample)], "id": np.array([sample])})


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree, seed = leaf(draw), draw(st.integers(0, 99))
    for step in range(draw(st.integers(0, 3))):
        tree = derived(draw, tree, seed + 100 * step)
    if draw(st.booleans()) and tree.samples:  # a column from memory beside them
        before, samples = tree.build, tree.samples
        more = penstock.from_arrays({"twice": 2 * np.array(samples)})
        tree = Tree(lambda open_: before(open_).zip(more), samples, False, tree.folders)
    return tree


KINDS = ["samples", "pack", "pad", "window"]


def rows(dataset: Dataset, kind: str, shuffle: tuple[int, Any] | None) -> Plan:
    stages: Any = dataset
    if kind in ("sample", "balance"):
        stages = dataset.sample("id", rows=9) if kind == "sample" else dataset.balance("id")
    stages = stages if shuffle is None else stages.shuffle(seed=shuffle[0], mode=shuffle[1])
    if kind in ("samples", "sample", "balance"):
        return stages.as_plan()
    if kind == "window":
        return stages.window(5)
    return stages.pack(8) if kind == "pack" else stages.pad(keep="id")


shuffles = st.one_of(st.none(), st.tuples(st.integers(0, 9), st.sampled_from(["windows", "full"])))


def found_in(plan: Plan, epoch: int) -> Counter[int]:
    """How often each sample, or each token, is in an epoch."""
    cut, found = plan.batch(3, tail="short"), Counter[int]()
    for step in range(cut.num_batches(epoch)):
        batch = cut.read(step, epoch)
        if "input_ids" not in batch:
            found.update(batch["id"].tolist())
        elif "document_ids" in batch:
            found.update(batch["input_ids"][batch["document_ids"] >= 0].tolist())
        elif "attention_mask" in batch:
            found.update(batch["input_ids"][batch["attention_mask"] == 1].tolist())
        else:
            found.update(batch["input_ids"].reshape(-1).tolist())
    return found


def opener(path: Path, as_of: Any = None) -> Open:
    return lambda number: penstock.open(path / str(number), **({} if as_of is None else {"as_of": as_of}))


def write_all(path: Path) -> None:
    for number, (size, _) in SIZES.items():
        write(path / str(number), number, 0, size)


def grow(path: Path) -> None:
    for number, (size, later) in SIZES.items():
        write(path / str(number), number, size, later)


@few
@given(trees())
def test_a_dataset_shows_the_samples_that_its_verbs_say(tree: Tree) -> None:
    with folder() as path:
        write_all(path)
        dataset = tree.build(opener(path))
        for each in (dataset, pickle.loads(pickle.dumps(dataset))):
            assert len(each) == len(tree.samples)
            assert each[:]["id"].tolist() == tree.samples
            assert [sample.tolist() for sample in each[:]["tokens"]] == [tokens_of(n).tolist() for n in tree.samples]
            assert each.lengths("tokens").tolist() == [len(tokens_of(sample)) for sample in tree.samples]
            for at, sample in list(enumerate(tree.samples))[:3]:
                assert int(each[at]["id"]) == sample
                assert each[at].get("twice", 2 * sample) == 2 * sample


@few
@given(trees(), st.sampled_from(KINDS), shuffles, st.integers(0, 2))
def test_an_epoch_holds_what_the_dataset_shows_exactly_once(tree: Tree, kind: str, shuffle: Any, epoch: int) -> None:
    with folder() as path:
        write_all(path)
        plan = rows(tree.build(opener(path)), kind, shuffle)
        tokens = [int(token) for sample in tree.samples for token in tokens_of(sample)]
        expected = tree.samples if kind == "samples" else tokens
        if kind == "window":
            expected = tokens[: len(tokens) // 5 * 5]
            assert plan.ledger(epoch).tokens_left_over == len(tokens) % 5
        assert found_in(plan, epoch) == Counter(expected)
        batch = plan.batch(4, tail="short")
        for step in range(min(2, batch.num_batches(epoch))):
            arrays = batch.read(step, epoch)
            for trace in batch.documents(step, epoch):
                sample = tree.samples[trace.document]
                if kind == "samples":
                    assert arrays["id"][trace.row] == sample
                    continue
                here = arrays["input_ids"][trace.row, trace.column : trace.column + trace.size]
                assert here.tolist() == tokens_of(sample)[trace.start : trace.start + trace.size].tolist()


@dataclass
class Recipe:
    """A plan over one tree or a mixture of two, and what may be asked of it."""

    build: Callable[[Open], Plan]
    has_file: bool
    folders: set[int]


@st.composite
def recipes(draw: st.DrawFn, kinds: tuple[str, ...] = ("samples", "pack", "pad", "sample", "balance")) -> Recipe:
    kind, verb = draw(st.sampled_from(kinds)), draw(st.sampled_from(["", "take", "skip", "repeat"]))
    drawn = [draw(trees().filter(lambda tree: sum(tree.samples) > 0)) for _ in range(draw(st.integers(1, 2)))]
    shuffled = [draw(shuffles) for _ in drawn]
    weights = [draw(st.integers(1, 4)) for _ in drawn]
    schedule = draw(st.sampled_from([None, {32: {"0": 1, "1": 3}}, {32: {"1": 1}, 64: {"0": 2, "1": 1}}]))
    is_nested = draw(st.booleans())
    epoch = draw(st.sampled_from([{"rows": 20}, {"epoch": "0"}, {"epoch": "1"}]))

    def build(open_: Open) -> Plan:
        columns = ["tokens", "id"] if kind in ("pack", "pad") else ["id"]
        shown = [tree.build(open_).select_columns(columns) for tree in drawn]
        parts = [rows(dataset, kind, how) for dataset, how in zip(shown, shuffled, strict=True)]
        plan = parts[0]
        if len(parts) == 2:
            sources = {
                str(number): (part, weight) for number, (part, weight) in enumerate(zip(parts, weights, strict=True))
            }
            plan = penstock.mix(sources, seed=3, schedule=schedule, **epoch)
            if is_nested:
                plan = penstock.mix({"both": (plan, 2), "one": (parts[0], 1)}, seed=4, epoch="both", temperature=2)
        if verb == "skip":
            plan = plan.skip(rows=min(3, plan.num_rows - 1))
        return plan.take(rows=11) if verb == "take" else plan.repeat(2) if verb == "repeat" else plan

    has_file = all(tree.has_file for tree in drawn)
    return Recipe(build, has_file, set().union(*(tree.folders for tree in drawn)))


@few
@given(recipes(), st.integers(0, 40), st.integers(1, 4), st.sampled_from(["carry", "short", "even", "pad", "drop"]))
def test_states_pickles_and_plan_files_go_on_with_the_same_rows_whatever_was_appended(
    recipe: Recipe, row: int, size: int, tail: Any
) -> None:
    with folder() as path:
        write_all(path)
        plan = recipe.build(opener(path))
        expected = [plan.batch(1).read_at(row + offset) for offset in range(3)]
        cut = plan.batch(size, tail=tail)
        steps = [cut.read(step) for step in range(cut.num_batches())]
        state = json.loads(json.dumps(Cursor(plan.batch(2), row).state()))
        file = path / "plan.toml"
        if recipe.has_file:
            file.write_text(plan.to_toml())
            assert penstock.load_plan(file) == plan
        else:
            with pytest.raises(ValueError, match="A plan over"):
                plan.to_toml()
        grow(path)
        other = recipe.build(opener(path, state))
        assert other == plan
        assert other.order_fingerprint == plan.order_fingerprint
        assert Cursor(other.batch(3)).restore(state).row == row
        for offset, batch in enumerate(expected):
            assert_same(other.batch(1).read_at(row + offset), batch)
        for step, batch in enumerate(steps):
            assert_same(other.batch(size, tail=tail).read(step), batch)


@few
@given(recipes(), st.integers(0, 60), st.integers(1, 3), st.integers(1, 3))
def test_ranks_and_batch_sizes_read_the_same_run(recipe: Recipe, row: int, share: int, world_size: int) -> None:
    with folder() as path:
        write_all(path)
        plan = recipe.build(opener(path))
        one_by_one, shared = plan.batch(1), plan.batch(share * world_size)
        expected = [rows_of(one_by_one.read_at(row + offset))[0] for offset in range(share * world_size)]
        for rank in range(world_size):
            assert rows_of(shared.read_at(row, rank, world_size)) == expected[rank::world_size]


@st.composite
def shared_batches(draw: st.DrawFn) -> Callable[[Plan], Plan]:
    """Batches whose rows are dealt by cost, or as many as a budget of tokens holds; 4 ranks may share them."""
    tail, balance = draw(st.sampled_from(["carry", "drop", "pad"])), draw(st.sampled_from(["tokens", "attention"]))
    if draw(st.booleans()):
        size = draw(st.sampled_from([4, 8]))
        return lambda plan: plan.batch(size, tail=tail, balance=balance)
    options: dict[str, Any] = {"tokens": draw(st.integers(60, 200)), "multiple": 4, "tail": tail}
    options |= {"balance": balance} if draw(st.booleans()) else {}
    return lambda plan: plan.batch(**options)


def documents_of(batch: dict[str, Any]) -> list[list[int]]:
    """The tokens of each row of a padded batch."""
    return [row[mask == 1].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


@few
@given(recipes(("pad",)), shared_batches(), st.integers(0, 60), st.integers(0, 3))
def test_batches_by_cost_and_by_tokens_share_the_run_and_go_on_with_other_ranks_and_more_data(
    recipe: Recipe, cut: Callable[[Plan], Plan], place: int, before: int
) -> None:
    with folder() as path:
        write_all(path)
        plan = cut(recipe.build(opener(path)))
        plain = recipe.build(opener(path)).batch(1)
        assume(plan.num_rows >= 8)
        row = plan.steps.skip_tail(plan.row_of(plan.num_batches() - 1) if place % 2 else place)
        for number in range(before + 3):
            world_size = 4 if number < before else 1 + number % 2
            ranks = [plan.read_at(row, rank, world_size) for rank in range(world_size)]
            whole, _ = plan.steps.rows_at(row)
            alone = [each for one in whole.tolist() for each in documents_of(plain.read_at(one))]
            assert sorted(each for rank in ranks for each in documents_of(rank)) == sorted(alone)
            assert len({len(batch["lengths"]) for batch in ranks}) == 1
            if plan.token_budget is not None:
                widest = max(batch["input_ids"].shape[1] for batch in ranks)
                assert len(whole) * widest <= plan.token_budget
                assert len(whole) % 4 == 0 or plan.steps.tail != "pad"
            assert len({batch["num_targets_global"] for batch in ranks}) == 1
            assert sum(batch["num_targets"] for batch in ranks) == ranks[0]["num_targets_global"]
            row = plan.steps.skip_tail(plan.steps.next_row(row))
            if number == before:
                state = json.loads(json.dumps(Cursor(plan, row).state()))
                grow(path)
                later = cut(recipe.build(opener(path, state)))
                assert later == plan
                assert Cursor(later).restore(state).row == row
                plan = later


def test_a_state_of_another_combination_is_refused(tmp_path: Path) -> None:
    write_all(tmp_path)
    data = [penstock.open(tmp_path / str(number)) for number in range(2)]
    parts = [each.split({"a": 0.5, "b": 0.5}, seed=1)["a"] for each in data]
    plans = [
        penstock.concat(*data).shuffle(1).pack(8),
        penstock.concat(*data[::-1]).shuffle(1).pack(8),
        penstock.concat(*parts).shuffle(1).pack(8),
        penstock.mix({"0": data[0].pack(8), "1": data[1].pack(8)}, seed=1, rows=9),
        penstock.mix({"0": data[0].pack(8), "1": parts[1].pack(8)}, seed=1, rows=9),
    ]
    for one in plans:
        for other in plans:
            state = Cursor(one.batch(2), 4).state()
            if one is other:
                assert Cursor(other.batch(3)).restore(state).row == 4
            else:
                with pytest.raises(StateError, match="another order"):
                    Cursor(other.batch(2)).restore(state)

"""Users' functions: the same result wherever a row is computed, and nobody else's generators disturbed."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import SchemaError
from penstock.plan import Dataset, Plan

from .examples import tokens_dataset

Row = dict[str, Any]


def numbers(count: int = 24) -> Dataset:
    return penstock.from_arrays({"x": np.arange(count), "v": np.arange(count * 2).reshape(count, 2)})


def with_generator(row: Row, rng: np.random.Generator) -> Row:
    return {"x": row["x"], "draw": rng.random(3), "whole": rng.integers(0, 2**62)}


def with_globals(row: Row) -> Row:
    draws = [random.random(), np.random.rand(), torch.rand(1).item()]
    return {"x": row["x"], "draw": np.array(draws)}


@penstock.pure
def double(row: Row) -> Row:
    return {"x": row["x"] * 2}


def rows_of(plan: Plan, row: int, rank: int = 0, world_size: int = 1) -> list[tuple[Any, ...]]:
    batch = plan.read_at(row, rank, world_size)
    return list(zip(*(np.asarray(batch[key]).tolist() for key in ("x", "draw")), strict=True))


@pytest.mark.parametrize("function", [with_generator, with_globals])
def test_a_row_comes_out_the_same_for_any_batch_size_rank_and_order(function: Callable[..., Any]) -> None:
    stages = numbers().shuffle(1).map(function)
    one_by_one = [rows_of(stages.batch(1), row)[0] for row in reversed(range(60))][::-1]
    assert [row for first in range(0, 60, 12) for row in rows_of(stages.batch(12), first)] == one_by_one
    for rank in range(4):
        assert rows_of(stages.batch(8), 16, rank, 4) == one_by_one[16 + rank : 24 : 4]
    draws = [tuple(draw) for _, draw in one_by_one]
    assert len(set(draws)) == 60  # other numbers for every row, in every epoch


def test_another_seed_draws_other_numbers() -> None:
    one, other = (numbers().shuffle(seed, "full").map(with_generator).batch(24).read(0) for seed in (1, 2))
    assert not set(one["whole"].tolist()) & set(other["whole"].tolist())


def test_two_maps_draw_from_streams_of_their_own() -> None:
    def first(row: Row, rng: np.random.Generator) -> Row:
        return {"x": row["x"], "one": rng.random()}

    def second(row: Row, rng: np.random.Generator) -> Row:
        return row | {"two": rng.random()}

    batch = numbers().map(first).map(second).batch(24).read(0)
    assert not set(batch["one"].tolist()) & set(batch["two"].tolist())


@pytest.mark.parametrize("function", [with_generator, with_globals, double])
def test_the_generators_of_the_caller_are_left_as_they_were(function: Callable[..., Any]) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    numbers().map(function).batch(8).read(0)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_the_generators_are_put_back_after_an_error_too() -> None:
    def broken(row: Row) -> Row:
        random.random()
        torch.rand(3)
        raise RuntimeError("broken by design")

    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="broken by design"):
        numbers().map(broken).batch(8).read(0)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_a_function_that_imports_torch_itself_finds_a_seeded_generator() -> None:
    """In a process without torch the first row must not differ from the same row anywhere else."""
    script = """
import sys, numpy as np, penstock
def draw(row):
    import torch
    return {"x": torch.rand(2).numpy()}
plan = penstock.from_arrays({"x": np.arange(3)}).map(draw).batch(3)
assert "torch" not in sys.modules
first = plan.read(0)["x"]
assert "torch" in sys.modules
assert (plan.read(0)["x"] == first).all(), "another first batch"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_pure_functions_are_called_as_they_are() -> None:
    plan = numbers().map(double).batch(4)
    assert plan.read(0)["x"].tolist() == [0, 2, 4, 6]
    assert list(plan.read(0)) == ["x"]


def test_a_plan_knows_whether_its_functions_need_isolation() -> None:
    def with_default(row: Row, scale: int = 2) -> Row:
        return row

    def with_optional_rng(row: Row, rng: Any = None) -> Row:
        assert rng is not None
        return row

    data = numbers()
    assert not data.batch(4).needs_isolation
    assert not data.map(with_generator).map(double).needs_isolation
    assert data.map(with_globals).needs_isolation
    assert data.map(with_default).needs_isolation
    assert data.map(double).map(with_default).batch(4).needs_isolation
    assert not data.map(with_optional_rng).needs_isolation
    data.map(with_optional_rng).batch(4).read(0)
    assert data.map(partial(with_default, scale=3)).needs_isolation
    assert not data.map(penstock.pure(lambda row: row)).needs_isolation


def test_a_batched_map_gets_whole_arrays_and_may_change_everything() -> None:
    def sums(batch: Row) -> Row:
        assert batch["v"].shape == (4, 2)
        return {"total": batch["v"].sum(1)}

    plan = numbers().map(sums, batched=True).map(lambda row: {"total": row["total"] + 1}).batch(4)
    assert plan.read(1)["total"].tolist() == [4 * row + 2 for row in range(4, 8)]


def test_a_batched_map_with_a_generator_is_the_same_every_time() -> None:
    def noise(batch: Row, rng: np.random.Generator) -> Row:
        return {"noise": rng.random(len(batch["x"]))}

    plan = numbers().shuffle(1).map(noise, batched=True).batch(4)
    assert plan.read(2)["noise"].tolist() == plan.read(2)["noise"].tolist()
    assert plan.read(2)["noise"].tolist() != plan.read(3)["noise"].tolist()


def test_a_batched_map_after_pack_sees_what_belongs_to_the_batch() -> None:
    def keep(batch: Row) -> Row:
        return {"input_ids": batch["input_ids"] + 1, "num_targets": batch["num_targets"]}

    plan = tokens_dataset([5, 9]).pack(8)
    batch = plan.map(keep, batched=True).batch(2).read(0)
    assert (batch["input_ids"] == plan.batch(2).read(0)["input_ids"] + 1).all()
    assert batch["num_targets"] == plan.batch(2).read(0)["num_targets"]


def test_a_map_of_rows_after_pack_is_explained() -> None:
    with pytest.raises(SchemaError, match=r"cu_seqlens, max_seqlen, .*belong to the whole batch.*batched=True"):
        tokens_dataset([5, 9, 7]).pack(8).map(double).batch(2).read(0)

    def leave_borders(batch: Row) -> Row:
        return {key: batch[key] for key in ("input_ids", "cu_seqlens")}

    with pytest.raises(SchemaError, match="cu_seqlens belong to the whole batch"):
        tokens_dataset([5, 9, 7]).pack(8).map(leave_borders, batched=True).map(double).batch(2).read(0)


def test_a_map_of_rows_after_window_gets_tokens_and_labels() -> None:
    plan = tokens_dataset([40]).window(4).map(lambda row: {"first": row["input_ids"][0], "last": row["labels"][-1]})
    assert plan.batch(2).read(0)["first"].tolist() == [1, 5]
    assert plan.batch(2).read(0)["last"].tolist() == [5, 9]


def test_results_may_be_numbers_lists_arrays_and_tensors() -> None:
    def kinds(row: Row) -> Row:
        return {"a": 1.5, "b": [1, 2], "c": torch.ones(2), "d": row["x"] > 3, "e": np.float16(2)}

    batch = numbers().map(kinds).batch(4).read(0)
    assert {key: (value.dtype.name, value.shape) for key, value in batch.items()} == {
        "a": ("float64", (4,)),
        "b": ("int64", (4, 2)),
        "c": ("float32", (4, 2)),
        "d": ("bool", (4,)),
        "e": ("float16", (4,)),
    }


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda row: {"a": 1 if row["x"] else 1.0}, r"returned 'a' as float64 \[\] for one row and as int64 \[\]"),
        (
            lambda row: {"a": "text" if row["x"] else 1},
            r"returned <U4 for 'a'; a column is made of numbers, bytes, str",
        ),
        (lambda row: {"a": None}, r"returned object for 'a'; a column is made of numbers, bytes, str, or dicts"),
        (lambda row: {"a": [[1], [1, None]]}, r"returned object for 'a'; a column is made of numbers"),
        (lambda row: {"a": {"b": 1} if row["x"] else {}}, r"returned \[\] for one row and \['b'\] for another"),
        (lambda row: {"a": 1} if row["x"] else {"b": 1}, r"returned \['b'\] for one row and \['a'\] for another"),
        (lambda row: row["x"], r"returned int64; a map returns a dict of columns"),
        (lambda row: None, r"returned NoneType; a map returns a dict of columns"),
    ],
)
def test_results_that_make_no_batch_are_refused_with_the_functions_name(function: Any, message: str) -> None:
    with pytest.raises((SchemaError, TypeError), match=rf"map\(<lambda>\) {message}"):
        numbers().map(function).batch(4).read(0)


def test_ragged_columns_reach_the_function_sample_by_sample() -> None:
    batch = tokens_dataset([5, 0, 2]).map(lambda row: {"n": len(row["tokens"])}).batch(3).read(0)
    assert batch["n"].tolist() == [5, 0, 2]


def test_repeated_rows_are_mapped_as_the_rows_they_repeat() -> None:
    batch = numbers(5).map(with_generator).batch(4, tail="pad").read(1)
    first = numbers(5).map(with_generator).batch(4, tail="pad").read(0)
    assert batch["is_repeated"].tolist() == [False, True, True, True]
    assert batch["whole"][1:].tolist() == first["whole"][:3].tolist()


def test_an_error_says_which_row_and_sample_it_was() -> None:
    def fail(row: Row, rng: np.random.Generator) -> Row:
        raise LookupError

    few = penstock.from_arrays({"x": np.arange(5)})
    plan = few.shuffle(seed=3).map(fail).batch(2)
    sample = int(few.shuffle(seed=3).batch(2).read_at(2)["x"][0])
    with pytest.raises(LookupError) as caught:
        plan.read_at(2)
    assert f"at row 2 (sample {sample})" in caught.value.__notes__[0]
    mixture = penstock.mix({"few": (few.shuffle(seed=3), 1)}, seed=1, rows=10).map(fail).batch(2)
    with pytest.raises(LookupError) as caught:
        mixture.read_at(2)
    sample = int(penstock.mix({"few": (few.shuffle(seed=3), 1)}, seed=1, rows=10).batch(2).read_at(2)["x"][0])
    assert f"(sample {sample}) of 'few'" in caught.value.__notes__[0]


def test_the_file_behind_a_row_at_fault_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    penstock.prepare(str(tmp_path / "a.jsonl"), tmp_path / "data")

    def fail(row: Row, rng: np.random.Generator) -> Row:
        raise LookupError

    with pytest.raises(LookupError) as caught:
        penstock.open(tmp_path / "data").map(fail).batch(1).read(1)
    assert re.search(r"at row 1 \(sample 1, from \S*a.jsonl", caught.value.__notes__[0])


def test_the_name_of_the_file_behind_a_row_at_fault_is_safe_to_print(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J\n.jsonl").write_text('{"x": 1}\n')
    penstock.prepare(tmp_path, tmp_path / "data")

    def fail(row: Row, rng: np.random.Generator) -> Row:
        raise LookupError

    with pytest.raises(LookupError) as caught:
        penstock.open(tmp_path / "data").map(fail).batch(1).read(0)
    assert r"a\x1b[2J\n.jsonl" in caught.value.__notes__[0]
    assert caught.value.__notes__[0].isprintable()


@pytest.mark.parametrize("batched", [True, False])
def test_tensors_that_a_function_returns_become_arrays(batched: bool) -> None:
    def use_torch(row: Row, rng: np.random.Generator) -> Row:
        v = torch.as_tensor(row["v"])
        return {"v": v, "half": v.bfloat16() / 2, "learned": torch.nn.Parameter(v.float())}

    batch = numbers().map(use_torch, batched=batched).batch(4).read(1)
    assert all(isinstance(value, np.ndarray) for value in batch.values())
    assert batch["v"].tolist() == numbers()[4:8]["v"].tolist()
    assert batch["half"].dtype.name == "bfloat16"
    assert batch["half"].astype(float).tolist() == (batch["v"] / 2).tolist()
    assert batch["learned"].dtype == np.float32


@pytest.mark.parametrize("function", [with_generator, with_globals])
def test_how_a_function_is_called_is_found_out_once_for_a_batch(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, asked = numbers().map(function).batch(24), []
    monkeypatch.setattr("penstock.plan._mapping.takes_generator", lambda f: asked.append(f) or f is with_generator)
    plan.read(0)
    assert asked == [function]


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_that_runs_out_of_something_does_not_end_the_batch_quietly(batched: bool) -> None:
    with pytest.raises(StopIteration):
        numbers().map(lambda row: next(iter(())), batched=batched).batch(4).read(0)

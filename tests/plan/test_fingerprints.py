"""What the two fingerprints see: all of a plan, or only what decides which data is row i."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.plan import Dataset, Plan

from .examples import make_documents, ragged


def data(first: int = 1, **columns: Any) -> Dataset:
    documents = make_documents([5, 9, 2, 30], first=first)
    return penstock.from_arrays({"tokens": ragged(documents), "x": np.arange(4, dtype=np.uint8), **columns})


def numbers() -> Dataset:
    return penstock.from_arrays({"x": np.arange(9, dtype=np.uint8), "y": np.arange(9)})


def add_one(row: Any) -> Any:
    return {"x": row["x"] + 1}


def add_two(row: Any) -> Any:
    return {"x": row["x"] + 2}


def mixed(weight: float = 1, seed: int = 1, rows: int = 10, labels: Any = "next", name: str = "b") -> Plan:
    parts = {"a": (data().shuffle(1).pack(8, labels=labels), 1), name: (data(100).pack(8, labels=labels), weight)}
    return penstock.mix(parts, seed=seed, rows=rows)


SAME_ORDER: dict[str, tuple[Callable[[], Plan], Callable[[], Plan]]] = {
    "cast": (lambda: numbers().shuffle(1).batch(4), lambda: numbers().cast(x="int64").shuffle(1).batch(4)),
    "cast dtype": (lambda: numbers().cast(x="int32").batch(4), lambda: numbers().cast(x="int64").batch(4)),
    "map": (lambda: numbers().batch(4), lambda: numbers().map(add_one).batch(4)),
    "map code": (lambda: numbers().map(add_one).batch(4), lambda: numbers().map(add_two).batch(4)),
    "batched": (lambda: numbers().map(add_one).batch(4), lambda: numbers().map(add_one, batched=True).batch(4)),
    "batch": (lambda: numbers().batch(4), lambda: numbers().batch(5)),
    "tail": (lambda: numbers().batch(4), lambda: numbers().batch(4, tail="drop")),
    "columns": (lambda: numbers().batch(4), lambda: numbers().select_columns(["y"]).batch(4)),
    "labels": (lambda: data().pack(8), lambda: data().pack(8, labels="same")),
    "positions": (lambda: data().pack(8), lambda: data().pack(8, positions="continue")),
    "pad": (lambda: data().pack(8), lambda: data().pack(8, pad=3)),
    "packed columns": (lambda: data().pack(8), lambda: data().select_columns(["tokens"]).pack(8)),
    "mixed labels": (lambda: mixed(), lambda: mixed(labels="same")),
}
OTHER_ORDER: dict[str, tuple[Callable[[], Plan], Callable[[], Plan]]] = {
    "dataset": (lambda: data().pack(8), lambda: data(2).pack(8)),
    "subset": (lambda: data().pack(8), lambda: data().take([0, 1, 2]).pack(8)),
    "split seed": (
        lambda: data().split({"a": 0.5, "b": 0.5}, seed=1)["a"].pack(8),
        lambda: data().split({"a": 0.5, "b": 0.5}, seed=2)["a"].pack(8),
    ),
    "shuffled": (lambda: data().pack(8), lambda: data().shuffle(1).pack(8)),
    "seed": (lambda: data().shuffle(1).pack(8), lambda: data().shuffle(2).pack(8)),
    "mode": (lambda: data().shuffle(1).pack(8), lambda: data().shuffle(1, "full").pack(8)),
    "group": (lambda: data().shuffle(1).pack(8), lambda: data().shuffle(1, group=3).pack(8)),
    "length": (lambda: data().pack(8), lambda: data().pack(9)),
    "long": (lambda: data().pack(8), lambda: data().pack(8, long="drop")),
    "max_documents": (lambda: data().pack(8), lambda: data().pack(8, max_documents=2)),
    "window or pack": (lambda: data().pack(8), lambda: data().window(8)),
    "window length": (lambda: data().window(8), lambda: data().window(9)),
    "window or sample": (lambda: data().window(8), lambda: data().batch(8)),
    "mix weights": (lambda: mixed(1), lambda: mixed(2)),
    "mix seed": (lambda: mixed(seed=1), lambda: mixed(seed=2)),
    "mix rows": (lambda: mixed(rows=10), lambda: mixed(rows=11)),
}


@pytest.mark.parametrize("change", SAME_ORDER)
def test_what_does_not_move_a_row_changes_the_fingerprint_and_not_that_of_the_order(change: str) -> None:
    one, other = (build() for build in SAME_ORDER[change])
    assert one.order_fingerprint == other.order_fingerprint
    assert one.fingerprint != other.fingerprint
    assert one != other


@pytest.mark.parametrize("change", OTHER_ORDER)
def test_what_moves_a_row_changes_both(change: str) -> None:
    one, other = (build() for build in OTHER_ORDER[change])
    assert one.order_fingerprint != other.order_fingerprint
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("name", [*SAME_ORDER, *OTHER_ORDER])
def test_the_same_plan_built_again_is_equal(name: str) -> None:
    build = (SAME_ORDER | OTHER_ORDER)[name][0]
    assert build() == build()
    assert hash(build()) == hash(build())


def test_only_the_shares_of_a_mixture_count_for_its_order() -> None:
    parts = {"a": (numbers(), 1), "b": (numbers(), 3)}
    scaled = {"a": (numbers(), 10), "b": (numbers(), 30)}
    one, other = (penstock.mix(sources, seed=1, rows=9) for sources in (parts, scaled))
    assert one.order_fingerprint == other.order_fingerprint


def test_the_version_of_the_order_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = numbers().batch(4).order_fingerprint, data().pack(8).order_fingerprint
    monkeypatch.setattr("penstock.plan._plan.ORDER_VERSION", 999)
    assert numbers().batch(4).order_fingerprint != before[0]
    monkeypatch.undo()
    monkeypatch.setattr("penstock.plan._packed_rows.PACKING_VERSION", 999)
    assert data().pack(8).order_fingerprint != before[1]


def scale(row: Any, factor: int = 1) -> Any:
    return {"x": row["x"] * factor}


def scaling(factor: Any) -> Callable[..., Any]:
    return lambda row: {"x": row["x"] * factor}


class Scaling:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, row: Any) -> Any:
        return {"x": row["x"] * self.factor}

    def method(self, row: Any) -> Any:
        return self(row)


def logged(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(row: Any) -> Any:
        for _ in range(times):
            row = function(row)
        return row

    return wrapper


@pytest.mark.parametrize(
    "make",
    [
        lambda factor: functools.partial(scale, factor=factor),
        scaling,
        lambda factor: scaling(np.full(3, factor)),
        lambda factor: scaling({"a": [factor]}),
        lambda factor: scaling(frozenset([factor, 1])),
        Scaling,
        lambda factor: Scaling(factor).method,
        lambda factor: logged(add_one, factor),
        lambda factor: logged(scaling(factor), 1),
        lambda factor: lambda row, f=factor: row,
        lambda factor: eval(f"lambda row: row in {{1, {factor}}}"),
    ],
)
def test_functions_that_carry_other_values_are_other_functions(make: Callable[[Any], Any]) -> None:
    def fingerprint(factor: int) -> str:
        return numbers().map(make(factor)).batch(4).fingerprint

    assert fingerprint(3) == fingerprint(3)
    assert fingerprint(3) != fingerprint(4)


def test_a_function_that_holds_itself_has_a_fingerprint() -> None:
    def recursive(row: Any) -> Any:
        return recursive if row is None else row

    assert numbers().map(recursive).batch(4).fingerprint == numbers().map(recursive).batch(4).fingerprint


SCRIPT = """
import numpy as np, penstock
def fn(row, rng, kinds={"b", "a", "c"}):
    return {"x": row["x"] in {1, 2, "three", "four"}, "y": rng.random()}
documents = penstock.Ragged(np.arange(200, dtype=np.uint16), np.array([0, 5, 5, 60, 111, 200]))
data = penstock.from_arrays({"tokens": documents, "x": np.arange(5)})
plan = penstock.mix({"b": (data.shuffle(1).pack(16), 2), "a": (data.pack(16), 1)}, seed=4, epoch="b").batch(8)
mapped = data.select_columns(["x"]).shuffle(3).map(fn).batch(4)
print(plan.fingerprint, plan.order_fingerprint, mapped.fingerprint)
for step in range(3):
    print({key: np.asarray(value).tolist() for key, value in plan.read_at(7 * step).items()})
    print({key: np.asarray(value).tolist() for key, value in mapped.read_at(4 * step).items()})
part = data.split({"a": 0.5, "b": 0.5}, seed=2)["a"]
print(part.fingerprint, part.window(4).batch(2).fingerprint)
"""


def test_a_fresh_interpreter_with_another_hash_seed_gives_the_same_plan_and_batches() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            check=True,
            capture_output=True,
            timeout=100,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "4242")
    }
    assert len(outputs) == 1
    assert outputs.pop().count(b"\n") == 8

"""How a plan is put together: what may follow what, and what is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import SchemaError, StageError
from penstock.plan import Dataset, Plan
from plan.examples import make_documents, ragged, tokens_dataset, write_tokens

LEGAL_ORDER = (
    "select_columns, cast -> sample or balance -> shuffle -> window, pack or pad -> (mix) -> take, skip, repeat -> "
    "map, map, ... -> batch"
)


def dataset() -> Dataset:
    return tokens_dataset([3, 5, 2])


def numbers(count: int = 10) -> Dataset:
    return penstock.from_arrays({"x": np.arange(count, dtype=np.uint8), "y": np.arange(count)})


def identity(row: Any) -> Any:
    return row


@pytest.mark.parametrize(
    ("build", "second", "first"),
    [
        (lambda: dataset().pack(8).shuffle(1), "shuffle", "pack"),
        (lambda: dataset().window(8).shuffle(1), "shuffle", "window"),
        (lambda: dataset().shuffle(1).shuffle(2), "shuffle", "shuffle"),
        (lambda: dataset().pack(8).pack(8), "pack", "pack"),
        (lambda: dataset().pack(8).window(8), "window", "pack"),
        (lambda: dataset().batch(2).batch(2), "batch", "batch"),
        (lambda: dataset().batch(2).map(identity), "map", "batch"),
        (lambda: dataset().map(identity).shuffle(1), "shuffle", "map"),
        (lambda: dataset().map(identity).pack(8), "pack", "map"),
        (lambda: numbers().shuffle(1).cast(x="int64"), "cast", "shuffle"),
        (lambda: numbers().shuffle(1).select_columns(["x"]), "select_columns", "shuffle"),
        (lambda: numbers().batch(1).select_columns(["x"]), "select_columns", "batch"),
        (lambda: penstock.mix({"a": (numbers(), 1)}, seed=1, rows=4).shuffle(1), "shuffle", "mix"),
        (lambda: penstock.mix({"a": (dataset(), 1)}, seed=1, rows=4).pack(8), "pack", "mix"),
        (lambda: penstock.mix({"a": (numbers(), 1)}, seed=1, rows=4).select_columns(["x"]), "select_columns", "mix"),
    ],
)
def test_a_stage_out_of_order_is_refused_and_the_order_printed(
    build: Callable[[], Plan], second: str, first: str
) -> None:
    with pytest.raises(StageError) as caught:
        build()
    assert f"{second}() cannot follow {first}()" in str(caught.value)
    assert LEGAL_ORDER in str(caught.value)


def test_a_map_before_pack_is_sent_to_preparation() -> None:
    with pytest.raises(StageError, match="do what the map does when the data is prepared"):
        dataset().map(identity).pack(8)


def test_a_map_or_batch_inside_a_mixture_is_refused_by_name() -> None:
    with pytest.raises(StageError, match=r"'web' ends with batch\(\), which comes after mix"):
        penstock.mix({"web": (numbers().batch(2), 1)}, seed=1, rows=4)
    with pytest.raises(StageError, match=r"'web' ends with map\(\), which comes after mix"):
        penstock.mix({"web": (numbers().map(identity), 1)}, seed=1, rows=4)


def test_all_stages_in_their_order_are_accepted() -> None:
    plan = numbers().cast(x="int32").select_columns(["x"]).cast(x="int64").shuffle(1).map(identity).map(identity)
    batch = plan.batch(5).read(0)
    assert list(batch) == ["x"]
    assert batch["x"].dtype == np.int64
    assert sorted(int(x) for step in range(2) for x in plan.batch(5).read(step)["x"]) == list(range(10))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: numbers().shuffle(1.5), "seed must be an int"),
        (lambda: numbers().shuffle(True), "seed must be an int"),
        (lambda: numbers().shuffle(1, "random"), "choices are 'windows' and 'full'"),
        (lambda: numbers().shuffle(1, group=0), r"group=0"),
        (lambda: numbers().shuffle(1, group=2**63), r"group="),
        (lambda: dataset().window(0), r"window\(length=0\)"),
        (lambda: dataset().window(2.0), r"window\(length=2.0\)"),
        (lambda: dataset().pack(0), "length must be from 1"),
        (lambda: dataset().pack(8, long="cut"), "long must be one of 'split', 'truncate', 'drop'"),
        (lambda: dataset().pack(8, max_documents=0), "max_documents must be at least 1"),
        (lambda: dataset().pack(8, labels="shifted"), "choices are 'next' and 'same'"),
        (lambda: dataset().pack(8, positions="reset"), "choices are 'restart' and 'continue'"),
        (lambda: dataset().pack(8, pad=0.0), r"pack\(pad=0.0\)"),
        (lambda: numbers().batch(0), r"batch\(global_size=0\): the global_size must be at least 1\.$"),
        (lambda: numbers().batch(2**41), r"the global_size must be at most 1,099,511,627,776\.$"),
        (lambda: numbers().batch(2, tail="keep"), "choices are 'carry', 'short', 'even', 'pad' and 'drop'"),
        (lambda: numbers().map(3), r"map\(3\): a function is needed"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_where_it_is_given(build: Callable[[], Plan], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        build()


@pytest.mark.parametrize(
    ("columns", "spec"),
    [
        ({"tokens": np.zeros((4, 8), np.uint16)}, r"uint16\[8\]"),
        ({"tokens": [b"ab", b"c"]}, "bytes"),
        ({"tokens": penstock.Ragged(np.zeros(3, np.float32), np.array([0, 2, 3]))}, r"float32\[\*\]"),
        ({"tokens": penstock.Ragged(np.zeros((3, 2), np.int32), np.array([0, 2, 3]))}, r"int32\[\*,2\]"),
    ],
)
def test_only_documents_of_integers_are_packed(columns: dict[str, Any], spec: str) -> None:
    with pytest.raises(SchemaError, match=rf"pack\(\) takes documents of uneven length.*column 'tokens' is {spec}"):
        penstock.from_arrays(columns).pack(8)


@pytest.mark.parametrize(
    "columns",
    [
        {"tokens": np.zeros((4, 8), np.uint16)},
        {"tokens": [b"ab", b"c"]},
        {"tokens": np.zeros(4, np.float32)},
    ],
)
def test_only_streams_of_integers_are_windowed(columns: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"window\(\) cuts a stream of integers; column 'tokens'"):
        penstock.from_arrays(columns).window(2)


def test_documents_that_happen_to_be_of_one_length_are_told_what_to_do_about_windows() -> None:
    with pytest.raises(SchemaError, match=r"all of one length.*a Ragged makes them uneven"):
        penstock.from_arrays({"tokens": [np.arange(8), np.arange(8)]}).window(4)


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    for build in (lambda: dataset().pack(8, column="ids"), lambda: dataset().window(8, column="ids")):
        with pytest.raises(SchemaError, match="No column 'ids'; the columns are 'tokens'"):
            build()
    with pytest.raises(SchemaError, match="No column 'z'"):
        numbers().cast(z="int64")
    with pytest.raises(SchemaError, match="No column 'x'"):
        numbers().cast(x="int64").select_columns(["y"])


def test_a_cast_that_loses_or_has_no_effect_is_refused() -> None:
    with pytest.raises(SchemaError, match="int64 does not fit; cast to a wider dtype"):
        numbers().cast(y="int32")
    with pytest.raises(SchemaError, match="'tokens' is ragged"):
        dataset().cast(tokens="int64")
    fixed = penstock.from_arrays({"tokens": np.arange(8, dtype=np.uint16)})
    with pytest.raises(StageError, match=r"cast\(\) has no effect before window\(\)"):
        fixed.cast(tokens="int64").window(2)


def test_a_loss_mask_of_another_kind_is_refused() -> None:
    for mask in (
        np.zeros(2),
        ragged([np.zeros(2), np.zeros(1)], "float32"),
        ragged([np.zeros(2), np.zeros(1)], "int64"),
    ):
        columns = {"tokens": ragged([np.arange(2), np.arange(1)]), "loss_mask": mask}
        with pytest.raises(SchemaError, match="a loss mask is 'bool"):
            penstock.from_arrays(columns).pack(8)


def test_a_plan_without_batch_has_rows_and_says_what_is_missing_for_batches() -> None:
    plan = numbers().shuffle(1)
    assert plan.num_rows == 10
    for ask in (lambda: plan.read(0), lambda: plan.num_batches(), lambda: plan.documents(0), lambda: plan.global_size):
        with pytest.raises(StageError, match=r"The plan has no batch\(\) yet"):
            ask()


@pytest.mark.parametrize("stage", ["samples", "shuffle", "window", "pack", "all empty"])
def test_an_empty_dataset_has_no_steps(stage: str) -> None:
    empty = tokens_dataset([0, 0] if stage == "all empty" else [])
    built = {
        "samples": lambda: empty.batch(2),
        "shuffle": lambda: empty.shuffle(1).batch(2),
        "window": lambda: empty.shuffle(1).window(4).batch(2),
        "pack": lambda: empty.shuffle(1).pack(4).batch(2),
        "all empty": lambda: empty.pack(4).batch(2),
    }[stage]()
    assert (built.num_rows, built.num_batches(0), built.num_batches(5)) == (0, 0, 0)
    with pytest.raises(IndexError, match=r"Epoch 0 has no steps \(0 rows"):
        built.read(0)
    with pytest.raises(IndexError, match="an epoch has 0 rows"):
        built.read_at(0)
    assert built.ledger().num_rows == 0


def test_read_refuses_steps_and_ranks_that_are_not_there() -> None:
    plan = numbers().batch(4)
    with pytest.raises(IndexError, match="Epoch 0 has steps 0 to 2"):
        plan.read(3)
    with pytest.raises(ValueError, match="cannot be shared evenly by 3 ranks"):
        plan.read(0, world_size=3)
    with pytest.raises(ValueError, match="ranks go from 0"):
        plan.read(0, rank=2, world_size=2)


def test_the_repr_shows_the_stages_as_they_were_written() -> None:
    plan = dataset().shuffle(7, group=4).pack(8, labels="same", max_documents=3).map(identity, batched=True).batch(2)
    assert repr(plan).splitlines()[1:] == [
        "  .shuffle(seed=7, group=4)",
        "  .pack(length=8, max_documents=3, labels='same')",
        "  .map(identity, batched=True)",
        "  .batch(global_size=2)",
    ]
    assert "  .cast(x='int64', y='int64')" in repr(numbers().cast(x="int64", y="int64"))


def test_integers_of_numpy_make_the_same_plan_as_plain_ones(tmp_path: Path) -> None:
    write_tokens(tmp_path / "corpus", make_documents([3, 5, 9]))
    data = penstock.open(tmp_path / "corpus")

    def build(number: Callable[[int], Any]) -> Plan:
        part = data.split({"train": 0.9, "test": 0.1}, seed=number(3))["train"]
        packed = part.shuffle(number(7), group=number(2)).pack(number(8), max_documents=number(3), pad=number(1))
        return penstock.mix({"a": (packed, number(2))}, seed=number(5), rows=number(9)).batch(number(4))

    assert build(np.int64).to_toml() == build(np.uint8).to_toml() == build(int).to_toml()
    assert build(np.int64) == build(int)
    assert data.window(np.int64(4)).batch(2) == data.window(4).batch(2)
    assert type(build(int).num_batches(np.int64(1))) is int


def test_a_dtype_may_be_numpys_own() -> None:
    assert numbers().cast(x=np.int64) == numbers().cast(x="int64")


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda plan: plan.read(1.0), TypeError, r"read\(step=1.0\): the step must be an int, not float"),
        (lambda plan: plan.read("1"), TypeError, r"read\(step='1'\): the step must be an int, not str"),
        (lambda plan: plan.read(0, 0.5), TypeError, r"read\(epoch=0.5\): the epoch must be an int"),
        (lambda plan: plan.read_at(1.5), TypeError, r"read_at\(row=1.5\): the row must be an int"),
        (lambda plan: plan.read_at(2**63), IndexError, "Row 9223372036854775808 is asked for"),
        (lambda plan: plan.read(0, 10**30), IndexError, "is asked for; an epoch has 10 rows, and a run 2"),
        (lambda plan: plan.read(0, out={"x": [0] * 4}), TypeError, r"out\['x'\] is list; a numpy array is needed"),
    ],
)
def test_what_is_no_step_row_or_array_is_refused_in_words(
    ask: Callable[[Plan], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(numbers().batch(4))


def test_documents_that_happen_to_be_of_one_length_are_told_from_columns_that_hold_none() -> None:
    with pytest.raises(SchemaError, match="documents are all of one length: batch"):
        penstock.from_arrays({"tokens": [np.arange(4), np.arange(4)]}).pack(8)

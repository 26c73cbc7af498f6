"""Functions as transforms, and columns kept as they are."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import SchemaError, TransformFailed
from penstock.transforms import DecodeImage, FunctionTransform, KeepColumns, Tokenize

from .tokenizer_examples import make_records, reasons

HERE = f"{__name__}:"


def lengths(batch: dict[str, Any]) -> dict[str, Any]:
    return {"length": np.array([len(text) for text in batch["text"]])}


def words(batch: dict[str, Any]) -> dict[str, Any]:
    pairs = [(place, word.encode()) for place, text in enumerate(batch["text"]) for word in text.split()]
    return {"word": [word for _, word in pairs], "__source__": [place for place, _ in pairs]}


def inverses(batch: dict[str, Any]) -> dict[str, Any]:
    return {"inverse": [1 / value for value in batch["value"]]}


def scaled(batch: dict[str, Any], by: int) -> dict[str, Any]:
    return {"value": np.asarray(batch["value"]) * by}


def centred(batch: dict[str, Any]) -> dict[str, Any]:
    assert len(batch["value"]) < 3, "too many at once"
    return {"value": batch["value"]}


def run(function: Any, columns: dict[str, Any], **options: Any) -> Any:
    return FunctionTransform(function, **options).open()(make_records(columns, first_row=10))


def test_as_many_samples_as_rows_come_from_the_rows_in_order() -> None:
    output = run(lengths, {"text": pa.array(["a", "bbb"])})
    assert output.columns["length"].tolist() == [1, 3]
    assert output.sources.tolist() == [0, 1]


def test_a_function_says_which_row_each_sample_came_from() -> None:
    output = run(words, {"text": ["one two", "", "three"]})
    assert output.columns == {"word": [b"one", b"two", b"three"]}
    assert output.sources.tolist() == [0, 0, 2]


def test_it_may_make_no_sample_at_all() -> None:
    output = run(words, {"text": ["", ""]})
    assert output.num_samples == 0
    assert output.errors == ()


def upper(batch: dict[str, Any]) -> dict[str, Any]:
    return {"list": [text.upper() for text in batch["text"]], "array": np.array(batch["text"])}


def test_text_is_stored_as_bytes() -> None:
    output = run(upper, {"text": ["naïve", ""]})
    assert output.columns == {"list": ["NAÏVE".encode(), b""], "array": ["naïve".encode(), b""]}


def test_another_number_of_samples_without_sources_is_an_error_that_explains() -> None:
    with pytest.raises(SchemaError, match=r"made 1 samples from 2 rows .*'__source__': \[0, 0, 1"):
        run(one_sample, {"text": ["a", "b"]})


def one_sample(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": [1]}


@pytest.mark.parametrize(
    ("sources", "message"),
    [([0, 2], "from 0 to 1"), ([1, 0], "must be non-decreasing"), ([0], "2 integers"), ([0.0, 1.0], "float64")],
)
def test_sources_that_cannot_be_are_refused(sources: list[Any], message: str) -> None:
    function = functools.partial(give_sources, sources=sources)
    with pytest.raises(SchemaError, match=message):
        run(function, {"text": ["a", "b"]})


def give_sources(batch: dict[str, Any], sources: list[Any]) -> dict[str, Any]:
    return {"x": [1, 2], "__source__": sources}


def test_numbers_arrive_as_arrays_and_everything_else_as_lists() -> None:
    seen: dict[str, Any] = {}
    columns = {
        "n": pa.array([1, 2]),
        "b": pa.array([True, False]),
        "t": pa.array(["a", None]),
        "m": pa.array([1, None]),
    }
    opened = FunctionTransform(lengths).open()
    opened._function = lambda batch: seen.update(batch) or {"x": batch["n"]}  # type: ignore[attr-defined]
    opened(make_records(columns))
    assert isinstance(seen["n"], np.ndarray)
    assert seen["b"].dtype == bool
    assert seen["t"] == ["a", None]
    assert seen["m"] == [1, None]


def test_rows_on_which_the_function_fails_are_bad_rows_with_its_traceback() -> None:
    output = run(inverses, {"value": [1, 0, 4, 0]})
    assert reasons(output) == [(11, "ZeroDivisionError"), (13, "ZeroDivisionError")]
    assert "1 / value for value in batch" in output.errors[0].message
    assert "_functions.py" not in output.errors[0].message.replace("test_functions.py", "")
    assert output.columns["inverse"] == [1.0, 0.25]
    assert output.sources.tolist() == [0, 2]


def test_when_every_row_fails_there_are_only_errors() -> None:
    output = run(inverses, {"value": [0, 0]})
    assert output.num_samples == 0
    assert len(output.errors) == 2


def test_a_failure_that_no_single_row_has_stops_the_run_with_the_traceback() -> None:
    with pytest.raises(TransformFailed, match=r"(?s)failed on a batch of 3 rows \(from row 10 .*too many at once"):
        run(centred, {"value": [1, 2, 3]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned NoneType"),
        ({}, "one length"),
        ({"a": [1], "b": [1, 2]}, "'a': 1, 'b': 2"),
        ({"a": "text"}, "one str"),
    ],
)
def test_what_is_no_batch_is_refused(value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        run(functools.partial(give, value=value), {"text": ["a"]})


def give(batch: dict[str, Any], value: Any) -> Any:
    return value


def test_an_import_path_names_a_function() -> None:
    output = run(HERE + "lengths", {"text": ["abc"]})
    assert output.columns["length"].tolist() == [3]
    with pytest.raises(ValueError, match="No module 'no_such_package_here' for the function"):
        FunctionTransform("no_such_package_here:f")
    with pytest.raises(ValueError, match=r"\.py has no function 'nothing'"):
        FunctionTransform(HERE + "nothing")
    with pytest.raises(ValueError, match=r"write 'package\.module:function'"):
        FunctionTransform("lengths")
    with pytest.raises(TypeError, match="not callable"):
        FunctionTransform(HERE + "HERE")


def test_what_cannot_be_pickled_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="cannot be sent to workers"):
        FunctionTransform(lambda batch: batch)


def test_the_identity_follows_the_code_the_arguments_and_the_version() -> None:
    identities = [
        FunctionTransform(lengths).identity,
        FunctionTransform(words).identity,
        FunctionTransform(lengths, version="2").identity,
        FunctionTransform(functools.partial(scaled, by=2)).identity,
        FunctionTransform(functools.partial(scaled, by=3)).identity,
    ]
    assert len({json.dumps(identity) for identity in identities}) == len(identities)
    assert FunctionTransform(HERE + "lengths").identity["code"] == identities[0]["code"]
    again = pickle.loads(pickle.dumps(FunctionTransform(lengths)))
    assert again.identity == identities[0]


def test_types_may_be_given() -> None:
    assert FunctionTransform(lengths).columns() is None
    assert FunctionTransform(lengths, types={"length": "int32"}).columns() == {"length": "int32"}
    with pytest.raises(SchemaError):
        FunctionTransform(lengths, types={"length": "text"})


def test_without_a_transform_columns_are_stored_as_they_are(tmp_path: Path) -> None:
    records = make_records({"text": pa.array(["a", None, "c"]), "label": pa.array([1, 2, 3], pa.int8())})
    ready = KeepColumns().before_run([records])
    assert ready.columns() == {"text": "bytes", "label": "int8"}
    output = ready.open()(records)
    assert reasons(output) == [(1, "null")]
    with penstock.DatasetWriter(tmp_path / "data", ready.columns() or {}) as writer:
        writer.write_batch(output.columns)
    assert penstock.open(tmp_path / "data")[1]["text"] == b"c"
    assert KeepColumns(["label"]).before_run([records]).columns() == {"label": "int8"}


def test_a_column_that_no_dataset_can_hold_is_refused_with_a_way_out() -> None:
    records = make_records({"when": pa.array([{"a": 1}])})
    with pytest.raises(SchemaError, match="'when' cannot be kept: its first rows hold values of type struct"):
        KeepColumns().before_run([records])
    with pytest.raises(SchemaError, match="nothing but nulls"):
        KeepColumns().before_run([make_records({"x": [None]})])


def test_fixed_size_lists_keep_their_shape() -> None:
    records = make_records(
        {"box": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)), "pair": [[1, 2], [3, 4]]}
    )
    ready = KeepColumns().before_run([records])
    assert ready.columns() == {"box": "float32[2]", "pair": "int64[2]"}
    assert ready.open()(records).columns["box"].tolist() == [[1, 2], [3, 4]]


def test_transforms_say_which_columns_they_read() -> None:
    assert Tokenize("bytes", keep=["url"]).input_columns == ("text", "url")
    chat = Tokenize("bytes", chat_template="{{ messages }}", tools_column="tools", keep={"tools": "bytes"})
    assert chat.input_columns == ("messages", "tools")
    assert DecodeImage(size=8, keep=["label"]).input_columns == ("image", "label")
    assert DecodeImage(size=8).input_columns is None
    assert KeepColumns(["a"]).input_columns == ("a",)
    assert KeepColumns().input_columns is None
    assert FunctionTransform(lengths).input_columns is None

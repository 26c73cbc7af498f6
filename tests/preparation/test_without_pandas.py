"""Preparing does not import pandas, which takes half a second, in the command and in every worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.sources._arrow import binary_array, plain_values, text_array
from penstock.transforms._transform import numbers_of

pytest.importorskip("pandas")

PREPARE = """
import sys
from penstock import KeepColumns, SourceOptions, Tokenize
from penstock.preparation import _engines, prepare

_engines.Workforce._choose_engine = lambda *_: _engines.InlineTaskEngine()
folder = sys.argv[1]
reading = SourceOptions(types="infer")
for name in ("a.jsonl", "a.txt", "a.csv", "a.parquet"):
    prepare(f"{folder}/{name}", f"{folder}/tokens-{name}", transform=Tokenize("bytes"))
    assert "pandas" not in sys.modules, name
    if name != "a.txt":
        prepare(f"{folder}/{name}", f"{folder}/columns-{name}", transform=KeepColumns(["text"]), reading=reading)
        assert "pandas" not in sys.modules, name
kept = {"odd.jsonl": {"text": "bytes", "flag": "bool"}, "floats.csv": {"text": "bytes", "x": "float64"}}
for name, types in kept.items():
    transform, reading = KeepColumns(types), SourceOptions(types={"x": "float64"} if "csv" in name else None)
    prepare(f"{folder}/{name}", f"{folder}/{name}-data", transform=transform, reading=reading, on_error="skip")
    assert "pandas" not in sys.modules, name
"""


def test_preparing_imports_no_pandas(tmp_path: Path) -> None:
    texts = [f"{number} " * 100 for number in range(2_000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    odd = [{"text": text, "flag": not number, "gap": number % 2 or None} for number, text in enumerate(texts)]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd) + "no row\n")
    (tmp_path / "floats.csv").write_text("text,x\n" + "".join(f"{text},0.5\n" for text in texts) + "a,no number\n")
    (tmp_path / "a.csv").write_text("text,number\n" + "".join(f"{text},1\n" for text in texts))
    (tmp_path / "a.txt").write_text("\n".join(texts))
    subprocess.run([sys.executable, "-c", PREPARE, str(tmp_path)], check=True, timeout=100)


@example([0, 2**63])
@example([None, True])
@example([None, None])
@given(
    st.sampled_from([st.text(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.booleans()]).flatmap(
        lambda kind: st.lists(kind) | st.lists(st.none() | kind)
    )
)
def test_values_are_what_arrow_makes_of_them(values: list[Any]) -> None:
    expected: Any
    try:
        expected = pa.array(values)
    except OverflowError:  # neither int64 nor uint64 holds them all
        with pytest.raises(OverflowError):
            plain_values(values)
    else:
        assert plain_values(values).equals(expected)


@given(st.lists(st.text()))
def test_text_is_what_arrow_makes_of_it(values: list[str]) -> None:
    assert text_array(values).equals(pa.array(values, pa.string()))
    encoded = [value.encode() for value in values]
    assert binary_array(encoded).equals(pa.array(encoded, pa.large_binary()))


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        text_array(["a", "\ud800"])


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()])
def test_numbers_are_what_arrow_makes_of_them(kind: pa.DataType) -> None:
    column = pa.array([1, 0, 1, 1, 0], pa.int8()).cast(kind, safe=False)
    for part in (column, column[2:], column[:0]):
        found, expected = numbers_of(part), part.to_numpy(zero_copy_only=False)
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()

"""Where a batch came from: documents, offsets, files and rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.plan import Plan, _sample_rows
from plan.examples import make_documents, tokens_dataset, write_tokens
from shards.folders import add_provenance

LENGTHS = [5, 12, 0, 3, 30, 1, 8]
ORIGINS = {"files": ["a.jsonl", "b.jsonl"], "splits": [[0, 0, 900, 4, None], [1, 10, 20, 3, [[0, 5, 1], [2, 9, 2]]]]}


def assert_traced(plan: Plan, documents: list[np.ndarray], key: str = "input_ids") -> None:
    """Every place that holds a token is in exactly one trace, and the trace says which token it is."""
    for step in range(plan.num_batches()):
        for rank in range(2):
            batch = plan.read(step, rank=rank, world_size=2)
            seen = np.zeros(batch[key].shape, np.int64)
            for trace in plan.documents(step, rank=rank, world_size=2):
                assert trace.size > 0
                here = batch[key][trace.row, trace.column : trace.column + trace.size]
                expected = documents[trace.document][trace.start : trace.start + trace.size]
                assert here.tolist() == expected.tolist()
                seen[trace.row, trace.column : trace.column + trace.size] += 1
            is_token = batch["document_ids"] >= 0 if "document_ids" in batch else np.ones_like(seen, bool)
            np.testing.assert_array_equal(seen, is_token)


@pytest.mark.parametrize("cut", ["pack", "window"])
@pytest.mark.parametrize("subset", ["whole", "take"])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_every_token_of_a_batch_is_traced_to_its_document(
    cut: str, subset: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sample_rows, "_CHUNK", chunk)
    documents = make_documents(LENGTHS)
    data = tokens_dataset(LENGTHS)
    if subset == "take":
        chosen = [6, 1, 2, 4, 0]
        data, documents = data.take(chosen), [documents[index] for index in chosen]
    stages = data.shuffle(1)
    assert_traced((stages.pack(8) if cut == "pack" else stages.window(8)).batch(2, tail="short"), documents)


def test_samples_are_traced_by_their_index() -> None:
    plan = penstock.from_arrays({"x": np.arange(100, 110)}).take([7, 3, 5]).shuffle(1).batch(3)
    traces = plan.documents(0)
    assert [(trace.row, trace.column, trace.start, trace.size, trace.source, trace.origin) for trace in traces] == [
        (row, 0, 0, 1, "", "") for row in range(3)
    ]
    assert [[107, 103, 105][trace.document] for trace in traces] == plan.read(0)["x"].tolist()


def test_windows_of_a_raw_file_are_traced_by_their_first_token(tmp_path: Path) -> None:
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "train.bin")
    plan = penstock.open(tmp_path / "train.bin", dtype="uint16").shuffle(1).window(4, column="data").batch(5)
    firsts = [trace.document for trace in plan.documents(0)]
    assert firsts == plan.read(0)["input_ids"][:, 0].tolist()
    assert {trace.size for trace in plan.documents(0)} == {4}


def test_the_file_and_row_of_a_document_are_told(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "data", make_documents(LENGTHS))
    add_provenance(path, {"origins": ORIGINS})
    expected = ["a.jsonl [0:900], row 0", "a.jsonl [0:900], row 1", "", "a.jsonl [0:900], row 3",
                "b.jsonl [10:20], row 5", "b.jsonl [10:20], row 6", "b.jsonl [10:20], row 9"]  # fmt: skip
    data = penstock.open(path)
    plan = data.pack(8).batch(10, tail="short")
    assert {trace.origin for trace in plan.documents(0)} == set(expected) - {""}
    for trace in plan.documents(0):
        assert trace.origin == expected[trace.document]
    subset = data.take([6, 5]).pack(8).batch(10, tail="short")
    assert {trace.document: trace.origin for trace in subset.documents(0)} == {0: expected[6], 1: expected[5]}


def test_a_padded_batch_traces_its_repeated_rows_too() -> None:
    plan = tokens_dataset([8, 8, 8]).pack(8).batch(2, tail="pad")
    assert [trace.row for trace in plan.documents(1)] == [0, 1]


def test_the_origin_of_a_sample_is_asked_for_as_the_sample_is(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "data", make_documents(LENGTHS))
    add_provenance(path, {"origins": ORIGINS})
    data = penstock.open(path)
    assert data.origin(-1) == data.origin(len(LENGTHS) - 1) == "b.jsonl [10:20], row 9"
    assert data.take([0, 5]).origin(-1) == data.origin(5)
    for index in (len(LENGTHS), -len(LENGTHS) - 1):
        with pytest.raises(IndexError, match="out of range for 7 samples"):
            data.origin(index)

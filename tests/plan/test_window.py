"""Fixed windows of the token stream, against slicing one long array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import FormatError, SchemaError
from penstock.plan import Plan
from plan.examples import (
    assert_same,
    folder,
    lengths_lists,
    make_documents,
    ragged,
    read_epoch,
    tokens_dataset,
    write_tokens,
)

few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def reference(stream: np.ndarray, length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows and labels by slicing; only the stream's very last token has no label."""
    tokens = [*stream.tolist(), -100]
    firsts = range(0, len(stream) // length * length, length)
    return [tokens[first : first + length] for first in firsts], [
        tokens[first + 1 : first + length + 1] for first in firsts
    ]


def rows_of(plan: Plan) -> tuple[list[list[int]], list[list[int]]]:
    batches = read_epoch(plan)
    assert all(list(batch) == ["input_ids", "labels"] for batch in batches)
    assert all(value.dtype == np.int64 for batch in batches for value in batch.values())
    return [row for b in batches for row in b["input_ids"].tolist()], [
        row for b in batches for row in b["labels"].tolist()
    ]


@few
@given(lengths_lists, st.integers(1, 12), st.integers(1, 5))
def test_rows_are_slices_of_all_documents_and_labels_the_tokens_after(
    lengths: list[int], length: int, size: int
) -> None:
    plan = tokens_dataset(lengths).window(length).batch(size, tail="short")
    stream = np.arange(1, sum(lengths) + 1)
    assert rows_of(plan) == reference(stream, length)
    assert plan.num_rows == sum(lengths) // length
    assert plan.ledger().tokens_left_over == sum(lengths) % length


def test_labels_cross_the_borders_of_documents_and_the_last_label_of_the_stream_is_ignored() -> None:
    batch = tokens_dataset([2, 1, 3]).window(3).batch(2).read(0)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["labels"].tolist() == [[2, 3, 4], [5, 6, -100]]


def test_a_left_over_token_is_the_label_of_the_last_row() -> None:
    plan = tokens_dataset([2, 5]).window(3).batch(2)
    assert plan.read(0)["labels"].tolist() == [[2, 3, 4], [5, 6, 7]]
    assert plan.ledger().tokens_left_over == 1


@few
@given(lengths_lists, st.integers(1, 9), st.data())
def test_a_selection_windows_as_the_same_samples_written_out(
    lengths: list[int], length: int, data: st.DataObject
) -> None:
    documents = make_documents(lengths)
    dataset = penstock.from_arrays({"tokens": ragged(documents), "x": np.arange(len(lengths), dtype=np.uint8)})
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=12))
    mask = np.array([data.draw(st.booleans()) for _ in lengths])
    train = dataset.split({"train": 0.6, "test": 0.4}, seed=1)["train"]
    subsets = {
        "take": (dataset.take(chosen), [documents[index] for index in chosen]),
        "filter": (dataset.filter(mask), [documents[index] for index in np.flatnonzero(mask)]),
        "split": (
            train,
            [
                documents[index]
                for index in np.flatnonzero(np.isin(np.arange(len(lengths)), train.read(np.arange(len(train)))["x"]))
            ],
        ),
        "of a subset": (dataset.filter(mask).take([0]) if mask.any() else train, None),
    }
    for subset, expected in subsets.values():
        shuffled = subset.shuffle(5).window(length).batch(3, tail="short")
        for one, other in zip(
            read_epoch(shuffled),
            read_epoch(subset.in_memory().shuffle(5).window(length).batch(3, tail="short")),
            strict=True,
        ):
            assert_same(one, other)
        if expected is not None:
            stream = np.concatenate([*expected, np.empty(0, np.int64)])
            assert rows_of(subset.window(length).batch(2, tail="short")) == reference(stream, length)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint64"])
def test_a_raw_file_of_tokens_is_windowed_as_it_lies(tmp_path: Path, dtype: str) -> None:
    """nanoGPT's train.bin: no documents, one token after the other."""
    stream = np.arange(100, dtype=dtype)
    stream.tofile(tmp_path / "train.bin")
    dataset = penstock.open(tmp_path / "train.bin", dtype=dtype, column="tokens")
    assert rows_of(dataset.window(7).batch(3, tail="short")) == reference(stream, 7)
    tokens, labels = rows_of(dataset.shuffle(1).window(7).batch(3, tail="short"))
    assert tokens != reference(stream, 7)[0]
    assert sorted(zip(tokens, labels, strict=True)) == sorted(zip(*reference(stream, 7), strict=True))
    chosen = np.arange(90, 10, -3)
    subset = dataset.take(chosen).window(4).batch(2, tail="short")
    assert rows_of(subset) == reference(stream[chosen], 4)


@few
@given(lengths_lists, st.integers(1, 9), st.integers(20, 200), st.sampled_from(["map", "pread"]))
def test_windows_cross_the_borders_of_shards(lengths: list[int], length: int, shard_bytes: int, io: Any) -> None:
    documents = make_documents(lengths)
    with folder() as path:
        write_tokens(path / "data", documents, shard_bytes=shard_bytes)
        plan = penstock.open(path / "data", io=io).window(length).batch(3, tail="short")
        assert rows_of(plan) == reference(np.arange(1, sum(lengths) + 1), length)


def test_offered_buffers_are_filled_and_returned_and_wrong_ones_refused() -> None:
    plan = tokens_dataset([40]).shuffle(1).window(4).batch(3)
    out = {key: np.full((3, 4), 9) for key in ("input_ids", "labels")}
    batch = plan.read(1, out=out)
    assert batch["input_ids"] is out["input_ids"]
    assert batch["labels"] is out["labels"]
    assert_same(batch, plan.read(1))
    for wrong in (np.zeros((3, 5), np.int64), np.zeros((3, 4), np.int32), np.zeros((4, 3), np.int64).T):
        with pytest.raises(ValueError, match=r"out\['labels'\] is .*int64 \[3, 4\] is needed"):
            plan.read(0, out={"labels": wrong})


def test_a_rank_without_rows_gets_an_empty_batch() -> None:
    batch = tokens_dataset([5]).window(4).batch(2, tail="short").read(0, rank=1, world_size=2)
    assert batch["input_ids"].shape == batch["labels"].shape == (0, 4)


def test_a_window_of_one_token_has_the_next_token_as_label() -> None:
    batch = tokens_dataset([1, 2]).window(1).batch(3).read(0)
    assert batch["input_ids"].tolist() == [[1], [2], [3]]
    assert batch["labels"].tolist() == [[2], [3], [-100]]


@few
@given(st.data(), lengths_lists, st.integers(1, 12), st.booleans(), st.sampled_from(["bool", "uint8"]))
def test_a_loss_mask_hides_the_labels_of_tokens_that_are_not_predicted(
    data: st.DataObject, lengths: list[int], length: int, is_part: bool, dtype: str
) -> None:
    documents = make_documents(lengths)
    masks = [np.array(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), dtype) for n in lengths]
    chosen = list(range(len(lengths)))[::-2] if is_part else list(range(len(lengths)))
    rows, labels = reference(np.concatenate([documents[number] for number in chosen]), length)
    predicted = [*np.concatenate([masks[number] for number in chosen]).tolist(), False]
    hidden = [
        [label if predicted[row * length + place + 1] else -100 for place, label in enumerate(values)]
        for row, values in enumerate(labels)
    ]
    in_memory = penstock.from_arrays({"tokens": ragged(documents), "loss_mask": ragged(masks, dtype)})
    with folder() as path:
        stored = penstock.open(write_tokens(path / "data", documents, loss_mask=(f"{dtype}[*]", masks)))
        for whole in (in_memory, stored):
            dataset = whole.take(chosen) if is_part else whole
            assert rows_of(dataset.window(length).batch(3, tail="short")) == (rows, hidden)
            unmasked = dataset.select_columns(["tokens"]).window(length)
            assert rows_of(unmasked.batch(3, tail="short")) == (rows, labels)


def test_a_loss_mask_of_other_lengths_than_the_documents_is_refused_by_sample() -> None:
    documents, masks = make_documents([2, 4, 3]), [np.ones(n, np.bool_) for n in (2, 3, 4)]
    dataset = penstock.from_arrays({"tokens": ragged(documents), "loss_mask": ragged(masks, "bool")})
    with pytest.raises(FormatError, match="Sample 1 has 4 tokens and a loss mask of 3"):
        dataset.window(3)
    assert dataset.take([0]).window(2).num_rows == 1


def test_a_flat_file_of_tokens_may_have_a_flat_mask() -> None:
    columns = {"tokens": np.arange(6, dtype=np.uint16), "loss_mask": np.array([1, 1, 0, 1, 1, 0], np.uint8)}
    dataset = penstock.from_arrays(columns)
    assert dataset.window(3).batch(2).read(0)["labels"].tolist() == [[1, -100, 3], [4, -100, -100]]
    with pytest.raises(SchemaError, match=r"'loss_mask' is float64; a loss mask is 'bool' or 'uint8'"):
        penstock.from_arrays(columns | {"loss_mask": np.ones(6)}).window(3)


def test_the_data_of_windows_is_announced_group_by_group_where_a_sample_is_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.plan._epochs.STORAGE_WINDOW_BYTES", 80)
    np.arange(1003, dtype=np.uint16).tofile(tmp_path / "x.bin")
    data = penstock.open(tmp_path / "x.bin", dtype="uint16", column="tokens")
    asked: dict[str, list[tuple[int, int]]] = {"will_need": [], "dont_need": []}
    for name, ranges in asked.items():
        monkeypatch.setattr(data.storage, name, lambda column, begin, end, ranges=ranges: ranges.append((begin, end)))
    plan = data.shuffle(seed=1, group=2).window(10).batch(4)
    for row in range(0, plan.num_rows, 4):
        plan.will_need(row)
        plan.dont_need(row)
        firsts = [token for ids in plan.read_at(row)["input_ids"] for token in (int(ids[0]), int(ids[-1]))]
        known = asked["will_need"]
        if row + 4 <= plan.num_rows:
            assert all(any(begin <= token < end for begin, end in known) for token in firsts)
    assert sorted(asked["will_need"])[-1][1] == 1003
    assert set(asked["dont_need"]) < set(asked["will_need"])

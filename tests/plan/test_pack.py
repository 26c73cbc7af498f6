"""Packed batches, every array against a slow reference made from `plan.documents`."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import FormatError
from penstock.packing import _ledger
from penstock.plan import Plan, _packed_rows
from penstock.plan._packed_rows import PackedRows
from plan.examples import (
    IGNORED,
    assert_same,
    lengths_lists,
    make_documents,
    packed_reference,
    ragged,
    shuffled,
    tokens_dataset,
)

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LENGTHS = [5, 12, 0, 3, 30, 1, 1, 8, 9, 2, 0, 16]


def assert_reference(plan: Plan, documents: list[np.ndarray], epoch: int = 0, **options: Any) -> None:
    for step in range(plan.num_batches(epoch)):
        batch = plan.read(step, epoch)
        traces = plan.documents(step, epoch)
        assert_same(batch, packed_reference(plan, documents, traces, len(batch["input_ids"]), **options))


@few
@given(lengths_lists, st.sampled_from([1, 2, 8, 20]), st.sampled_from(["next", "same"]), st.data())
def test_every_array_is_what_the_list_of_documents_says(
    lengths: list[int], length: int, labels: Any, data: st.DataObject
) -> None:
    documents = make_documents(lengths)
    dataset = penstock.from_arrays({"tokens": ragged(documents)})
    plan = shuffled(dataset, data.draw).pack(
        length,
        labels=labels,
        long=data.draw(st.sampled_from(["split", "truncate", "drop"])),
        positions=data.draw(st.sampled_from(["restart", "continue"])),
        max_documents=data.draw(st.sampled_from([None, 1, 2, 5])),
        pad=data.draw(st.sampled_from([0, 77, -1])),
    )
    assert_reference(plan.batch(data.draw(st.integers(1, 5)), tail="short"), documents, data.draw(st.integers(0, 2)))


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
@pytest.mark.parametrize("labels", ["next", "same"])
def test_a_loss_mask_hides_labels_and_their_count(dtype: str, labels: Any) -> None:
    documents = make_documents(LENGTHS)
    rng = np.random.default_rng(0)
    masks = [(rng.random(len(document)) < 0.5).astype(dtype) for document in documents]
    if dtype == "uint8":
        masks = [mask * 200 for mask in masks]  # anything but 0 is true
    dataset = penstock.from_arrays({"tokens": ragged(documents), "loss_mask": ragged(masks, dtype)})
    plan = dataset.shuffle(1).pack(8, labels=labels).batch(4, tail="short")
    assert_reference(plan, documents, masks=masks)
    parts = [plan.read(0, rank=rank, world_size=4) for rank in range(4)]
    assert {part["num_targets_global"] for part in parts} == {plan.read(0)["num_targets"]}
    assert (
        0
        < plan.read(0)["num_targets"]
        < dataset.select_columns(["tokens"]).shuffle(1).pack(8).batch(4).read(0)["num_targets"]
    )


@pytest.mark.parametrize("change", [-1, 1])
def test_a_loss_mask_of_another_length_is_an_error_on_every_rank(change: int) -> None:
    documents = make_documents([4, 4, 4, 4])
    masks = [np.ones(4 + change * (number == 2)) for number in range(4)]
    dataset = penstock.from_arrays({"tokens": ragged(documents), "loss_mask": ragged(masks, "uint8")})
    plan = dataset.pack(4).batch(4)
    for rank in range(4):
        with pytest.raises(FormatError, match=rf"Sample 2 has 4 tokens and a loss mask of {4 + change}"):
            plan.read(0, rank=rank, world_size=4)


def test_labels_of_the_next_kind_end_with_each_document_and_the_same_kind_begins_with_it() -> None:
    """Written out by hand, so that the reference itself is checked once."""
    dataset = penstock.from_arrays({"tokens": [np.array([11, 12, 13]), np.array([21, 22])]})
    batch = dataset.pack(6).batch(1).read(0)
    first = batch["input_ids"][0, 0] == 11
    expected = {
        "input_ids": [11, 12, 13, 21, 22, 0] if first else [21, 22, 11, 12, 13, 0],
        "labels": [12, 13, -100, 22, -100, -100] if first else [22, -100, 12, 13, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0] if first else [0, 1, 0, 1, 2, 0],
        "document_ids": [0, 0, 0, 1, 1, -1] if first else [0, 0, 1, 1, 1, -1],
    }
    for key, values in expected.items():
        assert batch[key].tolist() == [values], key
        assert batch[key].dtype == (np.int32 if key == "document_ids" else np.int64)
    assert batch["cu_seqlens"].tolist() == ([0, 3, 5, 6] if first else [0, 2, 5, 6])
    assert batch["cu_seqlens"].dtype == np.int32
    assert {key: batch[key] for key in ("max_seqlen", "num_documents", "num_targets", "num_targets_global")} == {
        "max_seqlen": 3,
        "num_documents": 2,
        "num_targets": 3,
        "num_targets_global": 3,
    }
    same = dataset.pack(6, labels="same").batch(1).read(0)["labels"].tolist()
    assert same == [[-100, 12, 13, -100, 22, -100] if first else [-100, 22, -100, 12, 13, -100]]


def test_the_longest_segment_may_be_padding() -> None:
    batch = tokens_dataset([3]).pack(10).batch(1).read(0)
    assert batch["cu_seqlens"].tolist() == [0, 3, 10]
    assert batch["max_seqlen"] == 7


def test_with_max_documents_the_borders_have_one_length_and_repeat_the_last() -> None:
    plan = tokens_dataset(LENGTHS).shuffle(1).pack(8, max_documents=2).batch(3)
    for step in range(plan.num_batches()):
        batch = plan.read(step)
        assert batch["cu_seqlens"].shape == (3 * 3 + 1,)
        assert batch["cu_seqlens"][-1] == 24
        assert (np.diff(batch["cu_seqlens"]) >= 0).all()
        assert (np.bincount(batch["document_ids"][batch["document_ids"] >= 0] // 1) > 0).all()
        for ids in batch["document_ids"]:
            assert len(np.unique(ids[ids >= 0])) <= 2


@pytest.mark.parametrize("long", ["split", "truncate", "drop"])
def test_long_documents_are_split_truncated_or_dropped(long: Any) -> None:
    documents = make_documents(LENGTHS)
    plan = penstock.from_arrays({"tokens": ragged(documents)}).shuffle(2).pack(8, long=long).batch(2, tail="short")
    found: Counter[int] = Counter()
    for step in range(plan.num_batches()):
        batch = plan.read(step)
        found.update(batch["input_ids"][batch["document_ids"] >= 0].tolist())
    kept = {
        "split": documents,
        "truncate": [document[:8] for document in documents],
        "drop": [document for document in documents if len(document) <= 8],
    }[long]
    assert found == Counter(int(token) for document in kept for token in document)


def test_one_document_longer_than_many_rows_is_cut_at_multiples_of_the_row() -> None:
    plan = tokens_dataset([803]).shuffle(1).pack(8, positions="continue").batch(101)
    batch = plan.read(0)
    assert plan.num_rows == 101
    order = np.argsort(batch["input_ids"][:, 0])
    tokens = batch["input_ids"][batch["document_ids"] >= 0]
    assert sorted(tokens.tolist()) == list(range(1, 804))
    ordered, is_token = batch["input_ids"][order], (batch["document_ids"] >= 0)[order]
    # Row by row in order it is the document again, and positions say where each piece lies in it.
    np.testing.assert_array_equal(ordered[is_token], np.arange(1, 804))
    np.testing.assert_array_equal(batch["position_ids"][order][is_token], np.arange(803))


def test_a_dataset_of_a_single_token_makes_a_batch_without_a_target() -> None:
    for length in (1, 4):
        batch = tokens_dataset([1]).shuffle(1).pack(length).batch(2).read(0)
        assert batch["num_targets"] == batch["num_targets_global"] == 0
        assert batch["num_documents"] == 2
        assert (batch["labels"] == IGNORED).all()


def test_the_packing_is_redrawn_each_epoch_and_only_with_a_shuffle() -> None:
    dataset = tokens_dataset([4] * 40)

    def rows(plan: Plan, epoch: int) -> set[tuple[int, ...]]:
        return {tuple(sorted(row)) for row in plan.read(0, epoch)["input_ids"].tolist()}

    plan = dataset.shuffle(1).pack(8).batch(20)
    assert len(rows(plan, 0) & rows(plan, 1)) < 10
    plain = dataset.pack(8).batch(20)
    assert_same(plain.read(0, 0), plain.read(0, 1))


def test_without_a_shuffle_long_and_short_documents_still_mix() -> None:
    """The packer makes the rows of long pieces first; a run in that order would train on lengths."""
    plan = tokens_dataset([8] * 50 + [4] * 100).pack(8).batch(100)
    num_documents = np.array([len(np.unique(ids)) for ids in plan.read(0)["document_ids"]])
    assert 10 < (num_documents[:50] == 1).sum() < 40


def test_a_rank_without_rows_gets_an_empty_batch() -> None:
    plan = tokens_dataset([8, 8, 8]).pack(8, max_documents=2).batch(4, tail="short")
    batch = plan.read(0, rank=3, world_size=4)
    assert batch["input_ids"].shape == (0, 8)
    assert batch["cu_seqlens"].tolist() == [0]
    assert (batch["num_targets"], batch["num_targets_global"]) == (0, 21)


def test_every_unsigned_and_signed_token_type_is_packed() -> None:
    for dtype in ("uint8", "uint16", "int16", "uint32", "int32", "int64", "uint64"):
        documents = make_documents([5, 9, 2], dtype=dtype)
        dataset = penstock.from_arrays({"tokens": ragged(documents, dtype)})
        assert_reference(dataset.pack(8).batch(4, tail="short"), documents)


def offers(rows: int = 3, length: int = 8) -> dict[str, np.ndarray]:
    keys = ("input_ids", "labels", "position_ids")
    return {key: np.full((rows, length), 99) for key in keys} | {"document_ids": np.full((rows, length), 99, np.int32)}


def test_offered_buffers_are_filled_and_returned() -> None:
    plan = tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(3)
    out = offers()
    batch = plan.read(1, out=out)
    for key, array in out.items():
        assert batch[key] is array
    assert_same(batch, plan.read(1))
    some = {"labels": np.empty((3, 8), np.int64)}
    assert plan.read(1, out=some)["labels"] is some["labels"]


@pytest.mark.parametrize("key", ["input_ids", "labels", "position_ids", "document_ids"])
def test_wrong_buffers_are_refused_by_name(key: str) -> None:
    plan = tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(3)
    good = offers()[key]
    read_only = good.copy()
    read_only.flags.writeable = False
    wrong = {
        "int16": good.astype(np.int16),
        "int64 [3, 9]|int32 [3, 9]": np.zeros((3, 9), good.dtype),
        "read-only": read_only,
        "strided": np.zeros((8, 3), good.dtype).T,
        "strided ": np.zeros((3, 16), good.dtype)[:, ::2],
    }
    for words, array in wrong.items():
        with pytest.raises(ValueError, match=rf"out\['{key}'\] is .*is needed") as caught:
            plan.read(0, out={key: array})
        assert any(word in str(caught.value) for word in words.split("|"))


def test_threads_reading_random_steps_of_one_plan_get_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 4)
    monkeypatch.setattr(_packed_rows, "_KEPT_BYTES", 600)  # a few windows: threads push each other's out
    lengths = np.random.default_rng(0).integers(0, 30, 300).tolist()
    plan = tokens_dataset(lengths).shuffle(1, group=3).pack(16).batch(4)
    reference = {
        (step, epoch): tokens_dataset(lengths).shuffle(1, group=3).pack(16).batch(4).read(step, epoch)
        for epoch in range(2)
        for step in range(plan.num_batches(epoch))
    }
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        keys = list(reference) * 3
        random.Random(seed).shuffle(keys)
        try:
            for key in keys:
                assert_same(plan.read(*key), reference[key])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,), name=f"reader-{seed}") for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(plan.row_source.index.rows_per_window) > 8  # type: ignore[attr-defined]


def test_windows_that_were_let_go_are_packed_again_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 2)
    lengths = [3, 7, 2, 9] * 10
    roomy = tokens_dataset(lengths).shuffle(1, group=1).pack(8).batch(2)
    expected = [roomy.read(step, epoch) for epoch in range(2) for step in range(roomy.num_batches(epoch))]
    monkeypatch.setattr(_packed_rows, "_KEPT_BYTES", 0)
    tight = tokens_dataset(lengths).shuffle(1, group=1).pack(8).batch(2)
    found = [tight.read(step, epoch) for epoch in range(2) for step in range(tight.num_batches(epoch))]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert len(tight.row_source._blocks._snapshot.blocks) <= 2  # type: ignore[attr-defined]


def test_a_group_that_takes_more_than_the_cache_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 2)
    monkeypatch.setattr(_packed_rows, "_KEPT_BYTES", 0)
    packed: list[tuple[int, int]] = []
    pack = PackedRows._pack

    def counting(rows: PackedRows, epoch: int, number: int) -> _packed_rows.PackedBlock:
        packed.append((epoch, number))
        return pack(rows, epoch, number)

    monkeypatch.setattr(PackedRows, "_pack", counting)
    plan = tokens_dataset([3, 7, 2, 9] * 10).shuffle(1, group=4).pack(8).batch(2)
    for step in range(plan.num_batches()):
        plan.read(step)
    assert len(packed) == len(set(packed)) > 8

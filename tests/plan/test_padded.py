"""Padded batches, against a slow and obvious reference; and what is kept beside tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import FormatError, SchemaError
from penstock.plan import Dataset
from plan.examples import IGNORED, assert_same, make_documents, ragged, read_epoch, tokens_dataset

TEXTS = ["a", "", "ccc", "dd"]


def rich(lengths: list[int], first: int = 1) -> Dataset:
    """Documents with something per document, per token, and text."""
    documents = make_documents(lengths, first=first)
    texts = [TEXTS[number % 4].encode() for number in range(len(lengths))]
    return penstock.from_arrays(
        {
            "tokens": ragged(documents),
            "loss_mask": penstock.Ragged.from_lengths(np.arange(sum(lengths)) % 3 > 0, lengths),
            "domain": first + np.arange(len(lengths)),
            "weight": penstock.Ragged.from_lengths((np.concatenate(documents) / 2).astype(np.float32), lengths),
            "text": penstock.Ragged.from_lengths(np.frombuffer(b"".join(texts), np.uint8), list(map(len, texts)), True),
        }
    )


def padded_reference(ds: Dataset, samples: list[int], stage: Any) -> dict[str, Any]:
    """Row by row, token by token."""
    documents = [ds[sample]["tokens"][: stage.length].tolist() for sample in samples]
    masks = [ds[sample]["loss_mask"][: stage.length].tolist() for sample in samples]
    width = max([1, *map(len, documents)])
    width += -width % stage.multiple
    found: dict[str, list[Any]] = {"input_ids": [], "labels": [], "attention_mask": [], "position_ids": []}
    for tokens, mask in zip(documents, masks, strict=True):
        blank = [0] * (width - len(tokens))
        own = [token if place and mask[place] else IGNORED for place, token in enumerate(tokens)]
        if stage.labels == "next":
            own = own[1:] + [IGNORED] * bool(own)
        columns = {
            "input_ids": (tokens, [stage.pad]),
            "labels": (own, [IGNORED]),
            "attention_mask": ([1] * len(tokens), [0]),
            "position_ids": (list(range(len(tokens))), [0]),
        }
        for key, (values, fill) in columns.items():
            filled = fill * len(blank)
            found[key].append(filled + values if stage.side == "left" else values + filled)
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.sampled_from([None, 4]),
    st.integers(1, 3),
    st.sampled_from(["next", "same"]),
    st.sampled_from(["right", "left"]),
)
def test_a_padded_batch_is_what_one_would_write_by_hand(
    lengths: list[int], length: int | None, multiple: int, labels: Any, side: Any
) -> None:
    ds = rich([3, *lengths])
    plan = ds.shuffle(seed=1).pad(length, multiple=multiple, labels=labels, side=side, pad=7).batch(4, tail="short")
    for step, batch in enumerate(read_epoch(plan)):
        samples = [trace.document for trace in plan.documents(step)]
        expected = padded_reference(ds, samples, plan.stages[1])
        assert {key: batch[key].tolist() for key in expected} == expected
        assert batch["lengths"].tolist() == batch["attention_mask"].sum(axis=1).tolist()
        assert batch["num_targets"] == int((batch["labels"] != IGNORED).sum())


@pytest.mark.parametrize("verb", ["pad", "pack", "window"])
def test_the_mask_of_a_column_has_its_name(verb: str) -> None:
    tokens, mask = rich([5, 3, 8])[:]["tokens"], rich([5, 3, 8])[:]["loss_mask"]
    pair = {"chosen": tokens, "chosen_loss_mask": mask, "rejected": tokens}
    plain = penstock.from_arrays({"tokens": tokens, "loss_mask": mask})
    named, bare = penstock.from_arrays(pair), penstock.from_arrays({"tokens": tokens})
    arguments: dict[str, Any] = {} if verb == "pad" else {"length": 8}

    def labels(ds: Dataset, column: str) -> Any:
        return getattr(ds, verb)(column=column, **arguments).batch(2).read(0)["labels"].tolist()

    assert labels(named, "chosen") == labels(plain, "tokens") != labels(bare, "tokens")
    assert labels(named, "rejected") == labels(bare, "tokens")


def test_rows_of_a_fixed_length_are_a_multiple_of_it() -> None:
    plan = tokens_dataset([3, 90, 2]).pad(8, multiple=8).batch(1)
    assert [plan.read(step)["input_ids"].shape for step in range(3)] == [(1, 8)] * 3
    assert plan.ledger().tokens_truncated == 82


def test_buckets_put_rows_of_like_length_together_and_lose_none() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 1000)
    ds = penstock.from_arrays({"tokens": ragged(make_documents(lengths.tolist())), "x": np.arange(1000)})
    places = {}
    for bucket in (None, 256):
        plan = ds.shuffle(seed=1).pad(keep="x", bucket=bucket, run=16).batch(16, tail="short")
        batches = [batch for epoch in range(2) for batch in read_epoch(plan, epoch)]
        places[bucket] = sum(batch["input_ids"].size for batch in batches)
        seen = np.concatenate([batch["x"] for batch in batches]).reshape(2, 1000)
        assert (np.sort(seen, axis=1) == np.arange(1000)).all()
        assert seen[0].tolist() != seen[1].tolist()
    assert places[256] < 1.08 * 2 * lengths.sum() < places[None] / 1.5


def test_buckets_give_the_rows_they_always_gave() -> None:
    documents = penstock.Ragged.from_lengths(np.arange(45), list(range(10)))
    plan = penstock.from_arrays({"tokens": documents, "x": np.arange(10)}).shuffle(7).pad(keep="x", bucket=6, run=2)
    assert plan.batch(10).read(0)["x"].tolist() == [6, 7, 0, 2, 4, 5, 1, 3, 8, 9]


def test_the_order_without_buckets_is_that_of_samples() -> None:
    ds = rich([3, 5, 2, 9])
    assert ds.shuffle(seed=1).pad().order_fingerprint == ds.shuffle(seed=1).order_fingerprint
    assert ds.shuffle(seed=1).pad(bucket=4).order_fingerprint != ds.shuffle(seed=1).order_fingerprint


@pytest.mark.parametrize("verb", ["pack", "pad"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_what_is_kept_belongs_to_its_document_and_its_tokens(verb: str, is_mixed: bool) -> None:
    sources = {
        name: (getattr(rich([5, 3, 8, 11, 2, 9], first).shuffle(seed=1), verb)(8, keep=["domain", "weight", "text"]), 1)
        for name, first in (("a", 1), ("b", 1001))
    }
    plan = penstock.mix(sources, seed=1, rows=12) if is_mixed else sources["a"][0]
    plan = plan.batch(6)
    batch, traces = plan.read(0), plan.documents(0)
    assert batch["domain"].tolist() == [trace.document + (1001 if trace.source == "b" else 1) for trace in traces]
    assert [text.decode() for text in batch["text"]] == [TEXTS[trace.document % 4] for trace in traces]
    is_token = batch["document_ids"] >= 0 if verb == "pack" else batch["attention_mask"] != 0
    assert batch["weight"].dtype == np.float32
    assert (batch["weight"] == np.where(is_token, batch["input_ids"] / 2, 0)).all()
    parts = [plan.read(0, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(np.concatenate([part["domain"] for part in parts])) == sorted(batch["domain"])
    assert all(list(part) == list(batch) for part in parts)


def test_what_is_kept_is_written_into_offered_arrays() -> None:
    plan = rich([5, 3, 8]).pack(8, keep="weight").batch(2)
    out = {name: np.full(shape, 9, dtype) for name, (shape, dtype) in plan.output_arrays(2).items()}
    batch = plan.read(0, out=out)
    assert "weight" in out
    assert all(batch[name] is array for name, array in out.items())
    assert_same(batch, plan.read(0))


def test_keeping_nothing_leaves_fingerprints_and_keeping_changes_only_the_plan() -> None:
    ds = rich([5, 3, 8]).shuffle(seed=1)
    assert ds.pack(8, keep=[]).fingerprint == ds.pack(8).fingerprint
    assert ds.pack(8, keep="domain").fingerprint != ds.pack(8).fingerprint
    assert ds.pack(8, keep="domain").order_fingerprint == ds.pack(8).order_fingerprint


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda ds: ds.pad(0), ValueError, "at least 1"),
        (lambda ds: ds.pad(multiple=0), ValueError, "at least 1"),
        (lambda ds: ds.pad(side="up"), ValueError, "the choices are 'right' and 'left'"),
        (lambda ds: ds.pad(labels="last"), ValueError, "the choices are 'next' and 'same'"),
        (lambda ds: ds.pad(column="domain"), SchemaError, r"pad\(\) takes documents of uneven length"),
        (lambda ds: ds.pad(keep="tokens"), SchemaError, "has something of this name already"),
        (lambda ds: ds.pad(keep="nothing"), SchemaError, "nothing"),
        (lambda ds: ds.pack(8, keep=[3]), TypeError, "names of columns"),
        (
            lambda ds: ds.pad().batch(2).read(0, out={"input_ids": np.zeros((2, 3))}),
            SchemaError,
            "as wide as the longest",
        ),
        (
            lambda ds: penstock.mix({"a": (ds.pad(), 1), "b": (ds.pack(8), 1)}, seed=1, rows=4),
            SchemaError,
            "padded likewise",
        ),
        (
            lambda ds: penstock.mix({"a": (ds.pad(keep="domain"), 1), "b": (ds.pad(), 1)}, seed=1, rows=4),
            SchemaError,
            "differ in",
        ),
    ],
)
def test_nonsense_is_refused(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(rich([3, 4]))


def test_numbers_that_do_not_fit_the_tokens_are_an_error_that_names_the_sample() -> None:
    ds = penstock.from_arrays({"tokens": ragged(make_documents([3, 2])), "pos": ragged(make_documents([3, 4]))})
    with pytest.raises(FormatError, match="Sample 1 has 2 tokens and 4 values of 'pos'"):
        ds.pack(8, keep="pos").batch(1).read(0)


def test_a_plan_file_keeps_padding(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    with penstock.DatasetWriter(tmp_path / "data", {"tokens": "uint16[*]", "label": "int64"}) as writer:
        writer.write({"tokens": [1, 2, 3], "label": 1})
    plan = penstock.open(tmp_path / "data").pad(8, multiple=8, keep=["label"], bucket=64).batch(1)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize("side", ["right", "left"])
def test_any_ragged_column_pads_and_nests(side: Any) -> None:
    boxes = penstock.Ragged.from_lengths(np.arange(12.0).reshape(6, 2), [3, 0, 2, 1])
    tensors = penstock.Ragged(torch.from_numpy(boxes.values), torch.from_numpy(boxes.offsets))
    padded, mask = boxes.padded(-1, multiple=4, side=side), boxes.mask(multiple=4, side=side)
    assert padded.shape == (4, 4, 2)
    assert mask.sum(axis=1).tolist() == [3, 0, 2, 1]
    assert padded[mask].tolist() == boxes.values.tolist()
    assert (padded[~mask] == -1).all()
    assert tensors.padded(-1, multiple=4, side=side).tolist() == padded.tolist()
    assert tensors.mask(multiple=4, side=side).tolist() == mask.tolist()
    nested = tensors.nested()
    assert nested.layout == torch.jagged
    assert [part.tolist() for part in nested.unbind()] == [part.tolist() for part in boxes]
    assert penstock.Ragged(np.arange(0), np.zeros(1, np.int64)).padded().shape == (0, 0)
    with pytest.raises(TypeError, match="a Ragged of tensors"):
        boxes.nested()
    with pytest.raises(TypeError, match="Byte strings"):
        penstock.Ragged(np.zeros(1, np.uint8), np.array([0, 1]), is_bytes=True).padded()
    with pytest.raises(ValueError, match="'right' or 'left'"):
        boxes.padded(side="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int16, np.float16, bool])
def test_tensors_of_any_dtype_of_tokens_pad_as_arrays_do(dtype: Any) -> None:
    arrays = penstock.Ragged.from_lengths(np.array([1, 0, 250, 1, 1]).astype(dtype), [2, 0, 3])
    tensors = penstock.Ragged(torch.from_numpy(arrays.values), torch.from_numpy(arrays.offsets))
    assert tensors.padded(1).dtype == tensors.values.dtype  # type: ignore[comparison-overlap]
    assert tensors.padded(1).tolist() == arrays.padded(1).tolist()

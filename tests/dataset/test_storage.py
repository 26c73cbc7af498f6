"""The same samples give the same batches, wherever and however they are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.packing import _ledger
from penstock.plan import Dataset
from plan.examples import assert_same, make_documents, ragged, write_tokens

LENGTHS = [int(length) for length in np.random.default_rng(3).integers(0, 40, 60)] + [0, 0, 200, 1]
STAGES: dict[str, Callable[[Any], Any]] = {
    "samples": lambda data: data.shuffle(5).batch(7),
    "full": lambda data: data.shuffle(5, "full").batch(7),
    "window": lambda data: data.shuffle(5).window(16).batch(7),
    "pack": lambda data: data.shuffle(5, group=2).pack(16).batch(7),
    "pack, plain": lambda data: data.pack(32, max_documents=3, labels="same", positions="continue").batch(5),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same documents in shards of a few documents, and in one; documents larger than a shard stand alone."""
    documents = make_documents(LENGTHS)
    masks = [np.arange(length) % 3 != 0 for length in LENGTHS]
    root = tmp_path_factory.mktemp("data")
    extra = {"loss_mask": ("bool[*]", masks), "x": ("int32", list(range(len(LENGTHS))))}
    return {name: write_tokens(root / name, documents, shard_bytes=size, **extra) for name, size in
            {"tiny": 60, "small": 500, "one": 1 << 20}.items()}  # fmt: skip


def arrays() -> Dataset:
    masks = [np.arange(length) % 3 != 0 for length in LENGTHS]
    return penstock.from_arrays(
        {
            "tokens": ragged(make_documents(LENGTHS)),
            "loss_mask": ragged(masks, "bool"),
            "x": np.arange(len(LENGTHS), dtype=np.int32),
        }
    )


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("storage", ["tiny map", "tiny pread", "small map", "one pread", "one checked", "in memory"])
def test_every_storage_gives_the_batches_of_arrays_in_ram(
    folders: dict[str, Path], storage: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 4)
    name, _, how = storage.partition(" ")
    if name == "in":
        data = penstock.open(folders["tiny"]).in_memory()
    elif how == "checked":
        data = penstock.open(folders[name], check="open")
    else:
        data = penstock.open(folders[name], io=how)  # type: ignore[arg-type]
    plan, reference = STAGES[kind](data), STAGES[kind](arrays())
    assert plan.num_rows == reference.num_rows
    for epoch in range(2):
        assert plan.num_batches(epoch) == reference.num_batches(epoch)
        for step in range(reference.num_batches(epoch)):
            assert_same(plan.read(step, epoch, 0, 1), reference.read(step, epoch))


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("io", ["map", "pread"])
def test_a_selection_gives_the_batches_of_the_same_samples_written_out(
    folders: dict[str, Path], kind: str, io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 4)
    data = penstock.open(folders["tiny"], io=io)
    subsets = [
        data.split({"train": 0.7, "test": 0.3}, seed=1)["train"],
        data.take(np.arange(len(data))[::-2]),
        data.filter(np.arange(len(data)) % 3 > 0).take([5, 1, 1, 7]),
    ]
    for subset in subsets:
        plan, reference = STAGES[kind](subset), STAGES[kind](subset.in_memory())
        for epoch in range(2):
            for step in range(reference.num_batches(epoch)):
                assert_same(plan.read(step, epoch), reference.read(step, epoch))


def test_a_megatron_pair_is_packed_as_it_lies(tmp_path: Path) -> None:
    documents = make_documents([5, 9, 0, 12], dtype="uint16")
    np.concatenate(documents).tofile(tmp_path / "corpus.bin")
    lengths = np.array([len(document) for document in documents], np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8]) + (4).to_bytes(8, "little")
    borders = np.arange(5, dtype=np.int64)
    (tmp_path / "corpus.idx").write_bytes(
        header + (5).to_bytes(8, "little") + lengths.tobytes() + pointers.tobytes() + borders.tobytes()
    )
    plan = penstock.open(tmp_path / "corpus").shuffle(1).pack(8).batch(2)
    reference = penstock.from_arrays({"tokens": ragged(documents, "uint16")}).shuffle(1).pack(8).batch(2)
    for step in range(reference.num_batches()):
        assert_same(plan.read(step), reference.read(step))

"""Packed documents: 8 rows of 4,096 tokens with labels and positions; only tokens of documents count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _material
import numpy as np
from _turns import Peer, Question, Turn, endless, rate, run

LENGTH, ROWS, NUM_TOKENS = 4096, 8, 16_000_000
WORKERS = ("0 workers", "1 worker", "2 workers")


def prepare(folder: Path) -> None:
    documents = _material.documents(NUM_TOKENS)
    np.savez(folder / "documents.npz", np.concatenate(documents), np.array([len(each) for each in documents]))


def pieces(folder: Path) -> list[np.ndarray]:
    """Documents, cut where they are longer than a row, as all but Penstock need them."""
    with np.load(folder / "documents.npz") as saved:
        tokens, lengths = saved["arr_0"], saved["arr_1"]
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    return [each[at : at + LENGTH] for each in documents for at in range(0, len(each), LENGTH)]


def turn(batches: Iterator[Any], arm: str, share: float = 1.0) -> Turn:
    """Million tokens of documents a second; `share` of the places hold one, where no mask says which."""

    def count(batch: Any) -> float:
        assert str(batch["input_ids"].dtype) == str(batch["labels"].dtype) == "torch.int64"
        places = batch["attention_mask"].sum() if "attention_mask" in batch else share * batch["input_ids"].numel()
        return float(places) / 1e6 + 0 * int(batch["labels"][0, 0])

    names = ("any setting",) if arm == "0 workers" else ("any setting", "ahead of the loop")
    return lambda: dict.fromkeys(names, rate(batches, count))


def bare(folder: Path, arm: str) -> Turn:
    """Tokens copied as they lie, labels one further, and positions: nobody writes less."""
    import torch

    with np.load(folder / "documents.npz") as saved:
        tokens = saved["arr_0"]
    places, names = LENGTH * ROWS, ("input_ids", "labels", "position_ids")
    buffers = [{name: torch.empty((1, places), dtype=torch.int64) for name in names} for _ in range(8)]
    positions = np.arange(places)

    def batches() -> Iterator[Any]:
        for number in range(1 << 40):
            batch, at = buffers[number % 8], number * places % (len(tokens) - places - 1)
            batch["input_ids"].numpy()[0] = tokens[at : at + places]
            batch["labels"].numpy()[0] = tokens[at + 1 : at + 1 + places]
            batch["position_ids"].numpy()[0] = positions
            yield batch

    return turn(batches(), arm)


def penstock(folder: Path, arm: str) -> Turn:
    import penstock

    if not (folder / "penstock").exists():
        with np.load(folder / "documents.npz") as saved:
            ends = np.cumsum(saved["arr_1"])
            with penstock.DatasetWriter(folder / "penstock", {"tokens": "uint16[*]"}) as writer:
                writer.write_batch({"tokens": np.split(saved["arr_0"], ends[:-1])})
    plan = penstock.open(folder / "penstock").shuffle(seed=7).pack(LENGTH).batch(ROWS)
    kind = "process" if "process" in arm else "thread"
    loader = penstock.DataLoader(plan, num_workers=int(arm.split()[0]), workers=kind, epochs=None)
    return turn(iter(loader), arm, plan.ledger().fill)


def arrow(folder: Path) -> Any:
    import datasets

    if not (folder / "arrow").exists():
        features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
        datasets.Dataset.from_dict({"input_ids": pieces(folder)}, features=features).save_to_disk(folder / "arrow")
    return datasets.load_from_disk(folder / "arrow")


def loader(dataset: Any, batch_size: int, collate: Any, arm: str) -> Turn:
    from torch.utils.data import DataLoader

    workers = int(arm.split()[-2])
    options = {"num_workers": workers, "persistent_workers": workers > 0, "drop_last": True}
    torchs = DataLoader(dataset, batch_size, shuffle=True, collate_fn=collate, **options)
    return turn(endless(lambda: torchs), arm)


def trl(folder: Path, arm: str) -> Turn:
    """Packed once, before; then its collator, which writes the rows of a batch behind each other."""
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    packed = pack_dataset(arrow(folder), seq_length=LENGTH, strategy="bfd")
    return loader(packed, ROWS, DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True), arm)


def flattening(folder: Path, arm: str) -> Turn:
    from transformers import DataCollatorWithFlattening

    found = arrow(folder)
    documents = len(found) * ROWS * LENGTH // NUM_TOKENS
    return loader(found, documents, DataCollatorWithFlattening(), arm)


def padding(folder: Path, arm: str) -> Turn:
    """Rows of one document each, padded to the longest of the batch."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return loader(arrow(folder), ROWS, DataCollatorForLanguageModeling(pad_token_id=0), arm)


QUESTION = Question(
    title="Packed documents",
    measures={"any setting": "Mtok/s", "ahead of the loop": "Mtok/s"},
    same="Python's sources and documentation, a token for four bytes: about 16 million tokens, shuffled, to input_ids, "
    "labels and positions in int64, 32,768 places in a batch. Tokens of padding do not count.",
    limit="Copying tokens, labels and positions into eight buffers in turn, in the order in which they lie.",
    why="Penstock copies pieces of documents into a batch in one pass over arrays, and writes labels and positions "
    "beside them. Collators make Python lists of the tokens of every document, and tensors of the lists.",
    prepare=prepare,
    peers=(
        Peer("bare copies", bare, kind="limit"),
        Peer(
            "Penstock",
            penstock,
            ("0 workers", "1 thread", "2 threads", "1 process", "2 processes"),
            "ours",
            ("penstock-data",),
        ),
        Peer("TRL, packed", trl, WORKERS, packages=("trl", "datasets")),
        Peer("HF, flattened", flattening, WORKERS, packages=("transformers",)),
        Peer("TRL, padded", padding, WORKERS),
    ),
)

if __name__ == "__main__":
    run(QUESTION)

"""Which documents share a row: how fast is it decided, how full are rows, and what is lost?"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import _material
import numpy as np
from _turns import Peer, Question, Turn, run

LENGTH, NUM_DOCUMENTS = 4096, 50_000


def prepare(folder: Path) -> None:
    """Lengths of real texts, drawn again and again, each a little longer or shorter (10 %) than it is."""
    lengths, rng = [len(each) for each in _material.documents(8_000_000)], np.random.default_rng(0)
    drawn = rng.choice(lengths, NUM_DOCUMENTS) * rng.normal(1, 0.1, NUM_DOCUMENTS)
    np.save(folder / "lengths.npy", np.clip(drawn, 8, 16 * LENGTH).astype(np.int64))


def result(lengths: np.ndarray, begin: float, what: str, num_rows: int, placed: int) -> dict[str, float]:
    return {
        what: len(lengths) / (time.perf_counter() - begin),
        "fill": 100 * placed / (num_rows * LENGTH),
        "tokens kept": 100 * placed / int(lengths.sum()),
    }


def penstock(folder: Path, arm: str) -> Turn:
    import penstock
    from penstock.packing import PackingSettings, make_ledger, pack

    lengths, settings = np.load(folder / "lengths.npy"), PackingSettings(length=LENGTH)
    ledger = make_ledger(lengths, settings)
    tokens = penstock.Ragged.from_lengths(np.zeros(int(lengths.sum()), np.uint16), lengths)

    def measure() -> dict[str, float]:
        begin = time.perf_counter()
        if arm == "plan":
            pack(lengths, settings, 7)
            return result(lengths, begin, "decided", ledger.num_rows, ledger.tokens_placed)
        ordered = penstock.from_arrays({"tokens": tokens}).shuffle(seed=1)
        plan = (ordered.window(LENGTH) if "window" in arm else ordered.pack(LENGTH)).batch(32)
        for step in range(plan.num_rows // 32):
            plan.read(step)
        return result(lengths, begin, "decided and copied", ledger.num_rows, ledger.tokens_placed)

    return measure


def sort(folder: Path, arm: str) -> Turn:
    lengths = np.load(folder / "lengths.npy")

    def measure() -> dict[str, float]:
        begin = time.perf_counter()
        np.sort(lengths)
        return {"decided": len(lengths) / (time.perf_counter() - begin)}

    return measure


def rows_of(lengths: np.ndarray) -> Any:
    import datasets
    import pyarrow as pa

    datasets.disable_caching()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ones(offsets[-1], np.int32)))
    return datasets.Dataset(pa.table({"input_ids": column}))


def trl(folder: Path, arm: str) -> Turn:
    from trl.data_utils import pack_dataset

    lengths = np.load(folder / "lengths.npy")
    found = rows_of(lengths)

    def measure() -> dict[str, float]:
        begin = time.perf_counter()
        packed = pack_dataset(found, seq_length=LENGTH, strategy=arm, map_kwargs={"batch_size": 10_000})
        seconds = time.perf_counter() - begin
        placed = sum(len(chunk.values) for chunk in packed.data.column("input_ids").chunks)
        return result(lengths, time.perf_counter() - seconds, "decided and copied", len(packed), placed)

    return measure


def hugging_face(folder: Path, arm: str) -> Turn:
    """`group_texts` of transformers' run_clm.py: one after the other, cut at every row."""
    lengths = np.load(folder / "lengths.npy")
    found = rows_of(lengths)

    def group(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(itertools.chain.from_iterable(rows)) for key, rows in examples.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        return {key: [tokens[at : at + LENGTH] for at in range(0, total, LENGTH)] for key, tokens in joined.items()}

    def measure() -> dict[str, float]:
        begin = time.perf_counter()
        packed = found.map(group, batched=True)
        return result(lengths, begin, "decided and copied", len(packed), len(packed) * LENGTH)

    return measure


def olmo(folder: Path, arm: str) -> Turn:
    from olmo_core.data.utils import InstancePacker

    lengths = np.load(folder / "lengths.npy")
    cut = [min(LENGTH, length - at) for length in lengths.tolist() for at in range(0, length, LENGTH)]
    ends = np.cumsum(cut)
    indices = np.stack([ends - cut, ends], 1).astype(np.uint64)

    def measure() -> dict[str, float]:
        begin = time.perf_counter()
        instances, _, placed = InstancePacker(LENGTH).pack_documents(indices)
        return result(lengths, begin, "decided", len(instances), int(placed))

    return measure


QUESTION = Question(
    title="Packing planners",
    measures={"decided": "documents/s", "decided and copied": "documents/s", "fill": "%", "tokens kept": "%"},
    same="50,000 lengths of real texts, rows of 4,096. Some decide only, others copy tokens as well: both are there. "
    "Documents longer than a row are cut, or lose their end (TRL's `bfd`).",
    limit="Sorting the lengths; what is decided with them comes on top.",
    why="Penstock packs best-fit-decreasing, with free room in bitmaps, in C. TRL and OLMo-core have trees in Python. "
    "TRL's `wrapped` cuts documents wherever a row ends, and moves offsets only; Penstock's windows, which are the "
    "same, are read.",
    prepare=prepare,
    limit_seconds=90,
    peers=(
        Peer("numpy's sort", sort, kind="limit"),
        Peer("Penstock", penstock, ("plan", "plan and read", "window and read"), "ours", ("penstock-data",)),
        Peer("TRL", trl, ("bfd", "bfd_split", "wrapped"), packages=("trl", "datasets")),
        Peer("HF group_texts", hugging_face, packages=("datasets",)),
        Peer("OLMo-core", olmo, packages=("ai2-olmo-core",), environment="apart"),
    ),
)

if __name__ == "__main__":
    run(QUESTION)

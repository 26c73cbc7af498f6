"""Pre-tokenised windows: who hands over most tokens?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _rows
from _turns import Peer, Question, Turn, rate, run


def turn(batches: Iterator[Any], arm: str) -> Turn:
    """Million tokens a second; each batch is checked and touched. With workers, batches come while a step runs."""

    def count(batch: Any) -> float:
        if isinstance(batch, dict):
            batch = batch["tokens"]
        assert tuple(batch.shape) == (_rows.BATCH, _rows.ROW)
        assert str(batch.dtype) == "torch.int64"
        return _rows.BATCH * _rows.ROW / 1e6 + 0 * int(batch[0, 0])

    names = ("",) if arm.endswith("0 workers") or arm == "in the caller" else ("", "ahead of the loop")
    return lambda: dict.fromkeys(names, rate(batches, count))


def measured(batches: Callable[[Path, str], Iterator[Any]]) -> Callable[[Path, str], Turn]:
    return lambda folder, arm: turn(batches(folder, arm), arm)


TORCHS = tuple(f"{word}, {workers}" for word in ("item", "getitems") for workers in _rows.WORKERS)
QUESTION = Question(
    title="Pre-tokenised windows",
    measures={"": "Mtok/s", "ahead of the loop": "Mtok/s"},
    same="Shuffled batches of 32 x 2,048 int64 from 128 MB of uint16 in the page cache.",
    limit="One numpy gather per batch into eight buffers in turn: memory and nothing else.",
    why="Penstock gathers a whole batch at once, into memory that is used again. The others call Python for every row, "
    "allocate every batch, or send it from process to process. In the caller's thread a step waits for every batch.",
    prepare=_rows.prepare,
    peers=(
        Peer("bare gather", measured(_rows.bare), kind="limit"),
        Peer(
            "Penstock",
            measured(_rows.penstock),
            ("0 workers", "1 thread", "2 threads", "1 process", "2 processes"),
            "ours",
            ("penstock-data",),
        ),
        Peer("drop-in", measured(_rows.drop_in), _rows.WORKERS, "ours", ("penstock-data",)),
        Peer("torch", measured(_rows.torch), TORCHS, packages=("torch",)),
        Peer("LitData", measured(_rows.litdata), _rows.WORKERS, packages=("litdata",)),
        Peer("MosaicML", measured(_rows.mosaic), _rows.WORKERS, packages=("mosaicml-streaming",), environment="apart"),
        Peer("WebDataset", measured(_rows.web), _rows.WORKERS, packages=("webdataset",)),
        Peer("datasets", measured(_rows.hugging_face), _rows.WORKERS, packages=("datasets",)),
        Peer(
            "Grain",
            measured(_rows.grain),
            ("in the caller", "threads", "1 process", "2 processes"),
            packages=("grain",),
        ),
        Peer(
            "SPDL",
            measured(_rows.spdl),
            ("1 worker", "2 workers", "1 worker, batches", "2 workers, batches"),
            packages=("spdl",),
        ),
    ),
)

if __name__ == "__main__":
    run(QUESTION)

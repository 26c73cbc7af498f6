"""What does one worker more cost? The first batch of a new loader, and every batch, with 1 to 8 worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _rows
from _turns import Peer, Question, Turn, rate, run


def starting(batches: Callable[[Path, str], Iterator[Any]], alone: str, many: str) -> Callable[[Path, int], Turn]:
    """The library is imported and its data written, by a loader without workers; then a loader is made."""

    def start(folder: Path, workers: int) -> Turn:
        next(batches(folder, alone))

        def measure() -> dict[str, float]:
            begin = time.perf_counter()
            made = batches(folder, many.format(workers))
            assert next(made) is not None
            first = time.perf_counter() - begin
            return {"first batch": first, "every batch": 1 / rate(made, lambda batch: 1.0)}

        return measure

    return start


SIZES = (1, 2, 8)
QUESTION = Question(
    title="More workers",
    measures={"first batch": "s", "every batch": "s"},
    same="The rows of the first question, with worker processes on two cores. A new process for every measurement, in "
    "which the library is imported and has handed over a batch without workers before.",
    limit="For the first batch: forking. For every batch: copying it once.",
    why="Penstock's workers are forked from a process that has done its imports, and write into memory that is used "
    "again. Torch's are forked from the trainer; Grain's are spawned, and import everything first.",
    prepare=_rows.prepare,
    over="workers",
    rounds=2,
    limit_seconds=60,
    is_fresh=True,
    peers=(
        Peer("Penstock", starting(_rows.penstock, "0 workers", "{} processes"), SIZES, "ours", ("penstock-data",)),
        Peer("torch", starting(_rows.torch, "getitems, 0 workers", "getitems, {} workers"), SIZES, packages=("torch",)),
        Peer("LitData", starting(_rows.litdata, "0 workers", "{} workers"), SIZES, packages=("litdata",)),
        Peer("datasets", starting(_rows.hugging_face, "0 workers", "{} workers"), SIZES, packages=("datasets",)),
        Peer("Grain", starting(_rows.grain, "in the caller", "{} processes"), SIZES, packages=("grain",)),
        Peer(
            "MosaicML",
            starting(_rows.mosaic, "0 workers", "{} workers"),
            SIZES,
            packages=("mosaicml-streaming",),
            environment="apart",
        ),
    ),
)

if __name__ == "__main__":
    run(QUESTION)
